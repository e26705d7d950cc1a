"""AsyncCMID and AsyncCMListener: the phases of a connection, and what cancelling them leaves behind."""

import asyncio
import contextlib
import errno
import threading
from types import SimpleNamespace

import pytest
from loops import AsyncioLoop, on_every_loop

from rdmanet.cm import CMEventType
from rdmanet.verbs import PD, EventType, QPCap
from rdmanet.verbs_async import AsyncCMChannel, AsyncCMID, AsyncCMListener, AsyncCQ, DeviceEvents
from rdmanet.verbs_async import cm as async_cm
from tests.support.ports import free_port
from tests.support.waiting import begin

CAP = {"max_send_wr": 8, "max_recv_wr": 8}


class End:
    """One end of a connection, with its queues."""

    def __init__(self, loop, id):
        self.id = id
        with contextlib.ExitStack() as made:  # a peer that has gone makes the middle of it fail
            self.pd = made.enter_context(PD(id.context))
            self.mr = made.enter_context(self.pd.alloc_mr(64))
            self.cq = made.enter_context(AsyncCQ(id.context, 64, notifier=loop.notifier))
            self.qp = id.create_qp(self.pd, self.cq, QPCap(**CAP))
            self.made = made.pop_all()

    def close(self):
        self.id.close()
        self.made.close()


@contextlib.asynccontextmanager
async def connection(loop, device, address, **options):
    """(client, server), connected; the listener has gone again."""
    with contextlib.ExitStack() as stack:
        listener = AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier)
        with listener:
            connecting = loop.spawn(connect(loop, device, stack, listener.local_addr, **options))
            request = await listener.get_request()
            server = End(loop, request)
            stack.callback(server.close)
            await request.accept(b"welcome")
            client = await connecting.join()
        yield client, server


async def connect(loop, device, stack, address, **options):
    id = AsyncCMID(library=device.library, notifier=loop.notifier)
    stack.callback(id.close)
    await id.resolve(address)
    client = End(loop, id)
    stack.callback(client.close)
    await id.connect(b"hello", **options)
    return client


@on_every_loop
async def test_a_connection_outlives_its_listener(loop, device, address):
    async with connection(loop, device, address) as (client, server):
        assert server.id.private_data.rstrip(b"\0") == b"hello"
        assert client.id.private_data.rstrip(b"\0") == b"welcome"
        assert client.id.peer_addr == server.id.local_addr
        receiving = loop.spawn(server.qp.recv(server.mr))
        await loop.turn()
        client.mr[:4] = b"data"
        await client.qp.send(client.mr.at[:4])
        await receiving.join()
        assert server.mr[:4] == b"data"
        ending = loop.spawn(server.id.disconnected())
        await client.id.disconnect()
        await ending.join()
        await server.id.disconnect()  # it is already


@on_every_loop
async def test_a_late_refusal_ends_a_connection(loop, device, address):
    """What the kernel says when the peer closes before it knows that the connection stands."""
    async with connection(loop, device, address) as (client, _server):
        ending = loop.spawn(client.id.disconnected())
        await loop.turn()
        client.id._event(SimpleNamespace(type=CMEventType.REJECTED, status=28, private_data=b""))
        await ending.join()
        await client.id.disconnect()


@on_every_loop
async def test_which_device(loop, device, address):
    """A listener's address and an identifier that is resolved have led to it; before, the error says so."""
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        assert listener.context.name == device.name
        with AsyncCMID(library=device.library, notifier=loop.notifier) as id:
            with pytest.raises(ValueError, match="no device yet"):
                _ = id.context
            await id.resolve(listener.local_addr)
            assert id.context.name == device.name


@on_every_loop
async def test_a_free_port_that_tcp_has_is_left_for_another(loop, device, address, monkeypatch):
    """soft-iWARP knows only when it listens. A port that the program chose is the only one that is tried."""
    ports = []
    listen = AsyncCMListener._listen

    def listen_or_not(self, cm_id):
        ports.append(cm_id.local_addr[1])
        if len(ports) < 3:
            raise OSError(errno.EADDRINUSE, "rdma_listen: Address already in use")
        listen(self, cm_id)

    monkeypatch.setattr(AsyncCMListener, "_listen", listen_or_not)
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        assert listener.local_addr[1] == ports[-1]
    assert len(set(ports)) == 3
    del ports[:]
    with pytest.raises(OSError, match="Address already in use"):
        AsyncCMListener(
            listener_address := (address, free_port()), library=device.library, notifier=loop.notifier
        )
    assert ports == [listener_address[1]]


