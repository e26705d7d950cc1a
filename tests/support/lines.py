"""What a script says to the test that has started it by processes.py, and what it is told.

A line is text (`say`, `lines`) or a JSON object (`tell`, `hear`). A script ends when its standard input does: a test
that fails closes the pipe, so no script outlives it.
"""

import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from tests.support.waiting import readable


def say(*fields: object) -> None:
    print(*fields, flush=True)


def tell(**facts: Any) -> None:
    say(json.dumps(facts))


def hear() -> dict[str, Any] | None:
    """What it is told next; None when that was all."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


async def lines() -> AsyncIterator[str]:
    """All lines that it is told, until the test closes the pipe."""
    fd = sys.stdin.fileno()
    os.set_blocking(fd, False)
    unfinished = b""
    while True:
        await readable(fd)
        piece = os.read(fd, 65536)
        if not piece:
            return
        *whole, unfinished = (unfinished + piece).split(b"\n")
        for line in whole:
            yield line.decode()
