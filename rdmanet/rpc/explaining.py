"""Which calls are under way, and what each of them does or waits for: of a server, a connection, and a pool of them.

It is made when somebody asks: `rdmanet ss`, ``Server.explain()`` and ``rpc.explain(client)``. Of a method in the loop
its task knows the line at which it waits, and of one in a thread, Python does. At most `_LOOKED_AT` calls are looked
at, so that this takes a moment, however many there are.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Iterable
from heapq import nsmallest
from itertools import islice
from types import FrameType
from typing import Any

from rdmanet.base.accounts import place_text, time_text
from rdmanet.base.call_accounts import CALLS_MOST, CallsInfo, CallUnderWay

_LOOKED_AT = 2000
_SERVERS_MOST = 16
_FRAMES_MOST = 200
_KINDS = ("cr", "gi", "ag")
"""How the attributes of coroutines, generators and asynchronous generators begin."""
_LIBRARIES = ("rdmanet.", "asyncio.", "concurrent.", "threading", "uvloop.")


def of_server(server: Any) -> CallsInfo:
    """The calls that a server executes."""
    places = ", ".join(_place(sock.getsockname()) for sock in server.sockets or ()) or "no address"
    services = ", ".join(sorted({served.schema.name for served in server.services.values()}))
    calls = _executed(server.running, server.loop.time())
    notes = [f"{len(server.callees)} clients"]
    waiting = sum(_waits_for_thread(running) for running in islice(server.running, _LOOKED_AT))
    if waiting:
        notes.append(f"{waiting} calls wait for a thread of the executor")
    if server.refusal is not None:
        notes.append(f"it takes no new calls: {server.refusal}")
    return CallsInfo(id(server), "server", services, places, len(server.running), calls, notes)


def of_client(caller: Any) -> CallsInfo | None:
    """The calls of a client, or of an object that is borrowed; None if it is closed, or its connection is over."""
    caller = getattr(caller, "inner", caller)  # behind interceptors
    caller = getattr(caller, "_channel", caller)
    return _of_pool(caller) if hasattr(caller, "_slots") else _of_channel(caller)


def _of_channel(channel: Any) -> CallsInfo | None:
    if channel.link.is_over:
        return None
    calls, notes = _made([channel]), _notes(channel)
    lent = _lent(channel)
    calls = _longest(calls + _executed(lent, channel.loop.time(), "callback "))
    under_way = len(channel.book) + len(lent)
    return CallsInfo(
        id(channel), "client", channel.schema.name, _place(channel.peer), under_way, calls, notes
    )


def _of_pool(pool: Any) -> CallsInfo | None:
    if pool._is_closed:
        return None
    now, slots = pool.loop.time(), pool._slots
    channels = pool.channels
    lent = [running for channel in channels for running in _lent(channel)]
    calls = _longest(_made(channels) + _executed(lent, now, "callback "))
    notes = [note for channel in channels for note in _notes(channel)]
    usable = [slot for slot in slots if slot.usable]
    ejected = [slot for slot in usable if slot.ejected_for(now)]
    if ejected and 2 * len(ejected) > len(usable):
        notes.append(
            f"{len(ejected)} of {len(usable)} servers fail, and get calls all the same: more than half"
        )
        ejected = []
    for slot in ejected:
        when = _in(slot.ejected_for(now))
        notes.append(
            f"{_place(slot.address)} is ejected: {slot.row} calls in a row have failed there; it gets calls again"
            f" {when}"
        )
    for slot in slots:
        if slot.usable is None and slot.failures:
            where, when = ", ".join(map(_place, slot.addresses)), _in(slot.not_before - now)
            notes.append(f"no connection to {where}: {slot.failures} tries; the next {when}")
    if pool._waiting:
        why = f": {pool._error.text}" if pool._error is not None else ""
        notes.append(f"{pool._waiting} calls wait for a connection{why}")
    addresses = [_place(address) for slot in slots for address in slot.addresses]
    where = ", ".join(addresses[:_SERVERS_MOST]) or "no address"
    under_way = sum(len(channel.book) for channel in channels) + len(lent)
    notes = notes[:_SERVERS_MOST]
    return CallsInfo(id(pool), "client", pool.schema.name, where, under_way, calls, notes)


def _executed(runnings: Iterable[Any], now: float, what: str = "") -> list[CallUnderWay]:
    """The calls that this side executes and that have taken longest."""
    longest = nsmallest(CALLS_MOST, islice(runnings, _LOOKED_AT), key=lambda running: running.begun_at)
    return [
        CallUnderWay(f"{what}{running.method.label}", _since(running.begun_at, now), _doing(running))
        for running in longest
    ]


def _made(channels: list[Any]) -> list[CallUnderWay]:
    """The calls that this side has made and that have taken longest."""
    pending = [
        (each, channel)
        for channel in channels
        for _, each, *_ in islice(channel.book._calls.values(), _LOOKED_AT)
        if each is not None
    ]
    longest = nsmallest(CALLS_MOST, pending, key=lambda pair: pair[0].begun_at)
    return [
        CallUnderWay(
            each.method.label, _since(each.begun_at, channel.loop.time()), f"sent to {_place(channel.peer)}"
        )
        for each, channel in longest
    ]


def _longest(calls: list[CallUnderWay]) -> list[CallUnderWay]:
    return sorted(calls, key=lambda call: -call.us)[:CALLS_MOST]


def _notes(channel: Any) -> list[str]:
    notes, book, where = [], channel.book, _place(channel.peer)
    if len(book) >= book.calls_max:
        notes.append(f"{len(book)} calls of {where} have not ended, and no more may be made (Limits.calls)")
    if channel.link.turns.busy:
        notes.append(f"calls of {where} wait to be sent: the transport takes no more")
    if channel.refusal is not None:
        notes.append(f"{where}: {channel.refusal}")
    return notes


def _lent(channel: Any) -> list[Any]:
    """Calls of objects that a client has lent."""
    lender = getattr(channel, "_lender", None)
    return [] if lender is None else list(lender.running)


def _doing(running: Any) -> str:
    """What a call does that this side executes."""
    if running.released is not None:
        return "its result is on loan, and the caller has not let go of it"
    if running.taking:
        return "its arguments are read from the caller's memory"
    if running.call.is_over and running.threads:
        return "its caller has its answer, and a thread goes on"
    if _waits_for_thread(running):
        return "waits for a thread of the executor"
    if (work := running.call._work) is not None:
        return f"in a thread{_at(_frame_of_thread(work.thread))}"
    frame = _frame_of_task(running.task)
    how = "is cancelled, and waits" if running.is_cancelled else "waits"
    if frame is None and running.sent is not None:
        return "its stream waits: the caller takes no more items"
    return f"{how}{_at(frame)}"


def _waits_for_thread(running: Any) -> bool:
    work = running.call._work
    return work is not None and work.thread is None


def _frame_of_task(task: Any) -> FrameType | None:
    """The innermost frame of the program's own in which a task waits."""
    at, found = None if task is None else task.get_coro(), None
    for _ in range(_FRAMES_MOST):
        kind = next((kind for kind in _KINDS if hasattr(at, f"{kind}_frame")), None)
        if kind is None:  # what is awaited in the name of a coroutine, and does not tell of which
            within = gc.get_referents(at) if at is not None else []
            at = next(
                (each for each in within if any(hasattr(each, f"{kind}_frame") for kind in _KINDS)), None
            )
            if at is None:
                break
            continue
        frame = getattr(at, f"{kind}_frame")
        if frame is not None and not _is_librarys(frame):
            found = frame
        at = getattr(at, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
    return found


def _is_librarys(frame: FrameType) -> bool:
    """Whether it is of rdmanet, or of the loop. Compiled code has no names in its frames, and no lines."""
    name = frame.f_globals.get("__name__")
    return not isinstance(name, str) or name.startswith(_LIBRARIES)


def _frame_of_thread(thread: int) -> FrameType | None:
    """The innermost frame of the program's own in which a thread is."""
    frame = sys._current_frames().get(thread)
    while frame is not None and _is_librarys(frame):
        frame = frame.f_back
    return frame


def _at(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    code = frame.f_code
    return f" at {os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_qualname})"


def _since(begun_at: float, now: float) -> int:
    return max(0, int(1e6 * (now - begun_at)))


def _in(seconds: float) -> str:
    """When that is: a program may have said that it is never (`Retry`)."""
    microseconds = 1e6 * max(0.0, seconds)
    return "never" if microseconds == math.inf else f"in {time_text(int(microseconds))}"


def _place(address: Any) -> str:
    """An address, or what a program has given in its place."""
    if isinstance(address, tuple) and len(address) >= 2:
        return str(address[0]) if address[1] is None else place_text((address[0], address[1]))
    return str(address) if address else "an address that is not known"
