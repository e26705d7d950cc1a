"""Faults on purpose, as programs meet them. (tests/c/test_faults.c has each of them, in C.)"""

import errno
import os
import subprocess
import sys

import pytest

from rdmanet._core import RegistrationCache
from rdmanet.cm import CMEventType
from rdmanet.verbs import (
    AH,
    DM,
    MW,
    PD,
    SRQ,
    AHAttr,
    Context,
    Device,
    EventType,
    Library,
    PortState,
    QPState,
    QPType,
    SendFlags,
    SendWR,
    WCStatus,
    WROpcode,
)


@pytest.fixture(autouse=True)
def embedded_only(device: Device) -> None:
    if not device.library.embedded_device:
        pytest.skip("only the embedded device can be told to fail")


def test_a_lost_send_spends_its_retries(net, context):
    a, b = net.pair(rts={"timeout": 1, "retry_cnt": 2})
    context.set_faults("loss=send:2")
    for i in range(3):
        b.receive(wr_id=i)
    for i in range(3):
        a.send(wr_id=i)
    assert [(wc.wr_id, wc.status) for wc in a.poll(3)] == [
        (0, WCStatus.SUCCESS),
        (1, WCStatus.RETRY_EXC_ERR),
        (2, WCStatus.WR_FLUSH_ERR),
    ]
    assert a.qp.counters()["lost"] == 3
    assert b.one().status == WCStatus.SUCCESS
    assert b.quiet()
    assert b.qp.query()[0].qp_state == QPState.RTS


def test_a_lost_acknowledgement_hides_what_has_happened(net, context):
    a, b = net.pair(rts={"timeout": 1, "retry_cnt": 1})
    context.set_faults("ackloss=send:1")
    b.receive()
    a.send()
    assert a.one().status == WCStatus.RETRY_EXC_ERR
    assert b.one().status == WCStatus.SUCCESS


def fate(device: Device, make_net, faults: str) -> tuple[list[WCStatus], int]:
    with device.open() as context:
        context.set_faults(faults)
        net = make_net(context)
        try:
            a, b = net.side(max_send_wr=64), net.side(max_recv_wr=64)
            net.connect(a, b, rts={"timeout": 1, "retry_cnt": 1})
            for _ in range(64):
                b.receive()
            for _ in range(64):
                a.send()
            return [wc.status for wc in a.poll(64, timeout=20)], a.qp.counters()["lost"]
        finally:
            net.close()


def test_the_same_seed_is_the_same_fate(device, net):
    text = "seed={}, loss=20%, ackloss=5%, delay=0us..50us"
    first = fate(device, type(net), text.format(1))
    assert first == fate(device, type(net), text.format(1))
    assert first != fate(device, type(net), text.format(2))
    assert first[1] > 0


def test_the_nth_of_a_kind_fails(net, context):
    a, b = net.pair()
    mr = net.mr()
    context.set_faults("fail=write:2:REM_ACCESS_ERR")
    for i in range(3):
        a.send([mr.sge(0, 8)], WROpcode.RDMA_WRITE, wr_id=i, remote_addr=mr.address + 64, rkey=mr.rkey)
    assert [wc.status for wc in a.poll(3)] == [
        WCStatus.SUCCESS,
        WCStatus.REM_ACCESS_ERR,
        WCStatus.WR_FLUSH_ERR,
    ]


@pytest.mark.parametrize("opcode", [WROpcode.SEND, WROpcode.RDMA_WRITE, WROpcode.RDMA_READ])
@pytest.mark.parametrize(
    ("status", "told"),
    [
        (WCStatus.REM_ACCESS_ERR, EventType.QP_ACCESS_ERR),
        (WCStatus.REM_INV_REQ_ERR, EventType.QP_REQ_ERR),
        (WCStatus.REM_OP_ERR, None),
    ],
)
def test_a_responder_that_refuses_fails_as_well(net, context, opcode, status, told):
    """Its receives are flushed, after the event that says why; a local error of its own has none. Nothing is moved."""
    a, b = net.pair()
    here, there = net.mr(), net.mr()
    here[:8], there[:8] = b"here too", b"as it is"
    b.receive([there.sge(0, 8)])
    b.receive([there.sge(0, 8)])
    a.receive()
    a.send()
    assert b.one().status == WCStatus.SUCCESS
    b.send()  # so that the next one is an answer, which goes another way in a stream
    assert a.poll(2)[0].status == WCStatus.SUCCESS
    context.set_faults(f"fail={status.name}")
    a.send([here.sge(0, 8)], opcode, remote_addr=there.address, rkey=there.rkey)
    assert a.one().status == status
    assert a.qp.counters()["failed"] == 1
    assert {wc.status for wc in b.poll(2)} == {WCStatus.SUCCESS, WCStatus.WR_FLUSH_ERR}
    events = iter(context.get_async_event, None)
    assert [(event.event_type, event.qp) for event in events] == ([(told, b.qp)] if told else [])
    assert (bytes(here[:8]), bytes(there[:8])) == (b"here too", b"as it is")


