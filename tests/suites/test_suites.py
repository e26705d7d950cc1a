"""scripts/suites: what repeats is a failure, and what does not is unsteady; a hang or a crash takes nothing along."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from suites import c_tests  # noqa: E402
from suites.running import MOST_UNSTEADY, is_green, run_steps, table  # noqa: E402
from suites.steps import Command, Parts, Pytest, Result, Trouble  # noqa: E402
from suites.suites import kernel_parts  # noqa: E402

GOOD = "def test_good(): pass\ndef test_also(): pass\n"
BAD = "def test_bad(): assert 1 == 2\n"
# Fails in the first process that runs it.
ONCE = """
from pathlib import Path
def test_once():
    seen = Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first time")
"""
SKIPS = """
import pytest
@pytest.mark.skip(reason="no adapter")
def test_one(): pass
def test_two(): pytest.skip("no adapter")
@pytest.mark.xfail(reason="not built")
def test_three(): assert False
"""
HANGS = "import time\ndef test_hangs(): time.sleep(1000)\n"
SEGFAULT = "import ctypes\ndef test_crashes(): ctypes.string_at(0)\n"
# A crash that would not come again.
SEGFAULT_ONCE = ONCE.replace('raise AssertionError("the first time")', "import ctypes; ctypes.string_at(0)")
SANITIZER = 'def test_report(): assert "" == "==17==ERROR: AddressSanitizer: heap-use-after-free"\n'

Run = Callable[..., tuple[bool, dict[str, object]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run these files of tests as one step: whether it was green, and its result."""

    def run_files(*files: str, workers: int = 1, limit: float = 120, options: tuple[str, ...] = ()) -> object:
        for number, text in enumerate(files):
            (tmp_path / f"test_{number}.py").write_text(text)
        step = Pytest(
            "sample",
            (".",),
            options=("-p", "tests.support.recording", "-o", "faulthandler_timeout=3", *options),
            # Other plugins would take most of the time.
            environment={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            root=tmp_path,
            workers=workers,
            limit=limit,
        )
        (tmp_path / "pytest.ini").write_text("[pytest]\nfaulthandler_exit_on_timeout = true\n")
        report = tmp_path / "report.json"
        green = run_steps([step], report=report)
        return green, json.loads(report.read_text())[0]

    return run_files  # type: ignore[return-value]


def names(result: dict[str, object], kind: str) -> list[tuple[str, str]]:
    return sorted((each["name"], each["what"]) for each in result[kind])  # type: ignore[attr-defined]


def test_passes(run: Run) -> None:
    green, result = run(GOOD)
    assert green
    assert (result["passed"], result["failed"], result["unsteady"]) == (2, [], [])


def test_why_tests_were_skipped_is_printed(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    green, result = run(GOOD, SKIPS)
    assert green
    assert (result["passed"], result["skipped"]) == (2, 3)
    assert result["reasons"] == {"no adapter": 2, "expected to fail: not built": 1}
    assert "skipped: sample: 2 because: no adapter\n" in capfd.readouterr().out


def test_what_always_fails_is_a_failure(run: Run) -> None:
    green, result = run(GOOD, BAD)
    assert not green
    assert names(result, "failed") == [("test_1.py::test_bad", "failed")]
    assert "assert 1 == 2" in result["failed"][0]["output"]  # type: ignore[index]
    assert result["passed"] == 2


def test_what_fails_once_is_unsteady(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    green, result = run(GOOD, ONCE)
    assert green
    assert names(result, "unsteady") == [("test_1.py::test_once", "failed")]
    printed = capfd.readouterr().out
    assert printed.count("the first time") >= 2  # at once, and in whole at the end
    assert "unsteady: sample: test_1.py::test_once (failed)" in printed


def test_what_hangs_takes_nothing_along(run: Run) -> None:
    green, result = run(GOOD, HANGS, GOOD)
    assert not green
    assert names(result, "failed") == [("test_1.py::test_hangs", "hung")]
    assert result["passed"] == 4


def test_a_crash_takes_nothing_along_and_is_a_failure(run: Run) -> None:
    green, result = run(GOOD, SEGFAULT_ONCE, GOOD)
    assert not green
    assert names(result, "failed") == [("test_1.py::test_once", "crashed")]
    assert "Segmentation fault" in result["failed"][0]["output"]  # type: ignore[index]
    assert result["passed"] == 4


def test_a_sanitizers_report_is_not_repeated(run: Run) -> None:
    green, result = run(SANITIZER)
    assert not green
    assert names(result, "failed") == [("test_0.py::test_report", "crashed")]


def test_a_suite_out_of_time_says_where_it_was(run: Run) -> None:
    green, result = run(GOOD, HANGS, GOOD, limit=5, options=("-o", "faulthandler_timeout=60"))
    assert not green
    assert names(result, "failed") == [("sample", "out of time")]
    assert "it was at test_1.py::test_hangs" in result["failed"][0]["output"]  # type: ignore[index]


def test_what_can_not_be_collected_is_a_failure(run: Run) -> None:
    green, result = run(GOOD, "import there_is_no_such_module\n")
    assert not green
    assert names(result, "failed") == [("test_1.py", "failed")]


def test_two_workers_share_the_files(run: Run) -> None:
    green, result = run(*[GOOD] * 6, SEGFAULT, *[GOOD] * 6, workers=2)
    assert not green
    assert names(result, "failed") == [("test_6.py::test_crashes", "crashed")]
    assert result["passed"] == 24


def test_what_is_left_out_is_counted(run: Run) -> None:
    green, result = run(GOOD, options=("-k", "also"))
    assert green
    assert (result["passed"], result["left_out"]) == (1, 1)


def result_of(failed: int = 0, unsteady: int = 0) -> Result:
    trouble = Trouble("a", "failed", "")
    return Result("one", passed=5, failed=[trouble] * failed, unsteady=[trouble] * unsteady)


def test_more_than_a_few_unsteady_tests_are_a_failure() -> None:
    assert is_green([result_of(unsteady=MOST_UNSTEADY)])
    assert not is_green([result_of(unsteady=MOST_UNSTEADY), result_of(unsteady=1)])
    assert not is_green([result_of(failed=1)])


def test_the_table_ends_with_the_sums() -> None:
    lines = table([result_of(failed=1), result_of(unsteady=2)]).splitlines()
    assert lines[0].split() == ["step", "passed", "failed", "unsteady", "skipped", "seconds"]
    assert lines[-1] == "12 passed, 1 failed, 0 skipped"


def test_a_command_is_repeated_as_a_whole(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    once = Command("once", ["sh", "-c", f"test -e {seen} || {{ touch {seen}; exit 3; }}"])
    always = Command("always", ["sh", "-c", "echo no; exit 3"])
    report = tmp_path / "report.json"
    assert not run_steps([once, always], report=report)
    first, second = json.loads(report.read_text())
    assert names(first, "unsteady") == [("once", "failed")]
    assert names(second, "failed") == [("always", "failed")]
    assert "exited with 3\nno" in second["failed"][0]["output"]


def test_only_the_failed_part_of_a_command_is_repeated(tmp_path: Path) -> None:
    def parts(output: str) -> Parts:
        return Parts({"a"}, {"b": output})

    log = tmp_path / "repeated"
    step = Command("all", ["false"], parts=parts, repeat=lambda part: ["sh", "-c", f"echo {part} >>{log}"])
    assert run_steps([step])
    assert log.read_text().split() == ["b"] * 3


def test_a_step_says_in_its_own_result_what_its_steps_came_to(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
from suites.running import run_steps
from suites.steps import Command
sys.exit(not run_steps([Command("inner", ["false"])]))
"""
    report = tmp_path / "report.json"
    assert not run_steps([Command("outer", [sys.executable, "-c", program], nested=True)], report=report)
    (result,) = json.loads(report.read_text())
    assert (result["step"], names(result, "failed")) == ("outer", [("inner", "failed")])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    """Its steps are sessions of their own, which its signal does not reach."""
    said = tmp_path / "said"
    os.mkfifo(said)
    step = """
import os, signal, sys
sys.stdout = open(sys.argv[1], "w")
print(os.getpid(), flush=True)
signal.pause()
"""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
from suites import __main__ as suites
from suites.steps import Command
suites.GATE = ("waits",)
suites.SUITES = {{"waits": lambda: Command("waits", [sys.executable, "-c", {step!r}, {str(said)!r}])}}
suites.main()
"""
    ignore = "trap '' INT; " if number == signal.SIGTERM else ""  # as a shell does for `command &`
    command = ["sh", "-c", ignore + 'exec "$@"', "sh", sys.executable, "-c", program, "gate"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as run:
        with said.open() as words:  # end of file: nobody writes any more
            pid = int(words.readline())
            os.kill(pid, 0)
            run.send_signal(number)
            assert words.read() == ""
    assert run.returncode


def test_what_c_tests_say() -> None:
    output = """== test_a
  one       1 ms
== test_b
harness.h:408: expect_event: not so: readable (errno 11)
run-test_b: exit status 134 (124: not done in 240 s)
make[1]: *** [Makefile:57: run-test_b] Error 134
== test_c, by stream
  one       1 ms
"""
    parts = c_tests.parts(output)
    assert parts.passed == {"run-test_a", "stream-test_c"}
    assert list(parts.failed) == ["run-test_b"]
    assert "not so: readable" in parts.failed["run-test_b"]


def test_a_c_test_that_cannot_be_built_fails_beside_others_that_fail() -> None:
    output = """== test_a
  one       1 ms
test_b.c:145:12: error: redefinition of ‘tcp_to’
make: *** [Makefile:86: build/plain/test_b] Error 1
== test_c
test_c.c:7: one: not so: quiet (errno 0)
make: *** [Makefile:57: run-test_c] Aborted
make: Target 'check' not remade because of errors.
"""
    parts = c_tests.parts(output)
    assert parts.passed == {"run-test_a"}
    assert list(parts.failed) == ["build/plain/test_b", "run-test_c"]
    assert "redefinition" in parts.failed["build/plain/test_b"]
    assert parts.failed["run-test_c"].startswith("== test_c\n")


def test_what_the_tests_on_two_devices_say() -> None:
    output = """[  29 s] rxe0  1 passed of 3; tests/a.py::test_one
rxe0  tests/a.py::test_two[uvloop-a b] FAILED                    [ 66%]
siw0  tests/b.py::test_one ERROR                                 [ 50%]
rxe0  E   no answer on rxe0
siw0  E   no answer on siw0
[  49 s] siw0  1 error of 2; tests/b.py::test_two
rxe0  tests/a.py::test_three FAILED                              [100%]
rxe0  E   another

==== rxe0, status 1 ====
========= 2 failed, 1 passed in 1.20s =========
"""
    parts = kernel_parts(output)
    assert len(parts.passed) == 1
    assert {test: text.count("\n") for test, text in parts.failed.items()} == {
        "tests/a.py::test_two[uvloop-a b]": 2,
        "tests/b.py::test_one": 2,
        "tests/a.py::test_three": 2,
    }
    assert "no answer on rxe0" in parts.failed["tests/a.py::test_two[uvloop-a b]"]
