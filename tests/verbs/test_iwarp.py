"""iWARP's rules between two identifiers of the connection manager. (tests/c/test_iwarp.c has the others.)"""

import pytest

from rdmanet.cm import CMEventType
from rdmanet.verbs import Device, QPState, RecvWR, SendWR, WCStatus, WROpcode


@pytest.fixture(autouse=True)
def iwarp(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not device.library.embedded_device:
        pytest.skip("only the embedded device can be told to be another")
    monkeypatch.setenv("RDMANET_SOFT_RULES", "iwarp")


def ended(manager, *ids) -> None:
    """Both are told, and are in ERR."""
    manager.part(*ids)
    for id in ids:
        assert id.qp.query()[0].qp_state == QPState.ERR


def polled(cq, count):
    found = []
    while len(found) < count:
        found += cq.poll()
    return [wc.status for wc in found]


def test_the_accepting_side_may_not_speak_first(manager, address):
    client, server = manager.connected(address)
    client.qp.post_recv(RecvWR())
    server.qp.post_send(SendWR(WROpcode.SEND))
    ended(manager, client, server)


def test_it_may_answer(manager, address):
    client, server = manager.connected(address)
    _, cq = manager.queues(client.context)
    for id in (client, server):
        id.qp.post_recv(RecvWR())
    client.qp.post_send(SendWR(WROpcode.SEND))
    assert polled(cq, 2) == [WCStatus.SUCCESS] * 2
    server.qp.post_send(SendWR(WROpcode.SEND))
    assert polled(cq, 2) == [WCStatus.SUCCESS] * 2
    client.disconnect()
    manager.part(client, server)


def test_a_send_without_a_receive_ends_the_connection(manager, address):
    client, server = manager.connected(address)
    client.qp.post_send(SendWR(WROpcode.SEND))
    ended(manager, client, server)


def test_private_data_have_the_length_they_were_sent_with(manager, address):
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    manager.qp(client)
    client.connect(b"hello")
    request = manager.next(CMEventType.CONNECT_REQUEST)
    assert request.private_data == b"hello"
