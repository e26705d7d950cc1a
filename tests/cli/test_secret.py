"""The command that makes a secret, and the device that takes it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def run(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "rdmanet", *map(str, arguments)],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout, done.stderr


def test_prints_a_fresh_one():
    said = [run("secret") for _ in range(2)]
    assert all(re.fullmatch(r"[0-9a-f]{64}\n", out) and (status, err) == (0, "") for status, out, err in said)
    assert said[0] != said[1]
    assert run("devices", RDMANET_SOFT_SECRET=said[0][1].strip())[0] == 0


def test_writes_a_file_for_this_user_only(tmp_path):
    file = tmp_path / "secret"
    before = os.umask(0)
    try:
        assert run("secret", file) == (0, "", "")
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
    assert re.fullmatch(r"[0-9a-f]{64}\n", file.read_text())
    status, out, _ = run("devices", RDMANET_SOFT_SECRET_FILE=str(file))
    assert status == 0 and "cannot be opened" not in out
    file.chmod(0o644)
    _, out, _ = run("devices", RDMANET_SOFT_SECRET_FILE=str(file))
    assert (
        f"soft0 cannot be opened: [Errno 22] ibv_open_device(soft0): RDMANET_SOFT_SECRET_FILE={file}: " in out
    )
    assert "its mode is 644, which gives others access: chmod 600" in out


def test_never_writes_over_anything(tmp_path):
    file = tmp_path / "secret"
    file.write_text("an old one")
    (tmp_path / "link").symlink_to("nothing")
    for name in ("secret", "link"):
        assert run("secret", tmp_path / name) == (
            1,
            "",
            f"secret: {tmp_path / name} already exists, and was not changed\n",
        )
    assert file.read_text() == "an old one"
    assert not (tmp_path / "nothing").exists()
    assert run("secret", tmp_path / "no/where")[::2] == (
        1,
        f"secret: {tmp_path}/no/where: No such file or directory\n",
    )


@pytest.mark.parametrize("secret", ["", "open sesame", "0" * 63])
def test_the_exception_says_what_is_wrong_and_not_the_secret(secret):
    """The same by both ways to open the device."""
    code = """
import asyncio, rdmanet
from rdmanet import _core

def by_verbs():
    _core.Library.embedded().devices()[0].open()

def by_streams():
    asyncio.run(rdmanet.open_rdma_connection("127.0.0.1", 1))

for way in by_verbs, by_streams:
    try:
        way()
    except OSError as exc:
        print(exc.errno, exc)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=ENVIRONMENT | {"RDMANET_SOFT_SECRET": secret},
        capture_output=True,
        text=True,
        timeout=100,
    )
    by_verbs, by_streams = done.stdout.splitlines()
    why = f"RDMANET_SOFT_SECRET: it has {len(secret)} characters; a secret is 64 hexadecimal digits"
    assert by_verbs.startswith(f"22 [Errno 22] ibv_open_device(soft0): {why}")
    assert by_streams.startswith(f"22 [Errno 22] rdma_create_event_channel: {why}")
    assert not secret or secret not in done.stdout + done.stderr
