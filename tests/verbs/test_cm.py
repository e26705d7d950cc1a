"""The connection manager: every step, its event, and what is refused. Both ends in this process."""

import os
import select
import socket
import time

import pytest

from rdmanet.cm import CMID, CMEventChannel, CMEventType, PortSpace
from rdmanet.verbs import (
    CQ,
    PD,
    LinkLayer,
    QPInitAttr,
    QPState,
    RecvWR,
    SendWR,
    TransportType,
    WCStatus,
    WROpcode,
)

E = CMEventType


def iwarp(id: CMID) -> bool:
    """iWARP's connections are TCP's: no depths of retries, no numbers of queue pairs, other limits."""
    return id.context.query_port(id.port_num).link_layer == LinkLayer.ETHERNET and any(
        device.name == id.context.name and device.transport_type == TransportType.IWARP
        for device in id.library.devices()
    )


def exchange(manager, a, b):
    """Eight bytes each way, on established identifiers."""
    pd, cq = manager.queues(a.context)
    with pd.alloc_mr(64) as mr:
        for side in (a, b):
            side.qp.post_recv(RecvWR(mr.sge(0, 8)))
        for side in (a, b):
            side.qp.post_send(SendWR(WROpcode.SEND, mr.sge(8, 8)))
        found = []
        deadline = time.monotonic() + 60
        while len(found) < 4:
            found += cq.poll()
            assert time.monotonic() < deadline, found
        assert {wc.status for wc in found} == {WCStatus.SUCCESS}


def test_the_life_of_a_connection(manager, address):
    listener = manager.listener(address)
    at = listener.local_addr
    assert at[0] == address and at[1] > 0

    client = manager.id()
    assert client.context is None and client.qp is None
    client.resolve_addr(None, at)
    event = manager.next(E.ADDR_RESOLVED, client)
    assert event.status == 0 and event.error() is None
    assert client.context is not None and client.port_num >= 1
    client.resolve_route()
    manager.next(E.ROUTE_RESOLVED, client)
    client_qp = manager.qp(client)
    assert client_qp.state == QPState.INIT
    client.connect(b"hello", responder_resources=2, initiator_depth=3)

    request = manager.next(E.CONNECT_REQUEST)
    server = request.id
    assert request.listen_id is listener and server is not listener
    assert request.private_data[:5] == b"hello"
    assert not any(request.private_data[5:]), "padded with zeros, or not at all"
    assert server.context is client.context, "one context for all"
    assert server.local_addr == at
    assert server.peer_addr == client.local_addr
    assert client.peer_addr == at
    server_qp = manager.qp(server)
    server.accept(b"welcome")

    established = {(event := manager.next(E.ESTABLISHED)).id: event for _ in range(2)}
    assert set(established) == {client, server}
    assert established[client].private_data[:7] == b"welcome"
    client_attr, server_attr = client_qp.query()[0], server_qp.query()[0]
    assert client_attr.qp_state == server_attr.qp_state == QPState.RTS
    if not iwarp(client):
        assert client_attr.dest_qp_num == server_qp.qp_num
        assert server_attr.dest_qp_num == client_qp.qp_num
    exchange(manager, client, server)

    client.disconnect()
    if not iwarp(client):
        assert client_qp.query()[0].qp_state == QPState.ERR
    manager.part(client, server)


def test_resolving_at_once(manager, address):
    """One call instead of two steps with their events, or None: then the steps are still to be taken."""
    listener = manager.listener(address)
    at = listener.local_addr
    client = manager.id()
    if not client.library.embedded_device:
        assert client.resolve_at_once(None, at) is None
        client.resolve_addr(None, at)
        manager.next(E.ADDR_RESOLVED, client)
        return
    assert client.resolve_at_once(None, at) is True
    assert client.context is listener.context and client.port_num == listener.port_num
    assert (client.local_addr[0], client.peer_addr) == (address, at)
    assert client.channel.get_event() is None
    with pytest.raises(OSError, match=r"rdma_resolve_addr\(.*\): Invalid argument"):
        client.resolve_at_once(None, at)
    manager.qp(client)
    client.connect()
    server = manager.next(E.CONNECT_REQUEST).id
    manager.qp(server)
    server.accept()
    assert {manager.next(E.ESTABLISHED).id for _ in range(2)} == {client, server}
    exchange(manager, client, server)
    client.disconnect()
    manager.part(client, server)


