"""What every peer script shares: it speaks by lines and ends with its stdin.

A test that fails closes the pipe, so no peer outlives it.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import Any

HOST = os.environ.get("RDMANET_TEST_HOST", "127.0.0.1")
THERE = os.environ.get("RDMANET_TEST_PEER", HOST)  # where the other end serves


def say(*fields: object) -> None:
    print(*fields, flush=True)


def port_of(server: Any) -> int:
    return server.sockets[0].getsockname()[1]


async def orders() -> AsyncIterator[list[str]]:
    """The test's lines, split, until it closes the pipe."""
    loop = asyncio.get_running_loop()
    fd = sys.stdin.fileno()
    os.set_blocking(fd, False)
    text = b""
    while True:
        ready = loop.create_future()
        loop.add_reader(fd, lambda ready=ready: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_reader(fd)
        piece = os.read(fd, 4096)
        if not piece:
            return
        *lines, text = (text + piece).split(b"\n")
        for line in lines:
            yield line.decode().split()


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
