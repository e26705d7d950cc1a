"""Two engines in two containers, as far as a container is made of the kernel's parts: each has namespaces for network,
mounts, processes and IPC, a root directory with its own /dev and /sys, and a user of its own.
scripts/two_hosts.py makes the network, and programs/container.sh the rest.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import two_hosts  # noqa: E402

from tests.support.unfit import unfit  # noqa: E402

PROGRAMS = ROOT / "tests/engines/programs"
APART = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
LIMIT_S = 120


@pytest.fixture
def hosts() -> Iterator[tuple[two_hosts.Host, two_hosts.Host]]:
    if os.geteuid() != 0:
        unfit("only root can make a container whose user is another")
    try:
        with two_hosts.two_hosts() as both:
            mounts = subprocess.run(both[0].command(*APART, "mount", "-t", "tmpfs", "tmpfs", "/mnt"))
            if mounts.returncode:
                unfit("nobody may mount here")
            yield both
    except two_hosts.NoNetwork as exc:
        unfit(str(exc))


def command(host: two_hosts.Host, user: int, secret: Path | str, *arguments: str) -> list[str]:
    """A program of tests/engines/programs under soft-run, in a container."""
    engines = (ROOT / os.environ["RDMANET_TEST_ENGINES"]).parents[1]
    [packages] = engines.glob("lib/python3*/site-packages")
    python = f"{sys.base_prefix}/bin/python3"
    needed = Path(msgspec.__file__).parents[1]
    container = (PROGRAMS / "container.sh", user, sys.base_prefix, packages, needed, secret)
    program = (python, "/opt/rdmanet/tests/engines/programs/far.py")
    return host.command(*APART, *container, python, "-m", "rdmanet", "soft-run", "--", *program, *arguments)


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


def test_mooncake(hosts, secrets):
    """A READ and a WRITE: all bytes go by TCP, and are compared."""
    done = transfer(hosts, "mooncake", secrets[0], secrets[0])
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
