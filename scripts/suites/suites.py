# SPDX-License-Identifier: Apache-2.0
"""All suites by name, and which of them make up `make test`, the gate and the matrix.

make test     the suite of one Python without what is long: what a newcomer runs
the gate      what must be green before a commit lands (.ci/run)
the matrix    all the rest: other Pythons, sanitizers, modes of the device, kernels, hosts
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from suites import c_tests
from suites.steps import ROOT, Command, Parts, Pytest, Step

USING_A_DEVICE = ("tests/verbs", "tests/streams", "tests/verbs_async", "tests/tensors")
WITH_OTHER_PROCESSES = ("tests/streams", "tests/verbs", "tests/tensors")
QUICK = "not long"


class Missing(Exception):
    """This machine lacks what a suite needs; the text says what."""


# ---- One Python ---------------------------------------------------------------------------------------------


def test() -> Step:
    """Three workers for two CPUs: these tests wait for other processes, and for time-outs, as long as they compute."""
    return Pytest("test", marks=QUICK, workers=3, limit=1500)


def test_all() -> Step:
    """Two workers: floods and thousands of repetitions need the CPUs, and the matrix runs two such suites at a time."""
    return Pytest("test-all", workers=2, limit=1800)


# ---- The gate -------------------------------------------------------------------------------------------------


def make(name: str, *targets: str, nested: bool = False, alone: bool = False, limit: float = 600) -> Step:
    # ARGS is that of `make matrix` itself, and make passes it on.
    command = ["make", "--no-print-directory", *targets, f"PYTHON={python()}", "ARGS="]
    return Command(name, command, nested=nested, alone=alone, limit=limit)


def python() -> str:
    """The interpreter that the environment in use was made of, as `make PYTHON=` takes it."""
    return os.environ.get("SUITES_PYTHON", "python3")


def foreign_quick() -> Step:
    """Alone: these programs' own time limits are for a machine that is not busy."""
    program = [sys.executable, "scripts/foreign.py", "--quick"]
    return Command(
        "foreign-quick",
        program,
        environment={"PYTHONPATH": str(ROOT)},
        alone=True,
        parts=foreign_parts,
        repeat=lambda title: [*program, "-k", f"^{re.escape(title)}$"],
    )


FOREIGN = re.compile(r"^ *\d+/\d+ (?P<mark>ok|as explained|BAD)\s+(?P<title>.*?)   ", re.MULTILINE)


def foreign_parts(output: str) -> Parts:
    found = Parts()
    lines = [*FOREIGN.finditer(output)]
    for line, end in zip(lines, [*(each.start() for each in lines[1:]), len(output)], strict=True):
        if line["mark"] == "BAD":
            found.failed[line["title"]] = output[line.start() : end]
        else:
            found.passed.add(line["title"])
    return found


def c_suite(name: str, sanitizer: str) -> Step:
    program = ["make", "--no-print-directory", "-C", "tests/c", f"SAN={sanitizer}"]
    return Command(
        name,
        [*program, "--keep-going", "check"],
        parts=c_tests.parts,
        repeat=lambda target: [*program, target],
        limit=1200,
    )


def wheel() -> Step:
    return Command("wheel", ["scripts/try-wheel", python()], limit=600)


# ---- The matrix -----------------------------------------------------------------------------------------------


def other_python(version: str) -> Step:
    """The whole suite on another Python, in a tree of its own: a build writes into its tree."""
    interpreter = interpreter_of(version)
    tree = ROOT / "build" / f"python{version}"
    program = ["scripts/other-python", interpreter, str(tree)]
    return Command(f"python{version}", program, nested=True, limit=2700)


def distribution(name: str, release: str, python: str = "python3") -> Step:
    """README's two commands on a distribution that has nothing yet."""
    if os.geteuid() or not shutil.which("debootstrap"):
        raise Missing("another distribution takes root, and the package debootstrap")
    return Command(name, ["scripts/distribution", release, python], nested=True, limit=2700)


def two_releases() -> Step:
    """This tree and an older one, each from its wheel, beside each other."""
    return Command("two-releases", [sys.executable, "scripts/two_releases.py"], limit=1800)


def interpreter_of(version: str) -> str:
    """The first interpreter of this version that runs; a pyenv shim without a version behind it does not."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [
        *map(str, sorted(pyenv.glob(f"{version}.*/bin/python{version}"))),
        f"/usr/bin/python{version}",
    ]
    for candidate in candidates:
        if os.access(candidate, os.X_OK) and not subprocess.run([candidate, "-c", ""]).returncode:
            return candidate
    raise Missing(f"there is no Python {version} here: tried {', '.join(candidates)}")


def mode(name: str, variable: str, *options: str, marks: str = "") -> Step:
    """What the device does differently where requests are executed late, by TCP, or by iWARP's rules.

    A mode is the device's and a loop is Python's, so each mode is tried on half of the loops. Tests of our side alone
    (`once`) run in the first, which shows what is used again too early.
    """
    key, value = variable.split("=")
    return Pytest(name, USING_A_DEVICE, marks, options, environment={key: value})


def two_hosts(name: str, *options: str, paths: tuple[str, ...] = WITH_OTHER_PROCESSES) -> Step:
    """Half of the event loops by IPv4, the other half by IPv6."""
    prefix = (sys.executable, "scripts/two_hosts.py")
    if subprocess.run([*prefix, "true"], cwd=ROOT).returncode == 77:
        raise Missing("this machine makes no network namespaces")
    return Pytest(name, paths, "not once", options, prefix)


def asan(name: str, *options: str, paths: tuple[str, ...]) -> Step:
    """Without the streams' long tests: a thousand repetitions show nothing new there. `make test-asan` builds."""
    return Pytest(name, paths, QUICK, options, ("scripts/asan",), limit=2400)


