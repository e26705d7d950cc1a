"""Time limits of coroutine tests: one that waits for too long ends with TimeoutError, and shows where it waited."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


def limited(test: Callable[..., Coroutine[Any, Any, None]], seconds: float) -> Callable[..., Any]:
    """The test, ended after so many seconds."""

    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        async with asyncio.timeout(seconds):
            await test(*args, **kwargs)

    return run
