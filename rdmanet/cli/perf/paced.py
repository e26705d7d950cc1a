"""Clients of latency that keep to a rate: a message is sent when it is due, or when the one before it was answered.

Its time counts from when it was due, if the answer before it came after that: then a stall counts for all messages that
it delays. An event loop's timer is late, too, by up to a millisecond. That is no fault of the peer's, so the message
and all after it are due so much later.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from rdmanet.base.pause import pause
from rdmanet.cli.workloads import BufferedPinger, Pinger, Report, StreamPinger, finish_streams


class Schedule:
    """When messages are due, and how long each has taken.

    :param note: gets each time, in seconds. It returns whether that was the last one
    """

    def __init__(self, rate: float, note: Callable[[float], bool]) -> None:
        self.interval_s, self.note = 1 / rate, note
        self.due_s = self.began_s = 0.0
        self.waits = False

    def begin(self) -> None:
        self.due_s = self.began_s = time.perf_counter()

    def answered(self, now_s: float) -> bool:
        """Whether that was the last one."""
        last = self.note(now_s - self.began_s)
        self.due_s += self.interval_s
        self.waits = now_s < self.due_s
        return last

    def left_s(self) -> float:
        """How long to wait before the next one; 0.0: it begins now."""
        now = time.perf_counter()
        if now < self.due_s:
            return self.due_s - now
        if self.waits:
            self.due_s = now
        self.began_s = self.due_s
        return 0.0


class _Scheduled:
    """What keeps to a schedule."""

    def __init__(self, size: int, seconds: float, schedule: Schedule) -> None:
        super().__init__(size, seconds)  # type: ignore[call-arg]
        self.schedule = schedule


class _Paced(_Scheduled):
    """Of a protocol."""

    def start(self: Any) -> None:
        self.schedule.begin()
        super().start()  # type: ignore[misc]

    def answered(self: Any, nbytes: int) -> None:
        self._pending += nbytes
        if self._pending < self.size:
            return
        self._pending = 0
        last = self.schedule.answered(time.perf_counter())
        if last or self.schedule.due_s >= self.deadline_s:
            self.finish()
        else:
            self.send_when_due()

    def send_when_due(self: Any) -> None:
        if left := self.schedule.left_s():
            asyncio.get_running_loop().call_later(left, self.send_when_due)
        else:
            self._send()


class PacedPinger(_Paced, Pinger):
    """That is handed `bytes`."""


class PacedBufferedPinger(_Paced, BufferedPinger):
    """That receives into its own buffer."""


class PacedStreamPinger(_Scheduled, StreamPinger):
    """By reader and writer."""

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Report:
        message, schedule, clock = bytes(self.size), self.schedule, time.perf_counter
        self.cpu_s = -time.process_time()
        self.deadline_s = clock() + self.seconds
        schedule.begin()
        while True:
            writer.write(message)
            await reader.readexactly(self.size)
            if schedule.answered(clock()) or schedule.due_s >= self.deadline_s:
                break
            while left := schedule.left_s():
                await pause(asyncio.get_running_loop(), left)
        self.cpu_s += time.process_time()
        return await finish_streams(reader, writer)
