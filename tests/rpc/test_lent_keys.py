"""When a call has ended, nobody reads what it has lent: not a peer that keeps the key, nor one that was stopped."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from net import HOST, Journal, Net, bindings, channel, idle

from rdmanet import rpc
from rdmanet.rpc import Code, lending
from rdmanet.rpc.lending import LEND_BYTES
from rdmanet.wire.offers import ACCEPTED_MAX
from tests.rpc.keeper import Keeper, keep, read_by_force
from tests.support.processes import AwaitedProcess
from tests.support.waiting import begin, loop_turns

pytestmark = pytest.mark.parametrize("transport", ["rdma"])

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


async def failure(call: Any) -> Code:
    with pytest.raises(rpc.Error) as caught:
        await call
    return caught.value.code


async def answered(client: Keeper, data: rpc.Buffer, journal: Journal) -> None:
    await client.hold(data, "answers")


async def answered_in_time(client: Keeper, data: rpc.Buffer, journal: Journal) -> None:
    """The answer has come, and then the time is over, while the peer does not let go."""
    await rpc.options(client, timeout=2).hold(data, "answers")


async def failed(client: Keeper, data: rpc.Buffer, journal: Journal) -> None:
    assert await failure(client.hold(data, "fails")) is Code.ABORTED


async def late(client: Keeper, data: rpc.Buffer, journal: Journal) -> None:
    assert await failure(rpc.options(client, timeout=0.5).hold(data, "waits")) is Code.DEADLINE_EXCEEDED


async def cancelled(client: Keeper, data: rpc.Buffer, journal: Journal) -> None:
    (call,) = await begin(client.hold(data, "waits"))
    await journal.until("holds")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def cancelled_twice(client: Keeper, data: rpc.Buffer, journal: Journal) -> None:
    (call,) = await begin(client.hold(data, "waits"))
    await journal.until("holds")
    for _ in range(2):
        call.cancel()
        await loop_turns(1)
    with pytest.raises(asyncio.CancelledError):
        await call


async def left(client: Keeper, data: rpc.Buffer, journal: Journal) -> None:
    stream: Any = client.items(data)
    assert await anext(stream) == 1
    await stream.aclose()


@pytest.mark.parametrize(
    "ended", [answered, answered_in_time, failed, late, cancelled, cancelled_twice, left]
)
async def test_a_peer_that_keeps_the_key(net: Net, ended: Any):
    """The call ends all the same, and so does the key."""
    service = Keeper(Journal())
    client, server = await net.pair(service)
    memory = bytearray(b"lent" * (LEND_BYTES // 4))
    await ended(client, rpc.Buffer(memory), service.say)
    assert not bindings(channel(client).link)
    memory[:] = b"mine" * (LEND_BYTES // 4)
    assert await read_by_force(service.kept) == b""
    service.kept = None
    await idle(server)


async def test_a_caller_that_keeps_the_key_of_a_result(net: Net):
    service = Keeper(Journal())
    service.kept = memory = bytearray(b"lent" * (LEND_BYTES // 4))
    client, server = await net.pair(service)
    lent = await client.lend()
    kept = await keep(lent)
    lent.release()
    await idle(server)
    memory[:] = b"mine" * (LEND_BYTES // 4)
    assert await read_by_force(kept) == b""
    service.kept = None


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_peer_that_is_stopped(net: Net, how: str):
    """Its caller does not wait for it, and when it goes on it reads nothing."""
    with AwaitedProcess(sys.executable, Path(__file__).parent / "keeper.py", env=ENVIRONMENT) as peer:
        async with rpc.connect(Keeper, HOST, int(await peer.line())) as client:
            memory = bytearray(b"lent" * (LEND_BYTES // 4))
            timeout = 2 if how == "late" else None
            (call,) = await begin(rpc.options(client, timeout=timeout).hold(rpc.Buffer(memory), "waits"))
            assert await peer.line() == "holds"
            peer.stop()
            if how == "cancelled":
                call.cancel()
            with pytest.raises((asyncio.CancelledError, rpc.Error)):
                await call
            memory[:] = b"mine" * (LEND_BYTES // 4)
            peer.send_signal(signal.SIGCONT)
            peer.say("read")
            assert await peer.line() == "nothing"


async def test_a_peer_that_never_confirms(net: Net, monkeypatch: pytest.MonkeyPatch):
    """When the connection has no more numbers for loans, calls that need one fail, and others go on."""
    monkeypatch.setattr(lending, "RETURN_S", 0)
    service = Keeper(Journal())
    client, _ = await net.pair(service)
    data = rpc.Buffer(bytearray(LEND_BYTES))
    for _ in range(ACCEPTED_MAX):
        await client.hold(data, "answers")
    assert await failure(client.hold(data, "answers")) is Code.RESOURCE_EXHAUSTED
    assert await client.echo("short") == "short"
    service.kept = None
