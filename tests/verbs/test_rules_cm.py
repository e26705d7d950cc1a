"""Rules of the connection manager: what is refused, by whom, with which words; private data and its limits.

docs/rules.md maps the rules to the tests.
"""

import contextlib
import errno

import pytest

from rdmanet.cm import CMEventType, PortSpace
from rdmanet.verbs import CQ, PD, QP, QPAttr, QPCap, QPInitAttr, QPState, QPType, WCStatus
from tests.support.ports import free_port

from .conftest import Manager, driver, needs

E = CMEventType


@pytest.fixture
def iwarp(device) -> bool:
    return bool(device.transport_type == 1)


def requested(manager: Manager, address: str, data: bytes = b""):
    """A client that waits, and the server's identifier for it."""
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    manager.qp(client)
    client.connect(data)
    event = manager.next(E.CONNECT_REQUEST)
    return listener, client, event


# ---- Bad outcomes ----------------------------------------------------------------------------------------------


def test_nobody_listens(manager, address, iwarp):
    """REJECTED with reason 8, invalid service id; iWARP's has an errno, which may come at once."""
    client = manager.resolved((address, free_port()))
    manager.qp(client)
    try:
        client.connect()
    except ConnectionRefusedError:
        assert iwarp
        return
    event = manager.next(E.REJECTED, client)
    assert event.status in ((-errno.ECONNREFUSED, -errno.ECONNRESET) if iwarp else (8,))
    assert isinstance(event.error(), ConnectionRefusedError)
    assert client.qp.query()[0].qp_state in (QPState.ERR, QPState.RESET, QPState.INIT)


def test_refused_by_the_program(manager, address, iwarp):
    """REJECTED with reason 28, consumer defined, and the server's words."""
    _, client, event = requested(manager, address)
    event.id.reject(b"not today")
    rejected = manager.next(E.REJECTED, client)
    assert rejected.status in ((-errno.ECONNREFUSED, -errno.ECONNRESET) if iwarp else (28,))
    assert rejected.private_data.rstrip(b"\0") == b"not today"


def test_a_listener_that_closes(manager, address):
    """A waiting client is refused."""
    listener, client, event = requested(manager, address)
    event.id.close()
    listener.close()
    assert manager.next(E.REJECTED, client).status != 0


def test_an_address_that_is_not_ours(manager):
    with pytest.raises(OSError, match="rdma_bind_addr") as caught:
        manager.id().bind_addr(("198.51.100.77", 0))
    assert caught.value.errno in (errno.EADDRNOTAVAIL, errno.ENODEV)


def test_a_port_that_is_taken(manager, address):
    first = manager.listener(address)
    second = manager.id()
    with pytest.raises(OSError) as caught:
        second.bind_addr(first.local_addr)
        second.listen()
    assert caught.value.errno == errno.EADDRINUSE


def test_listening_twice(manager, address):
    listener = manager.listener(address)
    with pytest.raises(OSError, match="rdma_listen") as caught:
        listener.listen()
    assert caught.value.errno == errno.EINVAL


def test_binding_twice(manager, address):
    id = manager.id()
    id.bind_addr((address, 0))
    with pytest.raises(OSError, match="rdma_bind_addr") as caught:
        id.bind_addr((address, 0))
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize("call", ["resolve_route", "connect", "accept", "reject", "disconnect"])
def test_steps_before_an_address(manager, call):
    with pytest.raises(OSError, match=f"rdma_{call}") as caught:
        getattr(manager.id(), call)()
    assert caught.value.errno == errno.EINVAL


def test_connecting_before_the_route(manager, address):
    listener = manager.listener(address)
    client = manager.id()
    client.resolve_addr(None, listener.local_addr)
    manager.next(E.ADDR_RESOLVED, client)
    manager.qp(client)
    with pytest.raises(OSError, match="rdma_connect") as caught:
        client.connect()
    assert caught.value.errno == errno.EINVAL


def test_resolving_twice(manager, address):
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    with pytest.raises(OSError, match="rdma_resolve_addr") as caught:
        client.resolve_addr(None, listener.local_addr)
    assert caught.value.errno == errno.EINVAL


def test_accepting_what_was_not_asked(manager, address):
    """A client's identifier has nothing to accept."""
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    manager.qp(client)
    with pytest.raises(OSError, match="rdma_accept") as caught:
        client.accept()
    assert caught.value.errno == errno.EINVAL


def test_an_address_of_the_wrong_family(manager, address):
    other = "127.0.0.1" if ":" in address else "::1"
    with pytest.raises(OSError):
        manager.id().resolve_addr((other, 0), (address, 7471))


# ---- Parting ---------------------------------------------------------------------------------------------------


