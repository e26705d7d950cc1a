"""Count the calls that a message costs: system calls, sleeps, Python calls, and copies by the device.

usage: python -m benchmarks.count [--loop LOOP] [--fabric FABRIC]... [--case CASE]...

Times drift and depend on the machine; counts do not, and they show where the time goes. Every number is for one
message and both processes, client + server. In an echo a message goes in both directions. The last case is a connection
that is made, carries one byte there and back, and is closed (benchmarks/connecting.py, always on uvloop).

    system calls    by `perf stat`, where that is allowed. `strace -c` names them, from the difference of a long and a
                    short run, which excludes the start-up. It slows them down a hundredfold, so that a polling process
                    seems to poll less often than it does.
    sleeps          voluntary context switches: each one costs a wake-up. The engine is the embedded device's thread.
    Python calls    calls of Python functions, and their calls of built-in functions, by sys.setprofile; methods of
                    compiled classes, such as a transport's write, are not included.
    device          the embedded device's own counters, both sides together.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import connecting
from benchmarks.__main__ import Pair, Process
from benchmarks.cases import BUFFERED, CASES, PROTOCOL, Case, Variant

SECONDS = 0.5
CONNECTION, CONNECTIONS = "a connection", 400

# The budget that the goals for speed leave: an iteration of a loop with its epoll_wait costs some 0.3 us, a system call
# the same, a Python call 0.05, a copy of 64 KiB 1.5, and a sleep with its wake-up 45.
COUNTED = {
    ("round trip 64 B", PROTOCOL): [
        "1.5 us",
        "2 + 2",
        "",
        "0 + 0",
        "6 + 3",
        "bytes_mapped 160: one copy each way",
    ],
    ("one way 64 B", PROTOCOL): [
        "0.25 us",
        "0.05 + 0.05",
        "",
        "0 + 0",
        "0.05 + 0.05",
        "one copy, send_wrs 0.01",
    ],
    ("one way 64 KiB", PROTOCOL): ["2.3 us", "2 + 2", "", "0 + 0", "2 + 4", "bytes_mapped 65536: one copy"],
    ("one way 1 MiB", BUFFERED): [
        "27 us",
        "20 + 20",
        "",
        "0 + 0",
        "20 + 50",
        "bytes_mapped 1048576: one copy",
    ],
}
FABRICS = ["rdmanet", "unix", "tcp"]
SIDES = ("client", "server")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.count")
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    parser.add_argument("--fabric", action="append", choices=FABRICS)
    parser.add_argument("--case", action="append", choices=[*(name for name, _ in COUNTED), CONNECTION])
    parser.add_argument("--quick", action="store_true", help="few connections: to see that they are counted")
    args = parser.parse_args()

    cpus = sorted(os.sched_getaffinity(0))
    pinned = (cpus[0], cpus[1]) if len(cpus) > 1 else (-1, -1)
    cases = {case.name: replace(case, seconds=SECONDS) for case in CASES}
    for (name, api), (time_goal, *budget) in COUNTED.items():
        if args.case and name not in args.case:
            continue
        print(f"\n## {name}, {api}, {args.loop}\n")
        print("| transport | system calls | by strace | sleeps | Python calls | device |")
        print("|---|---:|---|---:|---:|---|")
        print(f"| *budget for {time_goal}* | {' | '.join(budget)} |")
        for fabric in args.fabric or FABRICS:
            variant = Variant(fabric, args.loop)
            plain = _plain(variant, pinned, cases[name], api)
            calls = _python_calls(variant, pinned, cases[name], api)
            traced = _traced(variant, pinned, cases[name], api)
            cells = [
                fabric,
                _sides(plain["system_calls"]),
                _named(traced),
                _sides(plain["sleeps"]),
                _sides(calls),
                ", ".join(f"{key} {value:.4g}" for key, value in plain["device"].items()),
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
    if not args.case or CONNECTION in args.case:
        print(f"\n## {CONNECTION}, uvloop\n")
        print("| transport | system calls | by strace | sleeps | sleeps of the engine |")
        print("|---|---:|---|---:|---:|")
        for fabric in args.fabric or FABRICS:
            print(f"| {' | '.join(_connection(fabric, 20 if args.quick else CONNECTIONS))} |", flush=True)
    return 0


def _sides(each: list[float] | None) -> str:
    return "" if each is None else " + ".join(f"{value:.3g}" for value in each)


def _named(traced: list[Counter[str]] | None) -> str:
    """The calls that matter, client's then server's."""
    if traced is None:
        return ""
    return "; ".join(
        ", ".join(f"{name} {value:.3g}" for name, value in counts.most_common(3) if value >= 0.005) or "none"
        for counts in traced
    )


def _processes(pair: Pair) -> list[Process]:
    return [pair.client, pair.server]


# --- an ordinary run ----------------------------------------------------------------------------------


def _plain(variant: Variant, pinned: tuple[int, int], case: Case, api: str) -> dict[str, Any]:
    with Pair(variant, *pinned) as pair:
        processes = _processes(pair)
        pair.run(case, api)  # do what is done only once
        before = [process.call("usage") for process in processes]
        with _system_calls([process.process.pid for process in processes]) as system_calls:
            messages = pair.run(case, api)["messages"]
        after = [process.call("usage") for process in processes]
    spent = [
        {key: (late[key] - early.get(key, 0)) / messages for key in late}
        for early, late in zip(before, after, strict=True)
    ]
    device = Counter[str]()
    for side in spent:
        device.update({key[7:]: value for key, value in side.items() if key.startswith("device_")})
    return {
        "sleeps": [side["sleeps"] for side in spent],
        "device": {key: value for key, value in device.items() if value > 0.0005},
        "system_calls": [count / messages for count in system_calls] or None,
    }


@contextmanager
def _system_calls(pids: list[int]) -> Iterator[list[int]]:
    """Fill the list with the number of system calls that each process made inside the block."""
    counts: list[int] = []
    perf = shutil.which("perf")
    if perf is None:
        yield counts
        return
    command = [perf, "stat", "-x", ",", "-e", "raw_syscalls:sys_enter", "-p"]
    watchers = [
        subprocess.Popen([*command, str(pid)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        for pid in pids
    ]
    time.sleep(0.5)  # perf does not report when it has attached
    try:
        yield counts
    finally:
        for watcher in watchers:
            if watcher.poll() is None:
                watcher.send_signal(signal.SIGINT)
        texts = [watcher.communicate()[1] for watcher in watchers]
    found = [re.search(r"^(\d+),,raw_syscalls", text, re.MULTILINE) for text in texts]
    if all(found):
        counts += [int(match[1]) for match in found if match]


# --- connections ---------------------------------------------------------------------------------------


@contextmanager
def _client_and_server(kind: str, prefixes: dict[str, list[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """The two processes, in this order. The client makes connections by `_connect`."""

    def start(side: str, call: str, number: int) -> subprocess.Popen[str]:
        command = [*prefixes.get(side, []), *connecting.program("connecting", call, number)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start("server", f"serve({kind!r})", -1) as server:
        assert server.stdin and server.stdout
        where = server.stdout.readline().strip()
        with start("client", f"connect_when_asked({kind!r}, {where!r})", 0) as client:
            yield [client, server]
            assert client.stdin
            client.stdin.close()
        server.stdin.close()


def _connect(client: subprocess.Popen[str], number: int) -> None:
    assert client.stdin and client.stdout
    print(number, file=client.stdin, flush=True)
    if client.stdout.readline() != "\n":
        raise RuntimeError(f"the client ended with status {client.wait()}")


def _connection(kind: str, number: int) -> list[str]:
    """A row of the table."""
    with _client_and_server(kind, {}) as processes:
        pids = [process.pid for process in processes]
        _connect(processes[0], number)  # do what is done only once
        before = [_sleeps_of(pid) for pid in pids]
        with _system_calls(pids) as system_calls:
            _connect(processes[0], number)
        after = [_sleeps_of(pid) for pid in pids]
    slept = [late - early for early, late in zip(before, after, strict=True)]
    traced = None
    if shutil.which("strace") is not None:
        short, long = _strace_connections(kind, number), _strace_connections(kind, 3 * number)
        traced = [
            Counter({name: (more[name] - less[name]) / (2 * number) for name in more})
            for less, more in zip(short, long, strict=True)
        ]
    return [
        kind,
        _sides([count / number for count in system_calls] or None),
        _named(traced),
        _sides([sum(counts.values()) / number for counts in slept]),
        _sides([counts["rdmanet-engine"] / number for counts in slept]),
    ]


def _sleeps_of(pid: int) -> Counter[str]:
    """How often its threads have slept, by their names."""
    counts = Counter[str]()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (thread / "status").read_text(), re.MULTILINE)
        assert found
        counts[(thread / "comm").read_text().strip()] += int(found[1])
    return counts


def _strace_connections(kind: str, number: int) -> list[Counter[str]]:
    with tempfile.TemporaryDirectory() as directory:
        outputs = {side: Path(directory, side) for side in SIDES}
        prefixes = {side: ["strace", "-f", "-c", "-o", str(outputs[side])] for side in SIDES}
        with _client_and_server(kind, prefixes) as (client, _):
            _connect(client, number)
        return [_strace_summary(outputs[side].read_text()) for side in SIDES]


# --- runs under an observer ---------------------------------------------------------------------------


def _python_calls(variant: Variant, pinned: tuple[int, int], case: Case, api: str) -> list[float]:
    with Pair(variant, *pinned) as pair:
        for process in _processes(pair):
            process.call("profile")
        before = [process.call("usage")["python_calls"] for process in _processes(pair)]
        messages = pair.run(case, api)["messages"]
        after = [process.call("usage")["python_calls"] for process in _processes(pair)]
    return [(late - early) / messages for early, late in zip(before, after, strict=True)]


def _traced(variant: Variant, pinned: tuple[int, int], case: Case, api: str) -> list[Counter[str]] | None:
    if shutil.which("strace") is None:
        return None
    short, short_messages = _strace_run(variant, pinned, replace(case, seconds=0.05), api)
    long, long_messages = _strace_run(variant, pinned, case, api)
    messages = long_messages - short_messages
    if messages <= 0:  # on a busy machine none may arrive, since a tracer slows them down so much
        return None
    return [
        Counter({name: (after[name] - before[name]) / messages for name in after})
        for before, after in zip(short, long, strict=True)
    ]


def _strace_run(
    variant: Variant, pinned: tuple[int, int], case: Case, api: str
) -> tuple[list[Counter[str]], float]:
    with tempfile.TemporaryDirectory() as directory:
        outputs = {side: Path(directory, side) for side in SIDES}
        pair = Pair(variant, *pinned)
        prefixes = {side: ["strace", "-f", "-c", "-o", str(outputs[side])] for side in SIDES}
        pair.client = Process(variant, pinned[1], prefixes["client"])
        pair.server = Process(variant, pinned[0], prefixes["server"])
        try:
            messages = pair.run(case, api)["messages"]
        finally:
            pair.__exit__()
        return [_strace_summary(outputs[side].read_text()) for side in SIDES], messages


def _strace_summary(text: str) -> Counter[str]:
    """Calls by name; the columns are: % time, seconds, usecs/call, calls, [errors,] syscall."""
    counts = Counter[str]()
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 5 and re.fullmatch(r"[\d.]+", fields[0]) and fields[-1] != "total":
            counts[fields[-1]] += int(fields[3])
    return counts


if __name__ == "__main__":
    sys.exit(main())
