"""The enumerations of `rdmanet.verbs` and `rdmanet.cm` against the headers: each number, and no name too many."""

import re
from pathlib import Path

import pytest

from rdmanet import _core

ABI = Path(__file__).parents[2] / "rdmanet/abi"

PREFIXES = {
    "NodeType": "IBV_NODE_",
    "TransportType": "IBV_TRANSPORT_",
    "PortState": "IBV_PORT_",
    "LinkLayer": "IBV_LINK_LAYER_",
    "MTU": "IBV_",
    "AtomicCap": "IBV_ATOMIC_",
    "GIDType": "IBV_GID_TYPE_",
    "EventType": "IBV_EVENT_",
    "AccessFlags": "IBV_ACCESS_",
    "AdviseMRAdvice": "IB_UVERBS_ADVISE_MR_ADVICE_",
    "AdviseMRFlags": "IB_UVERBS_ADVISE_MR_FLAG_",
    "WCStatus": "IBV_WC_",
    "WCOpcode": "IBV_WC_",
    "WCFlags": "IBV_WC_",
    "CreateCQWCFlags": "IBV_WC_EX_",
    "CreateCQFlags": "IBV_CREATE_CQ_ATTR_",
    "WROpcode": "IBV_WR_",
    "SendFlags": "IBV_SEND_",
    "MWType": "IBV_MW_",
    "SRQType": "IBV_SRQT_",
    "QPType": "IBV_QPT_",
    "QPState": "IBV_QPS_",
    "MigState": "IBV_MIG_",
    "QPAttrMask": "IBV_QP_",
    "SendOpsFlags": "IBV_QP_EX_WITH_",
    "QPCreateFlags": "IBV_QP_CREATE_",
    "PortSpace": "RDMA_PS_",
    "CMEventType": "RDMA_CM_EVENT_",
}
"""What the names have before them in C."""

OURS = {("AdviseMRFlags", "NONE"): 0, ("CreateCQFlags", "NONE"): 0, ("SendFlags", "NONE"): 0}
"""Names that C does not have."""


def numbers() -> dict[str, int]:
    """Each constant of the headers' enums."""
    text = "".join((ABI / header).read_text() for header in ("verbs.h", "rdma_cma.h"))
    known: dict[str, int] = {}
    for body in re.findall(
        r"\benum \w* ?\{(.*?)\}", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL), re.DOTALL
    ):
        number = -1
        for item in filter(None, map(str.strip, body.split(","))):
            name, _, value = item.partition("=")
            number = eval(" ".join(value.split()), {}, known) if value else number + 1
            known[name.strip()] = number
    return known


@pytest.mark.parametrize("name", PREFIXES)
def test_the_numbers_are_those_of_the_headers(name: str):
    known = numbers() | {"IBV_WC_EX_STANDARD": numbers()["IBV_WC_STANDARD_FLAGS"]}
    for member, value in getattr(_core, name).__members__.items():
        expected = OURS.get((name, member))
        assert value == (known[PREFIXES[name] + member] if expected is None else expected), member


def test_every_enumeration_is_compared():
    text = (ABI.parent / "_core.pyi").read_text()
    assert set(re.findall(r"^class (\w+)\(Int(?:Enum|Flag)\)", text, re.MULTILINE)) == set(PREFIXES)