def test_parting_flushes_and_tells_both(manager, address):
    """rdma_disconnect puts one's own queue pair into ERR first; the peer's is left as it is until it answers."""
    client, server = manager.connected(address)
    # siw ends what has been sent first.
    ended = (QPState.ERR,) if driver(client.context) != "siw" else (QPState.SQD, QPState.RESET, QPState.ERR)
    client.disconnect()
    assert client.qp.query()[0].qp_state in ended
    manager.part(client, server)
    assert server.qp.query()[0].qp_state in ended


def test_parting_twice(manager, address):
    client, server = manager.connected(address)
    client.disconnect()
    manager.part(client, server)
    with contextlib.suppress(OSError):  # iWARP has no connection any more; with RoCE nothing happens
        client.disconnect()
    assert manager.channel.get_event() is None


def test_a_peer_whose_identifier_is_closed(manager, address):
    client, server = manager.connected(address)
    server.close()
    assert manager.next(E.DISCONNECTED, client).status in (0, -errno.ECONNRESET)


# ---- Private data ------------------------------------------------------------------------------------------------


def test_connect_takes_56_bytes(manager, address, iwarp):
    if iwarp:
        pytest.skip("iWARP takes 512 bytes each way")
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    manager.qp(client)
    with pytest.raises(OSError, match="rdma_connect") as caught:
        client.connect(bytes(57))
    assert caught.value.errno == errno.EINVAL
    client.connect(bytes(range(56)))
    data = manager.next(E.CONNECT_REQUEST).private_data
    assert data[:56] == bytes(range(56)) and not any(data[56:])


def test_accept_takes_196_bytes(manager, address, iwarp):
    if iwarp:
        pytest.skip("iWARP takes 512 bytes each way")
    _, client, event = requested(manager, address)
    manager.qp(event.id)
    with pytest.raises(OSError, match="rdma_accept") as caught:
        event.id.accept(bytes(197))
    assert caught.value.errno == errno.EINVAL
    assert manager.next(E.REJECTED, client).status == 28, "the attempt has used up the request"
    _, client, event = requested(manager, address)
    manager.qp(event.id)
    event.id.accept(bytes(range(196)))
    data = manager.next(E.ESTABLISHED)
    other = manager.next(E.ESTABLISHED)
    at_client = data if data.id is client else other
    assert at_client.private_data[:196] == bytes(range(196))


def test_reject_takes_148_bytes(manager, address, iwarp):
    if iwarp:
        pytest.skip("iWARP takes 512 bytes each way")
    _, client, event = requested(manager, address)
    with pytest.raises(OSError, match="rdma_reject") as caught:
        event.id.reject(bytes(149))
    assert caught.value.errno == errno.EINVAL
    event.id.reject(bytes(range(148)))
    assert manager.next(E.REJECTED, client).private_data[:148] == bytes(range(148))


def test_private_data_is_padded(manager, address, iwarp):
    """A program learns the length of the field, not of what was put into it; iWARP tells the true length."""
    _, _, event = requested(manager, address, b"five!")
    assert event.private_data == b"five!" if iwarp else event.private_data.rstrip(b"\0") == b"five!"
    assert len(event.private_data) == (5 if iwarp else 56)
    event.id.reject()


# ---- Queue pairs of one's own --------------------------------------------------------------------------------------


def test_a_queue_pair_moved_by_its_user(manager, address, iwarp):
    """CONNECT_RESPONSE instead of ESTABLISHED, init_qp_attr() for the steps, establish() in the end."""
    if iwarp:
        pytest.skip("iWARP's connection manager connects the queue pair itself")
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    pd, cq = PD(client.context), CQ(client.context, 16)
    qp = QP(pd, QPInitAttr(cq, cq, QPCap(4, 4, 1, 1)))
    try:
        client.connect(qp_num=qp.qp_num)
        server = manager.next(E.CONNECT_REQUEST).id
        manager.qp(server)
        server.accept()
        manager.next(E.CONNECT_RESPONSE, client)
        for state in (QPState.INIT, QPState.RTR, QPState.RTS):
            attr: QPAttr = client.init_qp_attr(state)
            attr.qp_state = state
            qp.modify(attr)
        client.establish()
        manager.next(E.ESTABLISHED, server)
        assert qp.query()[0].dest_qp_num == server.qp.qp_num
        client.disconnect()
        manager.part(client, server)
    finally:
        qp.close()
        cq.close()
        client.close()
        pd.close()


def test_the_answer_timeout_is_the_users(manager, address, iwarp):
    if iwarp:
        pytest.skip("iWARP has no such timeout")
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    with needs("the option ACK_TIMEOUT"):
        client.set_ack_timeout(17)
    manager.qp(client)
    client.connect()
    server = manager.next(E.CONNECT_REQUEST).id
    manager.qp(server)
    server.accept()
    manager.next(E.ESTABLISHED)
    manager.next(E.ESTABLISHED)
    assert client.qp.query()[0].timeout == 17


