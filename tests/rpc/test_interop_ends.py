"""How calls end before their time, over each transport: cancelled in each phase, by deadlines, by the ends of servers.

The others of gRPC's interoperability tests are in test_interop.py.
"""

import asyncio
from typing import Any

import pytest
from interop import (
    KINDS,
    PATTERN,
    SMALL,
    TIMEOUT_S,
    Source,
    Work,
    gated,
    items_and_error,
    listed,
    outcome,
    pair,
    said,
    time_passes,
)
from net import Net, callee, channel, idle

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.lending import LEND_BYTES
from rdmanet.rpc.messages import Pong
from tests.support.waiting import begin, until_seen

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

SOON_S = 0.05
"""How long keepalive waits."""
ENDLESS = rpc.Retry(first_seconds=0.001, most_seconds=0.002, attempts=None)


async def cancelled(call: asyncio.Future[Any]) -> bool:
    """Cancel a call, and wait for its end; returns whether it was cancelled."""
    call.cancel()
    await asyncio.wait([call])
    return call.cancelled()


# -- cancelling ----------------------------------------------------------------------------------------------


async def test_cancel_before_begin(net: Net):
    """Nothing is sent."""
    client, service, _ = await pair(net)
    call = asyncio.ensure_future(client.wait())
    assert await cancelled(call)
    await client.empty()
    assert rpc.stats(client)["wait"].begun == 0 and service.journal.entries == []


async def test_cancel_after_begin(net: Net):
    """Before the first item of the client's stream."""
    client, service, _ = await pair(net)
    (call,) = await begin(client.aggregate(listening := Silent()))
    await listening.asked.wait()
    assert await cancelled(call) and listening.is_closed


class Silent:
    """A stream of the caller's that gives nothing."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.is_closed = False

    def __aiter__(self) -> "Silent":
        return self

    async def __anext__(self) -> Any:
        self.asked.set()
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.is_closed = True


async def test_cancel_after_first_response(net: Net):
    client, service, _ = await pair(net)
    stream = client.wait_both(gated(asyncio.Event()))
    assert await anext(stream) == 0
    (waiting,) = await begin(anext(stream))  # type: ignore[arg-type]
    assert await cancelled(waiting)
    await service.journal.until("cancelled")
    assert service.journal.entries == ["begins", "cancelled"]


@pytest.mark.parametrize("kind", KINDS)
async def test_cancel_while_the_method_runs(net: Net, kind: str):
    client, service, server = await pair(net)
    (call,) = await begin(KINDS[kind][0](client, gated(asyncio.Event())))
    await service.journal.until("begins")
    assert await cancelled(call)
    await service.journal.until("cancelled")
    await client.empty()  # whose answer comes after that of the other
    assert len(channel(client).book) == len(callee(server).book) == len(server.running) == 0


async def test_cancel_while_the_client_waits_for_credit(net: Net):
    client, service, _ = await pair(net)
    source = Source(None)
    (call,) = await begin(client.take_none(source))
    await service.journal.until("begins")
    await client.empty()
    assert await cancelled(call) and source.is_closed
    await service.journal.until("cancelled")


async def test_cancel_while_the_server_waits_for_credit(net: Net):
    client, service, _ = await pair(net)
    stream: Any = client.count()
    await anext(stream)
    await client.empty()
    before = service.given
    await stream.aclose()
    await service.journal.until("cancelled")
    assert service.given == before


async def test_cancel_while_the_transport_is_full(net: Net):
    """The call was not sent."""
    client, service, _ = await pair(net)
    channel(client).link.pause_writing()
    (call,) = await begin(client.wait())
    assert await cancelled(call)
    channel(client).link.resume_writing()
    await client.empty()
    assert service.journal.entries == []


async def test_cancel_after_half_close(net: Net):
    """The method has taken all that the client has, and gives."""
    client, service, _ = await pair(net)
    stream = client.wait_both(Source(1))
    assert await anext(stream) == 0
    await client.empty()
    await stream.aclose()  # type: ignore[attr-defined]
    await service.journal.until("cancelled")
    assert service.journal.entries == ["begins", "cancelled"]


async def test_cancel_while_an_argument_is_lent(net: Net):
    """Its memory is the caller's own again."""
    client, service, _ = await pair(net)
    payload = rpc.Buffer(PATTERN[:LEND_BYTES])
    (call,) = await begin(client.wait_holding(payload))
    await service.journal.until("begins")
    assert await cancelled(call)
    payload.release()
    await service.journal.until("cancelled")


async def test_cancel_when_all_items_have_come(net: Net):
    """The server has ended the call: there is nothing to cancel."""
    client, _, server = await pair(net)
    stream = client.give([1, 2, 3])
    assert await anext(stream) == PATTERN[:1]
    await until_seen(lambda: not server.running)
    await stream.aclose()  # type: ignore[attr-defined]
    await client.empty()
    assert server.stats()["give"].ended == {"OK": 1}


