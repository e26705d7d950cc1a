"""The traffic that is measured: the server's and the client's side of each kind, over any fabric.

There are two kinds. Echo: the server answers each message with one write; the client keeps a number of messages in
flight and takes the time of every answer. Flood: the client writes for a while; the server only counts, and takes the
time, because the sender would stop its clock when its buffers have taken the last byte, not when the receiver has it.
The client ends a run with write_eof(); the server answers with its Report, a line of JSON.
"""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, cast

BUFFER_BYTES = 256 * 1024
"""The size of the buffer that each BufferedProtocol reuses for all it receives."""

BURST_BYTES = 1 << 20
"""How much a flood writes before it yields to the loop, unless it is paused earlier."""


class Report(NamedTuple):
    """What the server measured, from the first byte to the end of the stream."""

    received: int
    seconds: float
    cpu_s: float


class _Meter:
    """Bytes, time and CPU time from the first byte on."""

    def __init__(self) -> None:
        self.received = 0
        self._begin_s = self._begin_cpu_s = 0.0

    def count(self, nbytes: int) -> None:
        if not self.received:
            self._begin_s = time.perf_counter()
            self._begin_cpu_s = time.process_time()
        self.received += nbytes

    def report(self) -> bytes:
        seconds = time.perf_counter() - self._begin_s
        cpu_s = time.process_time() - self._begin_cpu_s
        return json.dumps([self.received, seconds, cpu_s]).encode() + b"\n"


# --- the server's side --------------------------------------------------------------------------------


class _Server(asyncio.BaseProtocol):
    transport: asyncio.Transport

    def __init__(self) -> None:
        self.meter = _Meter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        """The client does not read: neither does this, which would keep all answers."""
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()

    def eof_received(self) -> None:
        self.transport.write(self.meter.report())  # and the transport closes once it has written that


class Echo(_Server, asyncio.Protocol):
    """Answers what arrives with one write."""

    def data_received(self, data: bytes) -> None:
        self.meter.count(len(data))
        self.transport.write(data)


class Sink(_Server, asyncio.Protocol):
    """Counts."""

    def data_received(self, data: bytes) -> None:
        self.meter.count(len(data))


