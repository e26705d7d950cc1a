"""The client's process: all tests, one after another, against a server that it finds or starts."""

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import rdmanet
from rdmanet.cli import interrupts
from rdmanet.cli.perf.conditions import pinned_to
from rdmanet.cli.perf.control import ANSWER_S, Control, Gone, Hello, PerfError, Probe, Run
from rdmanet.cli.perf.kinds import KINDS
from rdmanet.cli.perf.pairs import Place
from rdmanet.cli.perf.progress import Progress
from rdmanet.cli.perf.results import Machine, Result
from rdmanet.cli.perf.server import PROBE_BYTES, probe

CONNECT_S = 10.0
END_S = 5.0


class Session:
    """A server that has said Hello.

    :param memory: shared with the server, to measure how far the two CPUs are apart: if they are of one machine
    :ivar client_cpu: where the client is pinned
    :ivar server_cpu: where the server is
    """

    def __init__(
        self, control: Control, place: Place, factory: Callable[[], Any], memory: int | None = None
    ) -> None:
        self.control, self.place, self.factory, self.memory = control, place, factory, memory
        self.server_cpu: int | None = None
        self.client_cpu: int | None = None

    def greet(self, seconds: float | None = ANSWER_S) -> None:
        """:raises PerfError: the server is of another version, or says nothing for so long"""
        theirs = self.control.receive(Hello, seconds)
        self.control.send(Hello(rdmanet.__version__, os.getpid()))
        if theirs.version != rdmanet.__version__:
            raise PerfError(
                f"the server has rdmanet {theirs.version}, this is {rdmanet.__version__}: install the same version"
            )
        self.server_cpu = theirs.cpu if theirs.cpu >= 0 else None

    def probe(self) -> float | None:
        """How long a cache line takes to the server's CPU and back, in nanoseconds; None if that is not known."""
        if self.memory is None:
            return None
        os.pwrite(self.memory, bytes(PROBE_BYTES), 0)
        self.control.send(Probe())
        return probe(self.memory, answers=False)

    def measure(self, run: Run) -> Result:
        """One test with one size.

        :raises PerfError: it cannot be measured
        """
        settings = run.settings
        progress = Progress(f"{run.kind} {run.size} B", 0 if settings.iterations else settings.seconds)
        family = KINDS[run.kind].family
        try:
            if family == "verbs":
                from rdmanet.cli.perf import verbs_client

                return verbs_client.measure(self.control, self.place, run, progress)
            if family == "stream":
                from rdmanet.cli.perf import streams

                return interrupts.run(streams.measure(self.control, run, progress), self.factory)
            from rdmanet.cli.perf import calls

            return interrupts.run(calls.measure(self.control, run, progress), self.factory)
        except Gone:
            raise PerfError(
                "the server has ended, or has closed the connection: see what it has printed"
            ) from None
        finally:
            progress.clear()


@contextlib.contextmanager
def to_host(
    host: str, port: int, place: Place, cpu: int | None, factory: Callable[[], Any]
) -> Iterator[Session]:
    """With `rdmanet perf server` of another machine."""
    try:
        sock = socket.create_connection((host, port), CONNECT_S)
    except OSError as exc:
        raise PerfError(
            f"{host} port {port}: {exc.strerror or exc}: start `rdmanet perf server` there, or say its port (-p); if"
            f" {host} is to be a test: tests are {', '.join(KINDS)}"
        ) from None
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.closing(Control(sock)) as control:
        session = Session(control, place, factory)
        session.client_cpu = pinned_to(cpu)
        try:
            session.greet()
        except Gone:
            raise PerfError(
                f"{host} port {port} is no rdmanet perf server: it closes the connection"
            ) from None
        yield session


@contextlib.contextmanager
def on_this_machine(
    place: Place, cpus: list[int], loop: str | None, factory: Callable[[], Any]
) -> Iterator[Session]:
    """With a server that is started here, and ends with this.

    :param cpus: the server's and the client's; empty if they are not pinned
    """
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("rdmanet-perf")
    os.ftruncate(memory, PROBE_BYTES)
    with contextlib.closing(Control(ours)) as control, contextlib.ExitStack() as stack:
        stack.callback(os.close, memory)
        together = len(cpus) == 2 and cpus[0] != cpus[1]
        options = {
            "socket": theirs.fileno(),
            "probe": memory if together else None,
            "cpu": cpus[0] if cpus else None,
            "loop": loop,
            "device": place.device,
            "port": place.port,
            "gid_index": place.gid_index,
        }
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "rdmanet.cli.perf.server", json.dumps(options)],
                pass_fds=[theirs.fileno(), memory],
                stdin=subprocess.DEVNULL,
            )
        stack.callback(_end, process, control)
        session = Session(control, place, factory, memory if together else None)
        session.client_cpu = pinned_to(cpus[-1] if cpus else None)
        try:
            session.greet(None)  # on a busy machine its start takes long; if it fails, it is gone
        except Gone:
            raise PerfError(f"the server process ended with status {process.wait()}") from None
        yield session


def _end(process: subprocess.Popen[bytes], control: Control) -> None:
    control.close()
    try:
        process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def machine(session: Session, host: str | None, loop: str) -> Machine:
    """Where this is measured."""
    return Machine(
        cpu=_cpu_model(),
        cpus=os.cpu_count() or 0,
        kernel=platform.release(),
        python=platform.python_version(),
        rdmanet=rdmanet.__version__,
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        loop=loop,
        client_cpu=session.client_cpu,
        server_cpu=session.server_cpu,
        host=host or "",
        cache_line_ns=session.probe(),
    )


def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