async def test_cancel_by_the_server(net: Net):
    client, _, _ = await pair(net)
    assert said(await outcome(client.cancel_itself())) == (Code.CANCELLED, True)


async def test_cancel_by_the_server_after_first_response(net: Net):
    client, _, _ = await pair(net)
    found, error = await items_and_error(client.cancel_itself_later())
    assert found == [0] and error is not None and error.code is Code.CANCELLED


# -- deadlines -----------------------------------------------------------------------------------------------


def timed(client: Work) -> Work:
    """The client, whose calls are over when the time passes."""
    return rpc.options(client, timeout=TIMEOUT_S)


async def test_timeout_on_sleeping_server(net: Net):
    client, service, _ = await pair(net)
    stream = timed(client).wait_both(gated(asyncio.Event()))
    assert await anext(stream) == 0
    time_passes()
    assert said(await outcome(anext(stream))) == (Code.DEADLINE_EXCEEDED, True)
    await service.journal.until("cancelled")


async def test_timeout_of_a_call_that_is_answered_before(net: Net):
    """Its timers are gone: neither side hears of them."""
    client, _, server = await pair(net)
    assert await timed(client).answer(b"", 10) == PATTERN[:10]
    time_passes()
    await client.empty()
    assert server.stats()["answer"].ended == rpc.stats(client)["answer"].ended == {"OK": 1}


async def test_timeout_before_sending(net: Net):
    client, _, _ = await pair(net)
    assert said(await outcome(rpc.options(client, timeout=0).wait())) == (Code.DEADLINE_EXCEEDED, False)


async def test_timeout_while_the_transport_is_full(net: Net):
    client, _, _ = await pair(net)
    channel(client).link.pause_writing()
    (call,) = await begin(outcome(timed(client).wait()))
    time_passes()
    assert said(await call) == (Code.DEADLINE_EXCEEDED, False)
    channel(client).link.resume_writing()


async def test_timeout_while_the_client_waits_for_credit(net: Net):
    client, service, _ = await pair(net)
    source = Source(None)
    (call,) = await begin(outcome(timed(client).take_none(source)))
    await service.journal.until("begins")
    await client.empty()
    time_passes()
    assert (*said(await call), source.is_closed) == (Code.DEADLINE_EXCEEDED, True, True)
    await service.journal.until("cancelled")


async def test_timeout_while_the_server_waits_for_credit(net: Net):
    """What has come may still be taken."""
    client, service, _ = await pair(net)
    stream = timed(client).count()
    assert await anext(stream) == 0
    await client.empty()
    time_passes()
    await service.journal.until("cancelled")
    found, error = await items_and_error(stream)
    assert found == list(range(1, service.given - 1)) and error is not None
    assert error.code is Code.DEADLINE_EXCEEDED


async def test_timeout_while_the_method_waits_for_an_item(net: Net):
    client, service, _ = await pair(net)
    (call,) = await begin(outcome(timed(client).take_all(gated(asyncio.Event()))))
    await service.journal.until("begins")
    time_passes()
    assert said(await call) == (Code.DEADLINE_EXCEEDED, True)
    await service.journal.until("cancelled")


async def test_timeout_while_an_argument_is_lent(net: Net):
    """Its memory is the caller's own again."""
    client, service, _ = await pair(net)
    payload = rpc.Buffer(PATTERN[:LEND_BYTES])
    (call,) = await begin(outcome(timed(client).wait_holding(payload)))
    await service.journal.until("begins")
    time_passes()
    assert said(await call) == (Code.DEADLINE_EXCEEDED, True)
    payload.release()
    await service.journal.until("cancelled")


async def nested(net: Net) -> tuple[Work, Work]:
    """(a client of a service that calls another one, that other one)."""
    inner, behind, _ = await pair(net)
    client = await net.connect(Work, await net.serve(Work(inner), limits=SMALL), limits=SMALL)
    return client, behind


async def test_timeout_of_a_nested_call(net: Net):
    """It goes along, and ends the method behind."""
    client, behind = await nested(net)
    (call,) = await begin(outcome(timed(client).through()))
    await behind.journal.until("begins")
    assert behind.deadline is not None
    time_passes()
    assert said(await call) == (Code.DEADLINE_EXCEEDED, True)
    await behind.journal.until("cancelled")


async def test_timeout_of_a_nested_stream(net: Net):
    client, behind = await nested(net)
    stream = timed(client).through_stream()
    assert await anext(stream) == 0 and behind.deadline is not None
    time_passes()
    assert said(await outcome(anext(stream))) == (Code.DEADLINE_EXCEEDED, True)
    await behind.journal.until("cancelled")


async def test_cancel_of_a_nested_call(net: Net):
    client, behind = await nested(net)
    (call,) = await begin(client.through())
    await behind.journal.until("begins")
    await cancelled(call)
    await behind.journal.until("cancelled")
    assert behind.journal.entries == ["begins", "cancelled"]


