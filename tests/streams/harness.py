"""What every stream test is made of: protocols that remember, peers in other processes, and Net.

No test here sleeps to let something happen. `Recorder.until` waits for a condition over callbacks, `Net.until` for one
over those of all recorders, `Peer.line` for a line of another process; what never comes ends in the test's time limit.
tests/support/waiting.py has the rest.
"""

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import rdmanet
from tests.support import ending
from tests.support.processes import AwaitedProcess
from tests.support.waiting import Conditions

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
        self._conditions = Conditions()
        self.net: Net | None = None  # to be told, too

    # ---- what a test waits for

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once `condition` holds; it is looked at after each callback."""
        await self._conditions.until(condition)

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
        self._conditions.look()
        if self.net is not None:
            self.net.conditions.look()

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


class Peer(AwaitedProcess):
    """A script of tests/streams/peers in a process of its own; on the other host, if there is one."""

    def __init__(
        self,
        script: str,
        *args: object,
        env: dict[str, str] | None = None,
        keep_errors: bool = False,
        fresh: bool = False,
    ) -> None:
        """:param fresh: start Python for it: `env` is for what reads it before a script runs"""
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), str(HERE)]))
        hosts = {"RDMANET_TEST_HOST": THERE, "RDMANET_TEST_PEER": HOST}
        super().__init__(
            *([*FAR, sys.executable] if FAR or fresh else []),
            HERE / "peers" / script,
            *args,
            forked=not FAR and not fresh,
            keep_errors=keep_errors,
            env={**os.environ, "PYTHONPATH": path, **hosts, **(env or {})},
        )

    async def expect(self, word: str) -> list[str]:
        """The fields after `word` in the next line, which must begin with it."""
        first, *rest = (await self.line()).split()
        assert first == word, f"the peer said {first} {rest}, not {word}"
        return rest

    async def port(self) -> FarPort:
        return FarPort((await self.expect("port"))[0])


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
        self.conditions = Conditions()
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
                protocol.net = self
                self.recorders.append(protocol)
                self.conditions.look()
            return protocol

        return remembering

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once `condition` holds; it is looked at when a recorder is made, and after each of its callbacks."""
        await self.conditions.until(condition)

    async def accepted_beside(self, clients: list[Recorder]) -> list[Recorder]:
        """The servers' ends of `clients`: they may come to be a little later."""
        await self.until(lambda: len(self.recorders) >= 2 * len(clients))
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
            peer.close()
        for server in self.servers:
            server.close()
        for writer in self.writers:
            ending.abort(writer.transport)
        for recorder in self.recorders:
            if recorder.transport is not None and not recorder.lost:
                recorder.transport.abort()
        for recorder in self.recorders:
            if recorder.transport is not None:
                await recorder.until_lost()
        for server in self.servers:
            await server.wait_closed()
        self.writers.clear()  # they know errors, whose tracebacks know all that a test had
        violations = [text for recorder in self.recorders for text in recorder.violations]
        assert not violations, violations
        assert not self.complaints, self.complaints


async def within(seconds: float, coroutine: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.timeout(seconds):
        return await coroutine
