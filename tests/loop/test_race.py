"""To a peer on another host RDMA has a head start, and TCP stands by.

No adapter is needed here: the embedded device stands for one, and the address 127.0.0.1 for another host.
"""

import asyncio
import gc
import re
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest
from loop_harness import Echo, Recorder, fabric, plain_server, serving

from rdmanet.loop import choice, connecting, doors
from tests.support.waiting import begin, loop_turns, until_seen


@pytest.fixture
def far(monkeypatch):
    """No peer has a door, and there is an adapter: attempts go by the embedded device, as to a peer that has one."""
    original = connecting.Attempt.connect

    async def connect(self, address, chance):
        return await original(self, address, choice.Chance(cast(Any, "a door"), chance.reason))

    async def knock(found, receive):
        return doors.Place("127.0.0.1", far.port, 0)

    monkeypatch.setattr(doors, "find", lambda *_: doors.NOBODY)
    monkeypatch.setattr(doors, "knock", knock)
    monkeypatch.setattr(choice, "why_no_adapter", lambda excluded: "")
    monkeypatch.setattr(connecting.Attempt, "connect", connect)
    monkeypatch.setattr(connecting, "HEAD_START_S", 1000)  # beside load RDMA may be later than usual
    far = SimpleNamespace(port=0)
    return far


@pytest.fixture
def slow(monkeypatch):
    """RDMA never answers."""
    begun = []

    async def connect(self, address, chance):
        begun.append(self)
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(doors, "find", lambda *_: doors.NOBODY)
    monkeypatch.setattr(choice, "why_no_adapter", lambda excluded: "")
    monkeypatch.setattr(connecting.Attempt, "connect", connect)
    return begun


async def connect(port: int, factory=Recorder):
    return await asyncio.get_running_loop().create_connection(factory, "127.0.0.1", port)


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        ({}, "this host has no RDMA adapter for others"),
        ({"siw0": "4: RNIC\n"}, r"adapter for others \(siw0\) does iWARP, whose ports are TCP's"),
        ({"siw0": "4: RNIC\n", "rxe0": "1: CA\n"}, None),
        ({"mlx5_0": ""}, None),
    ],
    ids=["none", "iWARP", "iWARP and RoCE", "unknown"],
)
async def test_adapters_of_iwarp_are_for_programs_that_exclude_tcp(tmp_path, monkeypatch, devices, reason):
    for name, kind in devices.items():
        (tmp_path / name).mkdir()
        if kind:
            (tmp_path / name / "node_type").write_text(kind)
    monkeypatch.setattr(choice, "_ADAPTERS", str(tmp_path))
    chooser = asyncio.get_running_loop()._rdmanet.chooser
    chance = chooser.choose("elsewhere", ("192.0.2.1", 9))
    if reason is None:
        assert not chance.alone
    else:
        assert re.search(reason, chance)
    monkeypatch.setenv("RDMANET_REQUIRE", "rdma")
    assert choice.why_no_adapter(bool(chooser.excludes_tcp())) == ("" if devices else reason)


async def test_rdma_is_taken_and_remembered(far):
    async with serving() as (_, port):
        far.port = port
        for _ in range(2):
            transport, protocol = await connect(port)
            assert fabric(transport) == "rdma"
            transport.write(b"x")
            await protocol.until(lambda: protocol.data == b"x")  # noqa: B023
            transport.close()
        chooser = asyncio.get_running_loop()._rdmanet.chooser
        assert chooser.choose("x", ("127.0.0.1", port)).alone


@pytest.mark.parametrize("place", [("fe80::1", 9, 0, 1), ("fe80::1%lo", 9)], ids=["resolved", "as text"])
async def test_an_address_of_one_link_is_reached_by_tcp(far, place):
    """This host may have the same address on another link, and a server there."""
    chooser = asyncio.get_running_loop()._rdmanet.chooser
    assert chooser.choose("fe80::1%lo", place) == "an address with a zone is reached by TCP"
    assert not isinstance(chooser.choose("::1", ("::1", 9, 0, 0)), str)


async def test_tcp_is_taken_where_rdma_does_not_answer(slow):
    server, port = await plain_server()
    transport, protocol = await connect(port)
    assert (fabric(transport), len(slow), slow[0].is_given_up) == ("tcp", 1, True)
    assert transport.get_extra_info("fabric_reason") == "TCP was there first"
    transport.write(b"x")
    await protocol.until(lambda: protocol.data == b"x")
    transport.abort()
    transport, _ = await connect(port)
    assert (fabric(transport), len(slow)) == ("tcp", 1)
    assert "RDMA did not reach it" in transport.get_extra_info("fabric_reason")
    transport.abort()
    server.close()


