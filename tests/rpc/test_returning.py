"""A Reply says whether the callee has let go of its arguments on loan. If it has, the caller does not wait for more."""

import asyncio
from typing import Any

import pytest
from net import Net, bindings, callee, channel, idle

from rdmanet import rpc
from rdmanet.rpc import Code, lending
from rdmanet.rpc.framing import PlainReply
from rdmanet.rpc.lending import LEND_BYTES
from rdmanet.rpc.messages import Reply
from tests.rpc.keeper import keep, read_by_force

pytestmark = pytest.mark.parametrize("transport", ["rdma"])


class Store(rpc.Service):
    def __init__(self) -> None:
        self.kept: Any = None

    async def put(self, data: memoryview) -> int:
        return data.nbytes

    async def join(self, one: memoryview, other: bytes) -> int:
        return one.nbytes + len(other)

    async def first(self, data: rpc.Buffer) -> bytes:
        self.kept = await lending.found(data._source._link, data._source._loan)  # type: ignore[union-attr]
        return await data.read(0, 1)

    async def hold(self, data: rpc.Buffer) -> None:
        self.kept = await keep(data)

    async def keep_buffer(self, data: rpc.Buffer) -> None:
        self.kept = data

    async def fail(self, data: memoryview) -> None:
        raise rpc.Error(Code.ABORTED)


def lent(number: int = 1) -> memoryview:
    return memoryview(bytearray([number]) * LEND_BYTES)


def replies(client: rpc.Service) -> list[bool]:
    """What the Replies to a client will say."""
    said: list[bool] = []
    handlers: Any = channel(client)._handlers
    before = dict(handlers)

    def on_reply(message: Reply | PlainReply) -> None:
        said.append(isinstance(message, Reply) and message.returned)
        before[type(message)](message)

    handlers[Reply] = handlers[PlainReply] = on_reply
    return said


async def test_what_the_reply_says(net: Net):
    service = Store()
    client, server = await net.pair(service)
    said = replies(client)
    assert await client.put(lent()) == LEND_BYTES
    assert await client.join(lent(), lent().tobytes()) == 2 * LEND_BYTES
    assert await client.first(rpc.Buffer(lent(7))) == b"\7"
    await client.keep_buffer(rpc.Buffer(lent()))
    assert said == [True] * 4
    said.clear()
    assert await client.put(memoryview(b"in the message")) == 14
    await client.hold(rpc.Buffer(lent()))
    assert said == [False] * 2
    with pytest.raises(rpc.Error):
        await client.fail(lent())
    assert not bindings(channel(client).link)
    service.kept = None
    await idle(server)


async def test_a_buffer_that_is_kept_is_not_read_any_more(net: Net):
    service = Store()
    client, _ = await net.pair(service)
    await client.keep_buffer(rpc.Buffer(lent()))
    with pytest.raises(rpc.Error) as caught:
        await service.kept.read(0, 1)
    assert caught.value.code is Code.FAILED_PRECONDITION
    assert await client.put(lent()) == LEND_BYTES


async def test_the_key_is_invalid_when_the_call_has_ended(net: Net):
    service = Store()
    client, server = await net.pair(service)
    memory = lent()
    await client.first(rpc.Buffer(memory))
    assert not bindings(channel(client).link)
    memory[:] = lent(9)
    assert await read_by_force(service.kept) == b""
    await idle(server)


class Deaf(dict[int, None]):
    """Acknowledgements that are never sent."""

    def __setitem__(self, number: int, value: None) -> None:
        pass


async def test_the_caller_does_not_wait_for_more(net: Net, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lending, "RETURN_S", 1000)
    client, server = await net.pair(Store())
    regions: Any = callee(server).link.transport._regions  # type: ignore[attr-defined]
    monkeypatch.setattr(regions._offers, "_ack", Deaf())
    for _ in range(3):
        assert await client.put(lent()) == LEND_BYTES
        assert not bindings(channel(client).link)


async def test_an_interceptor_that_answers_first(net: Net):
    """What it goes on with reads no argument any more."""
    behind: list[asyncio.Task[Any]] = []

    async def hasty(call: Any, proceed: Any) -> Any:
        behind.append(asyncio.create_task(proceed()))
        return 0

    server = await net.serve(Store(), interceptors=[hasty])
    client = await net.connect(Store, server)
    said = replies(client)
    assert await client.put(lent()) == 0
    assert said == [False]
    with pytest.raises(rpc.Error) as caught:
        await behind[0]
    assert caught.value.code is Code.FAILED_PRECONDITION
    assert await client.put(memoryview(b"short")) == 0
    assert await behind[1] == 5
