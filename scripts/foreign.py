#!/usr/bin/env python3
"""Run other people's RDMA programs on the embedded device: Debian's, one server and one client at a time, and
transfer engines, if they are installed.

    make foreign          all of them; writes the table in docs/soft-device.md
    make foreign-quick    the short ones; writes nothing

A case passes if both sides exit with 0, in time, and the client prints the output of a successful run. For a case that
cannot run here, foreign_cases.py gives the reason. It must fail: if it passes, the reason has to be removed.

    scripts/foreign.py [-k PATTERN] [--quick] [--write] [--list] [--verbose]
"""

import argparse
import contextlib
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from foreign_cases import ENGINES, Case, all_cases, engines

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rdmanet import _core  # noqa: E402
from rdmanet.cli.soft_run import environment, library_directory  # noqa: E402

DOCUMENT = ROOT / "docs" / "soft-device.md"
BEGIN, END = "<!-- make foreign writes from here -->", "<!-- to here -->"
PATIENCE = 10.0  # for a server to be ready, and to end after its client


@dataclass
class Outcome:
    """The outcome of a case."""

    case: Case
    server: int | None = None  # exit statuses; None: no such process, or it had to be stopped
    client: int | None = None
    figure: str | None = None
    trouble: str = ""  # empty: it did as expected
    output: str = ""
    seconds: float = 0

    @property
    def good(self) -> bool:
        return bool(self.trouble) == bool(self.case.expected)


# --- processes ------------------------------------------------------------------------------------------------


class Program:
    """A process with its output in a file, line by line as it comes."""

    def __init__(self, command: str | list[str], environment: dict[str, str]) -> None:
        self.out = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        # C programs buffer output to a file; what a killed one had buffered would be lost.
        self.process = subprocess.Popen(
            ["stdbuf", "-oL", *(command.split() if isinstance(command, str) else command)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )

    def output(self) -> str:
        return os.pread(self.out.fileno(), 1 << 20, 0).decode(errors="replace")

    def wait(self, seconds: float) -> int | None:
        """Its exit status; None: it is running."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End it: SIGTERM first, then SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
                self.wait(3)
        self.out.close()

    def has_port(self, port: int, listening: bool = True) -> bool:
        """Has it a port that can be called: TCP that listens, UDP, or a name with the number in it that listens?

        The embedded device's identifiers have such names from when they are bound; who calls one that does not
        listen yet is refused.
        """
        accepts = 0x10000  # __SO_ACCEPTCON
        inodes = set()
        try:
            for fd in os.listdir(f"/proc/{self.process.pid}/fd"):
                if found := re.fullmatch(
                    r"socket:\[(\d+)\]", os.readlink(f"/proc/{self.process.pid}/fd/{fd}")
                ):
                    inodes.add(found[1])
        except OSError:
            return False
        for table, bound in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[9] in inodes and words[3] == bound and int(words[1].split(":")[1], 16) == port:
                    return True
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            words = line.split()
            if words[6] in inodes and len(words) > 7 and re.search(rf"\b{port}$", words[7]):
                if not listening or int(words[3], 16) & accepts:
                    return True
        return False


@contextmanager
def started(command: str | list[str], environment: dict[str, str]) -> Iterator[Program]:
    program = Program(command, environment)
    try:
        yield program
    finally:
        program.stop()


def free_port() -> int:
    """A port for a program that will bind it soon.

    The kernel hands out ports of its range to whoever connects, perhaps before the program comes to it: so below that.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, max(lowest, 20_000))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_ready(case: Case, server: Program, port: int) -> None:
    """Wait until the server can be reached; if not, the client's own message explains it best."""
    deadline = time.monotonic() + PATIENCE
    program = case.client.split()[0]
    fixed = {"udaddy": 7174, "mckey": 7174}.get(program, port)
    listening = program != "mckey"  # receives what is sent to a group
    while time.monotonic() < deadline and server.process.poll() is None:
        if case.ready is None and server.has_port(fixed, listening):
            return
        if case.ready is not None and re.search(case.ready, server.output()):
            return
        time.sleep(0.02)


# --- a case -----------------------------------------------------------------------------------------------------


def run(case: Case, environment: dict[str, str]) -> Outcome:
    outcome = Outcome(case)
    begin = time.monotonic()
    port = free_port()
    environment = environment | dict(case.environment)

    def filled(command: str) -> str:
        return command.format(port=port, address=case.address)

    if case.server is None:
        with started(filled(case.client), environment) as client:
            finish(outcome, client)
    else:
        with started(filled(case.server), environment) as server:
            wait_ready(case, server, port)
            with started(filled(case.client), environment) as client:
                finish(outcome, client)
            if not case.stays:
                outcome.server = server.wait(PATIENCE if not outcome.trouble else 1)
                if outcome.server != 0 and not outcome.trouble:
                    outcome.trouble = f"the server {ended(outcome.server)}"
            elif (status := server.process.poll()) is not None:
                outcome.server = status
                outcome.trouble = outcome.trouble or f"the server {ended(status)} before it was stopped"
            outcome.output += f"--- server\n{server.output()}"
    outcome.seconds = time.monotonic() - begin
    return outcome


