"""rpc.Resolver: the servers of a client change."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from net import Net, callee, idle

from rdmanet import rpc
from rdmanet.base import log_rate
from rdmanet.rpc.pool import Pool
from tests.support.waiting import loop_turns

ALWAYS = 1e-9
"""Ask with each call, unless an answer is awaited."""


class Named(rpc.Service):
    """Says which server it is."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def who(self) -> str:
        return self.name

    async def slow(self) -> str:
        self.begun.set()
        await self.may_end.wait()
        return self.name


class Servers:
    """What a resolver is told."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self.known: dict[str, rpc.Server] = {}
        self.services: dict[str, Named] = {}
        self.names = ""
        self.asked = 0

    async def add(self, name: str) -> None:
        self.services[name] = Named(name)
        self.known[name] = await self._net.serve(self.services[name])

    def __call__(self) -> list[Any]:
        self.asked += 1
        found = [self._net.address(self.known[name]) for name in self.names]
        return [each[0] if len(each) == 1 else each for each in found]


@pytest.fixture
async def servers(net: Net) -> Servers:
    found = Servers(net)
    await found.add("a")
    await found.add("b")
    return found


def connecting(net: Net, resolver: rpc.Resolver, **options: Any) -> Any:
    return rpc.connect(Named, resolver, transport=net.transport, **options)


def pool(client: Named) -> Pool:
    return client._caller  # type: ignore[attr-defined, no-any-return]


async def until(client: Named, name: str) -> None:
    while await client.who() != name:
        pass


async def nobody(server: rpc.Server) -> None:
    """Wait until a server has no connection."""
    while server.callees:
        await callee(server).link.closed


@pytest.mark.parametrize("policy", ["first", "spread"])
async def test_servers_come_and_go(net: Net, servers: Servers, policy: str):
    servers.names = "a"
    async with connecting(net, rpc.Resolver(servers, every=ALWAYS), policy=policy) as client:
        assert await client.who() == "a"
        servers.names = "b"
        await until(client, "b")
        await nobody(servers.known["a"])
        assert {await client.who() for _ in range(20)} == {"b"}
        servers.names = "ab"
        if policy == "spread":
            await until(client, "a")
            await until(client, "b")
        else:
            assert {await client.who() for _ in range(20)} == {"b"}  # which is there


@pytest.mark.parametrize("policy", ["first", "spread"])
async def test_a_call_at_a_server_that_goes_ends_there(net: Net, servers: Servers, policy: str):
    servers.names = "a"
    async with connecting(net, rpc.Resolver(servers, every=ALWAYS), policy=policy) as client:
        slow = asyncio.ensure_future(client.slow())
        await servers.services["a"].begun.wait()
        servers.names = "b"
        await until(client, "b")
        assert len(servers.known["a"].callees) == 1
        servers.services["a"].may_end.set()
        assert await slow == "a"
        await client.who()
        await nobody(servers.known["a"])


async def test_a_client_that_has_to_connect_asks(net: Net, servers: Servers, monkeypatch: pytest.MonkeyPatch):
    servers.names = "a"
    async with connecting(
        net, rpc.Resolver(servers, every=3600), retry=rpc.Retry(first_seconds=0.01)
    ) as client:
        for _ in range(10):
            assert await client.who() == "a"
        assert servers.asked == 1
        monkeypatch.setattr("rdmanet.rpc.resolving.AGAIN_S", ALWAYS)
        servers.names = "b"
        servers.known["a"].close()
        await servers.known["a"].wait_closed()
        assert await client.who() == "b"


async def test_a_server_that_goes_while_it_is_connected(
    net: Net, servers: Servers, monkeypatch: pytest.MonkeyPatch
):
    """It does not answer, and nobody waits for it any more when another one is known."""
    monkeypatch.setattr("rdmanet.rpc.resolving.AGAIN_S", 0.0)  # uvloop's clock may stand still
    servers.names = "a"
    retry = rpc.Retry(connect_seconds=3600)
    async with connecting(net, rpc.Resolver(servers, every=3600), retry=retry) as client:
        assert await client.who() == "a"
        dial, gone = pool(client)._dial, net.address(servers.known["a"])
        tried = []

        async def silent(address: Any) -> Any:
            tried.append(address)
            if address[0] == gone[0] and address[1:] in (gone[1:], (None,)):
                await asyncio.Event().wait()
            return await dial(address)

        pool(client)._dial = silent
        servers.known["a"].close()
        await servers.known["a"].wait_closed()

        async def later() -> Any:
            servers.names = "b"
            await loop_turns(10)
            return servers()

        pool(client)._resolving._resolver._servers = later  # type: ignore[union-attr]
        assert await client.who() == "b"
        assert len(tried) == 2


@pytest.mark.parametrize("answer", [[], None, [("host", "port")], OSError("the file is gone")])
async def test_what_fails_changes_nothing(
    net: Net, servers: Servers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, answer: Any
):
    monkeypatch.setattr(log_rate, "_said", {})
    servers.names, has_failed = "a", asyncio.Event()
    asked = 0

    async def find() -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            return servers()
        if asked > 2:
            has_failed.set()
        if isinstance(answer, Exception):
            raise answer
        return answer

    with caplog.at_level(logging.WARNING, "rdmanet.rpc"):
        async with connecting(net, rpc.Resolver(find, every=ALWAYS)) as client:
            while not has_failed.is_set():
                assert await client.who() == "a"
    assert "the servers stay as they were: " in caplog.text


async def test_a_client_that_is_closed_waits_for_no_answer(net: Net, servers: Servers):
    servers.names, asks, is_cancelled = "a", asyncio.Event(), asyncio.Event()

    async def find() -> Any:
        if servers.asked:
            asks.set()
            try:
                await asyncio.Event().wait()
            finally:
                is_cancelled.set()
        return servers()

    async with connecting(net, rpc.Resolver(find, every=ALWAYS)) as client:
        while not asks.is_set():
            await client.who()
        assert await client.who() == "a"  # nor does a call
    assert is_cancelled.is_set()


async def test_the_first_answer(net: Net):
    def fails() -> Any:
        raise OSError("there is no list")

    with pytest.raises(rpc.Error, match="there is no list") as caught:
        await connecting(net, rpc.Resolver(fails))
    assert caught.value.code is rpc.Code.UNAVAILABLE
    with pytest.raises(ValueError, match="the list of servers is empty"):
        await connecting(net, rpc.Resolver(list))
    with pytest.raises(ValueError, match="has their ports in it"):
        await rpc.connect(Named, rpc.Resolver(list), 1)


async def test_a_file(net: Net, servers: Servers, tmp_path: Path):
    path, new = tmp_path / "servers", tmp_path / "new"

    def write(names: str) -> None:
        lines = [" ".join(map(str, net.address(servers.known[name]))) + "  # of " + name for name in names]
        new.write_text("\n".join(["# all of them", "", *lines]))
        new.rename(path)

    write("a")
    async with connecting(net, rpc.Resolver.file(path, every=ALWAYS)) as client:
        assert await client.who() == "a"
        write("b")
        await until(client, "b")
    await idle(servers.known["b"])
    path.write_text("host 1 2\n")
    with pytest.raises(ValueError, match="servers:1: 'host 1 2' is neither"):
        await rpc.Resolver.file(path).addresses()


async def test_a_name():
    found = await rpc.Resolver.name("localhost", 7).addresses()
    assert (("127.0.0.1", 7), 1.0) in found and len(set(found)) == len(found)


def test_arguments():
    with pytest.raises(TypeError, match="is no function"):
        rpc.Resolver([("host", 1)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every=0 is not more than 0"):
        rpc.Resolver(list, every=0)
    with pytest.raises(TypeError, match="is no number"):
        rpc.Resolver(list, every="5")  # type: ignore[arg-type]