# ---- Datagrams -------------------------------------------------------------------------------------------------------


def datagram_id(manager: Manager):
    with needs("datagrams of the connection manager"):
        id = manager.channel.create_id(PortSpace.UDP)
    manager.ids.append(id)
    return id


def datagram_qp(manager: Manager, id):
    pd, cq = manager.queues(id.context)
    with needs("UD queue pairs"):
        return id.create_qp(pd, QPInitAttr(cq, cq, QPCap(8, 8, 1, 1), QPType.UD))


def test_datagrams_find_each_other(manager, address, iwarp):
    """ESTABLISHED brings the server's number, its key and the way to it."""
    from rdmanet.verbs import AH, SendWR, WROpcode

    if iwarp:
        pytest.skip("iWARP has no datagrams")
    listener = datagram_id(manager)
    with needs("datagrams of the connection manager"):
        listener.bind_addr((address, 0))
        listener.listen()
        client = datagram_id(manager)
        client.resolve_addr(None, listener.local_addr)
    manager.next(E.ADDR_RESOLVED, client)
    client.resolve_route()
    manager.next(E.ROUTE_RESOLVED, client)
    qp = datagram_qp(manager, client)
    client.connect(b"who is there")
    event = manager.next(E.CONNECT_REQUEST)
    assert event.private_data.rstrip(b"\0") == b"who is there"
    server_qp = datagram_qp(manager, event.id)
    event.id.accept(b"me", qp_num=server_qp.qp_num)
    found = manager.next(E.ESTABLISHED, client)
    assert (found.qp_num, found.private_data.rstrip(b"\0")) == (server_qp.qp_num, b"me")
    pd, cq = manager.queues(client.context)
    with AH(pd, found.ah_attr) as ah, pd.alloc_mr(4096) as mr:
        from rdmanet.verbs import RecvWR

        server_qp.post_recv(RecvWR(mr.sge(1024, 1024)))
        wr = SendWR(WROpcode.SEND, mr.sge(0, 8), ah=ah, remote_qpn=found.qp_num, remote_qkey=found.qkey)
        qp.post_send(wr)
        seen: list = []
        import time

        deadline = time.monotonic() + 60
        while len(seen) < 2:
            seen += cq.poll()
            assert time.monotonic() < deadline
        assert {wc.status for wc in seen} == {WCStatus.SUCCESS}


def test_datagram_limits(manager, address, iwarp):
    """180 bytes to connect, 136 to accept."""
    if iwarp:
        pytest.skip("iWARP has no datagrams")
    listener = datagram_id(manager)
    with needs("datagrams of the connection manager"):
        listener.bind_addr((address, 0))
        listener.listen()
        client = datagram_id(manager)
        client.resolve_addr(None, listener.local_addr)
    manager.next(E.ADDR_RESOLVED, client)
    client.resolve_route()
    manager.next(E.ROUTE_RESOLVED, client)
    datagram_qp(manager, client)
    with pytest.raises(OSError, match="rdma_connect") as caught:
        client.connect(bytes(181))
    assert caught.value.errno == errno.EINVAL
    client.connect(bytes(range(180)))
    event = manager.next(E.CONNECT_REQUEST)
    assert event.private_data[:180] == bytes(range(180))
    server_qp = datagram_qp(manager, event.id)
    event.id.accept(bytes(range(136)), qp_num=server_qp.qp_num)
    assert manager.next(E.ESTABLISHED, client).private_data[:136] == bytes(range(136))
    another = datagram_id(manager)
    another.resolve_addr(None, listener.local_addr)
    manager.next(E.ADDR_RESOLVED, another)
    another.resolve_route()
    manager.next(E.ROUTE_RESOLVED, another)
    datagram_qp(manager, another)
    another.connect()
    event = manager.next(E.CONNECT_REQUEST)
    datagram_qp(manager, event.id)
    with pytest.raises(OSError, match="rdma_accept") as caught:
        event.id.accept(bytes(137))
    assert caught.value.errno == errno.EINVAL


def test_a_group(manager, address, iwarp):
    """MULTICAST_JOIN brings what to send to; the queue pair is a member until leaving."""
    if iwarp:
        pytest.skip("iWARP has no multicast")
    id = datagram_id(manager)
    with needs("datagrams of the connection manager"):
        id.bind_addr((address, 0))
    datagram_qp(manager, id)
    with needs("multicast groups of the connection manager"):
        id.join_multicast(("239.9.9.9", 0))
    with needs("multicast groups of the connection manager"):
        event = manager.next(E.MULTICAST_JOIN, id, timeout=60, failing=E.MULTICAST_ERROR)
    assert event.qp_num == 0xFFFFFF and event.ah_attr.dgid is not None and event.qkey
    id.leave_multicast(("239.9.9.9", 0))
