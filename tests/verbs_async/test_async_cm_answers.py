"""Steps that do not end with a connection that is established: other queue pairs, datagrams, a device that goes."""

import contextlib
import errno
import select
from types import SimpleNamespace

import pytest
from loops import on_every_loop
from test_async_cm import End

from rdmanet.cm import CMEventChannel, CMEventType, PortSpace
from rdmanet.verbs import AH, CQ, PD, QPCap, QPInitAttr, QPState, QPType, TransportType
from rdmanet.verbs_async import AsyncCMID, AsyncCMListener, AsyncCQ

CAP = {"max_send_wr": 8, "max_recv_wr": 8}


async def unconnected(stack, loop, device, address):
    """A listener, a client of it that has not connected, and its memory and queue pair, which it moves itself."""
    listener = AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier)
    stack.callback(listener.close)
    client = AsyncCMID(library=device.library, notifier=loop.notifier)
    stack.callback(client.close)
    await client.resolve(listener.local_addr)
    pd = stack.enter_context(PD(client.context))
    mr = stack.enter_context(pd.alloc_mr(64))
    cq = stack.enter_context(AsyncCQ(client.context, 64, notifier=loop.notifier))
    qp = cq.create_qp(pd, QPCap(**CAP))
    stack.callback(qp.close)
    return listener, client, mr, qp


@on_every_loop
async def test_a_queue_pair_that_its_user_moves(loop, device, address):
    """connect() returns with CONNECT_RESPONSE, and the server's accept() after establish()."""
    with contextlib.ExitStack() as stack:
        listener, client, mr, qp = await unconnected(stack, loop, device, address)
        with pytest.raises(ValueError, match="has not returned"):
            client.establish()
        connecting = loop.spawn(client.connect(b"hello", qp_num=qp.qp.qp_num))
        server = End(loop, await listener.get_request())
        stack.callback(server.close)
        accepting = loop.spawn(server.id.accept(b"welcome"))
        reply = await connecting.join()
        assert reply is client.private_data and reply.rstrip(b"\0") == b"welcome"
        if client.reply.type is CMEventType.CONNECT_RESPONSE:
            for state in (QPState.INIT, QPState.RTR, QPState.RTS):
                attr = client.id.init_qp_attr(state)
                attr.qp_state = state
                qp.qp.modify(attr)
        else:
            assert device.transport_type == TransportType.IWARP
        client.establish()
        await accepting.join()
        receiving = loop.spawn(server.qp.recv(server.mr))
        await loop.turn()
        mr[:4] = b"data"
        await qp.send(mr.at[:4])
        await receiving.join()
        assert server.mr[:4] == b"data"
        ending = loop.spawn(server.id.disconnected())
        await client.disconnect()
        await ending.join()


@on_every_loop
async def test_a_client_whose_word_is_lost(loop, device, address):
    """It never calls establish(), which says that it is ready: its message says so, and accept() returns."""
    if device.transport_type == TransportType.IWARP:
        pytest.skip("iWARP's connection manager connects the queue pair itself")
    with contextlib.ExitStack() as stack:
        listener, client, mr, qp = await unconnected(stack, loop, device, address)
        connecting = loop.spawn(client.connect(b"hello", qp_num=qp.qp.qp_num))
        server = End(loop, await listener.get_request())
        stack.callback(server.close)
        receiving = loop.spawn(server.qp.recv(server.mr))
        await loop.turn()
        accepting = loop.spawn(server.id.accept())
        await connecting.join()
        for state in (QPState.INIT, QPState.RTR, QPState.RTS):
            attr = client.id.init_qp_attr(state)
            attr.qp_state = state
            qp.qp.modify(attr)
        await qp.send(mr.at[:4])
        await receiving.join()
        server.id.notify()
        await accepting.join()
        server.close()
        with pytest.raises(ValueError, match="is closed"):
            server.id.notify()


@on_every_loop
async def test_a_listener_whose_device_is_removed(loop, device, address):
    """No request will come any more, which all who wait learn, after the requests that came before."""
    with AsyncCMListener((address, 0), library=device.library, notifier=loop.notifier) as listener:
        waiting = loop.spawn(listener.get_request())
        iterating = loop.spawn(anext(aiter(listener)))
        await loop.turn()
        removal = SimpleNamespace(type=CMEventType.DEVICE_REMOVAL, status=0, id=listener.id, listen_id=None)
        removal.error = lambda: None
        listener._event(removal)
        for task in (waiting, iterating):
            with pytest.raises(OSError) as caught:
                await task.join()
            assert caught.value.errno == errno.ENODEV
        with pytest.raises(OSError):
            await listener.get_request()


class DatagramServer:
    """Answers one request, and receives one datagram. It does not await: that is the client's part."""

    def __init__(self, device, address) -> None:
        self.channel = CMEventChannel(device.library)
        self.made = contextlib.ExitStack()
        self.made.callback(self.channel.close)
        try:
            self.listener = self.made.enter_context(self.channel.create_id(PortSpace.UDP))
            self.listener.bind_addr((address, 0))
            self.listener.listen()
        except BaseException:
            self.made.close()
            raise

    def accept(self) -> None:
        select.select([self.channel], [], [], 60)
        event = self.channel.get_event()
        assert event.type is CMEventType.CONNECT_REQUEST
        self.id = self.made.enter_context(event.id)
        self.pd = self.made.enter_context(PD(self.id.context))
        self.mr = self.made.enter_context(self.pd.alloc_mr(4096))
        self.cq = self.made.enter_context(CQ(self.id.context, 8))
        self.qp = self.made.enter_context(
            self.id.create_qp(self.pd, QPInitAttr(self.cq, self.cq, QPCap(**CAP), QPType.UD))
        )
        self.id.accept(b"here", qp_num=self.qp.qp_num)


@pytest.mark.not_on_iwarp("has no datagrams")
@on_every_loop
async def test_datagrams(loop, device, address):
    """The reply says where the server receives, with which key, and the way there."""
    server = DatagramServer(device, address)
    with server.made, contextlib.ExitStack() as stack:
        client = AsyncCMID(library=device.library, notifier=loop.notifier, ps=PortSpace.UDP)
        stack.callback(client.close)
        await client.resolve(server.listener.local_addr)
        pd = stack.enter_context(PD(client.context))
        cq = stack.enter_context(AsyncCQ(client.context, 64, notifier=loop.notifier))
        stack.callback(client.create_qp(pd, cq, QPCap(**CAP), qp_type=QPType.UD).close)
        connecting = loop.spawn(client.connect(b"where are you"))
        await loop.turn()
        server.accept()
        assert (await connecting.join()).rstrip(b"\0") == b"here"
        assert client.reply.qp_num == server.qp.qp_num and client.reply.qkey
        ah = stack.enter_context(AH(pd, client.reply.ah_attr))
        assert not ah.closed
