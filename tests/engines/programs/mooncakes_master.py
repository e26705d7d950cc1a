"""Mooncake's master, as its wheel has it: it knows which process has memory for the store. It is also a metadata
server, where engines find each other that do not use P2PHANDSHAKE.
"""

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import mooncake
import pair

PROGRAM = Path(mooncake.__file__).parent / "mooncake_master"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((pair.HOST, 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def master() -> Iterator[tuple[str, str]]:
    """Its address for the store, and its URL for metadata."""
    ports = rpc, metadata, metrics = free_port(), free_port(), free_port()
    options = [f"--rpc_address={pair.HOST}", f"--rpc_port={rpc}"]
    options += ["--enable_http_metadata_server=true", f"--http_metadata_server_host={pair.HOST}"]
    options += [f"--http_metadata_server_port={metadata}"]
    options += [f"--metrics_host={pair.HOST}", f"--metrics_port={metrics}"]
    with subprocess.Popen([PROGRAM, *options]) as process:
        try:
            pair.until(lambda: all(map(listens, ports)), "the master")
            yield f"{pair.HOST}:{rpc}", f"http://{pair.HOST}:{metadata}/metadata"
        finally:
            process.terminate()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((pair.HOST, port)) == 0
