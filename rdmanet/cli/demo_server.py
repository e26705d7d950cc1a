"""The demo's server process: it echoes lines, receives a file, and serves the traffic that is measured.

usage: python -m rdmanet.cli.demo_server DIRECTORY LOOP FILE_BYTES

It prints its addresses as one line of JSON, and ends at the end of its standard input, which comes however the
process that started it ends. It listens on loopback, where other users of this host can reach it: they get their
lines echoed, but cannot fill the disk.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rdmanet.cli.fabrics import FABRICS, HOST, forget, loop_factory, pin
from rdmanet.cli.workloads import BufferedSink, Echo

CHUNK_BYTES = 1 << 20


async def serve(directory: Path, file_bytes: int, cpu: int | None) -> None:
    import rdmanet

    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)

    servers: list[Any] = []
    lines = await rdmanet.start_rdma_stream_server(echo_lines, HOST, 0)
    file = await rdmanet.start_rdma_stream_server(
        partial(receive_file, directory, file_bytes), HOST, 0, limit=CHUNK_BYTES
    )
    servers += [lines, file]
    measured: dict[str, dict[str, Any]] = {}
    for name, fabric in FABRICS.items():
        measured[name] = {}
        for role, factory in (("echo", Echo), ("sink", BufferedSink)):
            server, measured[name][role] = await fabric().listen(factory)
            servers.append(server)
    announcement = {
        "cpu": cpu,
        "lines": lines.sockets[0].getsockname()[:2],
        "file": file.sockets[0].getsockname()[:2],
        "fabrics": measured,
    }
    print(json.dumps(announcement), flush=True)

    await over.wait()
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    for server in servers:
        server.close()
    for listening in measured.values():
        for address in listening.values():
            forget(address)


async def echo_lines(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with ending(writer):
        while line := await reader.readline():
            writer.write(line)
            await writer.drain()
        writer.close()
        await writer.wait_closed()


@contextlib.contextmanager
def ending(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Close the writer at the end. Report every error except that the peer has gone."""
    try:
        yield
    except ConnectionError:
        pass
    except (EOFError, LookupError, OSError, TypeError, ValueError) as exc:
        print(f"server: {exc or type(exc).__name__}", file=sys.stderr)
    finally:
        writer.close()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def receive_file(
    directory: Path, file_bytes: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Receive a line of JSON (name, size), the bytes and the sender's SHA-256; answer with what arrived, and when."""
    with ending(writer):
        await take_file(directory, file_bytes, reader, writer)


async def take_file(
    directory: Path, file_bytes: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    header = json.loads(await reader.readline())
    if header["size"] != file_bytes:
        raise ValueError(f"refused a file of {header['size']!r:.20} bytes: the demo sends {file_bytes}")
    path = directory / ("received-" + os.path.basename(header["name"]))
    left = header["size"]
    begin_s = time.perf_counter()
    with path.open("xb") as file:
        while left:
            chunk = await reader.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise EOFError(f"the stream ended {left} bytes early")
            file.write(chunk)
            left -= len(chunk)
    seconds = time.perf_counter() - begin_s
    # After the transfer, which is several times as fast.
    ours, theirs = await asyncio.to_thread(sha256, path), (await reader.readline()).decode().rstrip()
    if ours != theirs:
        print(f"server: {path} has SHA-256 {ours}, but the sender computed {theirs}", file=sys.stderr)
    answer = {"path": str(path), "size": path.stat().st_size, "sha256": ours, "seconds": seconds}
    writer.write(json.dumps(answer).encode() + b"\n")
    writer.close()
    await writer.wait_closed()


def main() -> int:
    # Ctrl-C reaches the whole foreground group; this process ends when the one that started it does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    directory, loop, file_bytes = sys.argv[1:4]
    factory, _ = loop_factory(loop or None)
    cpu = pin(0)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(Path(directory), int(file_bytes), cpu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
