"""The connecting side's word that it is ready (RTU) gets lost: what it sends then says the same.

It is lost by a fault, or never said: a program that moves its queue pair itself says it with establish().
"""

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdmanet.cm import CMID, CMEventType
from rdmanet.verbs import EventType, QPState, WCStatus

from .conftest import Manager, Net, Side, differs

E = CMEventType
RTS = (QPState.INIT, QPState.RTR, QPState.RTS)


def move(cm_id: CMID, side: Side, *states: QPState) -> None:
    for state in states:
        attr = cm_id.init_qp_attr(state)
        attr.qp_state = state
        side.qp.modify(attr)


@contextlib.contextmanager
def two_ends(device, manager: Manager, address: str) -> Iterator[tuple[CMID, CMID, Net]]:
    """A client that was asked for a connection by the number of a queue pair, and a server; nobody has said more."""
    if device.transport_type == 1:
        pytest.skip("iWARP's connection manager connects the queue pair itself")
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    net = Net(client.context, address)
    net.side()
    client.connect(qp_num=net.sides[0].qp.qp_num)
    yield client, manager.next(E.CONNECT_REQUEST).id, net
    net.close()


@pytest.fixture
def ends(device, manager: Manager, address: str) -> Iterator[tuple[CMID, CMID, Net]]:
    with two_ends(device, manager, address) as found:
        yield found


def test_a_message_comes_instead(manager: Manager, ends):
    """The server's program says that it has heard the client, and ESTABLISHED comes."""
    client, server, net = ends
    ours = net.sides[0]
    with pytest.raises(OSError, match="rdma_notify") as caught:
        server.notify()  # it has not accepted
    assert caught.value.errno == errno.EINVAL
    qp = manager.qp(server)
    theirs = Side(server.qp.pd, None, qp.recv_cq, qp)  # type: ignore[arg-type]
    theirs.receive()
    server.accept()
    manager.next(E.CONNECT_RESPONSE, client)
    move(client, ours, *RTS)
    ours.send()
    assert theirs.one().status == WCStatus.SUCCESS
    assert manager.channel.get_event() is None
    server.notify()
    manager.next(E.ESTABLISHED, server)
    server.notify()  # does nothing
    client.establish()  # the word is late
    ours.receive()
    theirs.send()
    assert {ours.one().status, ours.one().status} == {WCStatus.SUCCESS}
    assert theirs.one().status == WCStatus.SUCCESS
    client.disconnect()
    manager.part(client, server)
    with pytest.raises(OSError, match="rdma_notify"):
        server.notify()


def test_comm_est(manager: Manager, ends):
    """A server's queue pair that waits in RTR for the client's word has the event COMM_EST."""
    client, server, net = ends
    differs(client.context, "rxe", "does not tell")
    ours, theirs = net.sides[0], net.side()
    move(server, theirs, QPState.INIT, QPState.RTR)
    theirs.receive()
    server.accept(qp_num=theirs.qp.qp_num)
    manager.next(E.CONNECT_RESPONSE, client)
    move(client, ours, *RTS)
    ours.send()
    assert net.event(EventType.COMM_EST).qp is theirs.qp
    server.notify(EventType.COMM_EST)
    manager.next(E.ESTABLISHED, server)
    move(server, theirs, QPState.RTS)
    assert ours.one().status == theirs.one().status == WCStatus.SUCCESS


def test_no_other_event(ends):
    _, server, net = ends
    with pytest.raises(OSError, match="rdma_notify") as caught:
        server.notify(EventType.SQ_DRAINED)
    assert caught.value.errno == errno.EINVAL


def engine_sleeps() -> int:
    """How often the engine of this process has fallen asleep; it sleeps now."""
    [engine] = (
        task
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text() == "rdmanet-engine\n"
    )
    while True:
        said = (engine / "status").read_text()
        if re.search(r"^State:\s*S", said, re.MULTILINE):
            return int(re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", said, re.MULTILINE)[0])


def wakes_the_engine(device, manager: Manager, address: str) -> bool:
    """Whether the engine has run since the server's program said that it has heard the client."""
    with two_ends(device, manager, address) as (client, server, net):
        qp = manager.qp(server)
        theirs = Side(server.qp.pd, None, qp.recv_cq, qp)  # type: ignore[arg-type]
        theirs.receive()
        server.accept()
        manager.next(E.CONNECT_RESPONSE, client)
        move(client, net.sides[0], *RTS)
        net.sides[0].send()
        assert theirs.one().status == WCStatus.SUCCESS
        slept = engine_sleeps()
        server.notify()
        has_run = engine_sleeps() != slept
        manager.next(E.ESTABLISHED, server)
        return has_run


@pytest.mark.embedded_only("a kernel has no engine")
def test_the_engine_sleeps_on(device, manager: Manager, address: str):
    """The thread that says it does what is to be done: it wakes no engine, which might be on its CPU."""
    assert not all(wakes_the_engine(device, manager, address) for _ in range(10))  # a timer may wake it


@pytest.mark.embedded_only("by a fault")
def test_who_is_never_heard_may_part(device, manager: Manager, address: str):
    """A client that says nothing and goes: the server, which asks nobody, hears of the end only."""
    listener = manager.listener(address)
    client = manager.resolved(listener.local_addr)
    client.context.set_faults("loss=rtu:1")
    try:
        manager.qp(client)
        client.connect()
        server = manager.next(E.CONNECT_REQUEST).id
        manager.qp(server)
        server.accept()
        manager.next(E.ESTABLISHED, client)
        client.disconnect()
        manager.part(client, server)
        assert client.context.faults() == {"loss=rtu:1": 1}
        assert server.qp.query()[0].qp_state == QPState.ERR
    finally:
        client.context.set_faults("")


@pytest.mark.embedded_only("by a fault")
def test_only_the_nth_is_lost(device, manager: Manager, address: str):
    context = manager.resolved(manager.listener(address).local_addr).context
    context.set_faults("loss=rtu:2")
    try:
        manager.connected(address)
        assert context.faults() == {"loss=rtu:2": 0}
    finally:
        context.set_faults("")