@pytest.mark.embedded_only("only the embedded device knows the users of its peers")
@pytest.mark.parametrize("way", ["tcp", "name"])
def test_the_user_who_asks(manager, address, way):
    """By TCP the kernel is asked for it; by name, where a TCP program has the port, the socket tells."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as tcp_program:
        tcp_program.bind((address, 0))
        port = tcp_program.getsockname()[1]
        if way == "tcp":
            tcp_program.close()
        else:
            tcp_program.listen()
        listener = manager.listener(address, port=port)
        client = manager.id()
        client.resolve_addr(None, listener.local_addr)
        manager.next(E.ADDR_RESOLVED, client)
        client.resolve_route()
        manager.next(E.ROUTE_RESOLVED, client)
        manager.qp(client)
        client.connect()
        server = manager.next(E.CONNECT_REQUEST).id
        assert (server.peer_user, server.peer_by_name) == (os.geteuid(), way == "name")
        assert (client.peer_user, client.peer_by_name) == (None, False)


def test_depths_are_exchanged(manager, address):
    """Each side's responder_resources is the other's initiator_depth."""
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    manager.qp(client)
    client.connect(responder_resources=2, initiator_depth=3, retry_count=6, rnr_retry_count=5)
    request = manager.next(E.CONNECT_REQUEST)
    assert (request.responder_resources, request.initiator_depth) == (3, 2)
    if not iwarp(client):
        assert (request.retry_count, request.rnr_retry_count) == (6, 5)
    server_qp = manager.qp(request.id)
    request.id.accept(responder_resources=3, initiator_depth=2, rnr_retry_count=4)
    manager.next(E.ESTABLISHED), manager.next(E.ESTABLISHED)
    if not iwarp(client):
        attr = server_qp.query()[0]
        assert attr.max_rd_atomic <= 2 and attr.max_dest_rd_atomic >= 3
        assert (attr.rnr_retry, client.qp.query()[0].rnr_retry) == (5, 4)


def test_data_before_established_is_read(manager, address):
    """The client may send as soon as it is established; the server's event may come later than the data."""
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    manager.qp(client)
    pd, cq = manager.queues(client.context)
    client.connect()
    server = manager.next(E.CONNECT_REQUEST).id
    manager.qp(server)
    with pd.alloc_mr(64) as mr:
        server.qp.post_recv(RecvWR(mr.sge(0, 8)))
        server.accept()
        manager.next(E.ESTABLISHED)
        manager.next(E.ESTABLISHED)
        client.qp.post_send(SendWR(WROpcode.SEND, mr.sge(8, 8)))
        found = []
        deadline = time.monotonic() + 60
        while len(found) < 2 and time.monotonic() < deadline:
            found += cq.poll()
        assert [wc.status for wc in found] == [WCStatus.SUCCESS] * 2


def test_reject(manager, address):
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    qp = manager.qp(client)
    client.connect()
    request = manager.next(E.CONNECT_REQUEST)
    request.id.reject(b"not today")
    event = manager.next(E.REJECTED, client)
    assert event.private_data[:9] == b"not today"
    with pytest.raises(ConnectionRefusedError, match="refused by the application|rejected"):
        event.raise_for_status()
    assert qp.state == QPState.ERR or qp.query()[0].qp_state in (QPState.ERR, QPState.INIT)


def test_a_request_that_nobody_keeps_is_refused(manager, address):
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    manager.qp(client)
    client.connect()
    request = manager.next(E.CONNECT_REQUEST)
    request.id.close()
    event = manager.next(E.REJECTED, client)
    assert isinstance(event.error(), ConnectionRefusedError)


def test_nobody_listens(manager, address):
    listener = manager.listener(address)
    where = listener.local_addr
    listener.close()
    client = manager.resolved(where)
    manager.qp(client)
    with pytest.raises(ConnectionRefusedError, match="no RDMA program listens|refused"):
        client.connect()  # iWARP knows at once
        manager.next(E.REJECTED, client).raise_for_status()


def test_closing_a_listener_refuses_who_waits(manager, address):
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    manager.qp(client)
    client.connect()
    select.select([manager.channel], [], [], 5)  # the request is there, and not read
    listener.close()
    event = manager.next(E.REJECTED, client)
    assert isinstance(event.error(), ConnectionRefusedError)