async def test_200_calls_whose_time_is_over_at_once(net: Net):
    client, service, server = await pair(net)
    calls = await begin(*(outcome(timed(client).wait()) for _ in range(200)))
    await service.journal.until("begins", 200)
    time_passes()
    assert {said(each) for each in await asyncio.gather(*calls)} == {(Code.DEADLINE_EXCEEDED, True)}
    await idle(server)


# -- the ends of servers and connections ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_drain_while_a_call_runs(net: Net, kind: str):
    """It ends well, with both of its streams."""
    client, service, server = await pair(net)
    call, result = KINDS[kind]
    (running,) = await begin(call(client, gated(service.gate)))
    await service.journal.until("begins")
    (drained,) = await begin(server.drain())
    await until_seen(lambda: channel(client).refusal)
    service.gate.set()
    assert await outcome(running) == result
    await drained


@pytest.mark.parametrize("kind", KINDS)
async def test_close_while_a_call_runs(net: Net, kind: str):
    """It is cancelled, and says so; the client's stream has ended."""
    client, service, server = await pair(net)
    (running,) = await begin(outcome(KINDS[kind][0](client, gated(asyncio.Event()))))
    await service.journal.until("begins")
    server.close()
    assert said(await running) == (Code.CANCELLED, True)
    await server.wait_closed()


async def stop_at_once(server: rpc.Server) -> None:
    """As a server that is killed: its connections are lost without a word."""
    callees = list(server.callees)
    for each in callees:
        each.link.transport.abort()
    server.close()
    await server.wait_closed()
    for each in callees:
        await each.link.closed


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lost_connection_while_a_call_runs(net: Net, kind: str):
    client, service, server = await pair(net)
    (running,) = await begin(outcome(KINDS[kind][0](client, gated(asyncio.Event()))))
    await service.journal.until("begins")
    await stop_at_once(server)
    assert said(await running) == (Code.UNAVAILABLE, True)


async def test_a_call_after_the_connection_was_lost(net: Net):
    client, _, server = await pair(net)
    await stop_at_once(server)
    await channel(client).link.closed
    assert said(await outcome(client.empty())) == (Code.UNAVAILABLE, False)


async def test_reconnecting_after_the_server_was_killed(net: Net):
    """To the next server at its address."""
    server = await net.serve(Work(), limits=SMALL)
    client = await net.connect(Work, server, retry=ENDLESS)
    await client.empty()
    address = net.address(server)
    await stop_at_once(server)
    (call,) = await begin(listed(client.give([3])))
    async with await rpc.serve(Work(), *address, transport=net.transport):
        assert await call == [PATTERN[:3]]


async def test_a_call_of_a_killed_server_is_made_again_if_it_may_be(net: Net):
    service = Work()
    server = await net.serve(service)
    client = await net.connect(Work, server, retry=ENDLESS)
    calls = await begin(outcome(client.wait()), outcome(client.wait_again()))
    await service.journal.until("begins", 2)
    address = net.address(server)
    await stop_at_once(server)
    service.gate.set()
    async with await rpc.serve(service, *address, transport=net.transport):
        once, again = await asyncio.gather(*calls)
    assert (said(once), again) == ((Code.UNAVAILABLE, True), "waited")


async def test_timeout_while_there_is_no_server(net: Net):
    server = await net.serve(Work())
    client = await net.connect(Work, server, retry=ENDLESS)
    await stop_at_once(server)
    (call,) = await begin(outcome(timed(client).empty()))
    time_passes()
    assert said(await call) == (Code.DEADLINE_EXCEEDED, False)


async def test_a_client_that_closes_while_its_calls_run(net: Net):
    service = Work()
    server = await net.serve(service)
    async with net.connecting(Work, server) as client:
        calls = await begin(*(outcome(call(client, gated(asyncio.Event()))) for call, _ in KINDS.values()))
        await service.journal.until("begins", len(KINDS))
    assert [said(await call) for call in calls] == [(Code.CANCELLED, True)] * len(KINDS)
    await service.journal.until("cancelled", len(KINDS))


async def test_keepalive_while_a_call_runs(net: Net):
    """Nothing comes but Pongs, for longer than is waited for something."""
    server = await net.serve(service := Work())
    client = await net.connect(Work, server, keepalive=SOON_S)
    (call,) = await begin(outcome(client.wait()))
    pongs = iter(range(3))

    def heard(_: Pong) -> None:
        if next(pongs, None) is None:
            service.gate.set()

    channel(client)._handlers[Pong] = heard
    assert await call == "waited"


async def test_keepalive_of_a_server_that_is_stuck(net: Net):
    service = Work()
    server = await net.serve(service)
    client = await net.connect(Work, server, keepalive=SOON_S)
    (call,) = await begin(outcome(client.wait()))
    await service.journal.until("begins")
    callee(server).link.transport.pause_reading()
    assert said(await call) == (Code.UNAVAILABLE, True)