@on_every_loop
async def test_many_requests_wait_for_their_turn(loop, device, address):
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        with contextlib.ExitStack() as stack:
            connecting = [loop.spawn(connect(loop, device, stack, listener.local_addr)) for _ in range(5)]
            served = 0
            async for request in listener:
                server = End(loop, request)
                stack.callback(server.close)
                await request.accept()
                served += 1
                if served == len(connecting):
                    break
            for task in connecting:
                await task.join()


@on_every_loop
async def test_refusals(loop, device, address):
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        with contextlib.ExitStack() as stack:
            connecting = loop.spawn(connect(loop, device, stack, listener.local_addr))
            (await listener.get_request()).reject(b"no")
            with pytest.raises(ConnectionRefusedError):
                await connecting.join()
            connecting = loop.spawn(connect(loop, device, stack, listener.local_addr))
            (await listener.get_request()).close()
            with pytest.raises(ConnectionRefusedError):
                await connecting.join()
            # Nobody has taken this one when the listener closes.
            connecting = loop.spawn(connect(loop, device, stack, listener.local_addr))
            while not listener._requests:
                await loop.turn()
            listener.close()
            with pytest.raises(ConnectionRefusedError):
                await connecting.join()
    with pytest.raises(ValueError, match="closed"):
        await listener.get_request()


@on_every_loop
async def test_no_descriptor_for_a_request(loop, device, address, monkeypatch):
    """It is rejected, and the next can be taken."""

    def exhausted(*args, **options):
        raise OSError(errno.EMFILE, "no descriptor")

    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        with contextlib.ExitStack() as stack:
            connecting = loop.spawn(connect(loop, device, stack, listener.local_addr))
            while not listener._requests:
                await loop.turn()
            with monkeypatch.context() as patch:
                patch.setattr(async_cm, "AsyncCMChannel", exhausted)
                with pytest.raises(OSError, match="no descriptor"):
                    await listener.get_request()
            with pytest.raises(ConnectionRefusedError):
                await connecting.join()
            connecting = loop.spawn(connect(loop, device, stack, listener.local_addr))
            server = End(loop, await listener.get_request())
            stack.callback(server.close)
            await server.id.accept()
            await connecting.join()


@on_every_loop
async def test_iterating_goes_on_without_a_descriptor(loop, device, address, monkeypatch):
    """A request that cannot be taken is rejected; a later one gets in."""
    real, taken = async_cm.AsyncCMChannel, []

    def exhausted_once(*args, **options):
        monkeypatch.setattr(async_cm, "AsyncCMChannel", real)
        raise OSError(errno.EMFILE, "no descriptor")

    async def serve():
        async for id in listener:
            taken.append(End(loop, id))
            await id.accept()
            listener.close()

    with contextlib.ExitStack() as stack:
        listener = AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier)
        stack.enter_context(listener)
        at = listener.local_addr
        connecting = loop.spawn(connect(loop, device, stack, at))
        while not listener._requests:
            await loop.turn()
        monkeypatch.setattr(async_cm, "AsyncCMChannel", exhausted_once)
        serving = loop.spawn(serve())
        with pytest.raises(ConnectionRefusedError):
            await connecting.join()
        connecting = loop.spawn(connect(loop, device, stack, at))
        await connecting.join()
        await serving.join()
        assert len(taken) == 1
        taken[0].close()


@on_every_loop
async def test_a_private_refusal_is_read(loop, device, address):
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        with AsyncCMID(library=device.library, notifier=loop.notifier) as id:
            await id.resolve(listener.local_addr)
            end = End(loop, id)
            connecting = loop.spawn(id.connect())
            (await listener.get_request()).reject(b"full")
            with pytest.raises(ConnectionRefusedError):
                await connecting.join()
            assert id.private_data.rstrip(b"\0") == b"full"
            end.close()


@on_every_loop
async def test_cancelling_a_request_loses_none(loop, device, address):
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        waiting = loop.spawn(listener.get_request())
        await loop.turn()
        waiting.cancel()
        await waiting.join()
        with contextlib.ExitStack() as stack:
            connecting = loop.spawn(connect(loop, device, stack, listener.local_addr))
            request = await listener.get_request()
            server = End(loop, request)
            stack.callback(server.close)
            await request.accept()
            await connecting.join()