async def test_tcp_waits_while_rdma_has_its_head_start(slow, monkeypatch):
    monkeypatch.setattr(connecting, "HEAD_START_S", 1000)
    accepted: list[Echo] = []

    def accept() -> Echo:
        accepted.append(Echo())
        return accepted[-1]

    server, port = await plain_server(accept)
    (connect_both,) = await begin(connect(port))
    await until_seen(lambda: slow)
    await loop_turns(100)
    assert not accepted
    connect_both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connect_both
    server.close()


async def test_it_is_forgotten_after_a_minute(slow, monkeypatch):
    server, port = await plain_server()
    monkeypatch.setattr(choice, "MEMORY_S", 0.0)
    for _ in range(2):
        transport, _ = await connect(port)
        transport.abort()
    assert len(slow) == 2
    server.close()


async def test_a_refusal_does_not_wait(monkeypatch):
    async def connect_refused(self, address, chance):
        raise ConnectionRefusedError("no")

    monkeypatch.setattr(doors, "find", lambda *_: doors.NOBODY)
    monkeypatch.setattr(choice, "why_no_adapter", lambda excluded: "")
    monkeypatch.setattr(connecting.Attempt, "connect", connect_refused)
    monkeypatch.setattr(connecting, "HEAD_START_S", 1000)
    server, port = await plain_server()
    transport, _ = await connect(port)
    assert fabric(transport) == "tcp"
    assert transport.get_extra_info("fabric_reason") == "RDMA was tried: no"
    transport.abort()
    server.close()


async def test_a_socket_that_tcp_connected_knows_why(slow):
    server, port = await plain_server()
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    await loop.sock_connect(sock, ("127.0.0.1", port))
    transport, _ = await loop.create_connection(Recorder, sock=sock)
    assert fabric(transport) == "tcp"
    assert transport.get_extra_info("fabric_reason") == "TCP was there first"
    transport.abort()
    server.close()


async def test_what_is_made_in_time_is_taken_however_late_the_loop_is(monkeypatch):
    async def connect_late(self, address, chance):
        self.make_protocol()
        await asyncio.sleep(0.1)  # longer than PATIENCE_S
        return "made"

    monkeypatch.setattr(connecting, "PATIENCE_S", 0.02)
    monkeypatch.setattr(connecting.Attempt, "connect", connect_late)
    base = asyncio.get_running_loop()._rdmanet.base
    assert await connecting._in_time(base, attempt(), ("127.0.0.1", 1), cast(Any, None)) == "made"


async def test_nothing_is_made_when_the_time_is_up(monkeypatch):
    """The peer's answer may come in the turn in which the time is up."""

    async def connect_late(self, address, chance):
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            with pytest.raises(ConnectionAbortedError):
                self.make_protocol()

    monkeypatch.setattr(connecting, "PATIENCE_S", 0.02)
    monkeypatch.setattr(connecting.Attempt, "connect", connect_late)
    late = attempt()
    with pytest.raises(TimeoutError, match=r"no connection within 0\.02 s"):
        base = asyncio.get_running_loop()._rdmanet.base
        await connecting._in_time(base, late, ("127.0.0.1", 1), cast(Any, None))
    assert not late.is_made


def attempt() -> connecting.Attempt:
    wanted = cast(Any, SimpleNamespace(factory=Recorder))
    return connecting.Attempt(cast(Any, None), cast(Any, None), cast(Any, None), wanted)


