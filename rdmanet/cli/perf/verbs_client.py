"""The client's side of a measurement of verbs.

The loop in C runs in slices of a tenth of a second. Between slices this looks at the clock, takes a sample, shows
progress, and hears Ctrl-C. Before the measurement comes the warm-up, which is drained: so the time is from the first
request to the last completion, and no message counts that was sent before.
"""

import contextlib
import time
from typing import Any

from rdmanet._core import Histogram
from rdmanet.cli.perf.conditions import Usage
from rdmanet.cli.perf.control import Control, Done, Go, PerfError, Run, Stop, Verbs
from rdmanet.cli.perf.pairs import Place, Side
from rdmanet.cli.perf.progress import Progress
from rdmanet.cli.perf.results import Result, Sample, latency_of, note_conditions
from rdmanet.errors import CompletionError

SLICE_S = 0.1
SILENT_S = 10.0
"""So long without one message, and the peer, or the message, is lost."""
BY = {"write": 0, "send": 1, "read": 2, "atomic": 2}
"""What a latency test waits for: rdmanet/_pyx/traffic.pxi has the numbers."""


def measure(control: Control, place: Place, run: Run, progress: Progress) -> Result:
    """Run one test with one size.

    :raises PerfError: it cannot be, or the other side has failed
    """
    with contextlib.ExitStack() as stack:
        side = Side(stack, place, run)
        control.send(run)
        theirs = control.receive(Verbs)
        control.send(side.told())
        side.connect(theirs)
        traffic = side.traffic(sends=True)
        control.receive(Go)
        control.send(Go())
        measurement = _Latency(traffic, run) if side.kind.latency else _Bandwidth(traffic, run)
        usage = Usage()
        try:
            try:
                measurement.warm_up()
                usage = Usage()
                measurement.go(progress)
            except KeyboardInterrupt:
                measurement.interrupted = True
            spent = usage.since()
            measurement.drain()
        except (CompletionError, PerfError):
            control.raise_failure()
            raise
        finally:
            control.send(Stop())
        done = _other_side(control, traffic)
        result = measurement.result(done, spent.cpu_s)
        result.device = f"{side.context.name}, {theirs.device}"
        note_conditions(result, spent, done)
        return result


def _other_side(control: Control, traffic: Any) -> Done:
    """What it says at the end. It may have sends in flight until then, which need our receives."""
    until = time.monotonic() + SILENT_S
    while not control.heard() and time.monotonic() < until:
        traffic.flow(SLICE_S / 10, posting=False)
    return control.receive(Done)


class _Measurement:
    """What both kinds have.

    :ivar counted: messages that have completed
    """

    def __init__(self, traffic: Any, run: Run) -> None:
        self.traffic, self.run, self.settings = traffic, run, run.settings
        self.counted, self.seconds = 0, 0.0
        self.samples: list[Sample] = []
        self.interrupted = False

    def step(self, seconds: float) -> bool:
        """Run for so long. True if it is over."""
        raise NotImplementedError

    def take(self) -> tuple[int, float | None, float | None]:
        """How many messages in all, and p50 and p99 in microseconds since the last call."""
        raise NotImplementedError

    def warm_up(self) -> None:
        raise NotImplementedError

    def drain(self) -> None:
        raise NotImplementedError

    def go(self, progress: Progress) -> None:
        began = last = heard = time.perf_counter()
        wanted = self.settings.seconds if not self.settings.iterations else float("inf")
        over = False
        try:
            while not over and last - began < wanted:
                over = self.step(min(SLICE_S, wanted - (last - began)))
                now = time.perf_counter()
                count, p50, p99 = self.take()
                if count > self.counted:
                    heard = now
                elif now - heard > SILENT_S:
                    raise PerfError(self.why_silent())
                self.samples.append(Sample(now - began, count - self.counted, now - last, p50, p99))
                self.counted, last, self.seconds = count, now, now - began
                progress.update(self.seconds, count, count * self.run.size / self.seconds)
        except KeyboardInterrupt:
            self.interrupted = True
            self.counted, _, _ = self.take()
            self.seconds = time.perf_counter() - began

    def why_silent(self) -> str:
        return (
            f"{self.run.kind}: nothing has completed for {SILENT_S:.0f} s: a message was lost, which"
            f" {self.settings.connection} does not send again; -c RC does"
            if self.settings.connection != "RC"
            else f"{self.run.kind}: nothing has completed for {SILENT_S:.0f} s: the peer does not answer"
        )

    def result(self, done: Done, cpu_s: float) -> Result:
        raise NotImplementedError

    def _result(self, messages: int, rate: float, done: Done, cpu_s: float) -> Result:
        """With the CPU time of the server as a part of the time, since its clock runs a little longer."""
        size, seconds = self.run.size, max(self.seconds, 1e-9)
        each, share = max(messages, 1), done.cpu_s / max(done.seconds, 1e-9)
        gb = max(messages * size / 1e9, 1e-12)
        whole = [sample for sample in self.samples if sample.seconds > SLICE_S / 2]
        rates = [sample.messages * size / sample.seconds / 1e9 for sample in whole]
        return Result(
            test=self.run.kind,
            size=size,
            messages=messages,
            seconds=self.seconds,
            messages_per_s=rate,
            gb_per_s=rate * size / 1e9,
            min_gb_per_s=min(rates, default=None),
            peak_gb_per_s=max(rates, default=None),
            client_cpu_us=cpu_s / each * 1e6,
            server_cpu_us=share * seconds / each * 1e6,
            client_cpu_s_per_gb=cpu_s / gb,
            server_cpu_s_per_gb=share * seconds / gb,
            samples=self.samples,
            interrupted=self.interrupted,
            settings=self.settings,
        )


