"""Ctrl-C around the life of a loop: rdmanet.cli.interrupts."""

import asyncio
import signal
import subprocess
import sys

import pytest

from rdmanet.cli import interrupts


@pytest.fixture(autouse=True)
def heard_once(interruptible, monkeypatch):
    """As in a command that has just begun: the first SIGINT counts, and those behind it are ignored."""
    for name in ("_then", "_task", "_has_loop", "_heard"):
        monkeypatch.setattr(interrupts, name, getattr(interrupts, name))
    interrupts.hear_once(signal.SIG_IGN)


class Loop(asyncio.SelectorEventLoop):
    """A loop that hears Ctrl-C where it is told to."""

    def __init__(self, when=None):
        super().__init__()
        self.when = when
        if when == "made":
            signal.raise_signal(signal.SIGINT)

    def close(self):
        if self.when == "closed" and not self.is_closed():
            signal.raise_signal(signal.SIGINT)
        super().close()


@pytest.mark.parametrize(
    ("when", "result"), [("made", []), ("run", ["begun"]), ("closed", ["begun", "done"])]
)
def test_the_loop_is_closed(when, result):
    """Wherever Ctrl-C comes, the loop ends in good order, and the caller hears of it."""
    loops, steps = [], []

    def make():
        loops.append(Loop(when))
        return loops[-1]

    async def main():
        steps.append("begun")
        if when == "run":
            signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        steps.append("done")

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(main(), make)
    assert steps == result
    assert [loop.is_closed() for loop in loops] == [True]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_nobody_interrupts():
    async def main():
        return 5

    assert interrupts.run(main(), Loop) == 5
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


EARLY = """
import runpy, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "rdmanet.cli.interrupts":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
runpy.run_module("rdmanet", run_name="__main__")
"""


def test_ctrl_c_before_the_command_is_imported():
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
