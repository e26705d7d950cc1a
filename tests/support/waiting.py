"""How coroutines of tests wait, on asyncio's loop or uvloop: for an event wherever there is one."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class Conditions:
    """Conditions that tasks wait for; code that changes what they depend on calls look()."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], object], asyncio.Future[None]]] = []

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once `condition` holds."""
        if condition():
            return
        entry = (condition, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        finally:
            self._waiting.remove(entry)

    def look(self) -> None:
        for condition, waiter in self._waiting:
            if not waiter.done() and condition():
                waiter.set_result(None)


async def readable(*fds: int) -> None:
    """Return once there is something to read from one of these."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    for fd in fds:
        loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        for fd in fds:
            loop.remove_reader(fd)


async def begin(*work: Awaitable[Any]) -> list[asyncio.Future[Any]]:
    """Start tasks; each has run until it had to wait for something."""
    tasks = [asyncio.ensure_future(each) for each in work]
    await asyncio.sleep(0)
    return tasks


async def loop_turns(count: int = 1) -> None:
    """So many turns of the loop: for tests of what may happen between any two of them."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until_seen(condition: Callable[[], object]) -> None:
    """Return once `condition` holds, where no callback tells of it: it is looked at in each turn of the loop."""
    while not condition():
        await asyncio.sleep(0)