class _Bandwidth(_Measurement):
    """As many messages as fit.

    :ivar before: how many were sent to warm up
    """

    before = 0

    def step(self, seconds: float) -> bool:
        return bool(self.traffic.flow(seconds, self.settings.iterations, rate=self.settings.rate))

    def take(self) -> tuple[int, float | None, float | None]:
        return self.traffic.sent, None, None

    def warm_up(self) -> None:
        until = time.perf_counter() + self.settings.warm_up_s
        while (left := until - time.perf_counter()) > 0:
            self.traffic.flow(min(left, SLICE_S))
        self._complete()
        self.before = self.traffic.sent
        self.traffic.restart()

    def drain(self) -> None:
        """What is in flight counts, with its time."""
        began, before = time.perf_counter(), self.traffic.sent
        self._complete()
        if self.traffic.sent > before and not self.interrupted:
            self.seconds += time.perf_counter() - began
            self.counted = self.traffic.sent

    def _complete(self) -> None:
        until = time.perf_counter() + SILENT_S
        while not self.traffic.flow(SLICE_S, posting=False):
            if time.perf_counter() > until:
                raise PerfError(f"{self.why_silent()}; {self.traffic.in_flight} requests are in flight")

    def result(self, done: Done, cpu_s: float) -> Result:
        rate, messages = self.counted / max(self.seconds, 1e-9), self.counted
        if self.settings.both_ways:
            theirs = done.sent / max(done.seconds, 1e-9)
            rate, messages = rate + theirs, messages + int(theirs * self.seconds)
        result = self._result(messages, rate, done, cpu_s)
        if self.settings.both_ways:  # the samples are of one direction
            result.min_gb_per_s = result.peak_gb_per_s = None
        if self.settings.connection != "RC" and self.run.kind == "send_bw" and not self.settings.both_ways:
            result.lost = max(0, self.before + self.traffic.sent - done.messages)
        return result


class _Latency(_Measurement):
    """One message at a time."""

    def __init__(self, traffic: Any, run: Run) -> None:
        super().__init__(traffic, run)
        self.found, self.recent = Histogram(), Histogram()
        self.by = BY[run.kind.removesuffix("_lat")]

    def step(self, seconds: float) -> bool:
        left = self.settings.iterations and max(1, self.settings.iterations - self.found.count)
        self.recent.clear()
        rate = self.settings.rate
        self.traffic.exchange(seconds, self.recent, left, by=self.by, answers=False, rate=rate)
        return bool(left and self.recent.count >= left)

    def take(self) -> tuple[int, float | None, float | None]:
        self.found.merge(self.recent)
        p50, p99 = (self.recent.percentile(percent) / 1e3 for percent in (50, 99))
        empty = not self.recent.count
        self.recent.clear()
        return self.found.count, None if empty else p50, None if empty else p99

    def warm_up(self) -> None:
        until = time.perf_counter() + max(self.settings.warm_up_s, 1e-3)
        while (left := until - time.perf_counter()) > 0:
            self.traffic.exchange(min(left, SLICE_S), self.recent, by=self.by, answers=False)
        self.recent.clear()

    def drain(self) -> None:
        """The answer to the last message may be on its way: it stays."""

    def result(self, done: Done, cpu_s: float) -> Result:
        result = self._result(self.counted, self.counted / max(self.seconds, 1e-9), done, cpu_s)
        result.latency = latency_of(self.found)
        result.min_gb_per_s = result.peak_gb_per_s = None
        return result