class _BufferedServer(_Server, asyncio.BufferedProtocol):
    def __init__(self) -> None:
        super().__init__()
        self.view = memoryview(bytearray(BUFFER_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.view


class BufferedEcho(_BufferedServer):
    """Answers what arrived in its own buffer.

    A socket transport may hold on to what it could not send at once, and the buffer is about to be filled again. So
    the answer is a copy, on every fabric alike.
    """

    def buffer_updated(self, nbytes: int) -> None:
        self.meter.count(nbytes)
        self.transport.write(bytes(self.view[:nbytes]))


class BufferedSink(_BufferedServer):
    """Counts what arrived in its own buffer."""

    def buffer_updated(self, nbytes: int) -> None:
        self.meter.count(nbytes)


def stream_echo(size: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """Answers each message of `size` bytes with one write."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        meter = _Meter()
        try:
            while True:
                message = await reader.readexactly(size)
                meter.count(size)
                writer.write(message)
                await writer.drain()
        except asyncio.IncompleteReadError:
            await _finish_server(meter, writer)

    return serve


async def stream_sink(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Counts."""
    meter = _Meter()
    while data := await reader.read(BUFFER_BYTES):
        meter.count(len(data))
    await _finish_server(meter, writer)


async def _finish_server(meter: _Meter, writer: asyncio.StreamWriter) -> None:
    writer.write(meter.report())
    writer.close()
    await writer.wait_closed()


# --- the client's side --------------------------------------------------------------------------------


class _Client(asyncio.BaseProtocol):
    """Runs for `seconds` once its connection is made; `done` gets the server's report at the end."""

    transport: asyncio.Transport

    def __init__(self, size: int, seconds: float) -> None:
        self.message = bytes(size)
        self.size = size
        self.seconds = seconds
        self.deadline_s = 0.0
        self.cpu_s = 0.0
        self.tail: bytearray | None = None
        self.done: asyncio.Future[Report] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def start(self) -> None:
        self.cpu_s = -time.process_time()
        self.deadline_s = time.perf_counter() + self.seconds

    def finish(self) -> None:
        """Stop sending: what arrives from now on is the report."""
        self.cpu_s += time.process_time()
        self.tail = bytearray()
        self.transport.write_eof()

    def keep(self, data: bytes | memoryview) -> None:
        assert self.tail is not None
        self.tail += data
        if self.tail.endswith(b"\n") and not self.done.done():
            self.done.set_result(Report(*json.loads(self.tail)))
            self.transport.close()

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionResetError("the connection ended before the report"))


class _Pinger(_Client):
    """Keeps `depth` messages in flight and records when each answer came.

    `stamps` begins with the time of the first write. With a `pause_s` the next message is sent that long after an
    answer: sparse traffic.

    :param stamp: takes the times instead of `stamps`, which would need memory for each. It ends the run before its time
        by setting `deadline_s` to 0: this loop is what is measured, and counts nothing itself
    """

    def __init__(
        self,
        size: int,
        seconds: float,
        *,
        depth: int = 1,
        pause_s: float = 0.0,
        stamp: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(size, seconds)
        self.depth = depth
        self.pause_s = pause_s
        self.stamps: list[float] = []
        self.stamp = self.stamps.append if stamp is None else stamp
        self.sent_s: list[float] = []
        self._pending = 0
        self._in_flight = 0

    def start(self) -> None:
        super().start()
        self.stamp(time.perf_counter())
        for _ in range(self.depth):
            self._send()

    def _send(self) -> None:
        self._in_flight += 1
        if self.pause_s:
            self.sent_s.append(time.perf_counter())
        self.transport.write(self.message)

    def answered(self, nbytes: int) -> None:
        self._pending += nbytes
        while self._pending >= self.size:
            self._pending -= self.size
            self._in_flight -= 1
            now = time.perf_counter()
            self.stamp(now)
            if now >= self.deadline_s:
                if not self._in_flight:
                    self.finish()
            elif self.pause_s:
                asyncio.get_running_loop().call_later(self.pause_s, self._send)
            else:
                self._send()


class Pinger(_Pinger, asyncio.Protocol):
    """A pinger that is handed `bytes`."""

    def data_received(self, data: bytes) -> None:
        if self.tail is not None:
            self.keep(data)
        else:
            self.answered(len(data))


class BufferedPinger(_Pinger, asyncio.BufferedProtocol):
    """A pinger that receives into its own buffer."""

    def __init__(self, size: int, seconds: float, **options: Any) -> None:
        super().__init__(size, seconds, **options)
        self.view = memoryview(bytearray(BUFFER_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.view

    def buffer_updated(self, nbytes: int) -> None:
        if self.tail is not None:
            self.keep(self.view[:nbytes])
        else:
            self.answered(nbytes)


class Flooder(_Client, asyncio.Protocol):
    """Writes message after message, one call each, for as long as it is not paused."""

    def __init__(self, size: int, seconds: float, *, most: float = math.inf) -> None:
        super().__init__(size, seconds)
        self.most = most
        self.burst = max(1, BURST_BYTES // size)
        self.sent = 0
        self._paused = self._scheduled = False

    def start(self) -> None:
        super().start()
        self._pump()

    def _pump(self) -> None:
        self._scheduled = False
        if self.tail is not None or self._paused or self.transport.is_closing():
            return
        if time.perf_counter() >= self.deadline_s or self.sent >= self.most:
            self.finish()
            return
        write, message = self.transport.write, self.message
        for _ in range(int(min(self.burst, self.most - self.sent))):
            write(message)
            self.sent += 1
            if self._paused:
                return
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._schedule()

    def data_received(self, data: bytes) -> None:
        self.keep(data)


class StreamPinger:
    """A pinger by reader and writer."""

    def __init__(
        self, size: int, seconds: float, *, depth: int = 1, stamp: Callable[[float], object] | None = None
    ) -> None:
        self.size, self.seconds, self.depth = size, seconds, depth
        self.stamps: list[float] = []
        self.stamp = self.stamps.append if stamp is None else stamp
        self.deadline_s = 0.0
        self.cpu_s = 0.0

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Report:
        message, size, stamp, clock = bytes(self.size), self.size, self.stamp, time.perf_counter
        self.cpu_s = -time.process_time()
        now = clock()
        stamp(now)
        self.deadline_s = now + self.seconds
        for _ in range(self.depth):
            writer.write(message)
        in_flight = self.depth
        while in_flight:
            await reader.readexactly(size)
            now = clock()
            stamp(now)
            if now < self.deadline_s:
                writer.write(message)
            else:
                in_flight -= 1
        self.cpu_s += time.process_time()
        return await finish_streams(reader, writer)


class StreamFlooder:
    """A flooder by reader and writer: write and drain for each message."""

    def __init__(self, size: int, seconds: float, *, most: float = math.inf) -> None:
        self.size, self.seconds, self.most = size, seconds, most
        self.sent = 0
        self.deadline_s = 0.0
        self.cpu_s = 0.0

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Report:
        message, burst = bytes(self.size), max(1, BURST_BYTES // self.size)
        self.cpu_s = -time.process_time()
        self.deadline_s = time.perf_counter() + self.seconds
        while time.perf_counter() < self.deadline_s and self.sent < self.most:
            count = int(min(burst, self.most - self.sent))
            for _ in range(count):
                writer.write(message)
                await writer.drain()
            self.sent += count
        self.cpu_s += time.process_time()
        return await finish_streams(reader, writer)


async def finish_streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Report:
    """End a run: the server's report."""
    writer.write_eof()
    report = Report(*json.loads(await reader.readline()))
    writer.close()
    await writer.wait_closed()
    return report


# --- numbers ------------------------------------------------------------------------------------------


def round_trips_s(pinger: Any) -> list[float]:
    """How long each answer took, with one message in flight at a time."""
    begins = getattr(pinger, "sent_s", None) or pinger.stamps
    return [end - begin for begin, end in zip(begins, pinger.stamps[1:], strict=False)]


def percentile(samples: list[float], percent: float) -> float:
    """The nearest-rank percentile; 50 is the median."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


async def run_client(connect: Callable[[Any, Any], Awaitable[Any]], client: Any, address: Any) -> Report:
    """Connect a client protocol, let it run, and return the server's report."""
    transport, _ = await connect(lambda: client, address)
    try:
        client.start()
        report: Report = await client.done
    finally:
        transport.abort()
    return report
