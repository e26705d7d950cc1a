"""How a connection is built: its sizes, its times, what they are by default, and which options there are not."""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any

from rdmanet import credit
from rdmanet._core import STREAM_DATA_SLOTS_MAX, STREAM_FIRST_SLOT_BYTES, STREAM_SHARED_SLOTS_MAX
from rdmanet.errors import shown

SLOT_BYTES = 65536
FIRST_SLOT_BYTES = STREAM_FIRST_SLOT_BYTES
DATA_SLOTS = 16
SHARED_SLOTS = 256
UNREAD_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_MOST_S = 32767  # as with TCP
KEEPALIVE_COUNT_MOST = 127
CLOSE_TIMEOUT_S = 30.0
REVOKE_TIMEOUT_S = 10.0
KEEPALIVE = (60.0, 10.0, 6)
"""Idle, interval, count. TCP's two hours would serve nobody in a data centre: idle peers are to be noticed before those
who wait for them ask. A minute is short beside the time-outs of load balancers and people, and a probe a minute costs
10,000 connections nothing that shows. Another minute bridges a switch that restarts."""

Keepalive = tuple[float, float, int]


def keepalive_of(value: object) -> Keepalive | None:
    """The keyword ``keepalive``, checked; None means off.

    :raises TypeError: it is neither (idle, interval, count) nor a truth value
    :raises ValueError: a time is not positive and finite, or the count is not positive
    """
    if value is None or value is False:
        return None
    if value is True:
        return KEEPALIVE
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise TypeError(
            f"keepalive={shown(value)} is neither (idle, interval, count) nor None, True or False"
        )
    idle, interval, count = float(value[0]), float(value[1]), operator.index(value[2])
    if not (
        0 < idle <= KEEPALIVE_MOST_S
        and 0 < interval <= KEEPALIVE_MOST_S
        and 0 < count <= KEEPALIVE_COUNT_MOST
    ):
        raise ValueError(
            f"keepalive={shown(value)}: idle and interval are seconds, more than 0 and at most {KEEPALIVE_MOST_S}; "
            f"count is between 1 and {KEEPALIVE_COUNT_MOST}"
        )
    return idle, interval, count