def test_calls_fail(context):
    context.set_faults("fail=alloc_pd:2..3:EPERM, memlock=64K")
    with PD(context) as pd:
        for _ in range(2):
            with pytest.raises(PermissionError):
                PD(context)
        with pd.alloc_mr(32 * 1024):
            with pytest.raises(OSError) as caught:
                pd.alloc_mr(64 * 1024)
            assert caught.value.errno == errno.ENOMEM
            assert "ibv_reg_mr: " in str(caught.value)
            assert "65536 bytes" in caught.value.__notes__[0]
            assert "`ulimit -l` does not matter" in caught.value.__notes__[0]
            assert "vm.max_map_count" in caught.value.__notes__[0]


def test_what_is_kept_registered_makes_room(context):
    """Where no more can be locked, registrations go that are kept for later; not those in use."""
    context.set_faults("memlock=64K")
    with PD(context) as pd:
        cache = RegistrationCache(pd)
        idle, busy = memoryview(bytearray(48 * 1024)), memoryview(bytearray(32 * 1024))
        with idle.cast("B") as view:
            cache.take(idle, view).close()
        with busy.cast("B") as view, idle.cast("B") as other:
            registration = cache.take(busy, view)
            assert cache.stats() == {"hits": 0, "misses": 2, "evictions": 1, "entries": 1, "bytes": 32 * 1024}
            with pytest.raises(OSError) as caught:
                cache.take(idle, other)
            assert caught.value.errno == errno.ENOMEM
            registration.close()
        cache.close()


def test_the_link_goes_down_and_comes_up(net, context, eventually):
    a, b = net.pair(rts={"timeout": 22})
    b.receive()
    context.set_faults("link=down")
    event = context.get_async_event()
    assert (event.event_type, event.port_num) == (EventType.PORT_ERR, 1)
    assert context.query_port().state == PortState.DOWN
    a.send()
    assert a.quiet() and b.quiet()
    context.set_faults("")
    assert context.get_async_event().event_type == EventType.PORT_ACTIVE
    assert context.query_port().state == PortState.ACTIVE
    assert a.one().status == b.one().status == WCStatus.SUCCESS


def link_cut(pipe, device, make_net, opcode):
    """In a process of its own, where everybody goes by TCP: a long message, and in its midst the link goes down."""
    os.environ["RDMANET_SOFT_TRANSPORT"] = "stream"
    with device.open() as context:
        net = make_net(context)
        a, b = net.pair(rts={"timeout": 8, "retry_cnt": 1})
        # The device's own thread carries it on, however late this one comes: a gigabyte, of which little is touched.
        here, there = net.mr(1 << 30), net.mr(1 << 30)
        b.receive([there.sge(0, 1 << 30)])
        a.send([here.sge(0, 1 << 30)], opcode, remote_addr=there.address, rkey=there.rkey)
        for _ in range(3):  # under way, and far from done
            assert not a.cq.poll()
        context.set_faults("link=down")
        status = a.one().status
        received = [wc.status for wc in b.cq.poll()]
        pipe.send((status, received, [event.event_type for event in iter(context.get_async_event, None)]))
        net.close()


@pytest.mark.not_on_iwarp("has other rules for what comes late")
@pytest.mark.parametrize("opcode", [WROpcode.SEND, WROpcode.RDMA_WRITE, WROpcode.RDMA_READ])
def test_the_link_goes_down_in_the_midst_of_a_message_by_tcp(device, net, peer, capfd, opcode):
    """It is lost like any other request, and not reported as an access error."""
    child = peer(link_cut, device, type(net), opcode)
    status, received, events = child.hear()
    assert child.wait() == 0
    assert status == WCStatus.RETRY_EXC_ERR
    assert set(received) <= {WCStatus.WR_FLUSH_ERR}
    assert events == [EventType.PORT_ERR]
    assert "may not have" not in capfd.readouterr().err


