"""RDMANET_TRACE: what the connections of this process have done, as a file that https://ui.perfetto.dev opens.

Events are entered in a ring in memory (_pyx/tracing.pxi), of which the last `EVENTS` are kept. Nothing is written while
the program runs: the ring becomes a file when the process ends, also by an exception, and whenever it gets SIGUSR2,
unless the program has a handler of its own for that, or no loop with connections in its main thread. That is done at
once, in that thread, and takes the time that a few hundred thousand lines of JSON take.

The file has the form that Chrome's tracing has defined: a list of events with a phase, a name and a time in
microseconds. Each connection is a track of its process, and so is each engine. A frame is a slice of no length at its
sender and at its receiver, with an arrow between them. The two know of each other by the receiver's end of the
connection and the number of the data frame on that connection, which both sides count; so the arrows appear as soon as
the files of both processes are in one, which `rdmanet trace` makes. An end is known by the number of its queue pair; on
iWARP, where a device does not know its peer's, by a number that both make of the two addresses. The clock is
CLOCK_MONOTONIC: one for all processes of a host, and of no use between hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

from rdmanet._core import process_id, trace_begin, trace_taken

logger = logging.getLogger("rdmanet")

VARIABLE = "RDMANET_TRACE"
EVENTS = 1 << 17
"""How many are kept: each takes 32 bytes."""
NUMBER = "%p"
"""In the name of the file: the number of the process."""

_EVENT = struct.Struct("=QIIQQ")  # trace_event
_OPENED, _ENDED, _WITHOUT, _WANTED, _ASLEEP, _PAIRED = range(1, 7)
_SENT, _RECEIVED, _COMPLETED = 16, 32, 48
_FRAMES = {
    1: "Data",
    2: "Credit",
    3: "Ping",
    4: "Pong",
    5: "Fin",
    6: "Abort",
    7: "Placed",
    14: "WRITE",
    15: "one-sided",
}
_MOMENT_US = 0.001  # so that a frame is a slice, to which an arrow can be tied: none lies half in another one
_TRACK = 1 << 40  # of an engine: no queue pair has this number

# In a connection's name:
ITS_PEER: Final = ", peer's "  # queue pair
OF_PAIR: Final = " of pair "  # on iWARP: the number of its two addresses

_traces_as = 0  # the process that does
_named_by = ""  # what the variable said then: a program may change its environment


def begin() -> None:
    """Trace, if the variable says so; call it for each event loop, in its thread."""
    global _named_by, _traces_as
    _named_by = _named_by or os.environ.get(VARIABLE, "")
    if not _named_by:
        return
    if threading.current_thread() is threading.main_thread() and (  # only there a handler can be set
        signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGUSR2, lambda number, frame: _write_or_tell())
    if _traces_as == process_id():
        return
    if not _traces_as:
        atexit.register(_write_or_tell)
    _traces_as = process_id()
    _write_at_the_end_of_a_child()
    trace_begin(EVENTS)


def _write_at_the_end_of_a_child() -> None:
    """A child that multiprocessing has forked runs nothing of atexit's: it has finalizers of its own."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _write_or_tell, exitpriority=0)


def _write_or_tell() -> None:
    if _traces_as != process_id():  # a forked child that has no connections
        return
    try:
        write(_path())
    except OSError as exc:
        logger.warning("%s: the trace cannot be written: %s", VARIABLE, exc)


def _path() -> str:
    pid = str(os.getpid())
    return _named_by.replace(NUMBER, pid) if NUMBER in _named_by else f"{_named_by}.{pid}"