@pytest.mark.parametrize("phase", ["resolve", "connect"])
@on_every_loop
async def test_cancelling_a_phase_leaves_closing(loop, device, address, phase):
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        id = AsyncCMID(library=device.library, notifier=loop.notifier)
        end = None
        if phase == "connect":
            await id.resolve(listener.local_addr)
            end = End(loop, id)
            doing = loop.spawn(id.connect())
        else:
            doing = loop.spawn(id.resolve_addr(listener.local_addr))
        await loop.turn()
        doing.cancel()
        await doing.join()
        if id._phase is not None:  # it had not been through
            with pytest.raises(ValueError, match="did not finish"):
                await id.resolve(listener.local_addr)
        if end is not None:
            end.close()
        id.close()
        id.close()


@pytest.mark.not_on_siw("lets go of an identifier that connects when it is answered, or after ten seconds")
@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("goes", ["client", "server", "both"])
@on_every_loop
async def test_cancelling_anywhere_while_the_other_side_goes(loop, device, address, goes, turns):
    """One side or both are cancelled some turns into a connection: nothing is left, and neither hangs."""
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:

        async def serve():
            with await listener.get_request() as id:
                end = End(loop, id)
                try:
                    await id.accept()
                    await id.disconnected()
                finally:
                    end.close()

        async def use():
            with contextlib.ExitStack() as stack:
                client = await connect(loop, device, stack, listener.local_addr)
                await client.id.disconnect()

        serving, using = loop.spawn(serve()), loop.spawn(use())
        for _ in range(turns * turns):
            await loop.turn()
        for task, name in ((serving, "server"), (using, "client")):
            if goes in (name, "both"):
                task.cancel()
                with contextlib.suppress(OSError):  # refused, since the other went first
                    await task.join()
        if goes == "client" and not serving.done and not listener._requests:
            serving.cancel()  # it may wait for a request that never came
        listener.close()  # refuses a client whom nobody serves any more
        for task in (using, serving):
            with contextlib.suppress(OSError, ValueError):
                await task.join()


@pytest.mark.not_on_siw(
    "gives a connection up when nobody has answered it in ten seconds, as long as a refusal takes"
)
@on_every_loop
async def test_a_backlog_is_a_bound(loop, device, address):
    with AsyncCMListener((address, 0), backlog=2, library=device.library, notifier=loop.notifier) as listener:
        with contextlib.ExitStack() as stack:
            connecting = [loop.spawn(connect(loop, device, stack, listener.local_addr)) for _ in range(5)]
            refused = 0
            while refused < 3:
                await loop.turn()
                refused = sum(task.done for task in connecting)
            assert len(listener._requests) == 2
            for _ in range(2):
                server = End(loop, await listener.get_request())
                stack.callback(server.close)
                await server.id.accept()
            errors = 0
            for task in connecting:
                try:
                    await task.join()
                except ConnectionRefusedError:
                    errors += 1
            assert errors == 3
    with pytest.raises(ValueError, match="backlog=0"):
        AsyncCMListener((address, 0), backlog=0, library=device.library, notifier=loop.notifier)


def test_a_connection_moves_to_another_loop(device, address):
    """One thread takes the requests, others serve: each identifier is its loop's, from the move on."""
    moved, served = threading.Event(), threading.Event()
    box = {}

    async def worker():
        with AsyncCMChannel(device.library) as channel:
            box["channel"] = channel
            box["ready"].set()
            await asyncio.to_thread(moved.wait)
            end = End(AsyncioLoop(), box["id"])
            [receiving] = await begin(end.qp.recv(end.mr))
            await end.id.accept()
            assert (await receiving).byte_len == 4
            served.set()
            await end.id.disconnected()
            end.close()

    async def main():
        with (
            AsyncCMListener((address, 0), library=device.library) as listener,
            contextlib.ExitStack() as stack,
        ):
            loop = AsyncioLoop()
            connecting = loop.spawn(connect(loop, device, stack, listener.local_addr))
            id = box["id"] = await listener.get_request()
            waiting = loop.spawn(id.event())
            await loop.turn()
            with pytest.raises(ValueError, match="awaited on its present loop"):
                id.migrate(box["channel"])
            waiting.cancel()
            await waiting.join()
            id.migrate(box["channel"])
            moved.set()
            client = await connecting.join()
            await client.qp.send(client.mr.at[:4])
            await client.id.disconnect()

    box["ready"] = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(worker()))
    thread.start()
    assert box["ready"].wait(60)
    try:
        asyncio.run(main())
    finally:
        moved.set()
        thread.join(60)
    assert served.is_set()


