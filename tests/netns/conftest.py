"""Two hosts: network namespaces joined by a pair of veth links, each with addresses of both families.

Programs of the tests run in one or the other. What is left of both hosts ends with the session: their
namespaces live as long as a process that was started for it.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOLD = "echo ready; exec cat"  # until its standard input ends


def _inside(pid: int) -> list[str]:
    """What makes a command run in the network of this process."""
    mine = os.readlink("/proc/self/ns/user") == os.readlink(f"/proc/{pid}/ns/user")
    return ["nsenter", f"--target={pid}", "--net", *([] if mine else ["--user", "--preserve-credentials"])]


@dataclass
class Host:
    """One of the two, and what was started on it."""

    pid: int
    addresses: dict[int, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def command(self, *arguments: object) -> list[str]:
        return [*_inside(self.pid), *map(str, arguments)]

    def start(self, *arguments: object, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command(*arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        )
        self.started.append(process)
        return process

    def python(self, script: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
        """One of the scripts beside this file."""
        return self.start(sys.executable, Path(__file__).parent / "peers" / script, *arguments, **environment)

    def ip(self, *arguments: str) -> None:
        subprocess.run(self.command("ip", *arguments), check=True)

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
        self.started.clear()


@pytest.fixture(scope="session")
def network() -> Iterator[tuple[Host, Host]]:
    holders: list[subprocess.Popen[str]] = []

    def hold(*enter: str) -> int:
        process = subprocess.Popen(
            [*enter, "sh", "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        holders.append(process)
        assert process.stdout
        if process.stdout.readline() != "ready\n":
            pytest.skip("no network namespace is to be had here")
        return process.pid

    try:
        if not all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip")):
            pytest.skip("it takes unshare, nsenter and ip to make a network")
        first = hold("unshare", *(["--net"] if os.geteuid() == 0 else ["--map-root-user", "--net"]))
        second = hold(*_inside(first), "unshare", "--net")
        here = Host(first, {4: "10.8.0.1", 6: "fd08::1"})
        there = Host(second, {4: "10.8.0.2", 6: "fd08::2"})
        here.ip("link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", str(second))
        for host in (here, there):
            host.ip("link", "set", "lo", "up")
            host.ip("link", "set", "wire", "up")
            host.ip("address", "add", f"{host.addresses[4]}/24", "dev", "wire")
            host.ip("address", "add", f"{host.addresses[6]}/64", "dev", "wire", "nodad")
        yield here, there
    finally:
        for process in holders:
            process.communicate()


@pytest.fixture
def hosts(network: tuple[Host, Host]) -> Iterator[tuple[Host, Host]]:
    yield network
    for host in network:
        host.end()


@pytest.fixture
def output() -> Callable[..., str]:
    """What a program says until it ends, which it must do well."""

    def read(process: subprocess.Popen[str], timeout: float = 30) -> str:
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == 0, err or out
        return out

    return read
