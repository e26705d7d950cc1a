"""`rdmanet run`: every loop of the program and of its children is switched, and nothing else is changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEERS = Path(__file__).parent / "peers"


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rdmanet", "run", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_every_loop_is_switched():
    done = run(PEERS / "every_loop.py", "first", "-m")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["['first', '-m']"] + ["rdma"] * 9 + ["['again']"] + ["rdma"] * 6


def test_a_module():
    done = run("-m", "timeit", "-n", "1", "-r", "1", "import asyncio; asyncio.new_event_loop().close()")
    assert done.returncode == 0 and "1 loop" in done.stdout, done.stderr


def test_a_program(tmp_path):
    script = tmp_path / "program"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {PEERS}/every_loop.py from-shell\n")
    script.chmod(0o755)
    done = run(script)
    assert done.stdout.splitlines() == ["['from-shell']"] + ["rdma"] * 6, done.stderr


def test_a_script_without_a_suffix(tmp_path):
    script = tmp_path / "script"
    script.write_text("import asyncio\nprint(type(asyncio.new_event_loop()).__name__)\n")
    assert run(script).stdout == "RdmaUnixSelectorEventLoop\n"


def test_the_peers_are_chosen_by_the_environment():
    assert "tcp" in run(PEERS / "every_loop.py", RDMANET_PEERS="!*").stdout


def test_its_status_is_the_programs():
    assert run("-c", "import sys; sys.exit(7)").returncode == 7


@pytest.mark.parametrize(
    ("words", "status"), [([], 2), (["-m"], 2), (["--no-such"], 2), (["no-such-program"], 127), (["/"], 126)]
)
def test_it_is_called_wrongly(words, status):
    done = run(*words)
    assert done.returncode == status and done.stderr.startswith("run: ") and not done.stdout


def test_help():
    done = run("--help")
    assert done.returncode == 0 and "usage: rdmanet run" in done.stdout


def test_another_sitecustomize_comes_first(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    code = "import asyncio, sys; print(type(asyncio.new_event_loop()).__name__, sys.modules['sitecustomize'].__file__)"
    done = run("-c", code, PYTHONPATH=f"{ROOT}:{tmp_path}")
    # The command itself is a Python of this environment, too.
    assert done.stdout.splitlines() == ["theirs"] * 2 + [
        f"RdmaUnixSelectorEventLoop {tmp_path}/sitecustomize.py"
    ]


def test_a_python_that_cannot_load_rdmanet_runs_its_program(tmp_path):
    """It has no msgspec, for example."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'msgspec' else find(name, *a)\n"
    )
    code = "import asyncio; print(type(asyncio.new_event_loop()).__name__)"
    done = run("-c", code, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert (done.stdout, done.stderr) == ("_UnixSelectorEventLoop\n", "")


def test_a_program_without_a_loop_imports_none():
    code = (
        "import sys; print([name for name in ('asyncio', 'uvloop', 'rdmanet._core') if name in sys.modules])"
    )
    assert run("-c", code).stdout == "[]\n"