def _check_seconds(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        raise TypeError(f"{name}={shown(value)} is neither a number of seconds nor None")
    if not float(value) >= 0:  # NaN is not, either
        raise ValueError(
            f"{name}={shown(value)} is negative or no number: it is in seconds, 0 or more; None is no limit"
        )


class StreamConfig:
    """The options of one connection, or of all that a server accepts; times in seconds, sizes in bytes.

    Connections with the same options share one, so nobody changes it. It is no dataclass: to make one takes longer than
    a connection.

    :ivar lost_peer: what a reader gets when the peer is lost and no byte of ours with it: "error", or "eof" as TCP's do
    :ivar reference_writes: whether a large memoryview of memory that can change is sent from where it lies
    :ivar unread_bytes: how much a connection takes in at least, though the program does not read, whatever its ring
    :ivar keepalive: when to look whether an idle peer's host is there (`keepalive_of`); None: never
    :ivar goes_elsewhere: whether a server may send this client to another of its processes, at another port of the same
        address
    :ivar waits_to_hear: whether an accepted connection gets its protocol with the client's first frame, and a client
        lets its program write that (beginning.py)
    :ivar beside_tcp: whether a TCP program that knows nothing of RDMA may listen at the peer's port. Then no iWARP
        adapter is used: its connections are TCP's, so that program would get what we say
    :ivar by_name_alone: whether the embedded device may reach a peer of this host only by its listener's name, so that
        the program which has the TCP port of that number gets no byte
    :ivar ends_when_read: whether the transport says that it is closing, when the peer has ended the connection, only
        after what had come was delivered
    :ivar reason: what get_extra_info("fabric_reason") says
    :raises TypeError: a size is no whole number, or a time no number
    :raises ValueError: a size is out of range, or a time is negative
    """

    def __init__(
        self,
        slot_bytes: int = SLOT_BYTES,
        data_slots: int = DATA_SLOTS,
        first_slot_bytes: int = FIRST_SLOT_BYTES,
        connect_timeout: float | None = CONNECT_TIMEOUT_S,
        close_timeout: float | None = CLOSE_TIMEOUT_S,
        busy_poll: float | None = None,
        *,
        shared_receive: bool = False,
        shared_slots: int = SHARED_SLOTS,
        lost_peer: str = "error",
        reference_writes: bool = True,
        unread_bytes: int = UNREAD_BYTES,
        keepalive: Keepalive | None = KEEPALIVE,
        goes_elsewhere: bool = True,
        waits_to_hear: bool = False,
        beside_tcp: bool = False,
        by_name_alone: bool = False,
        ends_when_read: bool = False,
        reason: str = "the program asked for RDMA",
    ) -> None:
        for name, value, least, most in (
            ("shared_slots", shared_slots, 0, STREAM_SHARED_SLOTS_MAX),
            ("slot_bytes", slot_bytes, credit.SLOT_BYTES_MIN, credit.SLOT_BYTES_MAX),
            ("first_slot_bytes", first_slot_bytes, credit.SLOT_BYTES_MIN, credit.SLOT_BYTES_MAX),
            ("data_slots", data_slots, 1, STREAM_DATA_SLOTS_MAX),
        ):
            if not hasattr(value, "__index__"):
                unit = "bytes" if name.endswith("bytes") else "slots"
                raise TypeError(
                    f"{name}={shown(value)} is not a whole number of {unit}, of {least} to {most}"
                )
            if not least <= operator.index(value) <= most:
                raise ValueError(f"{name}={shown(value)} is not between {least} and {most}")
        for name, seconds in (
            ("connect_timeout", connect_timeout),
            ("close_timeout", close_timeout),
            ("busy_poll", busy_poll),
        ):
            _check_seconds(name, seconds)
        if lost_peer not in ("error", "eof"):
            raise ValueError(f"lost_peer={shown(lost_peer)} is neither 'error' nor 'eof'")
        self.slot_bytes, self.data_slots, self.first_slot_bytes = slot_bytes, data_slots, first_slot_bytes
        self.connect_timeout, self.close_timeout, self.busy_poll = connect_timeout, close_timeout, busy_poll
        self.shared_receive, self.shared_slots = shared_receive, shared_slots
        self.lost_peer, self.reference_writes, self.unread_bytes = lost_peer, reference_writes, unread_bytes
        self.keepalive = keepalive_of(keepalive)
        self.goes_elsewhere, self.waits_to_hear = goes_elsewhere, waits_to_hear
        self.beside_tcp, self.by_name_alone, self.reason = beside_tcp, by_name_alone, reason
        self.ends_when_read = ends_when_read

    def replaced(self, **changes: Any) -> StreamConfig:
        """One that is the same but for these options."""
        return StreamConfig(**(vars(self) | changes))


_kept = lru_cache(maxsize=16, typed=True)(StreamConfig)
_last: tuple[tuple[Any, ...], StreamConfig] = ((), StreamConfig())


def config_of(
    slot_bytes: int,
    data_slots: int,
    first_slot_bytes: int,
    connect_timeout: float | None,
    close_timeout: float | None,
    busy_poll: float | None,
    keepalive: Any,
) -> StreamConfig:
    """The same as the constructor; the options of one connection are mostly the very objects of the one before."""
    global _last
    given = slot_bytes, data_slots, first_slot_bytes, connect_timeout, close_timeout, busy_poll, keepalive
    before, config = _last
    if len(before) == len(given) and all(map(operator.is_, given, before)):
        return config
    options = {
        "connect_timeout": connect_timeout,
        "close_timeout": close_timeout,
        "busy_poll": busy_poll,
        "keepalive": keepalive,
    }
    try:
        config = _kept(slot_bytes, data_slots, first_slot_bytes, **options)
    except TypeError:  # a wrong option, or one that has no hash, such as a list, which may change
        return StreamConfig(slot_bytes, data_slots, first_slot_bytes, **options)
    _last = given, config
    return config


_UNBUILT = {"sock", "happy_eyeballs_delay", "interleave", "reuse_port"}
"""The keywords of asyncio's functions that are not implemented yet."""


def refuse_unbuilt(call: str, given: dict[str, Any]) -> None:
    """Raise an error for keywords that are not implemented yet.

    :param call: what the program has called
    """
    named = [name for name, value in given.items() if name in _UNBUILT and value not in (None, False)]
    if named:
        raise NotImplementedError(
            f"{call}() does not support {', '.join(named)} yet: leave it out, or call asyncio's own function on the"
            " loop of rdmanet.run(), which takes TCP where RDMA cannot do this"
        )


def refuse_unknown(call: str, given: dict[str, Any]) -> None:
    """Raise an error for keywords that no version of asyncio's functions has."""
    for name in given:
        if name not in _UNBUILT:
            raise TypeError(f"{call}() got an unexpected keyword argument {shown(name)}")
