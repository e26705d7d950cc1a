"""What every stream test is made of: protocols that remember, peers in other processes, and Net.

No test here sleeps to let something happen. `Recorder.until` waits for a condition over callbacks,
`Peer.line` for a line of another process; what never comes ends in the test's time limit.
"""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import rdmanet

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
HOST = os.environ.get("RDMANET_TEST_HOST", "127.0.0.1")
# Where the other processes are, and what brings them there; see --across in tests/conftest.py.
THERE = os.environ.get("RDMANET_TEST_PEER", HOST)
FAR = shlex.split(os.environ.get("RDMANET_TEST_FAR", "")) if "RDMANET_TEST_PEER" in os.environ else []

# What memory needs to be offered; who gets a key of its own then may read and write it.
OFFERABLE = rdmanet.AccessFlags.LOCAL_WRITE | rdmanet.AccessFlags.MW_BIND

# That a peer has died is told by the kernel at once, not by a timer that runs out; a busy machine may take its time.
NOTICED_WITHIN_S = 10.0


class Recorder(asyncio.Protocol):
    """Remembers every callback and objects to an order that asyncio forbids."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.events: list[str] = []
        self.data = bytearray()
        self.received = 0
        self.error: BaseException | None = None
        self.writing_paused = False
        self.offered: list[Any] = []
        self.revoked: list[Any] = []
        self.violations: list[str] = []
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    # ---- what a test waits for

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds; it is looked at after each callback."""
        if condition():
            return
        waiter = asyncio.get_running_loop().create_future()
        entry = (condition, waiter)
        self._waiters.append(entry)
        try:
            await waiter
        finally:
            self._waiters.remove(entry)

    async def until_received(self, count: int) -> bytes:
        await self.until(lambda: self.received >= count)
        return bytes(self.data)

    async def until_lost(self) -> BaseException | None:
        await self.until(lambda: self.lost)
        return self.error

    @property
    def lost(self) -> bool:
        return "lost" in self.events

    @property
    def eof(self) -> bool:
        return "eof" in self.events

    # ---- for subclasses: react to data, then call note() through super()

    def note(self, event: str | None) -> None:
        if self.lost and event:
            self.violations.append(f"{event} after connection_lost: {self.events}")
        if event not in (None, "made") and not self.events[:1] == ["made"]:
            self.violations.append(f"{event} before connection_made: {self.events}")
        if event == "data" and self.eof:
            self.violations.append(f"data_received after eof_received: {self.events}")
        # Runs of data are one event: their number is the transport's own business.
        if event and not (event == "data" and self.events[-1:] == ["data"]):
            self.events.append(event)
        for condition, waiter in self._waiters:
            if not waiter.done() and condition():
                waiter.set_result(None)

    # ---- asyncio's callbacks

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.note("made")

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self.keep(data)
        self.note("data")

    def keep(self, data: bytes) -> None:
        self.data += data

    def eof_received(self) -> bool | None:
        self.note("eof")
        return None

    def pause_writing(self) -> None:
        self.writing_paused = True
        self.note("pause")

    def resume_writing(self) -> None:
        self.writing_paused = False
        self.note("resume")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.error = exc
        self.note("lost")

    # ---- rdmanet's optional callbacks

    def region_offered(self, remote: Any) -> None:
        self.offered.append(remote)
        self.note("offered")

    def region_revoked(self, remote: Any) -> None:
        self.revoked.append(remote)
        self.note("revoked")


class HalfOpen(Recorder):
    """Keeps its sending side after the peer's end of file."""

    def eof_received(self) -> bool:
        super().eof_received()
        return True


class Echo(Recorder):
    """Answers every piece with itself; keeps nothing."""

    def keep(self, data: bytes) -> None:
        self.transport.write(data)


class FarPort(int):
    """A port where the other processes are."""


