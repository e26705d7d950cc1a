#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that this tree and an older commit, each installed from its wheel on one host, understand or refuse each other.

usage: scripts/two_releases.py [COMMIT ...]

COMMIT is by default the last release or, as long as there is none, two commits: the last that changed a version, so the
first that speaks those of this tree, and one whose device speaks another. This tree serves, the other is its client,
and the other way round: by streams, calls, tensors, the event loop, and verbs, whose queue pairs are connected by the
connection manager or by hand and then share memory. What must happen follows from the versions in both sources, as
docs/developers/releasing.md says. If they are equal, the client is served. If not, the event loop takes TCP, and
everything else ends with an error. This tree says both versions: as the client in its error, its log or its
`fabric_reason`, as the server in its log, except on the event loop. What an older commit does not have yet is
skipped.

    exit status   0: so it is; 1: it is not, or a wheel cannot be built
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OF_ANOTHER_DEVICE = "4bb08e85"
PATIENCE_S = 60

VERSIONS = {
    "the device's protocol": ("rdmanet/soft/base/version.h", r"define RN_WIRE_VERSION (\d+)"),
    "the streams' protocol": ("rdmanet/credit.py", r"^VERSION.* = (\d+)"),
    "the protocol of rdmanet.rpc": ("rdmanet/rpc/messages.py", r"^VERSION.* = (\d+)"),
    "the tensors' protocol": ("rdmanet/tensors/messages.py", r"^VERSION.* = (\d+)"),
    "the doors' protocol": ("rdmanet/loop/doors.py", r"^(?:VERSION = |_GREETING = b\"rdmanet-stream )(\d+)"),
}
A_VERSION = "^(#define RN_WIRE_VERSION|VERSION|_GREETING)"  # a line of VERSIONS, for git

ON_THE_LOOP = """
import asyncio, sys, rdmanet

async def echo(reader, writer):
    writer.write(await reader.readline())
    writer.close()

async def serve():
    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        print("listening on", *server.sockets[0].getsockname(), flush=True)
        await server.serve_forever()

async def call(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"hello\\n")
    print((await reader.readline()).decode(), *map(writer.get_extra_info, ("fabric", "fabric_reason")))
    writer.close()

rdmanet.run(call(int(sys.argv[1])) if sys.argv[1:] else serve())
"""

TENSORS = """
import asyncio, sys
from rdmanet import tensors

async def serve():
    async with tensors.open() as owner, owner.register(bytearray(b"hello")) as memory:
        print("listening on", owner.address().hex() + "_" + memory.describe().hex(), flush=True)
        await asyncio.Event().wait()

async def call(address, descriptor):
    async with tensors.open() as endpoint:
        into = bytearray(5)
        await (await endpoint.connect(address)).read(descriptor, into)
        print("read", into.decode())

asyncio.run(call(*map(bytes.fromhex, sys.argv[1].split("_"))) if sys.argv[1:] else serve())
"""


@dataclass(frozen=True)
class Kind:
    """A server and its client: arguments of each release's own Python, the client's before where the server listens."""

    name: str
    server: tuple[str, ...]
    client: tuple[str, ...]
    protocols: tuple[str, ...]
    served: str  # what the client prints if all is well
    refused: str  # and among what it says if it is refused: on the event loop it is served all the same


DEVICE, STREAMS, RPC, TENSOR, DOORS = VERSIONS
ECHO = ("examples/echo_server.py", "--streams", "127.0.0.1", "0"), ("examples/echo_client.py", "127.0.0.1")
CALL = ("examples/rpc.py", "serve", "127.0.0.1", "0"), ("examples/rpc.py", "call", "127.0.0.1")
LOOP = ("-P", "-c", ON_THE_LOOP), ("-P", "-c", ON_THE_LOOP)
READ = ("-P", "-c", TENSORS), ("-P", "-c", TENSORS)
CM = ("examples/rping.py", "-s", "-p", "0"), ("examples/rping.py", "-c", "-a", "127.0.0.1", "-p")
BY_HAND = ("examples/rc_pingpong.py", "-p", "0"), ("examples/rc_pingpong.py", "127.0.0.1", "-p")
KINDS = [
    Kind("stream", *ECHO, (DEVICE, STREAMS), "hello\n", ""),
    Kind("rpc", *CALL, (DEVICE, STREAMS, RPC), "counted [0, 1, 2, 3, 4]\n", ""),
    Kind("tensors", *READ, (DEVICE, STREAMS, TENSOR), "read hello\n", ""),
    Kind("verbs by the connection manager", *CM, (DEVICE,), "", ""),
    Kind("verbs by hand", *BY_HAND, (DEVICE,), "1000 iters in ", ""),
    Kind("loop", *LOOP, (DOORS, DEVICE, STREAMS), "hello\n rdma ", "hello\n tcp "),
]


@dataclass(frozen=True)
class Release:
    name: str
    tree: Path
    python: Path
    versions: dict[str, int]


class Wrong(Exception):
    """Two releases do something else than the page says."""


