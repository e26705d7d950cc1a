"""Two engines in two containers, as far as a container is made of the kernel's parts: each has namespaces for network,
mounts, processes and IPC, a root directory with its own /dev and /sys, and a user of its own. Both have the same secret
in a file. scripts/two_hosts.py makes the network, and programs/container.sh the rest.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import two_hosts  # noqa: E402

PROGRAMS = ROOT / "tests/engines/programs"
APART = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
LIMIT_S = 120


@pytest.fixture
def hosts() -> Iterator[tuple[two_hosts.Host, two_hosts.Host]]:
    if os.geteuid() != 0:
        pytest.skip("only root can make a container whose user is another")
    try:
        with two_hosts.two_hosts() as both:
            mounts = subprocess.run(both[0].command(*APART, "mount", "-t", "tmpfs", "tmpfs", "/mnt"))
            if mounts.returncode:
                pytest.skip("nobody may mount here")
            yield both
    except two_hosts.NoNetwork as exc:
        pytest.skip(str(exc))


def command(host: two_hosts.Host, user: int, secret: Path, *arguments: str) -> list[str]:
    """A program of tests/engines/programs under soft-run, in a container."""
    engines = (ROOT / os.environ["RDMANET_TEST_ENGINES"]).parents[1]
    [packages] = engines.glob("lib/python3*/site-packages")
    python = f"{sys.base_prefix}/bin/python3"
    needed = Path(msgspec.__file__).parents[1]
    container = (PROGRAMS / "container.sh", user, sys.base_prefix, packages, needed, secret)
    program = (python, "/opt/rdmanet/tests/engines/programs/far.py")
    return host.command(*APART, *container, python, "-m", "rdmanet", "soft-run", "--", *program, *arguments)


def mooncake(hosts, folder: Path, *digits: str) -> subprocess.CompletedProcess[str]:
    """What the initiator says. The secrets of the two containers consist of these digits."""
    here, there = hosts
    secrets = []
    for digit, name in zip(digits, ("target's", "initiator's"), strict=True):
        secrets.append(folder / name)
        secrets[-1].write_text(digit * 64)
    serves = command(there, 61001, secrets[0], "mooncake", "serve", there.addresses[4])
    with subprocess.Popen(serves, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout.readline() == "ready\n"
            calls = command(
                here, 61002, secrets[1], "mooncake", "call", here.addresses[4], there.addresses[4]
            )
            return subprocess.run(calls, timeout=LIMIT_S, capture_output=True, text=True)
        finally:
            server.kill()


def test_mooncake(hosts, tmp_path):
    """A READ and a WRITE: all bytes go by TCP, and are compared."""
    done = mooncake(hosts, tmp_path, "a", "a")
    assert (done.returncode, done.stdout) == (0, "by TCP: 2097152 of 2097152 bytes\ndone\n"), done.stderr


def test_another_secret(hosts, tmp_path):
    """Nothing is transferred, and the log says why."""
    done = mooncake(hosts, tmp_path, "a", "b")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "says that its RDMANET_SOFT_SECRET differs from ours" in done.stderr