def finish(outcome: Outcome, client: Program) -> None:
    """Wait for the client, and read its figure."""
    case = outcome.case
    if case.server is None and case.stays:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and client.process.poll() is None:
            if case.figure is None or case.figure(client.output()):
                break
            time.sleep(0.02)
        outcome.client = client.process.poll()
        if outcome.client is not None:
            outcome.trouble = f"it {ended(outcome.client)} before it was stopped"
    else:
        outcome.client = client.wait(case.timeout)
        if outcome.client != 0:
            outcome.trouble = f"the client {ended(outcome.client)}"
    outcome.output = f"--- client\n{client.output()}"
    if case.figure is not None:
        outcome.figure = case.figure(client.output())
        if outcome.figure is None and not outcome.trouble:
            outcome.trouble = "the client exited with 0, but printed no result"


def ended(status: int | None) -> str:
    if status is None:
        return "did not end in time"
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"


# --- telling ----------------------------------------------------------------------------------------------------


def table(outcomes: list[Outcome]) -> str:
    lines = []
    for package in dict.fromkeys(outcome.case.package for outcome in outcomes):
        lines += ["", f"**{package} {version(package)}**", "", "| program | exit | result |", "|---|---|---|"]
        for outcome in outcomes:
            if outcome.case.package != package:
                continue
            said = outcome.figure or ""
            if outcome.trouble:
                said = f"{outcome.trouble}: {outcome.case.expected or 'not explained'}"
            lines.append(f"| `{outcome.case.title}` | {exits(outcome)} | {said} |")
    return "\n".join(lines[1:])


def exits(outcome: Outcome) -> str:
    """The client's status and the server's."""

    def said(status: int | None) -> str:
        return "stopped" if status is None else str(status)

    return said(outcome.client) + (f", {said(outcome.server)}" if outcome.case.server else "")


def version(package: str) -> str:
    found = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Version}", package], check=False, capture_output=True, text=True
    )
    return found.stdout or "(version unknown)"


def write(outcomes: list[Outcome]) -> None:
    """The table is of Debian's programs; docs/howto/engines.md says what the engines do."""
    outcomes = [outcome for outcome in outcomes if outcome.case.label is None]
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    good = sum(not outcome.trouble for outcome in outcomes)
    head = (
        f"{good} of {len(outcomes)} run, on {platform.system()} {platform.release().split('-')[0]} "
        f"{platform.machine()} with {os.cpu_count()} CPUs. Exit statuses are the client's and the server's; a "
        f"server that goes on by itself is stopped."
    )
    DOCUMENT.write_text(f"{before}{BEGIN}\n{head}\n\n{table(outcomes)}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description="other people's RDMA programs on the embedded device")
    parser.add_argument(
        "-k", metavar="PATTERN", default="", help="only commands, or titles, in which this is found"
    )
    parser.add_argument("--quick", action="store_true", help="only the short cases")
    parser.add_argument("--write", action="store_true", help="write the table into docs/soft-device.md")
    parser.add_argument("--list", action="store_true", help="list what would run")
    parser.add_argument("--verbose", action="store_true", help="show what failed, with all its output")
    args = parser.parse_args()
    has_engines = (ROOT / ENGINES).exists()
    cases = [
        case
        for case in [*all_cases(), *(engines() if has_engines else ())]
        if (re.search(args.k, case.client) or re.search(args.k, case.title))
        and (case.quick or not args.quick)
    ]
    if args.list:
        print("\n".join(case.client for case in cases))
        return 0
    if not has_engines:
        print(
            "NIXL, Mooncake, DLSlime and PeerCache are not tried: `make build/engines/.done` installs them (500 MB)"
        )
    commands = {command.split()[0] for case in cases for command in (case.client, case.server) if command}
    if absent := sorted(command for command in commands - {ENGINES} if not shutil.which(command)):
        print(f"not installed: {', '.join(absent)}", file=sys.stderr)
        print(
            "apt-get install ibverbs-utils rdmacm-utils perftest qperf libfabric-bin ucx-utils",
            file=sys.stderr,
        )
        return 2

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # running processes are stopped on the way out
    variables = environment(library_directory(Path(_core.Library.embedded().path)))
    outcomes = []
    for number, case in enumerate(cases, 1):
        outcome = run(case, variables)
        outcomes.append(outcome)
        verdict = outcome.trouble or outcome.figure or ""
        mark = "ok  " if outcome.good and not case.expected else "as explained" if outcome.good else "BAD "
        print(
            f"{number:3}/{len(cases)} {mark} {case.title}   {verdict}   ({outcome.seconds:.1f} s)", flush=True
        )
        if outcome.good:
            continue
        if case.expected and not outcome.trouble:
            print("      it runs, although foreign_cases.py says that it does not")
        lines = outcome.output.splitlines()
        print("\n".join(f"      {line}" for line in (lines if args.verbose else lines[-8:])))
    bad = [outcome for outcome in outcomes if not outcome.good]
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} as expected")
    if args.write:
        write(outcomes)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
