#!/usr/bin/env python3
"""Run rdma-core's own pyverbs tests on the embedded device.

    make pyverbs      needs Debian's python3-pyverbs and rdma-core (whose documentation holds the tests), 44 or later

Every test must pass, unless pyverbs_expected.py gives a reason why it cannot. A failure without a reason there fails
the run, and so does a listed one that passes, or a skip for an unlisted reason. If rdma-core's package is not
installed, apt-get downloads it.

    scripts/pyverbs_suite.py [-v] [NAME ...]      NAME: tests.test_qp, tests.test_qp.QPTest, ...
"""

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pyverbs_expected import FAILURES, SKIPS

HERE = Path(__file__).resolve().parent
PACKAGE = "rdma-core"
INSTALLED = Path("/usr/share/doc/rdma-core/tests")
INTERPRETER = "/usr/bin/python3"  # the one that Debian's pyverbs was built for
PATIENCE = 600.0


@dataclass
class Outcome:
    """The outcome of a test."""

    test: str
    result: str  # passed, failed, skipped
    why: str

    def trouble(self) -> str | None:
        """What is not as expected; None: all is well."""
        if self.result == "failed" and self.test not in FAILURES:
            return f"failed: {self.why}"
        if self.result == "passed" and self.test in FAILURES:
            return "passed, but is listed as failing: take it off the list"
        if self.result == "skipped" and self.test not in FAILURES and not reason_for(self.why):
            return f"skipped for a reason that isn't listed: {self.why}"
        return None


def reason_for(why: str) -> str | None:
    """Why such a skip is right."""
    return next((reason for part, reason in SKIPS.items() if part in why), None)


def collect_tests(to: Path) -> None:
    """Copy rdma-core's tests there as Python files: the package has the longer ones compressed.

    :raises OSError: they are nowhere to be had
    """
    source = INSTALLED
    if not source.is_dir():
        unpacked = to / "package"
        unpacked.mkdir()
        subprocess.run(["apt-get", "download", "-qq", PACKAGE], cwd=to, check=True)
        archive = next(to.glob(f"{PACKAGE}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", archive, unpacked], check=True)
        source = unpacked / INSTALLED.relative_to("/")
    tests = to / "tests"
    tests.mkdir()
    for file in source.iterdir():
        if file.suffix == ".gz":
            with gzip.open(file) as compressed, (tests / file.stem).open("wb") as plain:
                shutil.copyfileobj(compressed, plain)
        elif file.suffix == ".py":
            shutil.copy(file, tests)


def run_tests(directory: Path, names: list[str], verbose: bool) -> list[Outcome]:
    report = directory / "report.jsonl"
    command = [sys.executable, "-m", "rdmanet", "soft-run", "--"]
    command += [INTERPRETER, str(HERE / "pyverbs_runner.py"), str(report), "--dev", "soft0", *names]
    with (directory / "output").open("w+") as output:
        try:
            subprocess.run(
                command,
                check=False,
                cwd=directory,
                env=os.environ | {"PYTHONPATH": str(HERE.parent)},
                stdout=None if verbose else output,
                stderr=None if verbose else subprocess.STDOUT,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            print(f"not done after {PATIENCE:.0f} s", file=sys.stderr)
        output.seek(0)
        said = output.read()
    lines = report.read_text().splitlines() if report.exists() else []
    if "Ran " not in said and not verbose:  # it has crashed, or never started
        print(said[-3000:], file=sys.stderr)
        lines.append(json.dumps(["the run", "failed", "did not come to its end"]))
    return [Outcome(*json.loads(line)) for line in lines]


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-v", "--verbose", action="store_true", help="show the tests' own output")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these tests")
    args = parser.parse_args()
    if subprocess.run([INTERPRETER, "-c", "import pyverbs"], check=False, capture_output=True).returncode:
        print("pyverbs is not installed: apt-get install python3-pyverbs", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="rdmanet-pyverbs-") as name:
        directory = Path(name)
        try:
            collect_tests(directory)
        except (OSError, subprocess.CalledProcessError, StopIteration) as exc:
            print(f"cannot get rdma-core's tests: {exc}", file=sys.stderr)
            return 2
        outcomes = run_tests(directory, args.names, args.verbose)
    bad = [(outcome, trouble) for outcome in outcomes if (trouble := outcome.trouble())]
    for outcome in outcomes:
        if outcome.result == "failed" and outcome.test in FAILURES:
            print(f"expected   {outcome.test}: {FAILURES[outcome.test]}")
    for outcome, trouble in bad:
        print(f"WRONG      {outcome.test}: {trouble}")
    count = {what: sum(o.result == what for o in outcomes) for what in ("passed", "failed", "skipped")}
    print(f"{len(outcomes)} tests: " + ", ".join(f"{number} {what}" for what, number in count.items()))
    return 1 if bad or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
