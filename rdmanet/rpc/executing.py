# cython: nonecheck=True, auto_pickle=False
"""How a server executes a call, from its arguments to its answer.

Theory
------
A call that may begin does so at once (first_steps.pyx), unless an earlier one of its connection has not begun yet:
they begin in the order in which they come. If it does not end in the step in which it begins, it becomes a task, which
runs the method and sends the one answer. It ends in one of five ways:

    the method returns          Reply; for a stream, its Items and End
    the method raises Error     Failure with that
    it raises something else    Failure INTERNAL, and nothing more; the log has the rest. KeyboardInterrupt and
                                SystemExit go on from there, as from any task
    it is cancelled             Failure CANCELLED, or DEADLINE_EXCEEDED if its time is over
    the connection is lost      it is cancelled, unless the method outlives connections; there is nobody to answer

Cancelling is asyncio's: CancelledError is raised where the method awaits, and `finally` blocks run. The server awaits
the end of each task. A result on loan keeps its task until the caller has released it, or until the time for that is
over.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine
from typing import Any, Final, cast

from rdmanet.rpc.answers import Answers, is_long
from rdmanet.rpc.beginning import BEGINNING
from rdmanet.rpc.buffer import Buffer
from rdmanet.rpc.calls import CalleeBook
from rdmanet.rpc.context import CURRENT
from rdmanet.rpc.errors import ENDS_THE_PROGRAM, Code, Error, late
from rdmanet.rpc.failures import error_of, mistake, report, when_read
from rdmanet.rpc.first_steps import FirstSteps, Rest
from rdmanet.rpc.host import Host
from rdmanet.rpc.interceptors import chained
from rdmanet.rpc.link import Link
from rdmanet.rpc.method import Kind
from rdmanet.rpc.running import Running, threads_end
from rdmanet.rpc.shares import Share
from rdmanet.rpc.snapshot import alone
from rdmanet.rpc.taking import taken, unpacked

_UNARY: Final = Kind.UNARY


class Executing:
    """What executes the calls of one connection.

    :param server: has the connection
    :ivar link: the protocol of its transport
    :ivar book: its unfinished calls
    :ivar share: what these have
    """

    share: Share

    def __init__(self, server: Host, link: Link) -> None:
        self.server = server
        self.loop = server.loop
        self.limits = server.limits
        self.link = link
        self.book: CalleeBook = CalleeBook(self.limits.calls)
        self._running = server.running
        self._intercepts = False
        self._answers = Answers(link, self.book, self.limits)
        self._first_steps: FirstSteps = server.first_steps
        self._newest: Running | None = None  # a task that has not begun

    def _begin(self, running: Running, arguments: tuple[Any, ...]) -> None:
        """Begin a call, at once or as a task. It begins after those that have come before it."""
        self._running.add(running)  # before the task, which may be eager, and end at once
        if (
            self._newest is None
            and self._is_quick(running, arguments)
            and self._begins_at_once(running, arguments)
        ):
            return
        work = self._run(running, arguments)
        self._newest = running
        work.send(None)
        running.task = self.loop.create_task(work, name=running.method.label)

    def _is_quick(self, running: Running, arguments: tuple[Any, ...]) -> bool:
        """Whether the method can be called with these arguments as they are, and may end without having to wait."""
        method = running.method
        if method.result_is_memory or self._intercepts or self.link.turns.busy:
            return False
        return self._is_plain(running, arguments)

    def _is_plain(self, running: Running, arguments: tuple[Any, ...]) -> bool:
        """Whether the method can be called with these arguments as they are."""
        method = running.method
        if method.kind is not _UNARY or method.count < 0 or running.packed is not None:
            return False
        for index in method.buffers:
            if type(arguments[index]) is not bytes:
                return False
        return True

    def _begins_at_once(self, running: Running, arguments: tuple[Any, ...]) -> bool:
        """Take the first step of a method, which is mostly the last one, too. False: this is not possible now."""
        steps, method, rest = self._first_steps, running.method, None
        if not steps.enter(running):
            return False
        try:
            try:
                result = steps.first(running.function(*arguments))
                if type(result) is Rest:
                    rest = result
                elif self.link.turns.busy or (
                    method.result_is_apart and (type(result) is not bytes or is_long(method, result))
                ):
                    rest = Rest(None, error=StopIteration(result))
                else:
                    self._answers.send_plain(running, result)
            except BaseException as exc:
                rest = Rest(None, error=exc)
            if rest is None:
                self._has_ended(running)
            else:
                work = self._run(running, arguments, rest)
                work.send(None)
                steps.go_on(work)
        finally:
            steps.leave()
        return True

    async def _run(self, running: Running, arguments: tuple[Any, ...], rest: Rest | None = None) -> None:
        """The task of a call.

        :param rest: of its method, if that has begun
        """
        method, deadline = running.method, running.call.deadline
        timer: asyncio.TimerHandle | None = None
        buffers: list[Buffer] = []
        try:
            try:
                await BEGINNING
            finally:
                if self._newest is running:
                    self._newest = None
            if not running.task:  # an eager one begins before its creator has it
                running.task = cast("asyncio.Task[None]", asyncio.current_task())
            CURRENT.set(running.call)
            if deadline is not None:
                timer = self.loop.call_at(deadline, running.time_is_over)
            if rest is not None:
                execution: Any = rest
            elif self._intercepts:
                execution = self._intercepted(running, arguments, buffers)
            else:
                execution = self._execute(running, arguments, buffers)
            if method.result_is_memory:
                held, result = await alone(execution), None
            else:
                held, result = None, await execution
            if running.sent is not None:
                self._answers.end(running)
            elif (
                held is not None or self.link.turns.busy or running.borrowed
                or (method.result_is_apart and (type(result) is not bytes or is_long(method, result)))
            ):  # fmt: skip
                held, result = held or [result], None
                await self._answers.reply(running, held, buffers, timer)
            else:
                self._answers.send_plain(running, result)
        except asyncio.CancelledError:
            self._fail(running, late() if running.late else Error(Code.CANCELLED, "the call was cancelled"))
        except BaseException as exc:
            if isinstance(exc, GeneratorExit) and self.loop.is_closed():
                running.received = running.sent = None
                raise  # nobody will run this task any more
            await self._has_raised(running, exc)
            if isinstance(exc, ENDS_THE_PROGRAM):
                raise
        finally:
            if timer is not None:
                timer.cancel()
            if running.threads is not None and not self.loop.is_closed():
                await threads_end(self.book, running.threads)
            for buffer in buffers:
                buffer.release()
            self._has_ended(running)

    def _has_ended(self, running: Running) -> None:
        """This is the last step of a call."""
        counter = running.counter
        seconds = self.loop.time() - running.begun_at
        if running.code is None:
            counter.ok += 1
            counter.seconds += seconds
        else:
            counter.count_failed(running.code, seconds)
        self.share.end(running)
        self._running.discard(running)
        if self.server.refusal is not None and not self._running:
            self.server.is_idle()

    async def _intercepted(self, running: Running, arguments: tuple[Any, ...], buffers: list[Buffer]) -> Any:
        """Execute the method within the server's interceptors, and with the context variables that were sent."""
        server, call = self.server, running.call
        for variable in server.carry:
            if variable.name in call.metadata:
                variable.set(call.metadata[variable.name])
        execute = functools.partial(self._execute, running, arguments, buffers)
        return await chained(server.interceptors, call, execute)()

    def _execute(
        self, running: Running, arguments: tuple[Any, ...], buffers: list[Buffer]
    ) -> Coroutine[Any, Any, Any]:
        """Run the method. Returns its result; a stream is sent.

        Most calls are no more than the method's own coroutine: that of another one would be resumed each time, too.
        """
        if self._is_plain(running, arguments):
            return running.function(*arguments)  # type: ignore[no-any-return]
        return self._execute_prepared(running, arguments, buffers)

    async def _execute_prepared(
        self, running: Running, arguments: tuple[Any, ...], buffers: list[Buffer]
    ) -> Any:
        """Run a method that takes a stream, gives one, or gets more than plain arguments."""
        method = running.method
        if running.packed is not None:
            arguments = await unpacked(self.link, self.share, running)
        for index in method.buffers:
            if type(arguments[index]) is not bytes:  # else it is as declared
                arguments = await taken(self.link, self.share, running, arguments, buffers)
                break
        call = running.function(*arguments) if method.count >= 0 else running.called(arguments)
        if running.sent is not None:
            await running.sent.send(aiter(call))
            return None
        return await call

    async def _has_raised(self, running: Running, exc: BaseException) -> None:
        """Answer a call whose method has raised this."""
        with_traceback = self.server.send_tracebacks
        error = error_of(exc, with_traceback)
        told = error or mistake(exc, with_traceback)
        if self.link.turns.busy and isinstance(exc, Exception) and not running.is_cancelled:
            told = await when_read(self.link, self.share, running, told)
        self._fail(running, told)
        if error is None:
            report(running.method.label, exc)

    def _fail(self, running: Running, error: Error) -> None:
        """Answer a call with an error, unless it has been answered, or the connection is gone."""
        if not running.call.is_over:
            running.code = int(error.code)
        running.call.is_over = True
        running.end_streams()
        if not self.link.is_over and self.book.cancel(running.number) is running:
            try:
                self._answers.fail(running, error)
            finally:
                self.book.answered(running.number)
