"""More buffers at a time than a connection can lend."""

import asyncio
from collections.abc import Awaitable

import pytest
from net import Net, bindings, callee, channel, idle

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.lending import LEND_BYTES
from rdmanet.rpc.link import LOANS_MOST

DATA = bytes(range(256)) * (LEND_BYTES // 256)


class Meeting(rpc.Service):
    """Calls that end when so many are there."""

    def __init__(self, count: int) -> None:
        self.barrier = asyncio.Barrier(count)
        self.data = rpc.Buffer(DATA)

    async def meet(self, first: rpc.Buffer, second: rpc.Buffer) -> int:
        await self.barrier.wait()
        return sum([(await first.read(0, 10))[9], (await second.read(0, 20))[19]])

    async def lend(self) -> rpc.Buffer:
        return self.data


async def test_calls_that_wait_for_each_other(net: Net):
    """Those beyond the bound go in messages."""
    count = LOANS_MOST // 2 + 2
    client, server = await net.pair(Meeting(count))
    first, second = rpc.Buffer(DATA), rpc.Buffer(DATA)
    assert await asyncio.gather(*(client.meet(first, second) for _ in range(count))) == [9 + 19] * count
    links = channel(client).link, callee(server).link
    assert not bindings(*links) and {link.loans_left for link in links} == {LOANS_MOST}


async def test_results_that_are_held(net: Net):
    service = Meeting(1)
    client, server = await net.pair(service)
    held = [await client.lend() for _ in range(LOANS_MOST + 2)]
    for buffer in held:
        assert await buffer.read(LEND_BYTES - 1) == DATA[-1:]
        buffer.release()
    await idle(server)
    service.data.release()


@pytest.mark.parametrize("transport", ["rdma"])
async def test_what_is_too_long_for_a_message(net: Net):
    service = Meeting(1)
    limits = rpc.Limits(message_bytes=LEND_BYTES // 2)
    server = await net.serve(service, limits=limits)
    client = await net.connect(Meeting, server, limits=limits)
    held = [await client.lend() for _ in range(LOANS_MOST)]
    code, text, _ = await failure(client.lend())
    assert code is Code.RESOURCE_EXHAUSTED
    assert f"{LOANS_MOST} buffers are lent on this connection" in text and "message_bytes" in text
    for buffer in held:
        buffer.release()
    channel(client).link.loans_left = 1
    async with rpc.Buffer(DATA) as first, rpc.Buffer(DATA) as second:
        code, text, begun = await failure(client.meet(first, second))
    assert code is Code.RESOURCE_EXHAUSTED and "buffers are lent" in text and not begun
    channel(client).link.loans_left = LOANS_MOST
    await idle(server)
    service.data.release()


async def failure(call: Awaitable[object]) -> tuple[Code, str, bool]:
    with pytest.raises(rpc.Error) as caught:
        await call
    return caught.value.code, caught.value.text, caught.value.begun
