"""run two processes that talk asyncio over RDMA: they send lines and a file, and compare RDMA with sockets

This process is the client. It starts the server (demo_server.py) as another process, and ends it whatever happens.
The lines and the file go over RDMA (on the embedded device where there is no other) through the public functions
and asyncio's own stream classes. workloads.py measures the table in the same run, for RDMA and for the sockets that
an asyncio program would use today. The exit status is 0 only if every answer and the file were right.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rdmanet.cli import interrupts
from rdmanet.cli.demo_server import sha256
from rdmanet.cli.fabrics import FABRICS, forget, loop_factory, pin
from rdmanet.cli.text import Progress, file_path, rate_text, size_text, table
from rdmanet.cli.workloads import Flooder, Pinger, percentile, round_trips_s, run_client

LINES = ["hello, queue pair", "one changed line, and this is RDMA", "good-bye"]
FILE_MIB = 64
CHUNK_BYTES = 256 * 1024
REPETITIONS = 3
RUN_S = 0.25
TIMEOUT_S = 120.0


class DemoError(Exception):
    """The demo failed; the text says how."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        type=file_path,
        metavar="FILE",
        help=f"the file to send (default: {FILE_MIB} MiB of generated data)",
    )
    parser.add_argument(
        "--loop",
        choices=["uvloop", "asyncio"],
        help="the event loop of both processes (default: uvloop if it is installed)",
    )


def run(args: argparse.Namespace) -> int:
    interrupts.hear_once(signal.SIG_IGN)  # cleaning up takes seconds at most
    try:
        factory, loop_name = loop_factory(args.loop)
        with tempfile.TemporaryDirectory(prefix="rdmanet-demo-") as directory:
            path = args.file or _make_file(Path(directory) / f"made-up-{FILE_MIB}MiB.bin")
            if not path.is_file():
                raise DemoError(f"{path} is not a file")
            with _server_process(directory, args.loop, path.stat().st_size) as (pid, server):
                cpu = pin(1)
                print(
                    f"server: process {pid}{_on(server['cpu'])}; client: process {os.getpid()}{_on(cpu)}; "
                    f"loop: {loop_name}"
                )
                interrupts.run(_client(server, path, loop_name), factory)
    except (Exception, asyncio.CancelledError) as exc:
        if _interrupted(exc):
            raise KeyboardInterrupt from exc
        if isinstance(exc, BrokenPipeError) or not isinstance(exc, (DemoError, ImportError, OSError)):
            raise
        print(f"demo: {exc or type(exc).__name__}", file=sys.stderr)
        return 1
    return 0


def _interrupted(exc: BaseException | None) -> bool:
    """Whether an error is a consequence of Ctrl-C, which cancels the runner's task."""
    while exc is not None:
        if isinstance(exc, (asyncio.CancelledError, KeyboardInterrupt)):
            return True
        exc = exc.__context__
    return False


def _on(cpu: int | None) -> str:
    return "" if cpu is None else f" on CPU {cpu}"