def test_addresses_that_lead_nowhere(manager, device):
    # The embedded device tries every host that there is a way to; a kernel's asks for it first.
    nowhere = "255.255.255.255" if device.library.embedded_device else "192.0.2.1"
    client = manager.id()
    try:
        client.resolve_addr(None, (nowhere, 4000), 500)
    except OSError:
        return  # said at once
    event = manager.next(E.ADDR_ERROR, client)
    assert isinstance(event.error(), OSError)
    assert event.error().errno


def test_binding(manager, address):
    first = manager.listener(address)
    second = manager.id()
    with pytest.raises(OSError, match="rdma_bind_addr") as caught:
        second.bind_addr(first.local_addr)
        second.listen()
    assert caught.value.errno == 98
    with pytest.raises(OSError, match="rdma_bind_addr") as caught:
        manager.id().bind_addr(("198.51.100.77", 0))
    assert caught.value.errno in (99, 19)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [(("host", 1), ValueError), (("127.0.0.1", 70000), OverflowError), (("127.0.0.1", -1), OverflowError)],
)
def test_addresses_are_numbers(manager, wrong, error):
    with pytest.raises(error):
        manager.id().bind_addr(wrong)


def test_the_wildcard(manager, device):
    """It listens wherever the device is."""
    if not device.library.embedded_device:
        pytest.skip("the embedded device's own addresses are loopback's")
    listener = manager.listener("0.0.0.0")
    client = manager.resolved(("127.0.0.1", listener.local_addr[1]))
    manager.qp(client)
    client.connect()
    manager.next(E.CONNECT_REQUEST).id.reject()
    manager.next(E.REJECTED, client)


def test_ipv6(manager, device):
    if not device.library.embedded_device:
        pytest.skip("only the embedded device has ::1")
    client, server = manager.connected("::1")
    assert client.peer_addr[0] == server.local_addr[0] == "::1"
    assert len(client.peer_addr) == 4
    exchange(manager, client, server)


def test_private_data_limits(manager, address):
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    manager.qp(client)
    with pytest.raises(ValueError, match="300 bytes"):
        client.connect(bytes(300))
    if iwarp(client):
        pytest.skip("iWARP takes more")
    with pytest.raises(OSError, match="rdma_connect") as caught:
        client.connect(bytes(57))
    assert caught.value.errno == 22
    client.connect(bytes(range(56)))
    request = manager.next(E.CONNECT_REQUEST)
    assert request.private_data[:56] == bytes(range(56))
    manager.qp(request.id)
    request.id.accept(bytes(range(196)))
    events = {(event := manager.next(E.ESTABLISHED)).id: event for _ in range(2)}
    assert events[client].private_data[:196] == bytes(range(196))

    another = manager.resolved(listener.local_addr)
    manager.qp(another)
    another.connect()
    request = manager.next(E.CONNECT_REQUEST)
    manager.qp(request.id)
    with pytest.raises(OSError, match="rdma_accept") as caught:
        request.id.accept(bytes(197))
    assert caught.value.errno == 22


def test_steps_out_of_order(manager, address):
    id = manager.id()
    for step in (id.connect, id.accept, id.reject, id.disconnect, id.resolve_route):
        with pytest.raises(OSError, match="rdma_"):
            step()
    assert id.context is None


def test_migrate(manager, device, address):
    """An identifier moves with its unread events."""
    other = CMEventChannel(device.library)
    manager.channels.append(other)
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    manager.qp(client)
    client.connect()
    server = manager.next(E.CONNECT_REQUEST).id
    manager.qp(server)
    server.migrate(other)
    assert server.channel is other
    server.accept()
    manager.next(E.ESTABLISHED, client)
    manager.next(E.ESTABLISHED, server, other)
    server.disconnect()
    select.select([manager.channel], [], [], 5)
    client.migrate(other)
    assert manager.channel.get_event() is None
    manager.next(E.DISCONNECTED, None, other).id.disconnect()
    manager.next(E.DISCONNECTED, None, other)
    with pytest.raises(OSError, match="identifiers"):
        other.close()


def unread(channel):
    with open(f"/proc/self/fdinfo/{channel.fd}") as info:
        return next(int(line.split()[1], 16) for line in info if line.startswith("eventfd-count"))


