"""Rules: the state machine of RC, UC and UD queue pairs, every step with every attribute.

The table is the InfiniBand specification's (volume 1, 10.3.1 and table 96), as every kernel driver has it
from ib_modify_qp_is_ok(). docs/rules.md maps the rules to the tests.
"""

import errno
import pickle

import pytest

from rdmanet.verbs import (
    MTU,
    SGE,
    AccessFlags,
    AHAttr,
    MigState,
    ModifyQPError,
    QPAttr,
    QPAttrMask,
    QPCap,
    QPState,
    QPType,
    SendWR,
    WCStatus,
    WROpcode,
)

from .conftest import Net, Side, differs, driver

S = QPState
CONNECTED = "qp_access_flags pkey_index port_num"
SQD_UC = "pkey_index ah_attr alt_ah_attr qp_access_flags path_mig_state"
RUN_UC = "cur_qp_state qp_access_flags alt_ah_attr path_mig_state"
RUN_UD = "cur_qp_state qkey"
TO_RTR = "ah_attr path_mtu dest_qp_num rq_psn"
AT_RTR = "alt_ah_attr qp_access_flags pkey_index"

# (from, to): (what must be given, what may be given)
TABLE: dict[QPType, dict[tuple[QPState, QPState], tuple[str, str]]] = {
    QPType.RC: {
        (S.RESET, S.INIT): (CONNECTED, ""),
        (S.INIT, S.INIT): ("", CONNECTED),
        (S.INIT, S.RTR): (TO_RTR + " max_dest_rd_atomic min_rnr_timer", AT_RTR),
        (S.RTR, S.RTS): ("sq_psn timeout retry_cnt rnr_retry max_rd_atomic", RUN_UC + " min_rnr_timer"),
        (S.RTS, S.RTS): ("", RUN_UC + " min_rnr_timer"),
        (S.RTS, S.SQD): ("", "en_sqd_async_notify"),
        (S.SQD, S.RTS): ("", RUN_UC + " min_rnr_timer"),
        (S.SQD, S.SQD): (
            "",
            SQD_UC + " port_num max_rd_atomic max_dest_rd_atomic min_rnr_timer timeout retry_cnt rnr_retry",
        ),
    },
    QPType.UC: {
        (S.RESET, S.INIT): (CONNECTED, ""),
        (S.INIT, S.INIT): ("", CONNECTED),
        (S.INIT, S.RTR): (TO_RTR, AT_RTR),
        (S.RTR, S.RTS): ("sq_psn", RUN_UC),
        (S.RTS, S.RTS): ("", RUN_UC),
        (S.RTS, S.SQD): ("", "en_sqd_async_notify"),
        (S.SQD, S.RTS): ("", RUN_UC),
        (S.SQD, S.SQD): ("", SQD_UC),
    },
    QPType.UD: {
        (S.RESET, S.INIT): ("pkey_index port_num qkey", ""),
        (S.INIT, S.INIT): ("", "pkey_index port_num qkey"),
        (S.INIT, S.RTR): ("", "pkey_index qkey"),
        (S.RTR, S.RTS): ("sq_psn", RUN_UD),
        (S.RTS, S.RTS): ("", RUN_UD),
        (S.RTS, S.SQD): ("", "en_sqd_async_notify"),
        (S.SQD, S.RTS): ("", RUN_UD),
        (S.SQD, S.SQD): ("", "pkey_index qkey"),
    },
}
UP = [S.RESET, S.INIT, S.RTR, S.RTS, S.SQD]
STEPS = [(kind, origin, to) for kind, ways in TABLE.items() for origin, to in ways]
STEP_IDS = [f"{kind.name}-{origin.name}-{to.name}" for kind, origin, to in STEPS]
KINDS = pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.name)


