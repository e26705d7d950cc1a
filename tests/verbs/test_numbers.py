"""Numbers given to constructors, and to what else takes some: each is used as it is, or refused.

A float is no whole number, and no number is cut to what its place in a C struct can hold.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from rdmanet.cm import CMEventChannel
from rdmanet.verbs import (
    AH,
    CQ,
    CQEX,
    DM,
    MW,
    QP,
    SGE,
    SRQ,
    XRCD,
    AccessFlags,
    AHAttr,
    BufferPool,
    CQInitAttrEx,
    MWBindInfo,
    MWType,
    QPAttr,
    QPCap,
    QPInitAttr,
    QPInitAttrEx,
    QPState,
    SendWR,
    SRQAttr,
    WROpcode,
)
from rdmanet.wire.qpinfo import QPInfo

pytestmark = [
    pytest.mark.embedded_only("only the embedded device has all of what takes numbers"),
    pytest.mark.not_on_iwarp("lacks some of what takes numbers"),
]

NO_NUMBERS = (1.0, 1.5, float("nan"), "1", b"1", [], object())
# Whatever is left of them when they are cut to 8, 16, 32 or 64 bits is a number that a device takes.
TOO_MUCH = (-(2**70) + 1, 2**64 + 1, 2**70 + 1)
REFUSED = (ValueError, OverflowError, IndexError, OSError)


class Makers:
    """What takes numbers, by the names of the numbers. Each is called with one of them, the others are fine."""

    def __init__(self, net: Any) -> None:
        self.net = net
        self.side = net.side()
        self.mr = net.mr(4096, AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND)
        self.records: dict[tuple[type, str], Callable[[Any], object]] = {}
        self.arguments: dict[str, Callable[[Any], object]] = {}
        self.add_records()
        self.add_arguments()

    def add_records(self) -> None:
        pd, context, cq = self.net.pd, self.net.context, self.side.cq

        def add(record: Any, use: Callable[[Any], object], *names: str) -> None:
            for name in names:
                self.records[type(record), name] = lambda value, name=name: use(
                    dataclasses.replace(record, **{name: value})
                )

        add(CQInitAttrEx(16), lambda attr: CQEX(context, attr), "cqe", "comp_vector", "wc_flags", "flags")
        caps = [field.name for field in dataclasses.fields(QPCap)]
        add(QPCap(), lambda cap: QP(pd, QPInitAttr(cq, cq, cap)), *caps)
        add(QPInitAttrEx(cq, cq), lambda attr: QP(pd, attr), "send_ops_flags", "create_flags")
        add(SRQAttr(), lambda attr: SRQ(pd, attr), "max_wr", "max_sge", "srq_limit")
        way = AHAttr(self.net.gid.gid, self.net.gid.gid_index)
        numbers = [field.name for field in dataclasses.fields(AHAttr) if field.name != "dgid"]
        for name in numbers:
            self.records[AHAttr, name] = lambda value, name=name: AH(
                pd, AHAttr(**(vars(way) | {name: value}))
            )
        plain = QPAttr(qp_state=QPState.INIT, port_num=1, pkey_index=0, qp_access_flags=0)
        add(plain, self.side.qp.modify, "port_num", "pkey_index", "qp_access_flags", "qkey", "rq_psn", "sq_psn",
            "dest_qp_num", "max_rd_atomic", "max_dest_rd_atomic", "min_rnr_timer", "timeout", "retry_cnt",
            "rnr_retry", "rate_limit")  # fmt: skip
        add(MWBindInfo(self.mr), self.bound, "addr", "length", "mw_access_flags")

    def add_arguments(self) -> None:
        pd, context, cq, qp = self.net.pd, self.net.context, self.side.cq, self.side.qp
        more = {
            "CQ: cqe": lambda value: CQ(context, value),
            "CQ: comp_vector": lambda value: CQ(context, 16, None, value),
            "CQ.poll": cq.poll,
            "CQ.resize": cq.resize,
            "CQ.modify": lambda value: cq.modify(value, 1),
            "CQ.ack_events": cq.ack_events,
            "XRCD: fd": lambda value: XRCD(context, value),
            "DM: length": lambda value: DM(context, value),
            "DM: log_align_req": lambda value: DM(context, 64, value),
            "PD.reg_mr: access": lambda value: pd.reg_mr(bytearray(64), value),
            "PD.alloc_mr: length": pd.alloc_mr,
            "PD.alloc_mr: access": lambda value: pd.alloc_mr(64, value),
            "BufferPool: buffer_bytes": lambda value: BufferPool(pd, value, 4),
            "BufferPool: count": lambda value: BufferPool(pd, 64, value),
            "SGE: offset": lambda value: SGE(self.mr, value),
            "SGE: length": lambda value: SGE(self.mr, 0, value),
            "SGE: lkey": lambda value: SGE(bytearray(8), lkey=value),
            "MW: mw_type": lambda value: MW(pd, value),
            "SendWR: opcode": SendWR,
            "QP.to_init: port_num": qp.to_init,
            "QP.to_init: pkey_index": lambda value: qp.to_init(pkey_index=value),
            "CMEventChannel.create_id": self.identified,
            "Context.query_port": context.query_port,
            "Context.query_gid": lambda value: context.query_gid(1, value),
            "Context.pkey": lambda value: context.pkey(1, value),
            "QPInfo: qp_num": QPInfo,
            "QPInfo: psn": lambda value: QPInfo(1, value),
            "QPInfo: lid": lambda value: QPInfo(1, lid=value),
        }
        for name in ("flags", "imm_data", "remote_addr", "rkey", "compare_add", "swap", "remote_qpn",
                     "remote_qkey", "remote_srqn", "invalidate_rkey"):  # fmt: skip
            more[f"SendWR: {name}"] = lambda value, name=name: SendWR(WROpcode.SEND, **{name: value})
        self.arguments = more

    def bound(self, info: MWBindInfo) -> object:
        if not self.net.windows:
            self.net.windows.append(MW(self.net.pd, MWType.TYPE_2))
        return SendWR(WROpcode.BIND_MW, mw=self.net.windows[0], bind_info=info)

    def identified(self, value: Any) -> None:
        with CMEventChannel(self.net.context.library) as channel:
            channel.create_id(value).close()


@pytest.fixture
def makers(net) -> Makers:
    return Makers(net)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number_in_a_record(makers, value):
    """The record and its field are named."""
    for (record, name), use in makers.records.items():
        with pytest.raises(TypeError, match=rf"{record.__name__}\.{name}: .* is not an integer"):
            use(value)


@pytest.mark.parametrize("value", TOO_MUCH)
def test_what_is_too_much_in_a_record(makers, value):
    for (record, name), use in makers.records.items():
        with pytest.raises(OverflowError, match=rf"{record.__name__}\.{name}: {value} is not in 0\.\.\d+"):
            use(value)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number(makers, value):
    for name, use in makers.arguments.items():
        with pytest.raises((TypeError, ValueError) if name == "MW: mw_type" else TypeError):
            use(value)
            pytest.fail(f"{name} took {value!r}")


@pytest.mark.parametrize("value", TOO_MUCH)
def test_what_is_too_much(makers, value):
    for name, use in makers.arguments.items():
        try:
            use(value)
        except REFUSED:
            continue
        pytest.fail(f"{name} took {value}")


def test_what_fits_is_kept(net):
    for name, most in (("hop_limit", 2**8 - 1), ("traffic_class", 2**8 - 1), ("flow_label", 2**32 - 1)):
        with AH(net.pd, AHAttr(net.gid.gid, net.gid.gid_index, **{name: most})) as ah:
            assert getattr(ah.attr, name) == most
    assert SendWR(WROpcode.SEND, flags=True).flags == 1