def test_for_all_contexts(device, context):
    library = device.library
    library.set_faults("fail=alloc_pd")
    try:
        with device.open() as later:
            for one in (context, later):
                with pytest.raises(OSError):
                    PD(one)
    finally:
        library.set_faults(None)
    PD(context).close()


def test_each_fault_is_counted_by_itself(device, context):
    library = device.library
    library.set_faults("seed=2, fail=alloc_pd:2, fail=create_cq, fail=create_cq")
    try:
        PD(context).close()
        with pytest.raises(OSError):
            PD(context)
        assert library.faults() == {"fail=alloc_pd:2": 1, "fail=create_cq": 0}
        assert library.faults_happened() == 1
        context.set_faults("fail=reg_mr")
        assert context.faults() == {"fail=reg_mr": 0}
        assert library.faults() == {"fail=alloc_pd:2": 1, "fail=create_cq": 0}
    finally:
        library.set_faults("")
    assert library.faults() == context.faults() == {}
    library.set_faults(None)


def test_a_request_fails_by_chance(net, context):
    a, b = net.pair()
    context.set_faults("fail=send:99%:GENERAL_ERR")
    for _ in range(8):
        b.receive()
    a.qp.post_send([SendWR(WROpcode.SEND, wr_id=i) for i in range(8)])
    assert WCStatus.GENERAL_ERR in [wc.status for wc in a.poll(8)]
    assert context.faults() == {"fail=send:99%:GENERAL_ERR": 1}


def test_an_error_teaches(context, device):
    for set_faults in (context.set_faults, device.library.set_faults):
        with pytest.raises(ValueError, match="loss=sned:3: .*use one of any, send, write"):
            set_faults("delay=1ms, loss=sned:3")
        with pytest.raises(ValueError, match="dup=rtu: an RTU can only get lost: loss=rtu"):
            set_faults("dup=rtu")
        with pytest.raises(ValueError, match='loss=rtu:1:2: "2" is one part too many'):
            set_faults("loss=rtu:1:2")


def test_a_mistake_in_the_environment_is_said():
    script = "from rdmanet.verbs import Library; Library.embedded().devices()[0].open()"
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "RDMANET_SOFT_CHAOS": "los=5%"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.returncode == 1
    why = 'RDMANET_SOFT_CHAOS: los=5%: unknown fault "los"; use delay'
    assert f"rdmanet soft0: {why}" in run.stderr
    assert f"OSError: [Errno 22] ibv_open_device(soft0): {why}" in run.stderr


def test_not_on_another_device(monkeypatch):
    system = Library.system()
    if system is None:
        pytest.skip("rdma-core is not installed")
    with pytest.raises(OSError) as caught:
        system.set_faults("")
    assert caught.value.errno == errno.EOPNOTSUPP


def test_unsignaled_sends_fail_loudly(net, context):
    a, b = net.pair()
    context.set_faults("fail=send:2:GENERAL_ERR")
    for _ in range(3):
        b.receive()
    a.qp.post_send([SendWR(WROpcode.SEND, wr_id=i, flags=SendFlags(0)) for i in range(3)])
    assert [(wc.wr_id, wc.status) for wc in a.poll(2)] == [
        (1, WCStatus.GENERAL_ERR),
        (2, WCStatus.WR_FLUSH_ERR),
    ]


def test_a_context_of_the_connection_manager(manager, address):
    """Faults count in the connection manager's context, too."""
    client, server = manager.connected(address)
    context: Context = client.context
    context.set_faults("fail=alloc_pd")
    with pytest.raises(OSError):
        PD(context)
    context.set_faults("")
    client.disconnect()
    manager.part(client, server)


@pytest.mark.not_on_iwarp("is reliable")
def test_an_unreliable_message_is_lost_without_a_word(net, context):
    a, b = net.side(qp_type=QPType.UC), net.side(qp_type=QPType.UC)
    net.connect(a, b)
    context.set_faults("loss=send:1, rnr=send:2")
    for i in range(2):
        b.receive(wr_id=i)
    for i in range(3):
        a.send(wr_id=i)
    assert [wc.status for wc in a.poll(3)] == [WCStatus.SUCCESS] * 3
    assert b.one().wr_id == 0
    assert b.quiet()
    assert a.qp.counters()["lost"] == 1


