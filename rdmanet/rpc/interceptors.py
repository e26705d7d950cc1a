"""Interceptors: functions that run around calls, at either side.

Theory
------
An interceptor is ``async def log(call, proceed)``. It awaits ``proceed()`` once, which makes the call, or runs the next
interceptor, and it returns what that returned. It may do so for another result, raise, or not proceed at all.

At the server ``proceed()`` ends when the method has, and for a stream when all items were sent. At the client it ends
with the result, and for a stream when the last item was taken. So ``try`` and ``finally`` are around all of a call, of
any kind. Items of streams pass by: interceptors do not see them, and a stream's result is None.

A client's stream has no task of its own: the program takes its items. `Stepped` runs an interceptor in the task that
takes them, from one item to the next, as an asynchronous generator runs. So cancelling, time-outs and context variables
are those of that task.
"""

from __future__ import annotations

import asyncio
import functools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any

from rdmanet.rpc.context import CallInfo

__all__ = ["Interceptor"]


Proceed = Callable[[], Awaitable[Any]]
Interceptor = Callable[[CallInfo, Proceed], Coroutine[Any, Any, Any]]


def chained(
    interceptors: Sequence[Interceptor], call: CallInfo, innermost: Proceed
) -> Callable[[], Coroutine[Any, Any, Any]]:
    """What begins a call with all its interceptors, the first one outside."""
    is_begun = False

    async def once() -> Any:
        nonlocal is_begun
        if is_begun:
            raise RuntimeError("an interceptor may call proceed() once")
        is_begun = True
        return await innermost()

    proceed: Callable[[], Coroutine[Any, Any, Any]] = once
    for interceptor in reversed(interceptors):
        proceed = functools.partial(interceptor, call, proceed)
    return proceed


class _Handed:
    __slots__ = ("item",)

    def __init__(self, item: Any) -> None:
        self.item = item


@types.coroutine
def hand(item: Any) -> Generator[Any, Any, None]:
    """In a coroutine that a `Stepped` runs: give this item to who iterates, and go on when it wants the next one."""
    yield _Handed(item)


class Stepped:
    """An asynchronous iterator of what a coroutine hands out."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._has_ended = False

    def __aiter__(self) -> Stepped:
        return self

    def __anext__(self) -> Awaitable[Any]:
        return self._until_handed(self._coroutine.send, None)

    async def aclose(self) -> None:
        """End the coroutine: CancelledError is raised where it hands out an item.

        GeneratorExit would end the coroutines that it awaits by their close(), and so they could not await anything.
        """
        if not self._has_ended:
            left = asyncio.CancelledError()
            try:
                await self._until_handed(self._coroutine.throw, left)
            except StopAsyncIteration:
                pass
            except asyncio.CancelledError as exc:
                if exc is not left:
                    raise
            finally:
                del left  # which has this frame

    @types.coroutine
    def _until_handed(self, step: Callable[[Any], Any], value: Any) -> Generator[Any, Any, Any]:
        try:
            while True:
                try:
                    found = step(value)
                except StopIteration:
                    self._has_ended = True
                    raise StopAsyncIteration from None
                except BaseException:
                    self._has_ended = True
                    raise
                if type(found) is _Handed:
                    return found.item
                try:
                    value = yield found  # what the coroutine waits for
                    step = self._coroutine.send
                except BaseException as exc:
                    step, value = self._coroutine.throw, exc
        finally:
            del value  # it may be an error, and that has this frame
