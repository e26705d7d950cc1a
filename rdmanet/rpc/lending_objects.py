"""A client's side of service objects that it lends: who calls them, and for how long.

Theory
------
An object that is an argument gets a number of this connection, and is kept by it

    until the call ends        if the server has not opened the inner connection by then
    until that is closed       by the server, when its method lets go of the object; by the client, which takes it
                               back; or it is lost with the outer one

The server opens it before it answers, so whatever comes later by that number finds nothing, and is answered by Drop:
once, if the transport wants no more until then. What comes by a number that was never given is a violation of the
protocol.

Who ends this waits for the callbacks that run, which have been cancelled. A callback that ends it, or a task of one,
waits for none: two of them would wait for each other.

Within the inner connection the client is the server (callee.py). All objects of a connection are that server together,
with the limits that the client has.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Container, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from contextvars import ContextVar
from typing import Any

import msgspec

from rdmanet.errors import ProtocolError, shown
from rdmanet.rpc.builtin import Served, served_by_name
from rdmanet.rpc.callee import Callee
from rdmanet.rpc.channel import Channel
from rdmanet.rpc.context import CURRENT, server_side
from rdmanet.rpc.first_steps import FirstSteps
from rdmanet.rpc.inner import Inner, Inners
from rdmanet.rpc.interceptors import Interceptor
from rdmanet.rpc.limits import NUMBERS, Limits, exceeded
from rdmanet.rpc.link import Link
from rdmanet.rpc.messages import Drop
from rdmanet.rpc.method import Method, Parameter
from rdmanet.rpc.pending import CallDetails
from rdmanet.rpc.running import Running
from rdmanet.rpc.schema import Service, schema_of
from rdmanet.rpc.shares import Shares
from rdmanet.rpc.streaming import Cut, Results


class LendingChannel(Channel):
    """A connection of a client whose service has methods that take objects.

    :ivar callback_interceptors: run around calls of these objects
    """

    _lender: Lender | None = None
    callback_interceptors: Sequence[Interceptor] = ()

    def unary(self, call: CallDetails) -> Coroutine[Any, Any, Any]:
        if not call.method.objects:
            return super().unary(call)
        return self._unary(call)

    async def _unary(self, call: CallDetails) -> Any:
        with self._lent(call) as sent:
            result = await super().unary(sent)
        return result  # not before: see Channel

    def stream(self, call: CallDetails) -> Results:
        if not call.method.objects:
            return super().stream(call)
        return Results(cut := Cut(), functools.partial(self._lending, cut, call))

    async def _lending(self, cut: Cut, call: CallDetails) -> AsyncGenerator[Any, None]:
        with cut, self._lent(call) as sent:
            async with contextlib.aclosing(super().stream(sent)) as items:
                async for item in items:
                    yield item

    @contextlib.contextmanager
    def _lent(self, call: CallDetails) -> Iterator[CallDetails]:
        """The call with numbers in the place of its objects, which are lent meanwhile."""
        if self._lender is None:
            self._lender = Lender(self.link, self.limits, self.callback_interceptors)
        lender, method, arguments, numbers = self._lender, call.method, list(call.arguments), []
        try:
            for index in method.objects:
                if index >= len(arguments):
                    break  # left out: the server's default counts
                service = _checked(method, method.parameters[index], arguments[index])
                if service is not None:
                    arguments[index] = lender.lend(service)
                    numbers.append(arguments[index])
            yield call.giving(tuple(arguments))
        finally:
            for number in numbers:
                lender.call_has_ended(number)

    async def close(self) -> None:
        await super().close()
        if (lender := self._lender) is not None:
            await lender.ended(lender.running)

    async def take_back(self, service: Service) -> None:
        """Lend an object no more; see `client.take_back`."""
        if self._lender is not None:
            await self._lender.take_back(service)


def _checked(method: Any, parameter: Parameter, value: Any) -> Service | None:
    """The object that is given for a parameter.

    :raises TypeError: it is none
    """
    if value is None and parameter.may_be_none:
        return None
    if not isinstance(value, parameter.service):
        text = f"{shown(value)} is no object of a class that is derived from {parameter.service.__name__}"
        raise TypeError(f"{method.label}: parameter {parameter.name}: {text}")
    if schema_of(value).lends:
        text = (
            f"a method of {type(value).__name__} takes a service object itself, which its caller cannot lend"
        )
        raise TypeError(f"{method.label}: parameter {parameter.name}: {text}")
    return value  # type: ignore[no-any-return]


class Lender(Inners):
    """The objects that a client has lent on one connection.

    :ivar lent: they, by their numbers
    :ivar running: calls of them
    """

    def __init__(self, link: Link, limits: Limits, interceptors: Sequence[Interceptor]) -> None:
        super().__init__(link)
        self.limits = limits
        self.interceptors = interceptors
        self.lent: dict[int, Service] = {}
        self.running: set[Running] = set()
        together = min(limits.inline_bytes, limits.server_bytes)
        self.shares = Shares(
            msgspec.structs.replace(limits, server_calls=limits.calls, server_bytes=together)
        )
        self._count = 0  # of all that were ever lent
        self._to_drop: set[int] = set()  # when the transport takes more

    def lend(self, service: Service) -> int:
        """Lend an object for a call that begins. Returns its number.

        :raises Error: RESOURCE_EXHAUSTED; there are as many as there may be, and the call has not begun
        """
        if len(self.lent) >= self.limits.objects:
            error = exceeded("objects", self.limits.objects, f"{len(self.lent)} objects are lent")
            error.begun = False
            raise error
        while (number := self._count % NUMBERS) in self.lent:
            self._count += 1
        self._count += 1
        self.hear()
        self.lent[number] = service
        return number

    def call_has_ended(self, number: int) -> None:
        """The call that has lent it has ended. If the server has not opened it, it is not lent any more."""
        if number not in self.open:
            self.lent.pop(number, None)

    async def take_back(self, service: Service) -> None:
        """Lend an object no more, and wait until no callback of it runs."""
        for number in [number for number, lent in self.lent.items() if lent is service]:
            del self.lent[number]
            if (inner := self.open.get(number)) is not None:
                inner.within.close()
        await self.ended([each for each in self.running if server_side(each.call).server.service is service])

    def found(self, number: int) -> Inner | None:
        service = self.lent.get(number)
        if service is None:
            if number >= self._count:
                raise ProtocolError(f"the peer calls object {number}, which was not lent to it")
            if self.link.paused:
                self._to_drop.add(number)
            else:
                self.link.send(Drop(number))  # that was opened when its call had ended
            return None
        return self.begin(number, Callee(_Host(self, service)).link)

    def resume(self) -> None:
        super().resume()
        while self._to_drop and not self.link.paused:
            self.link.send(Drop(self._to_drop.pop()))

    def is_over(self, number: int) -> None:
        super().is_over(number)
        self.lent.pop(number, None)

    def lost(self, error: BaseException | None) -> None:
        super().lost(error)
        self.lent.clear()

    async def ended(self, those: Container[Running]) -> None:
        """Wait until none of these callbacks runs. Their connection is gone, and has cancelled them."""
        call = CURRENT.get()
        if call is not None and isinstance(host := server_side(call).server, _Host):
            if not call.is_over or any(running.call is call for running in host.running):
                return  # this is a callback; one in a thread goes on when its caller has an answer
        while tasks := [running.task for running in self.running if running in those]:
            await asyncio.wait(tasks)


class _Host:
    """An object that is lent, as the server of its inner connection."""

    send_tracebacks = intercept_builtin = is_closing = False
    keepalive: float | None = None
    refusal: str | None = None
    executor: Executor | None = None  # the loop's
    carry: Sequence[ContextVar[Any]] = ()

    def __init__(self, lender: Lender, service: Service) -> None:
        self.loop = lender.link.loop
        self.service = service
        self.services = served_by_name([service])
        self.builtin: dict[str, Served] = {}
        self.limits = lender.limits
        self.interceptors = lender.interceptors
        self.shares = lender.shares
        self.callees: set[Any] = set()
        self.unheard: set[Any] = set()
        self.running = lender.running
        self.first_steps = FirstSteps(self.loop)

    def methods_for(self, callee: Any, served: Served) -> list[tuple[Method, Callable[..., Any]]]:
        return served.methods

    def is_idle(self) -> None: ...

    def has_heard(self, callee: Any) -> None: ...
