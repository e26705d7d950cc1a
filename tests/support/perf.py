"""`rdmanet perf`, run by a test."""

import json
import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
COMMAND = (sys.executable, "-m", "rdmanet", "perf")
SHORT = ("-n", "200", "--warm-up", "0")


def perf(*arguments, **environment):
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def results(*arguments):
    status, out, err = perf(*arguments, "--json")
    assert (status, err) == (0, ""), err or status
    report = json.loads(out)
    assert report["schema"] == "rdmanet-perf/1"
    return report["results"]


def one_line(err):
    assert err.count("\n") == 1, err
    return err