def write(path: str) -> None:
    """Write what is in the ring to this file, in place of what was there before.

    :raises OSError: it cannot be written
    """
    from json import JSONEncoder

    taken, count = trace_taken()
    as_json = JSONEncoder(separators=(",", ":")).encode
    of_all = as_json({"clock": "CLOCK_MONOTONIC", "lost": count - len(taken) // _EVENT.size})
    beside = f"{path}.{os.urandom(8).hex()}"
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w", encoding="ascii") as file:
            file.write(f'{{"displayTimeUnit":"ns","otherData":{of_all},"traceEvents":[')
            # One at a time: all of them would take 100 MiB.
            for number, event in enumerate(events(taken, os.getpid())):
                file.write(f"{',' if number else ''}\n{as_json(event)}")
            file.write("]}\n")
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def events(taken: bytes, pid: int) -> Iterator[dict[str, Any]]:
    """The events of a process, as Chrome's format has them.

    :param taken: the ring, as trace_taken() returns it
    """
    yield _named("process_name", pid, 0, " ".join(map(os.path.basename, sys.orig_argv)) or "?")
    named: set[int] = set()
    ends: dict[int, tuple[str, str]] = {}  # of a connection: ours, and the peer's if we know it
    engines: dict[int, int] = {}
    since: dict[tuple[int, int], float] = {}
    ns = 0
    for ns, kind, qp, first, second in _EVENT.iter_unpack(taken):
        at = ns / 1000
        if kind != _ASLEEP and not qp:
            continue
        if kind == _ASLEEP and second not in engines:
            engines[second] = _TRACK + len(engines)
            yield _named("thread_name", pid, engines[second], f"engine {len(engines)}")
        if qp and qp not in named and not (kind == _PAIRED or (kind == _OPENED and first)):
            # It opens later, or did so before what the ring still has.
            named.add(qp)
            yield _named("thread_name", pid, qp, f"connection {qp:#x}")
        track = engines[second] if kind == _ASLEEP else qp
        if kind in (_ASLEEP, _WITHOUT):
            began = since.pop((track, kind), None)
            if first:
                since[track, kind] = at
            elif began is not None:
                yield _slice("asleep" if kind == _ASLEEP else "no credits", pid, track, began, at - began)
        elif kind == _PAIRED:
            named.add(qp)
            ends[qp] = (f"{first:#x}/{second}", f"{first:#x}/{second ^ 1}")
            yield _named("thread_name", pid, qp, f"connection {qp:#x}{OF_PAIR}{first:#x}")
        elif kind == _OPENED:
            if first:
                named.add(qp)
                ends[qp] = (f"{qp:#x}", f"{first:#x}")
                yield _named("thread_name", pid, qp, f"connection {qp:#x}{ITS_PEER}{first:#x}")
            yield _instant("opened", pid, qp, at)
        elif kind == _ENDED:
            if (began := since.pop((qp, _WITHOUT), None)) is not None:
                yield _slice("no credits", pid, qp, began, at - began)
            yield _instant("ended", pid, qp, at)
        elif kind == _WANTED:
            yield _instant("wanted", pid, qp, at, bytes=first)
        elif kind >= _COMPLETED:
            yield _instant(f"completed {_FRAMES.get(kind - _COMPLETED, '?')}", pid, qp, at, bytes=first)
        elif kind >= _SENT:
            yield from _frame(kind, pid, qp, ends.get(qp, (f"{qp:#x}", "")), at, first, second)
    for (track, kind), began in since.items():
        yield _slice("asleep" if kind == _ASLEEP else "no credits", pid, track, began, ns / 1000 - began)


def _frame(
    kind: int, pid: int, qp: int, ends: tuple[str, str], at: float, number: int, second: int
) -> Iterator[dict[str, Any]]:
    """A frame that goes or comes, and its end of the arrow."""
    is_sent = kind < _RECEIVED
    name = _FRAMES.get(kind & (_SENT - 1), "?")
    known = {"bytes": second & 0xFFFFFFFF, "credits": second >> 32}
    if number:
        known["frame"] = number
    yield _slice(f"{'sent' if is_sent else 'received'} {name}", pid, qp, at, _MOMENT_US, **known)
    to = ends[is_sent]
    if number and to:
        arrow = {"ph": "s"} if is_sent else {"ph": "f", "bp": "e"}
        same = {"name": "frame", "cat": "frame", "id": f"{to}.{number}"}
        yield {**arrow, **same, "pid": pid, "tid": qp, "ts": round(at, 3)}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(name: str, pid: int, tid: int, at: float, us: float, **known: int) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": pid, "tid": tid, "ts": round(at, 3), "dur": round(us, 3), "args": known
    }  # fmt: skip


def _instant(name: str, pid: int, tid: int, at: float, **known: int) -> dict[str, Any]:
    return {"ph": "i", "s": "t", "name": name, "pid": pid, "tid": tid, "ts": round(at, 3), "args": known}