@pytest.mark.not_on_iwarp("has neither address handles nor memory windows")
def test_creating_what_has_no_connection_fails(net, context):
    entry = context.gid_table(1)[0]
    context.set_faults("fail=create_srq, fail=alloc_mw, fail=create_ah, fail=alloc_dm")
    for create in (
        lambda: SRQ(net.pd),
        lambda: MW(net.pd),
        lambda: AH(net.pd, AHAttr(entry.gid, entry.gid_index)),
        lambda: DM(context, 4096),
    ):
        with pytest.raises(OSError) as caught:
            create()
        assert caught.value.errno == errno.ENOMEM


def test_a_device_dies(net, context):
    """DEVICE_FATAL, and what was under way is flushed; what is asked of it is EIO, what is given back is not."""
    a, b = net.pair()
    b.receive(wr_id=1)
    context.set_faults("fatal=now")
    event = context.get_async_event()
    assert event.event_type == EventType.DEVICE_FATAL
    assert b.one().status == WCStatus.WR_FLUSH_ERR
    a.send(wr_id=2)
    assert a.one().status == WCStatus.WR_FLUSH_ERR
    for ask in (lambda: PD(context), lambda: net.pd.alloc_mr(4096), a.qp.query, context.query_device):
        with pytest.raises(OSError) as caught:
            ask()
        assert caught.value.errno == errno.EIO


@pytest.mark.parametrize(
    ("fault", "event", "status"),
    [
        ("resolve_addr", CMEventType.ADDR_ERROR, -errno.ETIMEDOUT),
        ("resolve_addr:ENETUNREACH", CMEventType.ADDR_ERROR, -errno.ENETUNREACH),
        ("resolve_route", CMEventType.ROUTE_ERROR, -errno.ETIMEDOUT),
        ("connect", CMEventType.UNREACHABLE, -errno.ETIMEDOUT),
        ("connect:ECONNREFUSED", CMEventType.REJECTED, None),
    ],
)
def test_a_connection_does_not_come_about(manager, address, fault, event, status):
    """Each step of the set-up fails by its event; without the fault it goes through."""
    listener = manager.listener(address)
    listener.context.set_faults(f"fail={fault}, fail=create_id:2")
    client = manager.id()
    with pytest.raises(OSError) as caught:
        manager.id()
    assert caught.value.errno == errno.ENOMEM
    client.resolve_addr(None, listener.local_addr)
    if event != CMEventType.ADDR_ERROR:
        manager.next(CMEventType.ADDR_RESOLVED, client)
        client.resolve_route()
    if event not in (CMEventType.ADDR_ERROR, CMEventType.ROUTE_ERROR):
        manager.next(CMEventType.ROUTE_RESOLVED, client)
        manager.qp(client)
        client.connect()
    told = manager.next(event, client)
    assert told.status == status if status else told.status in (8, -errno.ECONNREFUSED)
    notes = getattr(told.error(), "__notes__", [])
    if event in (CMEventType.ROUTE_ERROR, CMEventType.UNREACHABLE):
        own = [
            entry
            for entry in client.context.gid_table(client.port_num)
            if str(entry.address) == client.local_addr[0].partition("%")[0]
        ]
        assert [f"from GID index {entry.gid_index} ({entry}, " in notes[0] for entry in own] == [True]
    else:
        assert not notes
    listener.context.set_faults("")
    again, server = manager.connected(address)
    again.disconnect()
    manager.part(again, server)


@pytest.mark.parametrize(
    ("fault", "event"),
    [("resolve_addr", CMEventType.ADDR_ERROR), ("resolve_route", CMEventType.ROUTE_ERROR)],
)
def test_what_is_resolved_at_once_fails_by_the_same_event(manager, address, fault, event):
    listener = manager.listener(address)
    listener.context.set_faults(f"fail={fault}")
    client = manager.id()
    assert client.resolve_at_once(None, listener.local_addr) is False
    told = manager.next(event, client)
    assert told.status == -errno.ETIMEDOUT
    assert client.peer_addr == listener.local_addr
    listener.context.set_faults("")