@contextlib.contextmanager
def _server_process(
    directory: str, loop: str | None, file_bytes: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Start the server and yield its pid and its addresses. It ends when its standard input is closed."""
    command = [sys.executable, "-m", "rdmanet.cli.demo_server", directory, loop or "", str(file_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        server: dict[str, Any] = {"fabrics": {}}
        try:
            announced = process.stdout.readline()
            if not announced:
                raise DemoError(
                    f"the server process ended with status {process.wait()} before it was listening"
                )
            server = json.loads(announced)
            yield process.pid, server
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
            # The server removes its sockets itself, unless it was killed.
            for listening in server["fabrics"].values():
                for address in listening.values():
                    forget(address)


async def _client(server: dict[str, Any], path: Path, loop_name: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await _echo_lines(server["lines"])
    await _send_file(server["file"], path)
    async with asyncio.timeout(TIMEOUT_S):
        await _compare(server["fabrics"], loop_name)


# --- lines --------------------------------------------------------------------------------------------


async def _echo_lines(address: list[Any]) -> None:
    import rdmanet

    reader, writer = await rdmanet.open_rdma_connection(*address)
    print(f"\nlines by open_rdma_connection() over device {writer.get_extra_info('rdma_device')}")
    for text in LINES:
        line = text.encode() + b"\n"
        writer.write(line)
        answer = await reader.readline()
        if answer != line:
            raise DemoError(f"sent {line!r}, but {answer!r} came back")
        print(f"  -> {text}\n  <- {answer.decode().rstrip()}")
    writer.close()
    await writer.wait_closed()


# --- a file -------------------------------------------------------------------------------------------


def _make_file(path: Path) -> Path:
    """The same bytes on every machine, so that the SHA-256 printed can be compared between them."""
    source = random.Random(FILE_MIB)
    with path.open("wb") as file:
        for _ in range(FILE_MIB):
            file.write(source.randbytes(1 << 20))
    return path


async def _send_file(address: list[Any], path: Path) -> None:
    import rdmanet

    # Before the transfer: computing it takes several times as long.
    ours = await asyncio.to_thread(sha256, path)
    reader, writer = await rdmanet.open_rdma_connection(*address)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        print(f"\nfile {path}, {size_text(size)}")
        progress = Progress(size)
        writer.write(json.dumps({"name": path.name, "size": size}).encode() + b"\n")
        sent = 0
        while chunk := file.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
            sent += len(chunk)
            progress.update(sent)
    writer.write(ours.encode() + b"\n")
    answer = await reader.readline()
    if not answer:
        raise DemoError("the server closed the connection before it had verified the file")
    theirs = json.loads(answer)
    writer.close()
    await writer.wait_closed()
    print(f"  sent      SHA-256 {ours}")
    print(f"  received  SHA-256 {theirs['sha256']}  in {theirs['path']}")
    print(
        f"  {rate_text(size / max(theirs['seconds'], 1e-9))} from file to file by StreamWriter and StreamReader, "
        "without the time for SHA-256"
    )
    if theirs["sha256"] != ours or theirs["size"] != size:
        raise DemoError("the received file differs from the one sent")
    print("  verified: both sides computed the same SHA-256")


# --- the table ----------------------------------------------------------------------------------------


async def _compare(addresses: dict[str, dict[str, list[Any]]], loop_name: str) -> None:
    print(
        f"\nround trip of 64 B, and throughput of 1 MiB writes: all on {loop_name}, "
        f"medians of {REPETITIONS} interleaved runs"
    )
    medians: dict[str, list[tuple[float, float, float]]] = {name: [] for name in addresses}
    for _ in range(REPETITIONS):
        for name, listening in addresses.items():
            fabric = FABRICS[name]()
            pinger = Pinger(64, RUN_S)
            await run_client(fabric.connect, pinger, listening["echo"])
            flood = await run_client(fabric.connect, Flooder(1 << 20, RUN_S), listening["sink"])
            times = round_trips_s(pinger)
            medians[name].append(
                (
                    percentile(times, 50) * 1e6,
                    percentile(times, 99) * 1e6,
                    flood.received / flood.seconds / 1e9,
                )
            )
    rows = [("", "p50 us", "p99 us", "rdmanet is", "GB/s", "rdmanet is")]
    ours = [statistics.median(column) for column in zip(*medians["rdmanet"], strict=True)]
    for name, samples in medians.items():
        p50, p99, gb_per_s = (statistics.median(column) for column in zip(*samples, strict=True))
        shorter = faster = ""
        if name != "rdmanet":
            shorter = _times(p50 / ours[0], "shorter", "longer")
            faster = _times(ours[2] / gb_per_s, "faster", "slower")
        label = FABRICS[name].name if name == "rdmanet" else f"asyncio {FABRICS[name].name}"
        rows.append((label, f"{p50:.2f}", f"{p99:.2f}", shorter, f"{gb_per_s:.2f}", faster))
    print(table(rows))


def _times(ratio: float, better: str, worse: str) -> str:
    return f"{ratio:.1f}x {better}" if ratio >= 1 else f"{1 / ratio:.1f}x {worse}"