async def test_if_both_fail_it_is_tcps_error(slow, monkeypatch):
    monkeypatch.setattr(connecting, "PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        await connect(port)


async def test_it_may_be_cancelled(slow):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.ensure_future(connect(listener.getsockname()[1], Echo))
        await until_seen(lambda: slow)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


# ---- Who loses, and when -----------------------------------------------------------------------------


class Runner:
    """One side of a race: it succeeds or fails when it is told to, also if it has been cancelled before."""

    def __init__(self, is_stubborn: bool = False) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.is_running = self.is_cancelled = False
        self._is_stubborn = is_stubborn

    async def run(self, *_: object) -> Any:
        self.is_running = True
        try:
            await asyncio.wait([self.result])
            return self.result.result()
        except asyncio.CancelledError:
            self.is_cancelled = True
            if not self._is_stubborn:
                raise
            return await self.result


class Prize:
    """A connection, or a socket."""

    def __init__(self) -> None:
        self.is_ended = False

    def abort(self) -> None:
        self.is_ended = True

    def close(self) -> None:
        self.is_ended = True


class Race:
    """A race between two runners; TCP has started, too."""

    def __init__(self, monkeypatch, is_stubborn: bool = False) -> None:
        monkeypatch.setattr(connecting, "HEAD_START_S", 0)
        self.rdma, self.tcp = Runner(is_stubborn), Runner(is_stubborn)
        self.attempt: Any = SimpleNamespace(is_made=False, is_given_up=False, connect=self.rdma.run)
        self.base = asyncio.get_running_loop()._rdmanet.base
        race = connecting._race(self.base, self.attempt, ("", 0), cast(Any, None), self.tcp.run, Prize.close)
        self.task = asyncio.ensure_future(race)

    async def begun(self) -> "Race":
        await until_seen(lambda: self.rdma.is_running and self.tcp.is_running)
        return self

    async def ended(self) -> None:
        """Nothing is left that runs."""
        await until_seen(lambda: not self.base.tasks)


async def test_a_tcp_socket_that_is_late_is_closed(monkeypatch):
    race = await Race(monkeypatch, is_stubborn=True).begun()
    won, late = Prize(), Prize()
    race.rdma.result.set_result(won)
    assert await race.task is won
    assert len(race.base.tasks) == 1
    race.tcp.result.set_result(late)
    await race.ended()
    assert race.tcp.is_cancelled and late.is_ended and not won.is_ended
    assert not race.attempt.is_given_up


async def test_a_connection_that_is_late_is_aborted(monkeypatch):
    race = await Race(monkeypatch, is_stubborn=True).begun()
    won, late = Prize(), Prize()
    race.tcp.result.set_result(won)
    assert await race.task is won
    race.rdma.result.set_result(late)
    await race.ended()
    assert race.rdma.is_cancelled and late.is_ended and not won.is_ended
    assert race.attempt.is_given_up


async def test_if_both_are_there_at_once_rdma_wins(monkeypatch):
    race = await Race(monkeypatch).begun()
    won, late = Prize(), Prize()
    race.tcp.result.set_result(late)
    race.rdma.result.set_result(won)
    assert await race.task is won
    await race.ended()
    assert late.is_ended and not won.is_ended


@pytest.mark.parametrize("is_stubborn", [False, True])
async def test_cancelling_ends_both(monkeypatch, is_stubborn):
    race = await Race(monkeypatch, is_stubborn).begun()
    race.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race.task
    await until_seen(lambda: race.rdma.is_cancelled and race.tcp.is_cancelled)
    assert race.attempt.is_given_up
    late = Prize(), Prize()
    race.rdma.result.set_result(late[0])
    race.tcp.result.set_result(late[1])
    await race.ended()
    assert [prize.is_ended for prize in late] == [is_stubborn] * 2  # the others were never made


async def test_a_late_failure_is_nobodys(monkeypatch):
    race = await Race(monkeypatch, is_stubborn=True).begun()
    won = Prize()
    race.tcp.result.set_result(won)
    assert await race.task is won
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    race.rdma.result.set_exception(ConnectionRefusedError("late"))
    await race.ended()
    del race
    gc.collect()
    assert not won.is_ended and not reported


@pytest.mark.parametrize("first", ["rdma", "tcp"])
async def test_one_that_fails_leaves_it_to_the_other(monkeypatch, first):
    race = await Race(monkeypatch).begun()
    one, other = (race.rdma, race.tcp) if first == "rdma" else (race.tcp, race.rdma)
    one.result.set_exception(ConnectionRefusedError(first))
    await loop_turns(5)
    assert not race.task.done()
    won = Prize()
    other.result.set_result(won)
    assert await race.task is won and not won.is_ended
    await race.ended()


@pytest.mark.parametrize("first", ["rdma", "tcp"])
async def test_if_both_fail_in_either_order_it_is_tcps_error(monkeypatch, first):
    race = await Race(monkeypatch).begun()
    for name in (first, "tcp" if first == "rdma" else "rdma"):
        getattr(race, name).result.set_exception(ConnectionRefusedError(name))
        await loop_turns()
    with pytest.raises(ConnectionRefusedError, match="tcp"):
        await race.task
    await race.ended()


async def test_there_is_no_way_back_once_the_protocol_is_made(monkeypatch):
    """TCP is there, but the program's factory was called for RDMA: its error is the call's."""
    race = await Race(monkeypatch).begun()
    race.attempt.is_made = True
    late = Prize()
    race.tcp.result.set_result(late)
    await loop_turns()
    race.rdma.result.set_exception(ZeroDivisionError("the factory's"))
    with pytest.raises(ZeroDivisionError):
        await race.task
    await race.ended()
    assert late.is_ended
