"""The server's side of a measurement of verbs.

It runs the same loop in C, in slices, and looks after each whether the client has said Stop. To what costs the server
nothing (WRITE, READ and atomics for bandwidth, READ and atomics for latency) it only waits for that, asleep.
"""

import contextlib
import time
from typing import Any

from rdmanet._core import Histogram
from rdmanet.cli.perf.conditions import Usage
from rdmanet.cli.perf.control import Control, Done, Go, PerfError, Run, Stop, Verbs
from rdmanet.cli.perf.pairs import Place, Side
from rdmanet.cli.perf.verbs_client import BY, SILENT_S, SLICE_S


def serve(control: Control, place: Place, run: Run) -> None:
    """Answer one Run.

    :raises PerfError: it cannot be done
    """
    with contextlib.ExitStack() as stack:
        side = Side(stack, place, run)
        control.send(side.told())
        side.connect(control.receive(Verbs))
        answers = side.kind.latency and side.kind.over in ("send", "write")
        both = run.settings.both_ways
        traffic = side.traffic(sends=answers or both)
        control.send(Go())
        control.receive(Go)
        began, usage = time.perf_counter(), Usage()
        if answers:
            _answer(control, traffic, BY[side.kind.over])
        elif side.kind.over == "send" or both:
            while not control.heard():
                traffic.flow(SLICE_S, posting=both, rate=run.settings.rate)
        control.receive(Stop, None)
        spent, seconds = usage.since(), time.perf_counter() - began
        done = Done(seconds, spent.cpu_s, traffic.received, traffic.sent, spent.preempted, spent.slept)
        if both:
            _complete(traffic)
        elif side.kind.over == "send":
            traffic.flow(SLICE_S / 100, posting=False)
            done.messages = traffic.received
        control.send(done)
        if both:  # the client receives until it has this, and may still have ours in flight
            traffic.flow(SLICE_S / 100, posting=False)


def _answer(control: Control, traffic: Any, by: int) -> None:
    nothing = Histogram()
    while not control.heard():
        traffic.exchange(SLICE_S, nothing, by=by, answers=True)


def _complete(traffic: Any) -> None:
    until = time.perf_counter() + SILENT_S
    while not traffic.flow(SLICE_S, posting=False):
        if time.perf_counter() > until:
            raise PerfError(f"{traffic.in_flight} requests of the server do not complete")
