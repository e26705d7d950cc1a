"""Every kind of object at once, closed and forgotten in random orders: nothing goes before what needs it."""

import gc
import random
import warnings

from rdmanet._core import Resource
from rdmanet.verbs import (
    AH,
    CQ,
    CQEX,
    DM,
    MW,
    PD,
    QP,
    SRQ,
    XRCD,
    AccessFlags,
    AHAttr,
    CompChannel,
    Context,
    CQInitAttrEx,
    Device,
    MWBindInfo,
    MWType,
    QPCap,
    QPInitAttr,
    QPInitAttrEx,
    QPType,
    RecvWR,
    SendOpsFlags,
    SendWR,
    SRQAttr,
    SRQInitAttr,
    SRQType,
    WROpcode,
    inc_rkey,
    live_objects,
)

from .conftest import EVERYTHING, driver, own_gid

LACKING = {95, 38, 93}


def seeds(device: Device) -> range:
    """Orders enough for a sanitizer to find what is wrong; few where the making of each takes its time."""
    return range(30) if device.library.embedded_device else range(6)


def graph(device: Device) -> dict[str, Resource]:
    """One of each that the device has, with work in flight that names them."""
    made: dict[str, Resource] = {}

    def add(name: str, make) -> None:
        try:
            made[name] = make()
        except OSError as exc:
            assert exc.errno in LACKING, name
        except KeyError:  # it needs another one, which the device lacks
            pass

    context = device.open()
    made["context"] = context
    assert isinstance(context, Context)
    pd = made["pd"] = PD(context)
    channel = made["channel"] = CompChannel(context)
    cq = made["cq"] = CQ(context, 32, channel)
    gid = own_gid(context)
    mr = made["mr"] = pd.alloc_mr(4096, EVERYTHING | AccessFlags.MW_BIND)
    made["borrowed"] = pd.reg_mr(bytearray(64))
    add("cqex", lambda: CQEX(context, CQInitAttrEx(16, channel)))
    add("srq", lambda: SRQ(pd, SRQAttr(8, 1)))
    add("ah", lambda: AH(pd, AHAttr(gid.gid, gid.gid_index)))
    add("mw", lambda: MW(pd, MWType.TYPE_2))
    add("dm", lambda: DM(context, 4096))
    add("dm_mr", lambda: pd.reg_dm_mr(made["dm"]))
    add("xrcd", lambda: XRCD(context))
    add("xrc_srq", lambda: SRQ(pd, SRQInitAttr(SRQAttr(8, 1), SRQType.XRC, made["xrcd"], cq)))
    add("xrc_target", lambda: QP(pd, QPInitAttrEx(qp_type=QPType.XRC_RECV, xrcd=made["xrcd"])))
    qp = made["qp"] = QP(pd, QPInitAttr(cq, cq, QPCap(8, 8, 1, 1)))
    add("sharing", lambda: QP(pd, QPInitAttr(made["cqex"], cq, QPCap(8, 0, 1, 0), srq=made["srq"])))
    add("ud", lambda: QP(pd, QPInitAttr(cq, made["cqex"], QPCap(8, 8, 1, 1), QPType.UD)))
    add("called", lambda: QP(pd, QPInitAttrEx(cq, cq, QPCap(8, 8, 1, 1), send_ops_flags=SendOpsFlags.SEND)))

    qp.to_init()
    qp.post_recv(RecvWR(mr.sge(0, 64)))
    if "srq" in made:
        made["srq"].post_recv(RecvWR(made["borrowed"], wr_id=made))  # a cycle
    # rxe waits for 50 s, and in vain, when a queue pair goes that a window is bound to.
    if "mw" in made and driver(context) != "rxe":
        qp.to_rtr(qp.qp_num, gid.gid, sgid_index=gid.gid_index)
        qp.to_rts()
        mw = made["mw"]
        info = MWBindInfo(mr, None, 64, AccessFlags.REMOTE_WRITE)
        qp.post_send(SendWR(WROpcode.BIND_MW, mw=mw, rkey=inc_rkey(mw.rkey), bind_info=info))
    if "ud" in made and "ah" in made:
        ud = made["ud"]
        ud.to_init(qkey=1)
        ud.to_rtr()
        ud.to_rts()
        ud.post_send(SendWR(WROpcode.SEND, mr.sge(64, 8), ah=made["ah"], remote_qpn=ud.qp_num, remote_qkey=1))
    return made


def test_forgotten_in_any_order(device: Device):
    """No order of `del` destroys a parent first, whether or not a cycle leaves it to the collector."""
    for seed in seeds(device):
        forget(device, seed)


def forget(device: Device, seed: int) -> None:
    before = live_objects()
    made = graph(device)
    order = list(made)
    random.Random(seed).shuffle(order)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        if seed % 3:
            # The cycle through the receive's wr_id is broken: the counts of references do the work.
            made = dict(made)
        for name in order:
            del made[name]
        del made
        gc.collect()
    assert live_objects() == before, seed


def test_closed_in_any_order(device: Device):
    """A parent that is needed refuses, and stays open; in as many rounds as it takes all are closed."""
    for seed in seeds(device):
        close(device, seed)


def close(device: Device, seed: int) -> None:
    made = graph(device)
    left = list(made.values())
    made.clear()
    choice = random.Random(seed)
    for _ in range(len(left)):
        choice.shuffle(left)
        for resource in list(left):
            try:
                resource.close()
            except OSError as exc:
                assert exc.errno in (16, 22), exc  # EBUSY; rxe's EINVAL for a bound region
                assert not resource.closed
            else:
                assert resource.closed
                resource.close()
                left.remove(resource)
        if not left:
            break
    assert left == [], seed
