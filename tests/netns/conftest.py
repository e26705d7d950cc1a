"""Two hosts, as scripts/two_hosts.py makes them. Programs of the tests run on one or the other."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import Process
from tests.support.unfit import unfit

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import two_hosts  # noqa: E402


class Host(two_hosts.Host):
    """One of the two, and what was started on it."""

    def __init__(self, host: two_hosts.Host) -> None:
        super().__init__(host.pid, host.addresses)
        self.started: list[Process] = []

    def start(self, *arguments: object, **environment: str) -> Process:
        env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
        self.started.append(Process(*self.command(*arguments), keep_errors=True, env=env))
        return self.started[-1]

    def script(self, script: str, *arguments: object) -> list[str]:
        """The command for one of the scripts beside this file."""
        return [sys.executable, str(Path(__file__).parent / "peers" / script), *map(str, arguments)]

    def python(self, script: str, *arguments: object, **environment: str) -> Process:
        return self.start(*self.script(script, *arguments), **environment)

    def end(self) -> None:
        for process in self.started:
            process.close()
        self.started.clear()


@pytest.fixture(scope="session")
def network() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts.two_hosts() as (here, there):
            yield Host(here), Host(there)
    except two_hosts.NoNetwork as exc:
        unfit(str(exc))


@pytest.fixture
def hosts(network: tuple[Host, Host]) -> Iterator[tuple[Host, Host]]:
    yield network
    for host in network:
        host.end()


@pytest.fixture
def output() -> Callable[..., str]:
    """All that a program prints; it must end with status 0."""

    def read(process: Process) -> str:
        out = process.rest()
        process.finish()
        return out

    return read
