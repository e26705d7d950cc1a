"""Engines in containers, as far as a container is made of the kernel's parts: each has namespaces for network, mounts,
processes and IPC, a root directory with its own /dev and /sys, and a user of its own. scripts/two_hosts.py makes the
network, and programs/container.sh the rest.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import two_hosts  # noqa: E402

from tests.support.unfit import unfit  # noqa: E402

PROGRAMS = ROOT / "tests/engines/programs"
INSIDE = "/opt/rdmanet/tests/engines/programs"
APART = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
LIMIT_S = 120


def need_mounts() -> None:
    if subprocess.run([*APART, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).returncode:
        unfit("nobody may mount here")


@pytest.fixture
def hosts() -> Iterator[tuple[two_hosts.Host, two_hosts.Host]]:
    if os.geteuid() != 0:
        unfit("only root can make a container whose user is another")
    try:
        with two_hosts.two_hosts() as both:
            need_mounts()
            yield both
    except two_hosts.NoNetwork as exc:
        unfit(str(exc))


def contained(user: int, secret: Path | str, programs: Path = PROGRAMS) -> list[Any]:
    """What runs the Python program that follows under soft-run, in a container made by APART."""
    engines = (ROOT / os.environ["RDMANET_TEST_ENGINES"]).parents[1]
    [packages] = engines.glob("lib/python3*/site-packages")
    python = f"{sys.base_prefix}/bin/python3"
    needed = Path(msgspec.__file__).parents[1]
    container = (programs / "container.sh", user, sys.base_prefix, packages, needed, secret)
    return [*map(str, container), python, "-m", "rdmanet", "soft-run", "--", python]


def command(host: two_hosts.Host, user: int, secret: Path | str, *arguments: str) -> list[str]:
    """A program of tests/engines/programs under soft-run, in a container."""
    return host.command(*APART, *contained(user, secret), f"{INSIDE}/far.py", *arguments)


def run_as_another(engine: str, programs: Path = PROGRAMS) -> None:
    """Both processes run in one container, which has the host's network."""
    command = [*APART, *contained(61001, "", programs), f"{INSIDE}/{engine}_pair.py", "read_and_write"]
    done = subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("done")


@pytest.mark.parametrize("engine", ["nixl", "mooncake", "dlslime", "peercache"])
def test_a_user_who_is_not_root(engine):
    if os.geteuid() != 0:
        pytest.skip("all of engine_cases.py is run by a user who is not root")
    need_mounts()
    run_as_another(engine)


def test_a_wheel_and_a_user_who_is_not_root(installed):
    if os.geteuid() != 0:
        pytest.skip("test_from_a_wheel is run by a user who is not root")
    need_mounts()
    run_as_another("mooncake", installed / "tests/engines/programs")


def transfer(hosts, engine: str, *secrets: Path | str) -> subprocess.CompletedProcess[str]:
    """What the initiator says."""
    here, there = hosts
    serves = command(there, 61001, secrets[0], engine, "serve", there.addresses[4])
    with subprocess.Popen(serves, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout.readline() == "ready\n"
            calls = command(here, 61002, secrets[1], engine, "call", here.addresses[4], there.addresses[4])
            return subprocess.run(calls, timeout=LIMIT_S, capture_output=True, text=True)
        finally:
            server.kill()


@pytest.fixture
def secrets(tmp_path) -> list[Path]:
    files = [tmp_path / digit for digit in "ab"]
    for file in files:
        file.write_text(file.name * 64)
    return files


@pytest.mark.parametrize("engine", ["mooncake", "dlslime", "peercache"])
def test_two_containers(hosts, secrets, engine):
    """A READ and a WRITE: all bytes go by TCP, and are compared."""
    done = transfer(hosts, engine, secrets[0], secrets[0])
    assert (done.returncode, done.stdout) == (0, "by TCP: 2097152 of 2097152 bytes\ndone\n"), done.stderr


def test_nixl(hosts):
    """The same. Without a secret: UCX connects by datagrams, which carry no proof of one."""
    done = transfer(hosts, "nixl", "", "")
    assert done.returncode == 0, done.stderr
    assert int(re.findall(r"by TCP: (\d+)", done.stdout)[0]) >= 2 << 20


def test_another_secret(hosts, secrets):
    """Nothing is transferred, and the log says why."""
    done = transfer(hosts, "mooncake", *secrets)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("I")]
    # Whichever of the two speaks first.
    assert any("rdmanet soft0" in line and "secret" in line.lower() for line in lines), "\n".join(lines)