def install(name: str, tree: Path, folder: Path) -> Release:
    """The wheel of a tree, in an environment of its own, with nothing else but what it needs."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    locked = ["--only-binary", ":all:", "--require-hashes", "--constraint", "requirements/constraints.txt"]
    python = folder / "bin/python"
    for command in (
        [*pip, "wheel", "--no-deps", "--build-constraint", "requirements/constraints.txt"]
        + ["--wheel-dir", str(folder), "."],
        [sys.executable, "-m", "venv", "--without-pip", str(folder)],
        [*pip, "--python", str(python), "install", *locked, "msgspec"],
        [*pip, "--python", str(python), "install", "--no-index", "--find-links", str(folder), "rdmanet"],
    ):
        subprocess.run(command, cwd=tree, env=environment(), check=True)
    versions = {}
    for protocol, (file, pattern) in VERSIONS.items():
        if (tree / file).exists():
            found = re.search(pattern, (tree / file).read_text(), re.MULTILINE)
            assert found, f"{name} has no version in {file}"
            versions[protocol] = int(found[1])
    return Release(name, tree, python, versions)


@contextlib.contextmanager
def serving(release: Release, kind: Kind, log: Path) -> Iterator[str]:
    """Where a server listens, which writes its log there: the last word that it says."""
    command = [str(release.python), *kind.server]
    with log.open("w") as errors:
        server = subprocess.Popen(
            command, cwd=release.tree, text=True, stdout=subprocess.PIPE, stderr=errors, env=environment()
        )
    with server:
        try:
            assert server.stdout
            line = server.stdout.readline()
            while line.startswith("  local address"):  # of examples/rc_pingpong.py
                line = server.stdout.readline()
            where = re.search(r"listening on .*?(\w+)\)?\n", line)
            if not where:
                raise Wrong(f"the server of {release.name} says {line!r}\n{log.read_text()}")
            yield where[1]
        finally:
            server.kill()


def environment() -> dict[str, str]:
    """Without the tree: each release imports itself."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def check(kind: Kind, server: Release, client: Release, folder: Path) -> str:
    """What happened, if it is what must happen."""
    differing = [name for name in kind.protocols if server.versions[name] != client.versions[name]]
    log = folder / "log"
    with serving(server, kind, log) as where:
        done = subprocess.run(
            [str(client.python), *kind.client, where],
            cwd=client.tree,
            env=environment(),
            text=True,
            timeout=PATIENCE_S,
            input="hello\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    said = f"{done.stdout}the client's exit status: {done.returncode}\nthe server's log:\n{log.read_text()}"
    if not differing:
        if done.returncode or kind.served not in done.stdout:
            raise Wrong(f"they speak the same protocols, and the client was not served\n{said}")
        return "served"
    numbers = [release.versions[differing[0]] for release in (server, client)]
    if kind.refused not in done.stdout or bool(done.returncode) is bool(kind.refused):
        raise Wrong(
            f"versions {numbers} of {differing[0]}, and the client was not refused as it must be\n{said}"
        )
    if client.tree == ROOT and not names(done.stdout, *numbers):
        raise Wrong(
            f"the client does not say that the server speaks version {numbers[0]}, itself {numbers[1]}\n{said}"
        )
    if server.tree == ROOT and not kind.refused and not names(log.read_text(), *reversed(numbers)):
        raise Wrong(
            f"the log does not say that the client speaks version {numbers[1]}, itself {numbers[0]}\n{said}"
        )
    return f"refused: {done.stdout.splitlines()[-1].strip()}"


def names(text: str, theirs: int, ours: int) -> bool:
    return bool(re.search(rf"version {theirs}\b.* version {ours}\b", text))


def commits_to_meet() -> list[str]:
    return git("tag", "--merged", "HEAD~", "--sort", "-version:refname", "v*")[:1] or [
        *git("log", "-1", "--format=%h", "-G", A_VERSION, "--", *(file for file, _ in VERSIONS.values())),
        OF_ANOTHER_DEVICE,
    ]


def git(*arguments: str) -> list[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, text=True, check=True, stdout=subprocess.PIPE).stdout.split()


def released(commit: str, folder: Path) -> Release:
    tree = folder / "tree"
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "--extract", "--directory", str(tree)], input=archive.stdout, check=True)
    return install(commit, tree, folder / "wheel")


def main(commits: list[str]) -> None:
    passed = failed = skipped = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        this = install("this tree", ROOT, folder / "this")
        print(f"{this.name}: {this.versions}")
        for commit in commits:
            other = released(commit, folder / commit)
            print(f"{other.name}: {other.versions}", flush=True)
            for server, client in ((this, other), (other, this)):
                for kind in KINDS:
                    if any(protocol not in other.versions for protocol in kind.protocols):
                        skipped += 1
                        answer = f"skipped: {other.name} does not have it"
                    else:
                        try:
                            answer = check(kind, server, client, folder)
                            passed += 1
                        except (Wrong, subprocess.TimeoutExpired) as error:
                            failed += 1
                            answer = f"WRONG: {error}"
                    print(
                        f"{kind.name}, the client of {client.name} at the server of {server.name}: {answer}",
                        flush=True,
                    )
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main(sys.argv[1:] or commits_to_meet())
