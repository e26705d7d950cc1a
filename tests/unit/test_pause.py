"""Nothing of rdmanet's waits by asyncio.sleep(), which tests of programs replace by what does not wait."""

import ast
import asyncio
from pathlib import Path

import pytest

from rdmanet.base.pause import pause
from tests.support.waiting import loop_turns

PACKAGE = Path(__file__).parents[2] / "rdmanet"


def sleeps(file):
    """The lines that call asyncio.sleep() for longer than a turn of the loop."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.sleep":
            if ast.unparse(node.args[0]) != "0":
                yield node.lineno


def test_nothing_sleeps():
    found = {str(file): lines for file in PACKAGE.rglob("*.py") if (lines := list(sleeps(file)))}
    assert not found, "use rdmanet.base.pause"


async def test_a_pause_lasts(monkeypatch):
    async def instantly(delay, result=None):
        return result

    monkeypatch.setattr(asyncio, "sleep", instantly)
    loop = asyncio.get_running_loop()
    before = loop.time()
    await pause(loop, 0.05)
    assert loop.time() - before > 0.04


async def test_a_pause_may_be_cancelled_as_it_ends():
    loop = asyncio.get_running_loop()
    failures = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    waits = loop.create_task(pause(loop, 0))
    await loop_turns()
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert not failures
