"""Objects that a client lends, and takes back; and the end of a client that its own callbacks close."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
from net import Journal, Net, callee, channel, failure

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.long_bodies import LongBody
from tests.support.waiting import loop_turns, until_seen


class Listener(rpc.Service):
    async def on(self, text: str) -> int: ...

    async def wait(self) -> None: ...

    @rpc.method(outlives_connection=True)
    async def close(self) -> None: ...

    @rpc.method(thread=True)
    def close_by_thread(self) -> None: ...


class Heard(Listener):
    def __init__(self) -> None:
        self.journal = Journal()
        self.clients: list[Any] = []
        self.may_close = asyncio.Event()
        self.loop: Any = None
        self.has_begun, self.may_go_on, self.is_closed = (threading.Event() for _ in range(3))

    async def on(self, text):
        self.journal(text)
        return len(text)

    async def wait(self):
        self.journal("wait")
        try:
            await asyncio.Event().wait()
        finally:
            await loop_turns(1)  # its end takes a while, which is waited for
            self.journal("cancelled")

    @rpc.method(outlives_connection=True)
    async def close(self):
        self.journal("close")
        await self.may_close.wait()
        for client in self.clients:
            await client.aclose()
        self.journal("closed")

    @rpc.method(thread=True)
    def close_by_thread(self):
        self.has_begun.set()
        self.may_go_on.wait()
        for client in self.clients:
            asyncio.run_coroutine_threadsafe(client.aclose(), self.loop).result(20)
        self.is_closed.set()


class Station(rpc.Service):
    def __init__(self) -> None:
        self.kept: list[Any] = []

    async def keep(self, listener: Listener) -> None:
        self.kept.append(listener)

    async def keep_twice(self, first: Listener, second: Listener) -> None:
        self.kept += [first, second]

    async def close_by(self, listener: Listener) -> None:
        await listener.close()

    async def counts(self, listener: Listener) -> AsyncIterator[int]:
        for number in range(1000):
            yield await listener.on(str(number))


class Plain(rpc.Service):
    async def get(self) -> int:
        return 1


def lender(client: Any) -> Any:
    return channel(client)._lender  # type: ignore[attr-defined]


# ---- Taking back -----------------------------------------------------------------------------------------------


async def test_taken_back(net: Net):
    service = Station()
    client, server = await net.pair(service)
    heard, other = Heard(), Heard()
    await client.keep_twice(heard, other)
    await client.keep(heard)
    first, second, again = service.kept
    assert await first.on("x") == await again.on("x") == 1
    await rpc.take_back(client, heard)
    assert list(lender(client).lent.values()) == [other]
    await until_seen(lambda: len(callee(server).link.inners.open) == 1)  # type: ignore[attr-defined]
    for gone in (first, again):
        error = await failure(gone.on("y"))
        assert error.code is Code.UNAVAILABLE and not error.begun
        assert error.text == "the connection is closed: the peer has closed it; this call was not sent"
    assert heard.journal.entries == ["x", "x"] and await second.on("four") == 4
    await rpc.take_back(client, heard)  # which it is already
    await client.keep(heard)  # and it may be lent again
    assert await service.kept[-1].on("anew") == 4


async def test_nobody_keeps_what_was_taken_back(net: Net):
    service = Station()
    client, _ = await net.pair(service)
    heard = Heard()
    await client.keep(heard)
    await service.kept[0].on("x")
    await rpc.take_back(client, heard)
    there = weakref.ref(heard)
    del heard
    await until_seen(lambda: gc.collect() is not None and there() is None)
    assert service.kept


async def test_nobody_keeps_what_the_peer_has_let_go_of(net: Net):
    service = Station()
    client, _ = await net.pair(service)
    there = []
    for letting_go in (service.kept.clear, lambda: service.kept[0].aclose()):
        heard = Heard()
        there.append(weakref.ref(heard))
        await client.keep(heard)
        del heard
        await service.kept[0].on("x")
        if (closing := letting_go()) is not None:
            await closing
    await until_seen(lambda: gc.collect() is not None and not any(each() for each in there))


async def test_callbacks_that_run_are_cancelled(net: Net):
    service = Station()
    client, _ = await net.pair(service)
    heard, other = Heard(), Heard()
    await client.keep_twice(heard, other)
    calls = [asyncio.ensure_future(kept.wait()) for kept in service.kept]
    await heard.journal.until("wait")
    await other.journal.until("wait")
    await rpc.take_back(client, heard)
    assert heard.journal.entries == ["wait", "cancelled"]  # it has waited for that
    assert (await failure(calls[0])).code is Code.UNAVAILABLE
    assert other.journal.entries == ["wait"] and not calls[1].done()
    calls[1].cancel()
    await other.journal.until("cancelled")


async def test_it_waits_for_callbacks_that_outlive_it_and_may_be_cancelled(net: Net):
    service = Station()
    client, _ = await net.pair(service)
    heard = Heard()
    await client.keep(heard)
    call = asyncio.ensure_future(service.kept[0].close())
    await heard.journal.until("close")
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await rpc.take_back(client, heard)
        assert not lender(client).lent
    waits = asyncio.ensure_future(rpc.take_back(client, heard))
    assert (await failure(call)).code is Code.UNAVAILABLE
    heard.may_close.set()
    await waits
    assert heard.journal.entries == ["close", "closed"]


async def test_taken_back_while_the_call_runs_that_has_lent_it(net: Net):
    client, _ = await net.pair(Station())
    heard = Heard()
    with pytest.raises(rpc.Error) as caught:
        async for _ in client.counts(heard):
            await rpc.take_back(client, heard)
    assert caught.value.code is Code.UNAVAILABLE and not lender(client).lent


async def test_taken_back_while_a_long_message_comes(net: Net):
    service = Station()
    client, _ = await net.pair(service)
    heard = Heard()
    await client.keep(heard)
    assert await service.kept[0].on("x") == 1
    [inner] = lender(client).open.values()
    call = asyncio.ensure_future(service.kept[0].on("y" * (8 << 20)))
    await until_seen(lambda: type(inner.get_protocol()) is LongBody)
    await rpc.take_back(client, heard)
    assert (await failure(call)).code is Code.UNAVAILABLE
    assert heard.journal.entries == ["x"] and not lender(client).open
    assert lender(client).shares.held_bytes == 0


async def test_by_a_callback_of_its_own(net: Net):
    service = Station()
    client, _ = await net.pair(service)

    class Leaving(Heard):
        async def on(self, text):
            await rpc.take_back(client, self)
            return len(text)

    await client.keep(leaving := Leaving())
    assert (await failure(service.kept[0].on("x"))).code is Code.UNAVAILABLE
    assert not lender(client).lent and leaving


async def test_clients_with_several_servers_and_interceptors(net: Net):
    async def step(call: rpc.CallInfo, proceed: Any) -> Any:
        return await proceed()

    services = [Station(), Station()]
    given = [net.address(await net.serve(service)) for service in services]
    addresses = [each if len(each) == 2 else each[0] for each in given]
    heard = Heard()
    connecting = rpc.connect(
        Station, addresses, transport=net.transport, policy="spread", interceptors=[step]
    )
    async with connecting as client:
        pool = client._caller.inner  # type: ignore[attr-defined]
        await until_seen(lambda: all(slot.usable for slot in pool._slots))
        while not all(service.kept for service in services):
            await client.keep(heard)
        await rpc.take_back(client, heard)
        for service in services:
            assert (await failure(service.kept[0].on("x"))).code is Code.UNAVAILABLE
        assert not any(slot.channel._lender.lent for slot in pool._slots)


async def test_what_cannot_be_taken_back(net: Net):
    client, _ = await net.pair(Station())
    plain, _ = await net.pair(Plain())
    with pytest.raises(TypeError, match=r"is not a client of rdmanet\.rpc\.connect"):
        await rpc.take_back(Station(), Heard())
    with pytest.raises(TypeError, match=r"rpc\.take_back: no method of Plain takes an object"):
        await rpc.take_back(plain, Heard())
    await rpc.take_back(client, Heard())  # which was never lent
    await client.aclose()
    await rpc.take_back(client, Heard())


@pytest.mark.parametrize("transport", ["rdma", "tcp", "unix"])  # one in memory is of one loop
async def test_without_an_event_loop(net: Net):
    service = Station()
    server = await net.serve(service)

    def script() -> list[Any]:
        with rpc.blocking.connect(Station, *net.address(server), transport=net.transport) as client:
            heard = Heard()
            client.keep(heard)
            rpc.blocking.take_back(client, heard)
            return list(lender(client._inner).lent)

    assert await asyncio.to_thread(script) == []
    await until_seen(lambda: not server.callees)


# ---- The end ---------------------------------------------------------------------------------------------------


async def closes(journals: list[Journal], count: int) -> None:
    async with asyncio.timeout(30):
        for journal in journals:
            await journal.until("closed", count)


@pytest.mark.parametrize("in_tasks", [False, True], ids=["itself", "by a task"])
async def test_callbacks_that_close_their_client(net: Net, in_tasks: bool):
    """Each outlives the connection, and neither waits for the other."""
    service = Station()
    server = await net.serve(service)
    client = await rpc.connect(Station, *net.address(server), transport=net.transport)
    heard = Heard()
    heard.clients = [_ByTask(client) if in_tasks else client]
    calls = [asyncio.ensure_future(client.close_by(heard)) for _ in range(3)]
    await heard.journal.until("close", 3)
    heard.may_close.set()
    await closes([heard.journal], 3)
    await asyncio.gather(*calls, return_exceptions=True)
    assert not lender(client).lent and not lender(client).running


async def test_callbacks_that_close_each_others_clients(net: Net):
    service = Station()
    server = await net.serve(service)
    clients = [await rpc.connect(Station, *net.address(server), transport=net.transport) for _ in range(2)]
    heard = [Heard(), Heard()]
    calls = []
    for client, other, each in zip(clients, reversed(clients), heard, strict=True):
        each.clients = [other, client]
        calls.append(asyncio.ensure_future(client.close_by(each)))
        await each.journal.until("close")
    for each in heard:
        each.may_close.set()
    await closes([each.journal for each in heard], 1)
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_callback_in_a_thread_whose_caller_has_gone(net: Net):
    """It goes on, and is not waited for by what it waits for itself."""
    service = Station()
    server = await net.serve(service)
    client = await rpc.connect(Station, *net.address(server), transport=net.transport)
    heard = Heard()
    heard.clients, heard.loop = [client], asyncio.get_running_loop()
    await client.keep(heard)
    call = asyncio.ensure_future(service.kept[0].close_by_thread())
    await until_seen(heard.has_begun.is_set)
    [running] = lender(client).running
    call.cancel()
    await until_seen(lambda: running.call.is_over)
    heard.may_go_on.set()
    await until_seen(heard.is_closed.is_set)


async def test_who_closes_a_client_from_outside_waits_for_its_callbacks(net: Net):
    service = Station()
    server = await net.serve(service)
    client = await rpc.connect(Station, *net.address(server), transport=net.transport)
    heard = Heard()
    call = asyncio.ensure_future(client.close_by(heard))
    await heard.journal.until("close")
    closing = asyncio.ensure_future(client.aclose())
    await asyncio.gather(call, return_exceptions=True)
    assert not closing.done()
    heard.may_close.set()
    await closing
    assert heard.journal.entries == ["close", "closed"]


class _ByTask:
    """Closes a client in a task of its own."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def aclose(self) -> None:
        await asyncio.create_task(self._client.aclose())