@pytest.mark.embedded_only("the channel of a kernel is no eventfd, which says how much is unread")
def test_a_listener_migrates_with_what_happened_to_its_requests(manager, device, address, eventually):
    other, clients = CMEventChannel(device.library), CMEventChannel(device.library)
    manager.channels += [other, clients]
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr, clients)
    manager.qp(client)
    client.connect()
    eventually(lambda: unread(manager.channel) == 1)
    client.close()
    eventually(lambda: unread(manager.channel) == 2)
    listener.migrate(other)
    assert unread(manager.channel) == 0
    server = manager.next(E.CONNECT_REQUEST, None, other).id
    manager.next(E.REJECTED, server, other)
    server.close()


def test_two_channels(manager, device, address):
    """A server with its own channel, as two drivers in one process have."""
    other = CMEventChannel(device.library)
    manager.channels.append(other)
    listener = manager.listener(address, other)
    client = manager.resolved(listener.local_addr)
    manager.qp(client)
    client.connect()
    server = manager.next(E.CONNECT_REQUEST, None, other).id
    assert server.channel is other
    manager.qp(server)
    server.accept()
    manager.next(E.ESTABLISHED, client)
    manager.next(E.ESTABLISHED, server, other)
    exchange(manager, client, server)


def test_many_at_once(manager, address):
    listener = manager.listener(address)
    clients = [manager.resolved(listener.local_addr) for _ in range(20)]
    for client in clients:
        manager.qp(client)
    for client in clients:
        client.connect(rnr_retry_count=7)
    established, servers = set(), []
    while len(established) < 40:
        select.select([manager.channel], [], [], 5)
        event = manager.channel.get_event()
        assert event is not None
        if event.type == E.CONNECT_REQUEST:
            manager.ids.append(event.id)
            manager.qp(event.id)
            event.id.accept(rnr_retry_count=7)
            servers.append(event.id)
        else:
            assert event.type == E.ESTABLISHED, event
            established.add(event.id)
    assert established == {*clients, *servers}
    for client in clients:
        client.disconnect()
    manager.part(*clients, *servers)


def test_disconnect_by_the_server(manager, address):
    client, server = manager.connected(address)
    server.disconnect()
    manager.part(client, server)


def test_who_disconnects_need_not_be_told(manager, address):
    """Then the embedded device waits for no answer. Other libraries tell all the same."""
    client, server = manager.connected(address)
    client.disconnect(told=False)
    if not client.library.embedded_device:
        manager.part(client, server)
        return
    assert client.qp.query()[0].qp_state == QPState.ERR
    manager.part(server)
    client.disconnect(told=False)
    server.close()
    assert client.channel.get_event() is None


def test_closing_is_disconnecting(manager, address):
    client, server = manager.connected(address)
    client.close()
    event = manager.next(E.DISCONNECTED, server, timeout=60)
    assert isinstance(event.error(), ConnectionResetError)


def test_a_queue_pair_of_its_own_context(manager, device, address):
    client = manager.id()
    client.resolve_addr(None, (address, 4000))
    manager.next(E.ADDR_RESOLVED, client)
    with device.open() as context, PD(context) as pd, CQ(context, 4) as cq:
        with pytest.raises(ValueError, match="belong to different contexts"):
            client.create_qp(pd, QPInitAttr(cq, cq))
    manager.qp(client)
    with pytest.raises(ValueError, match="already has a queue pair"):
        manager.qp(client)


def test_the_queue_pair_goes_with_its_identifier(manager, address):
    client, server = manager.connected(address)
    qp = client.qp
    client.close()
    assert qp.closed and client.closed
    server.destroy_qp()
    assert server.qp is None


def test_a_context_lives_as_long_as_it_is_needed(device, address):
    """Longer than the identifier that it came from, and not longer than what was made from it."""
    with CMEventChannel(device.library) as channel, channel.create_id() as id:
        id.bind_addr((address, 0))
        context = id.context
        pd = PD(context)
    assert context.query_device().max_qp > 0
    with pd.alloc_mr(64) as mr:
        mr[:] = bytes(64)
    pd.close()
    with pytest.raises(ValueError, match="last event channel"):
        context.query_device()
    context.close()


def test_the_channel_is_not_blocking(manager):
    assert manager.channel.get_event() is None
    assert manager.channel.fileno() == manager.channel.fd >= 0


def test_unused_identifiers(manager):
    with manager.channel.create_id() as id:
        assert id.local_addr is None or id.local_addr[1] == 0
        with pytest.raises(OSError) as caught:
            manager.channel.close()
        assert caught.value.errno == 16
    assert id.closed
    with pytest.raises(ValueError, match="CMID is closed"):
        id.listen()
    assert PortSpace.TCP == 0x106