def values(net: Net, side: Side, state: QPState) -> dict[str, object]:
    """A right value for every attribute; state is where the queue pair is."""
    return {
        "cur_qp_state": state,
        "en_sqd_async_notify": True,
        "qp_access_flags": AccessFlags.REMOTE_WRITE,
        "pkey_index": 0,
        "port_num": 1,
        "qkey": 0x1234,
        "ah_attr": AHAttr(net.gid.gid, net.gid.gid_index),
        "path_mtu": MTU.MTU_1024,
        "timeout": 14,
        "retry_cnt": 3,
        "rnr_retry": 3,
        "rq_psn": 0x111,
        "max_rd_atomic": 1,
        "alt_ah_attr": AHAttr(net.gid.gid, net.gid.gid_index),
        "min_rnr_timer": 12,
        "sq_psn": 0x111,
        "max_dest_rd_atomic": 1,
        "path_mig_state": MigState.MIGRATED,
        "cap": QPCap(),
        "dest_qp_num": side.qp.qp_num,
    }


def step(net: Net, side: Side, to: QPState, names: str | list[str]) -> None:
    all_values = values(net, side, side.qp.state)
    names = names.split() if isinstance(names, str) else names
    side.qp.modify(QPAttr(qp_state=to, **{name: all_values[name] for name in names}))


def at(net: Net, kind: QPType, state: QPState) -> Side:
    """A queue pair in this state."""
    net.by_hand()
    side = net.side(qp_type=kind)
    for origin, to in zip(UP, UP[1 : UP.index(state) + 1], strict=False):
        step(net, side, to, TABLE[kind][origin, to][0])
    if state == S.SQD:
        differs(net.context, "rxe", "does not stay in SQD")
    assert side.qp.query()[0].qp_state == state
    return side


@pytest.mark.parametrize(("kind", "origin", "to"), STEPS, ids=STEP_IDS)
def test_a_step_with_what_it_needs(net: Net, kind, origin, to):
    side = at(net, kind, origin)
    if to == S.SQD or origin == S.SQD:
        differs(net.context, "rxe", "does not stay in SQD")
    step(net, side, to, TABLE[kind][origin, to][0])
    assert side.qp.state == side.qp.query()[0].qp_state == to


@pytest.mark.parametrize(("kind", "origin", "to"), STEPS, ids=STEP_IDS)
def test_a_step_without_something(net: Net, kind, origin, to):
    """Each attribute that must be given is missed, by name, and nothing changes."""
    side = at(net, kind, origin)
    names = TABLE[kind][origin, to][0].split()
    for missing in names:
        with pytest.raises(ModifyQPError, match=f"missing: {missing}") as caught:
            step(net, side, to, [name for name in names if name != missing])
        assert caught.value.errno == errno.EINVAL
        assert (caught.value.cur_state, caught.value.next_state) == (origin, to)
        assert caught.value.missing == {missing} and not caught.value.not_allowed
        assert side.qp.query()[0].qp_state == origin


@pytest.mark.parametrize(("kind", "origin", "to"), STEPS, ids=STEP_IDS)
def test_a_step_with_too_much(net: Net, kind, origin, to):
    """Each attribute that is not in the table's row is refused, by name, and nothing changes."""
    side = at(net, kind, origin)
    required, optional = (names.split() for names in TABLE[kind][origin, to])
    for extra in values(net, side, origin):
        if extra in required or extra in optional:
            continue
        with pytest.raises(ModifyQPError, match=f"not allowed: {extra}") as caught:
            step(net, side, to, [*required, extra])
        assert caught.value.errno == errno.EINVAL, extra
        assert caught.value.not_allowed == {extra} and not caught.value.missing
        assert side.qp.query()[0].qp_state == origin


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.name)
def test_all_that_is_wrong_is_told_at_once(net: Net, kind):
    """By name in the message, and as sets, which survive the way to another process."""
    side = at(net, kind, S.RESET)
    with pytest.raises(ModifyQPError) as caught:
        side.qp.modify(QPAttr(qp_state=S.INIT, port_num=1, timeout=14, sq_psn=1))
    wanted = set(TABLE[kind][S.RESET, S.INIT][0].split()) - {"port_num"}
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert error.missing == wanted
        assert error.not_allowed == {"timeout", "sq_psn"}
        assert (error.cur_state, error.next_state) == (S.RESET, S.INIT)
        assert error.errno == errno.EINVAL
        assert str(error).startswith("[Errno 22] ibv_modify_qp: RESET to INIT was refused; missing: ")
        for name in (*wanted, "timeout", "sq_psn"):
            assert name in str(error)


