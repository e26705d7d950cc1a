"""A variable that is misspelt is told of, once a process; none that there is."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rdmanet._core import is_in_environment
from rdmanet.base import environment

ROOT = Path(__file__).parents[2]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bRDMANET_[A-Z][A-Z_]*[A-Z]\b", text))


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("RDMANET_REQIRE", "RDMANET_REQUIRE"),
        ("RDMANET_DEVCIE", "RDMANET_DEVICE"),
        ("RDMANET_SFOT_SECRET", "RDMANET_SOFT_SECRET"),
        ("RDMANET_SECRET_FILE", "RDMANET_SOFT_SECRET_FILE"),
        ("RDMANET_0123456789", ""),
    ],
)
def test_the_nearest_is_named(wrong, meant):
    assert environment.unknown(["PATH", "RDMANET_DEVICE", wrong]) == {wrong: meant}


def test_every_variable_that_there_is():
    """Those of the manual, of the device, of the build and of the tests."""
    settings = (ROOT / "rdmanet/soft/base/settings.c").read_text()
    devices = {environment.DEVICE + name for name in re.findall(r'\{\.name = "(\w+)"', settings)}
    known = {name for name in environment.EFFECTS if name.startswith(environment.DEVICE)}
    assert devices - {"RDMANET_SOFT_WITHOUT"} == known
    page = (ROOT / "docs/environment.md").read_text()
    assert set(re.findall(r"^\| `(RDMANET_\w+)=", page, re.MULTILINE)) == set(environment.EFFECTS)
    read = set()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("scripts/*"), *ROOT.glob("benchmarks/*"), ROOT / "Makefile"]:
        if path.is_file():
            read |= names_in(path.read_text())
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "rdmanet").glob("*.py")]:
        if path != Path(__file__):
            text = path.read_text()
            read |= set(re.findall(r"""(?:environ\S*|getenv\(|env\(|env=\{)\s*["'](RDMANET_\w+)["']""", text))
    assert {"RDMANET_KERNEL", "RDMANET_DEBUG", "RDMANET_TEST_HOST", "RDMANET_DEVICE"} <= read
    assert environment.unknown(read) == {}


def test_it_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(environment, "_is_told", False)
    monkeypatch.setenv("RDMANET_REQIRE", "very secret")
    with caplog.at_level(logging.WARNING, "rdmanet"):
        environment.tell_unknown()
        environment.tell_unknown()
    [told] = [record.getMessage() for record in caplog.records]
    assert told == "unknown environment variable RDMANET_REQIRE has no effect; did you mean RDMANET_REQUIRE?"


@pytest.mark.parametrize(
    "arguments", [["-c", "import rdmanet; rdmanet.devices()"], ["-m", "rdmanet", "soft-run", "--", "true"]]
)
def test_whoever_looks_for_devices_is_told(arguments):
    """By whatever way: a program, and a C program's start."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RDMANET_REQIRE": "rdma"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert done.stderr.count("RDMANET_REQIRE") == 1 and "did you mean RDMANET_REQUIRE?" in done.stderr


def test_whether_a_variable_is_set_is_asked_without_python(monkeypatch):
    monkeypatch.delenv("RDMANET_DEVICE", raising=False)
    assert not is_in_environment(b"RDMANET_DEVICE")
    monkeypatch.setenv("RDMANET_DEVICE", "")
    assert is_in_environment(b"RDMANET_DEVICE")
    monkeypatch.delenv("RDMANET_DEVICE")
    assert not is_in_environment(b"RDMANET_DEVICE")
