"""The records of the verbs are what dataclasses are, though their methods are compiled (_pyx/record.pxi)."""

import copy
import dataclasses
import inspect
import pickle
import sys
from typing import Any

import pytest

from rdmanet import _core
from rdmanet.verbs import (
    AHAttr,
    AsyncEvent,
    CQInitAttrEx,
    DeviceAttr,
    EventType,
    GIDEntry,
    GIDType,
    GlobalRoute,
    QPCap,
    QPInitAttr,
    QPInitAttrEx,
)


def test_they_are_made_and_shown() -> None:
    cap = QPCap(2, max_inline_data=64)
    assert (
        repr(cap) == "QPCap(max_send_wr=2, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, max_inline_data=64)"
    )
    assert QPInitAttr().cap == QPCap() and QPInitAttr().cap is not QPInitAttr().cap
    attr = QPInitAttrEx(cap=cap, xrcd=None, send_ops_flags=1)
    assert (attr.cap, attr.send_ops_flags, attr.sq_sig_all) == (cap, 1, False)
    assert AHAttr(gr=GlobalRoute(bytes(16), hop_limit=3)).hop_limit == 3
    assert "gr" not in repr(AHAttr())


@pytest.mark.parametrize(
    ("values", "named", "wrong"),
    [
        ((1, 2, 3, 4, 5, 6), {}, "6"),
        ((1,), {"cqe": 2}, "cqe"),
        ((), {}, "cqe"),
        ((1,), {"cq": 2}, "cq"),
    ],
)
def test_wrong_arguments_are_named(values: tuple[int, ...], named: dict[str, Any], wrong: str) -> None:
    with pytest.raises(TypeError, match=rf"^CQInitAttrEx\(\).*\b{wrong}\b"):
        CQInitAttrEx(*values, **named)


def test_they_are_compared() -> None:
    assert QPCap(2) == QPCap(max_send_wr=2) != QPCap(3)
    assert QPInitAttr() != QPInitAttrEx()
    with pytest.raises(TypeError, match="unhashable"):
        hash(QPCap())
    entry = GIDEntry(bytes(16), 0, 1, GIDType.ROCE_V2, 1)
    assert {entry: 1}[dataclasses.replace(entry)] == 1


def test_frozen_ones_stay_as_they_are() -> None:
    entry = GIDEntry(bytes(16), 0, 1, GIDType.ROCE_V2, 1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="port_num"):
        entry.port_num = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="port_num"):
        del entry.port_num  # type: ignore[misc]


def test_what_works_with_dataclasses_works_with_them() -> None:
    cap = QPCap(2)
    assert dataclasses.replace(cap, max_send_wr=3) == QPCap(3)
    assert dataclasses.replace(AHAttr(dlid=5), sl=1) == AHAttr(dlid=5, sl=1)
    assert dataclasses.asdict(QPInitAttr(cap=cap))["cap"] == vars(cap)
    assert len(dataclasses.fields(DeviceAttr)) == 39
    for one in (cap, GIDEntry(bytes(16), 0, 1, GIDType.ROCE_V2, 1)):
        for copied in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert copied == one and copied is not one


def test_their_signatures() -> None:
    found = inspect.signature(GlobalRoute).parameters
    defaults = {"flow_label": 0, "sgid_index": 0, "hop_limit": 64, "traffic_class": 0}
    assert {name: it.default for name, it in found.items()} == {"dgid": inspect.Parameter.empty} | defaults
    assert [*inspect.signature(QPInitAttrEx).parameters][-1] == "xrcd"


def test_each_is_replaced_as_copy_replace_does() -> None:
    """Python 3.13's copy.replace() calls __replace__, also that of a record which was made without `dataclasses`."""
    event = AsyncEvent(EventType.PORT_ACTIVE, port_num=1)
    assert event.__replace__(port_num=2) == AsyncEvent(EventType.PORT_ACTIVE, port_num=2)
    assert QPCap(2).__replace__(max_recv_wr=3) == QPCap(2, 3)
    with pytest.raises(TypeError, match="port"):
        event.__replace__(port=2)
    if sys.version_info >= (3, 13):
        assert copy.replace(event, port_num=2).port_num == 2


def test_what_makes_names_is_not_public() -> None:
    assert not {"late", "record", "core", "makers"} & {*vars(_core)}