class Peer:
    """A script of tests/net/peers in a process of its own, spoken to by lines; on the other host, if there is one.

    Its end is awaited through a pidfd: no thread of a child watcher, no signal handler, no
    polling. Scripts end by themselves when their stdin does.
    """

    def __init__(
        self, script: str, *args: object, env: dict[str, str] | None = None, stderr: bool = False
    ) -> None:
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), str(HERE)]))
        hosts = {"RDMANET_TEST_HOST": THERE, "RDMANET_TEST_PEER": HOST}
        self.process = subprocess.Popen(
            [*FAR, sys.executable, str(HERE / "peers" / script), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stderr else None,
            env={**os.environ, "PYTHONPATH": path, **hosts, **(env or {})},
        )
        self.pid = self.process.pid
        assert self.process.stdin and self.process.stdout
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._text = b""

    async def line(self) -> str:
        """The next line it prints; EOFError when it ended first."""
        while b"\n" not in self._text:
            await readable(self._stdout.fileno())
            piece = os.read(self._stdout.fileno(), 65536)
            if not piece:
                status = self.process.poll()
                raise EOFError(f"peer {self.process.args} ended with {status} after {self._text!r}")
            self._text += piece
        line, self._text = self._text.split(b"\n", 1)
        return line.decode()

    async def expect(self, word: str) -> list[str]:
        """The fields after `word` in the next line, which must begin with it."""
        first, *rest = (await self.line()).split()
        assert first == word, f"the peer said {first} {rest}, not {word}"
        return rest

    async def port(self) -> FarPort:
        return FarPort((await self.expect("port"))[0])

    def say(self, line: str) -> None:
        self._stdin.write(line.encode() + b"\n")
        self._stdin.flush()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def ended(self) -> int:
        """Its exit status, once it has one."""
        if self.process.returncode is None:
            fd = os.pidfd_open(self.pid)
            try:
                await readable(fd)
            finally:
                os.close(fd)
        return self.process.wait()

    def errors(self) -> bytes:
        """What it wrote to stderr, once it has ended."""
        assert self.process.stderr
        return self.process.stderr.read()

    async def finish(self) -> None:
        """Let it end by itself, and well."""
        self._stdin.close()
        status = await self.ended()
        assert status == 0, f"peer {self.process.args} ended with {status}"

    def destroy(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self._stdin.close()
        self._stdout.close()
        if self.process.stderr:
            self.process.stderr.close()


async def readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)


class Net:
    """The connections, servers and peers of one test; ends them all, then asks for complaints.

    Whatever reaches the loop's exception handler fails the test, unless the test takes it out
    with `complaint()`.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.servers: list[Any] = []
        self.recorders: list[Recorder] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.peers: list[Peer] = []
        self.complaints: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda loop, context: self.complaints.append(context))

    # ---- protocols

    async def serve(self, factory: Callable[[], Any] = Recorder, **options: Any) -> tuple[Any, int]:
        """A server, and the port it found."""
        return await self.serve_on(0, factory, **options)

    async def serve_on(
        self, port: int, factory: Callable[[], Any] = Recorder, **options: Any
    ) -> tuple[Any, int]:
        server = await rdmanet.start_rdma_server(self.remember(factory), HOST, port, **options)
        self.servers.append(server)
        return server, server.sockets[0].getsockname()[1]

    async def connect(self, port: int, factory: Callable[[], Any] = Recorder, **options: Any) -> Any:
        """The protocol of a new connection (its transport is at `.transport`)."""
        host = THERE if isinstance(port, FarPort) else HOST
        # A busy machine takes its time; the test has its own limit.
        options = {"connect_timeout": 60.0} | options
        _, protocol = await rdmanet.create_rdma_connection(self.remember(factory), host, port, **options)
        return protocol

    async def pair(
        self, client: Callable[[], Any] = Recorder, server: Callable[[], Any] = Recorder, **options: Any
    ) -> tuple[Any, Any]:
        """Both ends of one connection within this process."""
        accepted: asyncio.Future[Any] = self.loop.create_future()

        def factory() -> Any:
            protocol = server()
            made = protocol.connection_made

            def connection_made(transport: Any) -> None:
                accepted.done() or accepted.set_result(protocol)
                made(transport)

            protocol.connection_made = connection_made
            return protocol

        _, port = await self.serve(factory)
        near = await self.connect(port, client, **options)
        return near, await accepted

    def remember(self, factory: Callable[[], Any]) -> Callable[[], Any]:
        def remembering() -> Any:
            protocol = factory()
            if isinstance(protocol, Recorder):
                self.recorders.append(protocol)
            return protocol

        return remembering

    async def accepted_beside(self, clients: list[Recorder]) -> list[Recorder]:
        """The servers' ends of `clients`: they may come to be a little later."""
        while len(self.recorders) < 2 * len(clients):
            await asyncio.sleep(0)
        return [recorder for recorder in self.recorders if recorder not in clients]

    # ---- streams

    async def serve_streams(self, connected: Callable[..., Any], **options: Any) -> tuple[Any, int]:
        server = await rdmanet.start_rdma_stream_server(connected, HOST, 0, **options)
        self.servers.append(server)
        return server, server.sockets[0].getsockname()[1]

    async def open(self, port: int, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host = THERE if isinstance(port, FarPort) else HOST
        reader, writer = await rdmanet.open_rdma_connection(host, port, **options)
        self.writers.append(writer)
        return reader, writer

    async def stream_pair(self, **options: Any) -> tuple[Any, Any, Any, Any]:
        """(reader, writer) of the connecting side, then of the accepting side."""
        accepted: asyncio.Future[Any] = self.loop.create_future()
        _, port = await self.serve_streams(lambda r, w: accepted.set_result((r, w)), **options)
        near = await self.open(port, **options)
        far = await accepted
        self.writers.append(far[1])
        return (*near, *far)

    # ---- other processes

    def spawn(self, script: str, *args: object, **options: Any) -> Peer:
        peer = Peer(script, *args, **options)
        self.peers.append(peer)
        return peer

    # ---- the end

    def complaint(self) -> dict[str, Any]:
        """The oldest thing said to the exception handler, which the test expected."""
        assert self.complaints, "nothing reached the loop's exception handler"
        return self.complaints.pop(0)

    async def aclose(self) -> None:
        for peer in self.peers:
            peer.destroy()
        for server in self.servers:
            server.close()
        for writer in self.writers:
            writer.transport.abort()
        for recorder in self.recorders:
            if recorder.transport is not None and not recorder.lost:
                recorder.transport.abort()
        for recorder in self.recorders:
            if recorder.transport is not None:
                await recorder.until_lost()
        for server in self.servers:
            await server.wait_closed()
        violations = [text for recorder in self.recorders for text in recorder.violations]
        assert not violations, violations
        assert not self.complaints, self.complaints


async def within(seconds: float, coroutine: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.timeout(seconds):
        return await coroutine