@on_every_loop
async def test_closing_ends_a_phase(loop, device, address):
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        with AsyncCMID(library=device.library, notifier=loop.notifier) as id:
            await id.resolve(listener.local_addr)
            end = End(loop, id)
            connecting = loop.spawn(id.connect())
            request = await listener.get_request()  # which nobody answers
            receiving = loop.spawn(end.qp.recv(end.mr))
            await loop.turn()
            end.close()
            with pytest.raises(ValueError, match="closed"):
                await connecting.join()
            with pytest.raises(ConnectionResetError):
                await receiving.join()
            request.close()


@on_every_loop
async def test_identifiers_may_share_a_channel(loop, device, address):
    with AsyncCMChannel(device.library, notifier=loop.notifier) as channel:
        with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
            ids = [AsyncCMID(channel) for _ in range(3)]
            for id in ids:
                await id.resolve(listener.local_addr)
            with pytest.raises(OSError, match="identifiers"):
                channel.close()
            ids[0].migrate()
            assert ids[0].channel is not channel
            for id in ids:
                id.close()


@on_every_loop
async def test_how_long_a_step_may_take(loop, device, address):
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        with AsyncCMID(library=device.library, notifier=loop.notifier) as id:
            await id.resolve(listener.local_addr, timeout=float("inf"))
        for wrong in (-1, float("nan")):
            with AsyncCMID(library=device.library, notifier=loop.notifier) as id:
                with pytest.raises(ValueError, match="timeout"):
                    await id.resolve(listener.local_addr, timeout=wrong)


@on_every_loop
@pytest.mark.embedded_only("only the embedded device can be made to fail")
async def test_many_read_the_events_of_a_device(loop, verbs):
    """The context has one queue, and reading takes events from it; yet each iterator gets all events, in order."""
    many = [verbs.keep(DeviceEvents(verbs.context, notifier=loop.notifier)) for _ in range(3)]
    seen = [[] for _ in many]

    async def watch(events, seen):
        async for event in events:
            seen.append(event.event_type)

    watching = [loop.spawn(watch(*each)) for each in zip(many, seen, strict=True)]
    await loop.turn()
    verbs.context.set_faults("link=down")
    verbs.context.set_faults("")
    verbs.context.set_faults("fatal=now")
    expected = [EventType.PORT_ERR, EventType.PORT_ACTIVE, EventType.DEVICE_FATAL]
    while not all(len(each) == 3 for each in seen):
        await loop.turn()
    assert seen == [expected] * 3
    for events in many:
        events.close()
    for each in watching:
        await each.join()


@on_every_loop
async def test_events_of_the_device(loop, device, verbs):
    """For example, that a queue pair went to ERR because of a request against the rules."""
    verbs.by_hand()
    cq = verbs.cq(loop)
    with DeviceEvents(verbs.context, notifier=loop.notifier) as events:
        assert repr(events) == f"<DeviceEvents of {verbs.context!r}>"
        seen = []

        async def watch():
            async for event in events:
                seen.append(event.event_type)

        watching = loop.spawn(watch())
        await loop.turn()
        a, b = verbs.pair(cq)
        mr = verbs.mr()
        # Data before its receiver is ready to send itself: COMM_EST. Others may come as well.
        b2 = cq.create_qp(verbs.pd, QPCap(**CAP))
        verbs.keep(b2)
        a2 = cq.create_qp(verbs.pd, QPCap(**CAP))
        verbs.keep(a2)
        for side in (a2, b2):
            side.qp.to_init(access=7)
        for side, peer in ((a2, b2), (b2, a2)):
            side.qp.to_rtr(peer.qp.qp_num, verbs.gid.gid, sgid_index=verbs.gid.gid_index)
        a2.qp.to_rts()
        await a2.write(mr.at[:1], mr.to_remote())
        if device.library.embedded_device:
            while EventType.COMM_EST not in seen:
                await loop.turn()
    await watching.join()


@on_every_loop
async def test_another_thread_is_refused(loop, device, address):
    found = []
    options = {"library": device.library, "notifier": loop.notifier}
    with device.open() as context, DeviceEvents(context, notifier=loop.notifier) as events:
        with AsyncCMListener((address, 0), **options) as listener, AsyncCMID(**options) as id:

            def other():
                for coroutine in (
                    anext(events),
                    listener.get_request(),
                    id.resolve(listener.local_addr),
                    id.event(),
                    id.disconnected(),
                ):
                    try:
                        coroutine.send(None)
                    except RuntimeError as exc:
                        found.append(str(exc))

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert len(found) == 5 and all(
                "can be used in the thread of its event loop only" in text for text in found
            ), found
            await id.resolve(listener.local_addr)  # it is as it was
