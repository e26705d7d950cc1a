"""The commands as their user types them: processes, exit statuses, what they print and leave behind."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rdmanet
from tests.support.processes import Process

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "rdmanet", *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        **{"env": ENVIRONMENT, "stdout": subprocess.PIPE} | options,
    )


def spoken(*arguments, **environment):
    """A command whose lines are read as they come."""
    command = [sys.executable, "-m", "rdmanet", *arguments]
    return Process(*command, keep_errors=True, env=ENVIRONMENT | environment)


def run(*arguments, **options):
    with start(*arguments, **options) as process:
        out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def one_line(err):
    """The error message, which must be one line without a traceback."""
    assert err.count("\n") == 1 and err.endswith("\n") and "Traceback" not in err, err
    return err.rstrip()


def test_its_name_and_its_version():
    assert run("--version") == (0, f"rdmanet {rdmanet.__version__}\n", "")
    for arguments in (["--help"], ["devices", "--help"], ["soft-run", "--help"]):
        assert run(*arguments)[1].startswith("usage: rdmanet ")
    assert run("nonsense")[2].startswith("usage: rdmanet ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trace", "none", "--pid", "7", "/none"], "none"),
        (["proxy", "no:such", "--loop", "asyncio", "to"], "argument LISTEN TO"),
        (["perf", "x_lat", "--json", "write_lat"], "there is no test 'x_lat'"),
        (["run", "--help", "not", "for", "us"], ""),
        (["run", "none", "--json", "not", "ours"], "none"),
    ],
)
def test_words_before_and_after_options(words, says):
    status, out, err = run(*words)
    assert "unrecognized arguments" not in err and says in err
    assert status != 0 or out.startswith("usage: rdmanet run ")


def test_without_a_command_it_lists_them():
    status, out, err = run()
    assert (status, out) == (2, "")
    assert "doctor" in err and "soft-run" in err


def test_a_command_does_not_wait_for_the_others():
    """What they import takes longer than `rdmanet ss` may take in all."""
    program = (
        "import sys; from rdmanet.cli.command_line import COMMANDS, main; main(['ss', '--pid', '0']); "
        "print(*({name.replace('-', '_') for name in COMMANDS} & {each[12:] for each in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("ss", "")


def test_a_clone_that_is_not_built(tmp_path):
    """The command and the package say what to do."""
    shutil.copytree(
        ROOT / "rdmanet", tmp_path / "rdmanet", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    there = {"env": ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}, "cwd": tmp_path}
    hint = "rdmanet is not built: run `make build` in its folder, or `pip install .`"
    assert run("devices", **there) == (1, "", f"{hint}\n")
    done = subprocess.run(
        [sys.executable, "-c", "import rdmanet; print(rdmanet.__version__); rdmanet.open_rdma_connection"],
        capture_output=True, text=True, check=False, **there,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, f"{rdmanet.__version__}\n")
    assert hint in done.stderr.splitlines()[-1]


def test_devices_shows_the_embedded_one():
    status, out, _ = run("devices", "--json")
    assert status == 0
    [embedded] = [d for d in json.loads(out)["devices"] if d["library"] == "embedded"]
    [port] = embedded["ports"]
    assert port["state"] == "ACTIVE"
    assert "127.0.0.1" in [gid["address"] for gid in port["gids"]]
    status, table, _ = run("devices")
    assert status == 0
    assert embedded["name"] in table


def test_devices_without_any_library_says_so(tmp_path):
    missing = ENVIRONMENT | {"RDMANET_SOFT_LIBRARY": str(tmp_path / "none.so")}
    status, out, _ = run("devices", env=missing)
    assert "embedded is not available" in out
    assert status in (0, 1)  # 0 where the kernel has a device


@pytest.mark.quick_on("uvloop")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_demo_verifies_and_measures(loop, tmp_path):
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    file = tmp_path / "some file"
    file.write_bytes(os.urandom(3_000_001))
    status, out, err = run("demo", "--loop", loop, file, env=ENVIRONMENT | {"TMPDIR": str(tmp_path)})
    assert (status, err) == (0, "")
    digests = re.findall(r"SHA-256 ([0-9a-f]{64})", out)
    assert len(digests) == 2 and len(set(digests)) == 1
    assert {"rdmanet", "asyncio"} <= {line.split()[0] for line in out.splitlines() if line.strip()}
    assert list(tmp_path.iterdir()) == [file], "the demo left something behind"


def test_demo_of_a_file_that_is_not_there():
    status, _, err = run("demo", "/nonexistent")
    assert status == 1
    assert "/nonexistent" in one_line(err)


def test_demo_by_a_loop_that_is_not_there(tmp_path):
    (tmp_path / "uvloop.py").write_text("raise ImportError('hidden by a test')\n")
    status, out, err = run(
        "demo",
        "--loop",
        "uvloop",
        env=ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}"},
    )
    assert (status, out) == (1, "")
    assert one_line(err).startswith("demo: uvloop cannot be imported (hidden by a test): pip install")


def test_a_port_that_is_taken():
    """Also where the other family's is free."""
    with spoken("doctor", "--serve", 0) as server:
        port = re.search(r"0\.0\.0\.0:(\d+)", server.line())[1]
        status, out, err = run("doctor", "--serve", port)
    assert (status, out) == (1, "")
    assert re.match(rf"doctor: .*{port}.*Address already in use.*--serve", one_line(err))


