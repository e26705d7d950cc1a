"""What every peer script shares: it speaks by lines (tests/support/lines.py) and ends with its stdin."""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from tests.support.lines import lines, say

__all__ = ["HOST", "THERE", "orders", "port_of", "run", "say", "until_told_to_end"]

HOST = os.environ.get("RDMANET_TEST_HOST", "127.0.0.1")
THERE = os.environ.get("RDMANET_TEST_PEER", HOST)  # where the other end serves


def port_of(server: Any) -> int:
    return server.sockets[0].getsockname()[1]


async def orders() -> AsyncIterator[list[str]]:
    """The test's lines, split, until it closes the pipe."""
    async for line in lines():
        yield line.split()


async def until_told_to_end() -> None:
    async for _ in orders():
        pass


def run(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run on the loop that RDMANET_TEST_LOOP names."""
    factory = None
    if os.environ.get("RDMANET_TEST_LOOP") == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)
