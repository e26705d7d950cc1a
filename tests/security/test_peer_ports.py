"""A client by the listener's name has no port. What stands for one is never that of another user's TCP connection, by
which a server that asks the kernel (ident) would take the client for that user."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

import rdmanet
from rdmanet.stream import client_ports
from rdmanet.stream.facts import Facts
from tests.support.waiting import until_seen

# libuv opens a pipe for signals once a process; before the first test, so that none seems to leak it.
rdmanet.loop_factory().close()


def has_connection(here: tuple[str, int], there: tuple[str, int]) -> bool:
    """Whether the kernel knows a TCP connection between these, as ident would look for it."""

    def words(address: tuple[str, int]) -> str:
        return f"{int.from_bytes(socket.inet_aton(address[0]), 'little'):08X}:{address[1]:04X}"

    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any((row[1], row[2]) == (words(here), words(there)) for row in rows)


class Server(asyncio.Protocol):
    """Keeps the names of its peers by RDMA, in the order in which they come."""

    def __init__(self, names: asyncio.Queue[tuple[str, int]]) -> None:
        self._names = names
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if transport.get_extra_info("fabric") == "rdma":
            self._names.put_nowait(transport.get_extra_info("peername"))

    def eof_received(self) -> None:
        """The connection is closed then."""


async def name_of_the_attacker(monkeypatch) -> tuple[tuple[str, int], socket.socket, tuple[bool, bool]]:
    """The name of a client whose number was chosen so that its port is that of a live connection to the same server."""
    loop = asyncio.get_running_loop()
    names: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    served: list[Server] = []
    server = await loop.create_server(lambda: served.append(Server(names)) or served[-1], "127.0.0.1", 0)
    at = server.sockets[0].getsockname()
    victim = socket.create_connection(at)
    # The attacker's side of this: it chooses the number in its request, which both sides compute the port from.
    monkeypatch.setattr(client_ports, "port_of", lambda _: victim.getsockname()[1])
    transport, _ = await loop.create_connection(asyncio.Protocol, *at)
    assert transport.get_extra_info("fabric") == "rdma"
    with contextlib.closing(server), contextlib.closing(transport):
        name = await names.get()
        seen = has_connection(victim.getsockname(), at), has_connection(name, at)
        for each in served:
            if each.transport is not None:
                each.transport.close()
    return name, victim, seen


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "control"])
def test_another_users_connection_does_not_vouch_for_a_client(monkeypatch, guarded):
    if not guarded:
        monkeypatch.setattr(client_ports, "_bound_socket", lambda address: (None, address[1]))
    name, victim, seen = rdmanet.run(name_of_the_attacker(monkeypatch))
    with victim:
        assert seen == (True, not guarded)
        assert (name == victim.getsockname()) != guarded
        assert name[1]


def test_nobody_gets_the_port_while_the_connection_lasts():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        names: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        server = await loop.create_server(lambda: Server(names), "127.0.0.1", 0)
        transport, _ = await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname())
        name = await names.get()
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="Address already in use"):
                other.bind(name)
        transport.close()
        server.close()

    rdmanet.run(main())


def test_no_port_is_held_before_somebody_asks():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        served: list[asyncio.Protocol] = []
        ended = asyncio.Event()

        class Silent(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self.transport = transport
                served.append(self)

            def connection_lost(self, error: Exception | None) -> None:
                ended.set()

        server = await loop.create_server(Silent, "127.0.0.1", 0)
        transport, _ = await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname())
        transport.write(b"x")
        await until_seen(lambda: served)
        assert transport.get_extra_info("fabric") == "rdma"
        accepted = served[0].transport
        facts = accepted._life.facts
        [listed] = [info for info in rdmanet.connections() if info.role == "server"]
        assert listed.peer == ("127.0.0.1", 0) and accepted.get_extra_info("rdma_device")
        assert facts.held_port is None  # lists of connections, and other facts, take none
        name = accepted.get_extra_info("peername")
        assert name == ("127.0.0.1", facts.held_port.port)
        [listed] = [info for info in rdmanet.connections() if info.role == "server"]
        assert listed.peer == name
        transport.close()
        await ended.wait()
        await until_seen(lambda: not facts.held_port.port)
        assert accepted.get_extra_info("peername") == name
        server.close()

    rdmanet.run(main())


def test_who_is_asked_while_it_looks_answers_both(monkeypatch):
    """A signal handler or a finalizer runs in the middle of it, in the same thread."""
    facts = Facts()
    pd = SimpleNamespace(context=SimpleNamespace(name="soft0", library=SimpleNamespace(name="embedded")))
    facts._learned = "", ("127.0.0.1", 5), ("127.0.0.1", 0), 1, 2, pd
    facts._pid = os.getpid()
    names, held = [], client_ports._held

    def interrupted(address):
        if not names:
            names.append(None)
            names[0] = facts.get("peername")
        return client_ports.HeldPort(address)

    monkeypatch.setattr("rdmanet.stream.facts.HeldPort", interrupted)
    names.append(facts.get("peername"))
    assert names[0] == names[1] and names[0][1]
    assert client_ports._held == held + 1
    facts.close()
    assert client_ports._held == held


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "control"])
def test_who_asks_only_after_the_end_gets_no_others_port(monkeypatch, guarded):
    """Otherwise a client could disconnect at once, and be taken for somebody who is still connected."""
    if not guarded:
        monkeypatch.setattr(client_ports, "_bound_socket", lambda address: (None, address[1]))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[asyncio.BaseTransport] = asyncio.Queue()

        class Late(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self.transport = transport

            def connection_lost(self, error: Exception | None) -> None:
                ended.put_nowait(self.transport)

        server = await loop.create_server(Late, "127.0.0.1", 0)
        at = server.sockets[0].getsockname()
        victim = socket.create_connection(at)
        monkeypatch.setattr(client_ports, "port_of", lambda _: victim.getsockname()[1])
        transport, _ = await loop.create_connection(asyncio.Protocol, *at)
        assert transport.get_extra_info("fabric") == "rdma"
        transport.close()
        accepted = await ended.get()
        await until_seen(lambda: accepted._life.teardown.released)
        name = accepted.get_extra_info("peername")
        assert (name == victim.getsockname()) != guarded
        if guarded:
            assert not accepted._life.facts.held_port.port  # nothing is held for a connection that is over
        victim.close()
        await ended.get()
        server.close()

    rdmanet.run(main())


def test_where_none_is_to_be_had_it_is_none():
    assert client_ports.HeldPort(("192.0.2.1", 40000)).port == 0  # an address of no host


def test_ports_take_no_more_than_half_of_the_descriptors(monkeypatch):
    monkeypatch.setattr(client_ports.resource, "getrlimit", lambda _: (4, 4))
    held = [client_ports.HeldPort(("127.0.0.1", 0)) for _ in range(4)]
    assert [bool(each.port) for each in held] == [True, True, False, False]
    held[0].close()
    held[0].close()  # which changes nothing
    held[3].close()  # nor does this: it held none
    held += [client_ports.HeldPort(("127.0.0.1", 0)) for _ in range(2)]
    assert [bool(each.port) for each in held[4:]] == [True, False]
    for each in held:
        each.close()
