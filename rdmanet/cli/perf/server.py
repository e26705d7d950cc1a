"""The server's process: of another machine's clients, or of the one client that has started it.

usage: python -m rdmanet.cli.perf.server OPTIONS

`rdmanet perf server` takes one client after another: two at once would measure each other. OPTIONS, in JSON, are for
the process that a client starts: it has a socket and shared memory from it, and ends with it. It ignores Ctrl-C, which
reaches the whole foreground group: the client says when it is over.
"""

import contextlib
import json
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import rdmanet
from rdmanet.cli import interrupts
from rdmanet.cli.fabrics import loop_factory
from rdmanet.cli.perf.conditions import pinned_to
from rdmanet.cli.perf.control import (
    ANSWER_S,
    Control,
    Failed,
    Go,
    Gone,
    Hello,
    PerfError,
    Probe,
    Run,
    Stop,
    Verbs,
    check_run,
    host_of,
)
from rdmanet.cli.perf.guard import Guard, Limits
from rdmanet.cli.perf.kinds import KINDS
from rdmanet.cli.perf.pairs import Place

BACKLOG = 16
OF_A_RUN = (Verbs, Go, Stop)
"""What a client says after Run. It may be on its way while the server says that the run has failed."""
NEXT_S = 30.0
"""How long a client may be silent between two runs."""
KEEPALIVE_S = 10
"""How often a silent client's host is asked whether it is there: a host that died says nothing."""
KEEPALIVES = 3
PROBE_BYTES = 4096
PROBE_PART = 128
PROBE_ROUNDS = 1000
PROBE_S = 1.0


def session(
    control: Control,
    place: Place,
    cpu: int | None,
    factory: Callable[[], Any],
    *,
    memory: int | None = None,
    guard: Guard | None = None,
) -> None:
    """Do what a client asks for, until it goes.

    :param memory: shared with the client, for probes
    :param guard: what a client may ask for; None is for everything
    :raises PerfError: it is of another version, or speaks something else, or has had its time
    """
    control.send(Hello(rdmanet.__version__, os.getpid(), -1 if cpu is None else cpu))
    theirs = control.receive(Hello)
    if theirs.version != rdmanet.__version__:
        why = f"the client has rdmanet {theirs.version}, the server {rdmanet.__version__}: install the same version"
        control.send(Failed(why))
        raise PerfError(why)
    while True:
        try:
            if guard is not None:
                guard.check_turn()
        except PerfError as exc:
            control.send(Failed(f"the server: {exc}"))
            raise
        try:
            asked = control.receive((Run, Probe, *OF_A_RUN), NEXT_S)
        except Gone:
            return
        if isinstance(asked, Probe):
            if memory is not None:
                probe(memory, answers=True)
            continue
        if isinstance(asked, OF_A_RUN):  # that has failed here
            continue
        try:
            check_run(asked)
            if guard is not None:
                guard.begin(asked)
            answer(control, place, asked, factory)
        except Gone:
            return
        except Exception as exc:  # of any kind: what one client makes fail must not keep out the next
            control.send(Failed(f"the server: {exc or type(exc).__name__}"[:1000]))


def answer(control: Control, place: Place, run: Run, factory: Callable[[], Any]) -> None:
    """One Run."""
    family = KINDS[run.kind].family
    if family == "verbs":
        from rdmanet.cli.perf import verbs_server

        verbs_server.serve(control, place, run)
    elif family == "stream":
        from rdmanet.cli.perf import streams

        interrupts.run(streams.serve(control, run), factory)
    else:
        from rdmanet.cli.perf import calls

        interrupts.run(calls.serve(control, run), factory)


def listen(port: int, place: Place, cpu: int | None, factory: Callable[[], Any], limits: Limits) -> None:
    """`rdmanet perf server`: until Ctrl-C."""
    with _listener(port) as listener:
        at = listener.getsockname()
        on = "" if cpu is None else f", on CPU {cpu}"
        print(f"waiting for `rdmanet perf HOST` on port {at[1]}{on}", flush=True)
        while True:
            sock, peer = listener.accept()
            with contextlib.closing(Control(sock)) as control:
                name = host_of(peer)
                print(f"client {name}", flush=True)
                try:
                    _end_silence(sock)
                    session(control, place, cpu, factory, guard=Guard(limits, control, listener))
                except (PerfError, Gone, OSError) as exc:
                    print(f"client {name}: {exc or type(exc).__name__}", file=sys.stderr, flush=True)


def _end_silence(sock: socket.socket) -> None:
    """A client that reads nothing, or whose host has died, ends its session: the next one waits for that."""
    sock.settimeout(ANSWER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES)


def _listener(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            backlog=BACKLOG,
            dualstack_ipv6=both,
        )
    except OSError as exc:
        raise OSError(exc.errno, f"port {port} (-p): {exc.strerror or exc}") from None


def probe(fd: int, answers: bool) -> float | None:
    """How long a cache line takes to the other process and back, in nanoseconds; None if it does not answer.

    It is the least of some parts: on a busy machine the mean is how long a process waits for its CPU.

    :param fd: memory that both have, zero
    """
    from rdmanet._core import cache_line_ns

    with mmap.mmap(fd, PROBE_BYTES) as memory, memoryview(memory) as view:
        found = []
        for begin in range(0, PROBE_BYTES, PROBE_PART):
            with view[begin : begin + PROBE_PART] as part:
                found.append(cache_line_ns(part, PROBE_ROUNDS, answers, PROBE_S))
            if not found[-1]:
                return None
    return min(found)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options: dict[str, Any] = json.loads(sys.argv[1])
    factory, _ = loop_factory(options["loop"])
    cpu = pinned_to(options["cpu"])
    place = Place(options["device"], options["port"], options["gid_index"])
    with contextlib.closing(Control(socket.socket(fileno=options["socket"]))) as control:
        try:
            session(control, place, cpu, factory, memory=options["probe"])
        except Gone:
            pass
        except PerfError as exc:
            print(f"perf: the server: {exc}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
