"""Transfer engines of the AI stack, unmodified, on the embedded device: each case is a program of two processes.

`make engines` runs these. The programs compare every byte. They also read the device's counters before and after,
since an engine that finds no device silently takes TCP or shared memory.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
LIMIT_S = 1500 if {"RDMANET_TEST_TRANSFERS", "RDMANET_TEST_KILLS"} & set(os.environ) else 300

ENGINES = ("nixl", "mooncake", "dlslime", "peercache")
NIXL = ("read_and_write", "notifications", "lists", "random_sizes", "kills")
MOONCAKE = ("read_and_write", "batches", "segments", "random_sizes", "kills")
DLSLIME = ("read_and_write", "batches", "write_with_imm", "send_and_recv", "random_sizes", "kills")
IBVERBS = ("read_and_write", "send_and_recv", "random_sizes")
PEERCACHE = ("read_and_write", "batches", "random_sizes", "kills")


def output(program: Path, *arguments: str, options: tuple[str, ...] = ()) -> str:
    """What a program prints that ends well. Of UCX' transports it has only those of RDMA: on one host UCX would also
    copy a part itself, by CMA.
    """
    python = ROOT / os.environ["RDMANET_TEST_ENGINES"]
    soft_run = [sys.executable, "-m", "rdmanet", "soft-run", *options, "--"]
    command = [*soft_run, str(python), str(program), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "UCX_TLS": "ib"}
    done = subprocess.run(command, env=environment, timeout=LIMIT_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return done.stdout


def run(program: str, *arguments: str) -> None:
    assert output(PROGRAMS / program, *arguments).rstrip().endswith("done")


@pytest.mark.parametrize("case", NIXL)
def test_nixl(case):
    run("nixl_pair.py", case)


@pytest.mark.parametrize("case", MOONCAKE)
def test_mooncake(case):
    run("mooncake_pair.py", case)


def test_mooncakes_metadata_server():
    """A READ and a WRITE."""
    run("mooncake_metadata.py")


def test_mooncakes_store():
    """Put by one process into another's memory, and got by both."""
    run("mooncake_store.py")


@pytest.mark.parametrize("operation", ["read", "write"])
def test_mooncakes_benchmark(operation):
    run("mooncake_bench.py", operation)


@pytest.mark.parametrize("case", DLSLIME)
def test_dlslime(case):
    run("dlslime_pair.py", case)


@pytest.mark.parametrize("case", IBVERBS)
def test_ibverbs(case):
    run("ibverbs_pair.py", case)


@pytest.mark.parametrize("case", PEERCACHE)
def test_peercache(case):
    run("peercache_pair.py", case)


@pytest.mark.parametrize(
    ("faults", "arguments", "failed"),
    [
        ("fail=read:3:RETRY_EXC_ERR", (), 1),
        ("loss=read:3:2", (), 0),
        ("link=down:8s:500ms", ("--seconds", "12"), 0),
        ("", ("--kill", "5"), 1),
    ],
)
def test_the_example_with_faults(faults, arguments, failed):
    out = output(ROOT / "examples/nixl_blocks.py", *arguments, options=("--faults", faults))
    assert re.search(rf"^\d+ blocks are right, .* {failed} READs failed$", out, re.MULTILINE)


@pytest.mark.parametrize("engine", ENGINES)
def test_from_a_wheel(installed, tmp_path, engine):
    """rdmanet is installed by pip, and started elsewhere."""
    rdmanet, python = (installed / "venv/bin" / name for name in ("rdmanet", "python"))
    program = installed / f"tests/engines/programs/{engine}_pair.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [rdmanet, "soft-run", "--", python, program, "read_and_write"],
        env=environment | {"UCX_TLS": "ib"},
        cwd=tmp_path,
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("done")


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_page_shows(engine):
    run("page.py", engine)
