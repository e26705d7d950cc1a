"""soft-run: the program takes the command's place, finds the device under both names, and leaves nothing."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Opens both libraries as a stranger would, and says what it found: the device, and whether both are one.
STRANGER = """
import ctypes
verbs, cm = ctypes.CDLL("libibverbs.so.1"), ctypes.CDLL("librdmacm.so.1")
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
verbs.ibv_get_device_name.argtypes, verbs.ibv_get_device_name.restype = [ctypes.c_void_p], ctypes.c_char_p
count = ctypes.c_int()
devices = verbs.ibv_get_device_list(ctypes.byref(count))
print(count.value, verbs.ibv_get_device_name(devices[0]).decode(), verbs._handle == cm._handle)
"""


@pytest.fixture
def environment(tmp_path):
    """An environment with a cache of its own, and no library path."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "LD_PRELOAD")
    }
    return inherited | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def start(environment, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "rdmanet", "soft-run", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def soft_run(environment, *arguments):
    with start(environment, *arguments) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_finds_the_device_under_both_names(environment):
    assert soft_run(environment, "--", sys.executable, "-c", STRANGER) == (0, "1 soft0 True\n", "")


def test_what_is_preloaded_already_comes_first(environment):
    show = ["--", "sh", "-c", 'echo "$LD_PRELOAD"']
    _, directory, _ = soft_run(environment, "--show-path")
    ours = f"{directory.strip()}/libibverbs.so.1 {directory.strip()}/librdmanet_files.so"
    assert soft_run(environment, *show)[1] == f"{ours}\n"
    libc = "libc.so.6"
    assert soft_run(environment | {"LD_PRELOAD": libc}, *show)[1] == f"{libc} {ours}\n"
    assert soft_run(environment, "--no-files", *show)[1] == "\n"


def test_serves_programs_started_by_the_program(environment):
    again = f"{sys.executable} -c '{STRANGER}'"
    assert soft_run(environment, "--", "sh", "-c", again) == (0, "1 soft0 True\n", "")


def test_is_the_program(environment):
    """The process is PROGRAM's: its number, its arguments, its exit status, its signals."""
    with start(environment, "--", "sh", "-c", 'echo $$ "$@"; exit 7', "sh", "--", "a b", "-h") as process:
        out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == (f"{process.pid} -- a b -h\n", 7)
    with start(environment, "--", "sh", "-c", "kill -TERM $$") as process:
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


def test_keeps_a_library_path_and_the_users_choices(environment):
    show = ["--", "sh", "-c", 'echo "$LD_LIBRARY_PATH" "$RDMANET_SOFT_ARM" "$RDMANET_SOFT_ADOPT"']
    _, directory, _ = soft_run(environment, "--show-path")
    assert soft_run(environment, *show)[1] == f"{directory.strip()} lenient 1\n"
    environment |= {"LD_LIBRARY_PATH": "/some/where", "RDMANET_SOFT_ARM": "strict"}
    assert soft_run(environment, *show)[1] == f"{directory.strip()}:/some/where strict 1\n"


ALLOCATING = (
    STRANGER
    + """
verbs.ibv_open_device.argtypes, verbs.ibv_open_device.restype = [ctypes.c_void_p], ctypes.c_void_p
verbs.ibv_alloc_pd.argtypes, verbs.ibv_alloc_pd.restype = [ctypes.c_void_p], ctypes.c_void_p
context = verbs.ibv_open_device(devices[0])
print([verbs.ibv_alloc_pd(context) is not None for _ in range(3)])
"""
)


def test_injects_faults(environment):
    run = ["--", sys.executable, "-c", ALLOCATING]
    fails = (0, "1 soft0 True\n[True, False, True]\n", "")
    assert soft_run(environment, *run)[1].endswith("[True, True, True]\n")
    assert soft_run(environment, "--faults", "fail=alloc_pd:2", *run) == fails
    environment |= {"RDMANET_SOFT_CHAOS": "fail=alloc_pd:1"}
    assert (
        soft_run(environment, "--faults", "fail=alloc_pd:2", *run) == fails
    )  # in place of the environment's
    assert soft_run(environment, "--faults", "", *run)[1].endswith("[True, True, True]\n")


def test_faults_that_are_wrong_start_no_program(environment, tmp_path):
    started = tmp_path / "started"
    status, out, err = soft_run(environment, "--faults", "loss=2%, loss=send:often", "--", "touch", started)
    assert (status, out) == (2, "")
    assert err.startswith(
        'soft-run: --faults: loss=send:often: "often" does not say which ones: write 3 (the third)'
    )
    assert not started.exists()


def test_says_what_is_wrong(environment, tmp_path):
    assert soft_run(environment)[0] == 2
    assert soft_run(environment, "--", "/nonexistent/program")[::2] == (
        127,
        "soft-run: /nonexistent/program: No such file or directory\n",
    )
    (tmp_path / "text").write_text("no program")
    assert soft_run(environment, "--", tmp_path / "text")[0] == 126


def test_leaves_one_directory_for_all_runs(environment, tmp_path):
    for _ in range(2):
        status, directory, _ = soft_run(environment, "--show-path")
        assert status == 0
    [made] = (tmp_path / "cache").iterdir()
    assert str(made) == directory.strip()
    assert sorted(link.name for link in made.iterdir()) == [
        "libibverbs.so.1",
        "librdmacm.so.1",
        "librdmanet_files.so",
    ]
    assert made.stat().st_mode & 0o777 == 0o700


def test_repairs_a_link_that_leads_elsewhere(environment, tmp_path):
    _, directory, _ = soft_run(environment, "--show-path")
    link = Path(directory.strip()) / "libibverbs.so.1"
    link.unlink()
    link.symlink_to("/nonexistent")
    assert soft_run(environment, "--", sys.executable, "-c", STRANGER)[1] == "1 soft0 True\n"


def test_trusts_no_directory_that_others_can_write_to(environment, tmp_path):
    _, directory, _ = soft_run(environment, "--show-path")
    Path(directory.strip()).chmod(0o777)
    environment["TMPDIR"] = str(tmp_path)
    status, elsewhere, _ = soft_run(environment, "--show-path")
    assert status == 0
    assert Path(elsewhere.strip()).parent == tmp_path
    Path(elsewhere.strip()).chmod(0o777)
    status, _, err = soft_run(environment, "--show-path")
    assert status == 1
    assert "can be changed by other users" in err


def test_trusts_no_directory_that_others_can_replace(environment, tmp_path):
    """Nor one whose parent is writable for others, unless the parent is sticky, as /tmp is."""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    environment |= {"XDG_CACHE_HOME": str(open_to_all / "cache"), "TMPDIR": str(tmp_path)}
    status, elsewhere, _ = soft_run(environment, "--show-path")
    assert status == 0
    assert Path(elsewhere.strip()).parent == tmp_path
    open_to_all.chmod(0o1777)
    assert str(open_to_all / "cache") in soft_run(environment, "--show-path")[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's directory")
@pytest.mark.parametrize("mode", [0o700, 0o1777])
def test_trusts_no_directory_of_another_user(environment, tmp_path, mode):
    """Root with another's HOME, as sudo -E has it: the owner of a directory can replace what is in it."""
    theirs = tmp_path / "home"
    theirs.mkdir()
    theirs.chmod(mode)
    os.chown(theirs, 61001, 61001)
    del environment["XDG_CACHE_HOME"]
    environment |= {"HOME": str(theirs), "TMPDIR": str(tmp_path)}
    status, elsewhere, _ = soft_run(environment, "--show-path")
    assert status == 0
    assert Path(elsewhere.strip()).parent == tmp_path
    environment["TMPDIR"] = str(theirs)  # and no fallback to it either
    status, _, err = soft_run(environment, "--show-path")
    assert status == 1
    assert f"{theirs} belongs to another user" in err


@pytest.mark.parametrize("program", ["ibv_devices", "ibv_devinfo", "ib_write_bw"])
def test_distributions_programs_load(environment, program):
    """They bind all symbols at start, so one that is missing would stop them."""
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    arguments = ["--version"] if program == "ib_write_bw" else []
    status, out, err = soft_run(environment, "--", program, *arguments)
    assert "symbol" not in err
    assert "soft0" in out or out.startswith("Version"), status