def object_graphs() -> Step:
    count = os.environ.get("GRAPHS", "5000")
    return Command(
        "object-graphs",
        ["scripts/asan", sys.executable, "tests/verbs/object_graphs.py", "--count", count],
        limit=1200,
    )


KERNEL = re.compile(r"^(?P<device>rxe0|siw0)  (?:(?P<test>tests/\S+::.*?) (?:FAILED|ERROR)\b)?")
KERNEL_PASSED = re.compile(r"^=+ .*?(?P<passed>\d+) passed.* in ", re.MULTILINE)


def kernel() -> Step:
    """In a virtual machine, with both devices."""
    program = [sys.executable, "scripts/test-kernel"]
    environment = {"PYTHONPATH": str(ROOT)}
    return Command(
        "kernel",
        program,
        environment,
        parts=kernel_parts,
        repeat=lambda test: [*program, test],
        limit=3900,
    )


def kernel_parts(output: str) -> Parts:
    """Nothing is said of those that passed, one by one: they are only counted.

    What follows a failure on the same device, up to its next failure, is what pytest shows of it.
    """
    passed = sum(int(line["passed"]) for line in KERNEL_PASSED.finditer(output))
    found = Parts({f"test {number}" for number in range(passed)})
    failing: dict[str, str] = {}  # on each device
    for line in output.splitlines(keepends=True):
        if not (match := KERNEL.match(line)):
            continue
        if match["test"]:
            failing[match["device"]] = match["test"]
        if test := failing.get(match["device"]):
            found.failed[test] = found.failed.get(test, "") + line
    return found


SUITES: dict[str, Callable[[], Step]] = {
    "test": test,
    "test-all": test_all,
    # The gate's.
    "make test": partial(make, "make test", "test", nested=True, alone=True, limit=1800),
    "foreign-quick": foreign_quick,
    "demo": partial(make, "demo", "demo", alone=True),
    "c-asan": partial(c_suite, "c-asan", "address,undefined"),
    "check": partial(make, "check", "check"),
    "docs": partial(make, "docs", "look"),
    "wheel": wheel,
    # The matrix'.
    "kernel": kernel,
    "python3.11": partial(make, "python3.11", "test-all", nested=True, limit=2400),
    "python3.12": partial(other_python, "3.12"),
    "python3.13": partial(other_python, "3.13"),
    "distribution-bookworm": partial(distribution, "distribution-bookworm", "bookworm"),
    "distribution-trixie": partial(distribution, "distribution-trixie", "trixie"),
    "distribution-forky": partial(distribution, "distribution-forky", "forky"),
    "distribution-noble": partial(distribution, "distribution-noble", "noble"),
    "distribution-resolute": partial(distribution, "distribution-resolute", "resolute"),
    "python3.15": partial(distribution, "python3.15", "forky", "python3.15"),
    "two-releases": two_releases,
    "object-graphs": object_graphs,
    "asan-verbs": partial(
        asan,
        "asan-verbs",
        *("--loop", "uvloop", "--loop", "trio", "--loop", "own"),
        paths=("tests/verbs", "tests/verbs_async"),
    ),
    "asan-streams": partial(asan, "asan-streams", "--loop", "uvloop", paths=("tests/streams",)),
    "netns4": partial(two_hosts, "netns4", "--across", "4", "--loop", "asyncio", "--loop", "trio"),
    "netns6": partial(two_hosts, "netns6", "--across", "6", "--loop", "uvloop", "--loop", "own"),
    "defer": partial(mode, "defer", "RDMANET_SOFT_DEFER=20", "--loop", "asyncio", "--loop", "trio"),
    "stream": partial(
        mode, "stream", "RDMANET_SOFT_TRANSPORT=stream", "--loop", "uvloop", "--loop", "own", marks="not once"
    ),
    "iwarp": partial(
        mode, "iwarp", "RDMANET_SOFT_RULES=iwarp", "--loop", "asyncio", "--loop", "own", marks="not once"
    ),
    "c-tsan": partial(c_suite, "c-tsan", "thread"),
    "engines": partial(make, "engines", "engines", limit=1800),
    "frameworks": partial(make, "frameworks", "frameworks", limit=1200),
    "fuzz": partial(make, "fuzz", "fuzz", "SECONDS=10"),
}

# Those that are alone, then the longest first.
GATE = ("make test", "foreign-quick", "demo", "c-asan", "check", "wheel", "docs")
MATRIX = tuple(name for name in SUITES if name not in (*GATE, "test", "test-all"))


def chosen(names: list[str]) -> list[str]:
    """Suites by their names, or the beginnings of names: `netns` is netns4 and netns6."""
    found: list[str] = []
    for name in names:
        matches = [suite for suite in MATRIX if suite.startswith(name)]
        if not matches:
            raise Missing(f"there is no suite {name!r}; there are {', '.join(MATRIX)}")
        found += [suite for suite in matches if suite not in found]
    return found
