"""What all servers and clients of this process have counted, together: for `rdmanet.metrics()`.

A monitoring system's counters must not go back while the process lives. So what a server or a client has counted is
kept when it is gone, and added to the sums of the past later: when somebody asks, or when many are gone. A client may
be gone before its calls have ended: until then its counters still count. The label of a call is its method's; there is
none for a connection, and calls of objects that are lent are not in here.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from rdmanet.base import watching
from rdmanet.rpc.schema import Schema
from rdmanet.rpc.stats import Counter, counted

_FEW = 64
_NUMBERS = ("begun", "running", "seconds", "sent_bytes", "received_bytes", "lent_bytes")
_OF_NOW = "running"

Parts = list[tuple[Schema, list[Counter]]]
"""The methods of services, and their counters."""
Sums = dict[tuple[str, str, str], watching.CallSums]
"""By side, service and method."""


class _Kept(NamedTuple):
    """What a server or a client counts.

    :ivar owner: the server or client
    :ivar loop: on which its calls run
    """

    owner: weakref.ref[Any]
    loop: weakref.ref[Any]
    side: str
    parts: Parts

    @property
    def counts(self) -> bool:
        """Whether it may still count: it is there, or calls of it run, and their loop may go on."""
        if self.owner() is not None:
            return True
        loop = self.loop()
        if loop is None or loop.is_closed():
            return False
        return any(counter.running for _, counters in self.parts for counter in counters)


_kept: list[_Kept] = []
_past: Sums = {}
_lock = threading.RLock()
_many = _FEW


def keep(owner: Any, side: str, parts: Iterable[tuple[Schema, list[Counter]]]) -> None:
    """Count what this server or client counts, also when it is gone.

    :param owner: has a `loop`
    :param side: "server" or "client"
    """
    with _lock:
        _kept.append(_Kept(weakref.ref(owner), weakref.ref(owner.loop), side, list(parts)))
        if len(_kept) > _many:
            _let_go()
    watching.call_sums = sums


def sums() -> Sums:
    """What was counted until now."""
    with _lock:
        _let_go()
        found = {key: watching.CallSums(dict(each.numbers), dict(each.ended)) for key, each in _past.items()}
        for each in _kept:
            _add(found, each.side, each.parts)
    return found


def _let_go() -> None:
    """Add those that count no more to the past; and again when there are twice as many as are left."""
    global _many
    counting = []
    for each in _kept:
        if each.counts:
            counting.append(each)
        else:
            _add(_past, each.side, each.parts, is_past=True)
    _kept[:] = counting
    _many = max(_FEW, 2 * len(_kept))


def _add(to: Sums, side: str, parts: Parts, is_past: bool = False) -> None:
    for schema, counters in parts:
        for method, stats in counted(schema, counters).items():
            if not stats.begun:
                continue
            into = to.setdefault((side, schema.name, method), watching.CallSums({}, {}))
            for name in _NUMBERS:
                number: Any = 0 if is_past and name == _OF_NOW else getattr(stats, name)
                into.numbers[name] = into.numbers.get(name, 0) + number
            for code, count in stats.ended.items():
                into.ended[code] = into.ended.get(code, 0) + count


def _forked() -> None:
    """A forked child begins at 0."""
    global _lock, _many
    _lock = threading.RLock()
    _many = _FEW
    _past.clear()
    _kept.clear()


os.register_at_fork(after_in_child=_forked)
