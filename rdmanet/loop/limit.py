"""The end of an attempt: when its time is up, or when somebody says so.

It is what asyncio.timeout() is to the code within, without a timer of the loop for each connection (stream/waits.py):
the task is cancelled, and who catches that asks `was_it` whether the cancellation was this or the program's.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rdmanet.stream.waits import Waits


class Limit:
    """The limit of what the current task does now.

    :ivar has_ended: the task has been cancelled for it
    :ivar is_late: its time is up
    """

    __slots__ = ("_cancelling", "_task", "_wait", "has_ended", "is_late")

    def __init__(self, waits: Waits, seconds: float) -> None:
        task: Any = asyncio.current_task()
        self._task, self._cancelling = task, task.cancelling()
        self.has_ended = self.is_late = False
        self._wait = waits.begin(seconds, self._expire)

    def _expire(self) -> None:
        self.is_late = True
        self.end()

    def end(self) -> None:
        """End it now."""
        if not self.has_ended:
            self.has_ended = True
            self._task.cancel()

    def lift(self) -> None:
        """There is no time limit any more."""
        self._wait.cancel()

    def was_it(self) -> bool:
        """Whether the task was cancelled for this and nothing else. If so, it goes on, and may be ended again."""
        if not self.has_ended:
            return False
        self.has_ended = False
        return bool(self._task.uncancel() <= self._cancelling)