# Migration is a feature of its own, which no software device has.
MIGRATION = {"alt_ah_attr", "path_mig_state"}
OPTIONAL = [
    (kind, origin, to, name)
    for kind, origin, to in STEPS
    for name in TABLE[kind][origin, to][1].split()
    if name not in MIGRATION
]


@pytest.mark.parametrize(
    ("kind", "origin", "to", "name"),
    OPTIONAL,
    ids=[f"{kind.name}-{origin.name}-{to.name}-{name}" for kind, origin, to, name in OPTIONAL],
)
def test_a_step_with_something_more(net: Net, kind, origin, to, name):
    """Each attribute that may be given is taken."""
    if to == S.SQD:
        differs(net.context, "rxe", "does not stay in SQD")
    side = at(net, kind, origin)
    if name == "cur_qp_state" and origin not in (S.RTR, S.RTS, S.SQD, S.SQE):
        pytest.fail("the table is wrong")
    step(net, side, to, [*TABLE[kind][origin, to][0].split(), name])
    assert side.qp.query()[0].qp_state == to


@KINDS
@pytest.mark.parametrize("origin", UP, ids=lambda state: state.name)
def test_there_is_no_other_way(net: Net, kind, origin):
    """What is not in the table is refused, and nothing changes; RESET is open from everywhere."""
    side = at(net, kind, origin)
    ways = {to for start, to in TABLE[kind] if start == origin}
    for to in set(UP) - ways - {S.RESET}:
        required = TABLE[kind].get((UP[max(0, UP.index(to) - 1)], to), ("", ""))[0]
        with pytest.raises(OSError, match=f"no transition from {origin.name} to {to.name}") as caught:
            step(net, side, to, required)
        assert caught.value.errno == errno.EINVAL
        assert side.qp.query()[0].qp_state == origin
    side.qp.to_reset()
    assert side.qp.query()[0].qp_state == S.RESET


@KINDS
@pytest.mark.parametrize("origin", UP, ids=lambda state: state.name)
def test_the_way_to_error(net: Net, kind, origin):
    """ERR is open from everywhere but RESET; from there only RESET is."""
    side = at(net, kind, origin)
    if origin == S.RESET:
        with pytest.raises(OSError) as caught:
            side.qp.to_error()
        assert caught.value.errno == errno.EINVAL
        assert side.qp.query()[0].qp_state == S.RESET
        return
    side.qp.to_error()
    assert side.qp.query()[0].qp_state == S.ERR
    for to in (S.INIT, S.RTR, S.RTS, S.SQD):
        with pytest.raises(OSError, match="no transition from ERR"):
            step(net, side, to, "")
    side.qp.to_reset()
    assert side.qp.query()[0].qp_state == S.RESET


@KINDS
def test_reset_and_error_take_no_attributes(net: Net, kind):
    side = at(net, kind, S.RTS)
    for to in (S.RESET, S.ERR):
        with pytest.raises(OSError, match="not allowed: port_num"):
            step(net, side, to, "port_num")
        assert side.qp.query()[0].qp_state == S.RTS


@KINDS
def test_cur_state_must_be_true(net: Net, kind):
    """The state that a program believes in is compared with the true one."""
    differs(net.context, "rxe", "believes the program")
    side = at(net, kind, S.RTS)
    with pytest.raises(OSError) as caught:
        side.qp.modify(QPAttr(qp_state=S.RTS, cur_qp_state=S.SQD))
    assert caught.value.errno == errno.EINVAL
    side.qp.modify(QPAttr(qp_state=S.RTS, cur_qp_state=S.RTS))


@KINDS
def test_a_modify_without_a_state_stays(net: Net, kind):
    """The row of the state itself holds."""
    side = at(net, kind, S.INIT)
    attr = QPAttr(qkey=0x99) if kind == QPType.UD else QPAttr(qp_access_flags=AccessFlags.REMOTE_READ)
    side.qp.modify(attr)
    found = side.qp.query()[0]
    assert found.qp_state == S.INIT
    if kind == QPType.UD:
        assert found.qkey == 0x99
    else:
        assert found.qp_access_flags & AccessFlags.REMOTE_READ