@pytest.mark.parametrize(
    "arguments",
    [["devices"], ["devices", "--json"], ["gids"], ["doctor"], ["secret"], ["demo"]],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "unbuffered",
    [pytest.param("", id="buffered"), pytest.param("1", id="unbuffered", marks=pytest.mark.long)],
)
def test_a_reader_who_has_seen_enough(arguments, unbuffered, tmp_path):
    """`... | head`: the exit status is that of SIGPIPE, and nothing is said."""
    environment = ENVIRONMENT | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": unbuffered}
    with start(*arguments, env=environment) as process:
        process.stdout.close()
        err = process.stderr.read()
        status = process.wait(timeout=60)
    assert (status, err) == (141, "")
    assert list(tmp_path.iterdir()) == []


def test_output_that_has_no_room():
    with open("/dev/full", "w") as full:
        status, _, err = run("secret", stdout=full)
    assert status == 1 and one_line(err).startswith("secret: ")


@pytest.mark.parametrize("command", [["doctor", "--serve", "0"], ["demo"]], ids=" ".join)
def test_interrupted_over_and_over(command, tmp_path, interruptible):
    """An impatient Ctrl-C causes no traceback, and the demo still cleans up."""
    with spoken(*command, TMPDIR=str(tmp_path)) as process:
        process.line()
        while True:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=0.001)
                break
        assert process.errors() == ""
    assert status in (130, -signal.SIGINT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_demo_interrupted_takes_its_server_along(number, tmp_path, interruptible):
    with spoken("demo", TMPDIR=str(tmp_path)) as process:
        server = int(re.findall(r"server: process (\d+)", process.line())[0])
        # The pidfd is of the server whatever becomes of the number.
        watched = os.pidfd_open(server)
        process.send_signal(number)
        status = process.wait(timeout=20)
    try:
        signal.pidfd_send_signal(watched, 0)
        assert select.select([watched], [], [], 20)[0], "the server outlived the demo"
    except ProcessLookupError:
        pass  # gone already
    finally:
        os.close(watched)
    assert status == (130 if number == signal.SIGINT else -signal.SIGKILL)


def test_demo_whose_server_is_killed_fails(tmp_path):
    with spoken("demo", TMPDIR=str(tmp_path)) as process:
        server = int(re.findall(r"server: process (\d+)", process.line())[0])
        os.kill(server, signal.SIGKILL)
        assert process.wait() == 1
        assert process.errors().startswith("demo: ")
