"""Two hosts, as scripts/two_hosts.py makes them. Programs of the tests run on one or the other."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import two_hosts  # noqa: E402


class Host(two_hosts.Host):
    """One of the two, and what was started on it."""

    def __init__(self, host: two_hosts.Host) -> None:
        super().__init__(host.pid, host.addresses)
        self.started: list[subprocess.Popen[str]] = []

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

    def script(self, script: str, *arguments: object) -> list[str]:
        """The command for one of the scripts beside this file."""
        return [sys.executable, str(Path(__file__).parent / "peers" / script), *map(str, arguments)]

    def python(self, script: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
        return self.start(*self.script(script, *arguments), **environment)

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
        self.started.clear()


@pytest.fixture(scope="session")
def network() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts.two_hosts() as (here, there):
            yield Host(here), Host(there)
    except two_hosts.NoNetwork as exc:
        pytest.skip(str(exc))


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
