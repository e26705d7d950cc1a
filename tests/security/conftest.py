"""The stage for attacks: a device whose guards can be switched off, other users, and the actors.

Each attack is a program under `actors/`, as the attacker would write it, and is tried twice. Against a device
without the guard that the test is about it must reach its target: that is the control, without which a crash or an
early refusal would pass for a defence. Against the device as it is installed it must fail, and say how often it tried.
Controls are `long`: `make test` tries only what must fail.

An actor speaks lines, JSON objects (tests/support/processes.py). `actor.py` beside this file is what it is made of.
"""

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.processes import Process
from tests.support.unfit import unfit as unfit
from tests.support.versions import WIRE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "rdmanet"

# Users that nobody is: not root's, not `nobody`, which is what the kernel calls whom it can't name.
ATTACKER = 61001
VICTIM = 61002


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Nor may any other skip pass for a defence there."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"CI must show this: {reason}"
    return report


@functools.cache
def unguarded() -> Path:
    """The embedded device, built so that RDMANET_SOFT_WITHOUT switches guards off. Controls need it."""
    out = ROOT / "build" / "unguarded"
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "lock", "w") as lock:  # suites of several interpreters run at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        return built_without_guards(out)


def a_compiler() -> str:
    for name in ("cc", "gcc"):
        if found := shutil.which(name):
            return found
    unfit("there is no C compiler")


@pytest.fixture(scope="session")
def another_version() -> Path:
    """The embedded device, built as of the next version of its protocol."""
    out = ROOT / "build" / "another-version"
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return built_without_guards(out, f"-DRN_WIRE_VERSION={WIRE + 1}")


def built_without_guards(out: Path, *more: str) -> Path:
    compiler = a_compiler()
    sources = sorted(path for path in (SOURCES / "soft").glob("*/*.c") if path.parent.name != "preload")
    inputs = [
        *sources,
        *(SOURCES / "soft").glob("*/*.h"),
        *(SOURCES / "abi").glob("*.h"),
        SOURCES / "soft/soft.map",
    ]
    library = out / "librdmanet_soft.so"
    if library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return library
    flags = ["-std=gnu11", "-D_GNU_SOURCE=", "-g", "-DNDEBUG", "-DRDMANET_UNGUARDED", "-fPIC"]
    flags += ["-fvisibility=hidden", "-pthread", f"-I{SOURCES}/abi", f"-I{SOURCES}/soft", *more]

    def compile(source: Path) -> str:
        made = out / f"{source.parent.name}-{source.stem}.o"
        subprocess.run([str(compiler), *flags, "-c", str(source), "-o", str(made)], check=True)
        return str(made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile, sources))
    script = f"-Wl,--version-script,{SOURCES}/soft/soft.map"
    linked = ["-Wl,-z,nodelete", "-Wl,-Bsymbolic", "-pthread", "-o", f"{library}.new"]
    subprocess.run([str(compiler), "-shared", *objects, script, *linked], check=True)
    os.replace(f"{library}.new", library)
    return library


class Stage:
    """Starts actors, and ends them with the test."""

    def __init__(self) -> None:
        self.actors: list[Process] = []

    def start(
        self,
        script: str,
        *arguments: object,
        user: int | None = None,
        without: str = "",
        prefix: tuple[str, ...] = (),
        **environment: str,
    ) -> Process:
        """Run actors/<script>.py.

        :param user: it becomes this user before its first line; only root can arrange that
        :param without: guards that its device lacks, with commas between
        :param prefix: a command that starts it: `unshare …`, say
        :param environment: variables beside ours; ACTOR_DUMPABLE="1": as a user it may be traced by its like, as who
            hasn't been root
        """
        if user is not None and os.geteuid() != 0:
            unfit("only root can be another user")
        command = [*prefix, sys.executable, str(HERE / "actor.py"), str(HERE / "actors" / f"{script}.py")]
        env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
        if user is not None:
            env["ACTOR_USER"] = str(user)
        if without:
            env |= {"RDMANET_SOFT_LIBRARY": str(unguarded()), "RDMANET_SOFT_WITHOUT": without}
        actor = Process(*command, *arguments, keep_errors=True, env=env)
        self.actors.append(actor)
        return actor

    def end(self) -> None:
        for actor in self.actors:
            actor.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.end()


@pytest.fixture
def network() -> Iterator[tuple[str, ...]]:
    """The command to start a program in a network namespace of its own, with its own names and ports."""
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in ("unshare", "nsenter", "ip")):
        unfit("a network of our own takes root, unshare, nsenter and ip")
    script = "ip link set lo up && echo up && exec cat"
    with Process("unshare", "--net", "sh", "-c", script) as holder:
        try:
            assert holder.line() == "up"
        except EOFError:
            unfit("no network namespace is to be had")
        yield ("nsenter", f"--net=/proc/{holder.pid}/ns/net")


@pytest.fixture(scope="session")
def moments(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that tells an attacker of each system call by which the victim deals with ports (moments.c)."""
    return to_preload("moments", tmp_path_factory)


@pytest.fixture(scope="session")
def accepts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that counts the attempts to accept for which no descriptor was left (accepts.c)."""
    return to_preload("accepts", tmp_path_factory)


def to_preload(name: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    library = tmp_path_factory.mktemp(name) / f"{name}.so"
    source = HERE / f"{name}.c"
    subprocess.run(
        [a_compiler(), "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"],
        check=True,
    )
    return str(library)


@pytest.fixture(params=[pytest.param("control", marks=pytest.mark.long), "guarded"])
def guarded(request: pytest.FixtureRequest) -> bool:
    """Is the guard on? Without it the attack must reach its target."""
    return bool(request.param == "guarded")
