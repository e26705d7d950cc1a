"""Methods that compute: plain functions, which run in threads of an executor, so that the loop goes on.

Theory
------
``@rpc.method(thread=True)`` makes a coroutine function of a plain one. That runs it in the executor that `serve` was
given, or else in the loop's own, and waits for it. The context variables are those of the call, so `metadata`, `peer`
and the rest work in the thread.

A thread cannot be stopped. So when a call is cancelled, or its time is over, its caller has the answer at once, and the
thread goes on, if it has begun. Until it ends, the call keeps its place among the calls of its connection, of the
method and of the server, and the memory of its arguments, and `Server.drain` and `wait_closed` wait for it. What has
not begun does not begin any more, but keeps its place until a thread has come to it: it cannot be taken out of the
executor's queue, and a peer could make that as long as it likes. A function that takes long asks `is_active`, and
returns if nobody waits any more.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # not only when the first thread is wanted
import contextlib
import contextvars
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Literal, ParamSpec, TypeVar, overload

from rdmanet.errors import shown
from rdmanet.rpc.context import current, server_side
from rdmanet.rpc.method_options import Options, checked

__all__ = ["method"]

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
_T = TypeVar("_T")


@overload
def method(
    *,
    thread: Literal[True],
    details: Any = None,
    outlives_connection: bool = False,
    idempotent: bool = False,
    timeout: float | None = None,
    calls: int | None = None,
) -> Callable[[Callable[_P, _T]], Callable[_P, Coroutine[Any, Any, _T]]]: ...
@overload
def method(
    *,
    thread: Literal[False] = False,
    details: Any = None,
    outlives_connection: bool = False,
    idempotent: bool = False,
    timeout: float | None = None,
    calls: int | None = None,
) -> Callable[[_F], _F]: ...
def method(
    *,
    thread: bool = False,
    details: Any = None,
    outlives_connection: bool = False,
    idempotent: bool = False,
    timeout: float | None = None,
    calls: int | None = None,
) -> Callable[[Any], Any]:
    """Say more about a method of a service: ``@rpc.method(...)`` above it.

    :param thread: it is a plain function, ``def``, that computes, and runs in a thread: one of the executor that
        `serve` was given, or of the loop's default executor. Callers await it like others, ``await self.name()`` in
        the service itself, too. If its call ends before it does, by a deadline or because it is cancelled, the caller
        is answered at once, and the function goes on to its end, and keeps the call's place and memory; `is_active`
        tells it
    :param details: the type of ``Error.details`` that it raises, as its callers are to get them
    :param outlives_connection: it goes on when the connection of its caller is lost; otherwise it is cancelled then
    :param idempotent: calling it twice is as good as once. So a client that reconnects (`Retry`) may call it again when
        the connection was lost during the call
    :param timeout: how many seconds a call may take at the server, however long its caller would wait. A longer one
        fails with DEADLINE_EXCEEDED, and is cancelled
    :param calls: how many calls of it a server executes at a time, of all connections together. A further one fails
        with RESOURCE_EXHAUSTED, and has not begun
    :raises TypeError: `timeout` is no number, `calls` no whole number, or a function with `thread` is a coroutine
        function or a generator
    :raises ValueError: one of them is not more than 0
    """
    if not isinstance(thread, bool):
        raise TypeError(f"rpc.method: thread={shown(thread)} is neither True nor False")
    options = checked(
        Options(
            details=details,
            outlives_connection=outlives_connection,
            idempotent=idempotent,
            timeout=timeout,
            calls=calls,
            thread=thread,
        )
    )

    def mark(function: Any) -> Any:
        found: Any = _in_thread(function) if thread else function
        found.__rpc_options__ = options
        return found

    return mark


def check_executor(executor: concurrent.futures.Executor | None) -> None:
    """Raise TypeError if this is no executor that has threads."""
    processes = sys.modules.get("concurrent.futures.process")
    is_other = processes is not None and isinstance(executor, processes.ProcessPoolExecutor)
    if executor is not None and (is_other or not isinstance(executor, concurrent.futures.Executor)):
        raise TypeError(
            f"rpc.serve: executor={shown(executor)} has no threads: pass a concurrent.futures.ThreadPoolExecutor"
        )


def _in_thread(function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    name = getattr(function, "__qualname__", shown(function))
    for is_one, what in (
        (inspect.iscoroutinefunction, "a coroutine function, which runs in the loop"),
        (inspect.isasyncgenfunction, "an asynchronous generator, which runs in the loop"),
        (inspect.isgeneratorfunction, "a generator, and a method in a thread returns one result"),
    ):
        if is_one(function):
            raise TypeError(
                f"rpc.method(thread=True): {name} is {what}: write `def` without `yield`, or leave thread=True out"
            )

    @functools.wraps(function)
    async def in_thread(*arguments: Any, **by_name: Any) -> Any:
        return await _result(Work(functools.partial(function, *arguments, **by_name)))

    return in_thread


class Work:
    """A function that runs in a thread, once.

    It neither raises nor returns in the thread: what it has done is in `_done`, to which nothing else refers when it is
    taken. So a result can be lent where it is (snapshot.py), and an error takes no cycle.

    :ivar thread: in which it runs; None: it waits for one
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.thread: int | None = None
        self._to_do = [function]
        self._done: list[tuple[bool, Any]] = []

    def __call__(self) -> None:
        """In the thread."""
        self.thread = threading.get_ident()
        try:
            function = self._to_do.pop()
        except IndexError:
            return  # nobody waits for it any more
        try:
            result = function()
        except BaseException as exc:
            del function
            self._done.append((False, exc))
        else:
            del function  # and what it is called with, which may be the result
            self._done.append((True, result))

    def drop(self) -> None:
        """Do not begin, if it has not begun."""
        with contextlib.suppress(IndexError):
            self._to_do.pop()

    def taken(self) -> Any:
        """Return what the function has returned, or raise what it has raised."""
        is_result, found = self._done.pop()
        if is_result:
            return found
        try:
            raise found
        finally:
            del found  # whose traceback has this frame


async def _result(work: Work) -> Any:
    """Run it, and wait for it. Cancelling this ends the wait, and leaves what is in the executor to its call."""
    call = current()
    side = None if call is None else server_side(call)
    loop, executor = asyncio.get_running_loop(), None if side is None else side.executor
    running = loop.run_in_executor(executor, functools.partial(contextvars.copy_context().run, work))
    if call is not None:
        call._work = work
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        work.drop()
        if call is not None and side is not None:
            side.leave(call, running)
        raise
    if call is not None:
        call._work = None
    return work.taken()