@pytest.mark.parametrize(
    ("name", "value"),
    [("port_num", 7), ("pkey_index", 60000)],
    ids=["port", "pkey"],
)
def test_values_out_of_range(net: Net, name, value):
    if name == "pkey_index":
        differs(net.context, "rxe", "does not look at it")
    net.by_hand()
    side = net.side()
    attrs = {"port_num": 1, "pkey_index": 0, "qp_access_flags": AccessFlags(0)} | {name: value}
    with pytest.raises(OSError) as caught:
        side.qp.modify(QPAttr(qp_state=S.INIT, **attrs))
    assert caught.value.errno == errno.EINVAL
    assert side.qp.query()[0].qp_state == S.RESET


def test_depths_above_the_device(net: Net):
    """max_rd_atomic and max_dest_rd_atomic have the device's limits."""
    limits = net.context.query_device()
    side = at(net, QPType.RC, S.INIT)
    all_values = values(net, side, S.INIT)
    needs = {name: all_values[name] for name in TABLE[QPType.RC][S.INIT, S.RTR][0].split()}
    if limits.max_qp_rd_atom < 255 and driver(net.context) != "rxe":  # which looks at the other one only
        with pytest.raises(OSError) as caught:
            side.qp.modify(
                QPAttr(qp_state=S.RTR, **needs | {"max_dest_rd_atomic": limits.max_qp_rd_atom + 1})
            )
        assert caught.value.errno == errno.EINVAL
    side.qp.modify(QPAttr(qp_state=S.RTR, **needs))
    needs = {name: all_values[name] for name in TABLE[QPType.RC][S.RTR, S.RTS][0].split()}
    if limits.max_qp_init_rd_atom < 255:
        with pytest.raises(OSError) as caught:
            side.qp.modify(
                QPAttr(qp_state=S.RTS, **needs | {"max_rd_atomic": limits.max_qp_init_rd_atom + 1})
            )
        assert caught.value.errno == errno.EINVAL
    assert side.qp.query()[0].qp_state == S.RTR


@pytest.mark.parametrize("kind", [QPType.UC, QPType.UD], ids=lambda kind: kind.name)
def test_back_from_a_send_error(net: Net, kind):
    """SQE: a faulty request of an unreliable queue pair stops sending only, until RTS; RC has no such state."""
    differs(net.context, "rxe", "puts every queue pair with a faulty request into ERR")
    side = at(net, kind, S.RTS)
    mr = net.mr()
    options = {}
    if kind == QPType.UD:
        options = {"ah": net.ah(), "remote_qpn": side.qp.qp_num, "remote_qkey": 0x1234}
    side.receive(mr.sge(0, 64), wr_id="receive")
    bad = SGE(mr, 0, 8, lkey=0xDEAD00)
    side.qp.post_send(
        [
            SendWR(WROpcode.SEND, bad, wr_id="bad", **options),
            SendWR(WROpcode.SEND, mr.sge(0, 8), wr_id="behind", flags=0, **options),
        ]
    )
    found = side.poll(2)
    assert [(wc.wr_id, wc.status) for wc in found] == [
        ("bad", WCStatus.LOC_PROT_ERR),
        ("behind", WCStatus.WR_FLUSH_ERR),
    ]
    assert side.qp.query()[0].qp_state == S.SQE
    assert side.quiet(), "receives live on"
    assert side.qp.in_flight == (0, 1)
    for to in (S.INIT, S.RTR, S.SQD):
        with pytest.raises(OSError):
            step(net, side, to, "")
    side.qp.modify(QPAttr(qp_state=S.RTS))
    assert side.qp.query()[0].qp_state == S.RTS


def test_the_mask_follows_from_what_is_given():
    attr = QPAttr(qp_state=S.INIT, port_num=1, pkey_index=0)
    assert attr.mask == QPAttrMask.STATE | QPAttrMask.PORT | QPAttrMask.PKEY_INDEX
