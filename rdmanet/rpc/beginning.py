# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""Coroutines that have begun before they become tasks, so that they always get to their ends.

Theory
------
A task that is cancelled before its first step ends without a step: of its coroutine nothing runs, no `finally` either.
That happens when a loop ends: `asyncio.run` cancels all tasks. Whoever waits for the coroutine's last words then waits
for ever. So such a coroutine awaits `BEGINNING` in its `try`, and whoever makes its task takes this first step by
``send(None)``. The task takes the next one, in which the coroutine goes on, or gets CancelledError.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final


class _Beginning:
    """Waits for one step."""

    def __await__(self) -> Generator[None, None, None]:
        return iter(_ONE_STEP)  # type: ignore[return-value]  # any iterator is awaited


_ONE_STEP: Final = (None,)
BEGINNING: Final = _Beginning()
