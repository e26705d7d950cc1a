"""The event loop of a blocking stream, or of a listener: it runs only during calls.

Theory
------
A connection's beginning and end need a loop. Nobody runs one for a program that blocks, so a call does, for as long as
it waits for something that is not bytes (blocking.py). One call at a time may run it; `entered` marks each, and refuses
others. There is no lock for that: Ctrl-C may come at any line, and a lock that had just been taken would stay locked.

Ctrl-C ends a call and not the stream. So the loop is left as it was before, and its next run goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar, cast

from rdmanet.stream.loop_context import end_loop_contexts

_T = TypeVar("_T")


class End(Protocol):
    """The end of a connection that has a private loop."""

    def run_by_loop(self) -> None:
        """The loop is about to run: it has the completions, and no call has them."""

    async def until(self, what: int) -> None:
        """Wait until a call may go on."""


class PrivateLoop:
    """An event loop that runs only during calls.

    :ivar calls: the first is running, the others are about to be refused
    :ivar end: of the stream that has it, once that is connected
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.calls: list[object] = []
        self.end: End | None = None
        self._runner = asyncio.Runner(loop_factory=_Loop)
        self.loop = cast(_Loop, self._runner.get_loop())

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child; then the loop belongs to the parent."""
        return self._pid != os.getpid()

    @contextlib.contextmanager
    def entered(self, what: str) -> Iterator[None]:
        """Mark a call of this thread. Raises RuntimeError if there may be none now."""
        call = object()
        try:
            # Ctrl-C may come after each of these lines. A lock that had just been taken would stay locked.
            self.calls.append(call)
            if self.foreign or self.calls[0] is not call or asyncio._get_running_loop() is not None:
                raise self.refusal(what)
            yield
        finally:
            if call in self.calls:
                self.calls.remove(call)

    def refusal(self, what: str) -> RuntimeError:
        """Why there may be no call now."""
        if self.foreign:
            return RuntimeError(f"this was opened by process {self._pid}; open another after fork")
        if asyncio._get_running_loop() not in (None, self.loop):
            return RuntimeError(
                "an event loop runs in this thread, and a call that blocks would stop it: "
                "use open_rdma_connection() or start_rdma_stream_server() there"
            )
        return RuntimeError(f"another thread, or what a signal interrupted, is in a call of {what}")

    def turn(self) -> None:
        """Run what the loop has to run now."""
        self._run(asyncio.sleep(0))

    def run_until(self, end: End, what: int, timeout: float | None, late: str) -> None:
        """Run the loop until a call may go on.

        :param late: the text of the TimeoutError: it names the limit that the call had
        """
        self.run(lambda: end.until(what), timeout, late)

    def run(self, call: Callable[[], Coroutine[Any, Any, _T]], timeout: float | None, late: str = "") -> _T:
        """Run the loop until the coroutine ends. If that takes longer, cancel it and raise TimeoutError.

        :param late: the text of the error, if it is not to name `timeout`
        """

        async def bounded() -> _T:
            async with asyncio.timeout(timeout):
                return await call()

        if self.end is not None:
            self.end.run_by_loop()
        try:
            return self._run(bounded())
        except TimeoutError as exc:
            if exc.args:
                raise
            raise TimeoutError(late or f"not within {timeout} s") from None

    def _run(self, coroutine: Coroutine[Any, Any, _T], context: contextvars.Context | None = None) -> _T:
        try:
            return self._runner.run(coroutine, context=context)
        except (asyncio.CancelledError, KeyboardInterrupt):
            # What was to stop the loop may still be in its queue, and would stop its next run.
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
            # Only Ctrl-C cancels here, and the Runner forgets a Ctrl-C that comes while it prepares for one.
            raise KeyboardInterrupt from None

    def close(self) -> None:
        """End what is left on the loop. The loop need not run for that, so the collector may do it, in any thread."""
        end_loop_contexts(self.loop)
        self.loop.close()
        self.end = None


class _Loop(asyncio.SelectorEventLoop):
    """asyncio's loop, but a signal always wakes it, and names are resolved in this thread.

    Python handles a signal between two bytecodes, or when the signal interrupts a system call. A signal that comes just
    before the loop sleeps does neither, and Ctrl-C would have to wait for the next message. So the signal writes to the
    socket that wakes the loop.
    """

    _csock: socket.socket  # asyncio's ends of it
    _ssock: socket.socket

    def run_forever(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # signals go to that one
            super().run_forever()
            return
        before = signal.set_wakeup_fd(self._csock.fileno(), warn_on_full_buffer=False)
        try:
            super().run_forever()
        finally:
            signal.set_wakeup_fd(before)

    @property
    def bell(self) -> tuple[int, int]:
        """Two descriptors: what is written to the second wakes the loop, and makes the first readable."""
        return self._ssock.fileno(), self._csock.fileno()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run, now or at a time. (asyncio has no other way to ask.)"""
        return not self._ready and not self._scheduled  # type: ignore[attr-defined]

    async def getaddrinfo(self, host: Any, port: Any, **hints: Any) -> Any:
        return socket.getaddrinfo(host, port, **hints)
