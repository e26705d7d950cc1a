"""A server's side of service objects that its clients lend it: a method gets a client of each.

Theory
------
Such a client calls over an inner connection (inner.py), which is opened before the method runs, and of which Hello is
not waited for until the first call. It is closed when the method, and whoever else it has given the client, has let go
of it; as Python knows by counting references, or by ``await listener.aclose()``. Calls that run keep it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from rdmanet.errors import ProtocolError
from rdmanet.rpc.callee import Callee
from rdmanet.rpc.channel import Channel
from rdmanet.rpc.client import client_of
from rdmanet.rpc.client_interceptors import Caller, Intercepted
from rdmanet.rpc.errors import Code, Error, late, not_begun
from rdmanet.rpc.inner import Inners
from rdmanet.rpc.interceptors import Interceptor
from rdmanet.rpc.limits import exceeded
from rdmanet.rpc.method import Method
from rdmanet.rpc.pending import CallDetails
from rdmanet.rpc.schema import schema_of
from rdmanet.rpc.shares import Holder
from rdmanet.rpc.stats import counters_of
from rdmanet.rpc.streaming import Cut, Results


class _ToClient(Channel):
    """By which a server calls."""

    _who = "client"


class Borrower(Inners):
    """The objects that a server has got on one connection."""

    def __init__(self, callee: Callee, interceptors: Sequence[Interceptor]) -> None:
        super().__init__(callee.link)
        self._interceptors = interceptors
        self._share = callee.share
        self._limits = callee.limits
        self._holder = Holder()  # of what has come of results that are not complete
        self._holder.is_counted = True
        self._unfinished: dict[int, int] = {}

    def get(self, number: int, service: Any) -> Any:
        """A client of the object of this number.

        :raises Error: INVALID_ARGUMENT if that is in use, RESOURCE_EXHAUSTED if there are too many, UNAVAILABLE if the
            connection is gone
        """
        if self.link.is_over:
            raise self.link.lost_error()
        if number in self.open:
            raise Error(Code.INVALID_ARGUMENT, f"object {number} is lent already")
        if len(self.open) >= self._limits.objects:
            raise exceeded("objects", self._limits.objects, f"{len(self.open)} objects are lent")
        schema = schema_of(service)
        counters = counters_of(schema)
        channel = _ToClient(schema, self._limits, None, counters)
        channel.link._on_unfinished = functools.partial(self._unfinished_is, number)
        self.hear()
        self.begin(number, channel.link)
        caller: Caller = Borrowed(channel)
        if self._interceptors:
            caller = Intercepted(caller, self._interceptors, (), self._limits)
        return client_of(caller, self._limits, counters)

    def _unfinished_is(self, number: int, nbytes: int) -> None:
        """So much has come of a message that is not complete.

        :raises ProtocolError: there is no memory for it
        """
        before = self._unfinished.get(number, 0)
        if nbytes > before:
            try:
                self._share.hold(self._holder, nbytes - before, "results of objects")
            except Error as exc:
                raise ProtocolError(exc.text) from None
        else:
            self._share.drop(self._holder, before - nbytes)
        self._unfinished[number] = nbytes

    def is_over(self, number: int) -> None:
        super().is_over(number)
        self._share.drop(self._holder, self._unfinished.pop(number, 0))


class Borrowed:
    """What makes the calls of an object, as `Channel` does those of a server, until nothing refers to it."""

    def __init__(self, channel: Channel) -> None:
        self.schema = channel.schema
        self._channel = channel
        self._hello = channel.loop.create_task(channel.greeted(), name=f"rpc Hello of {self.schema.name}")
        self._hello.add_done_callback(_seen)

    @property
    def peer(self) -> Any:
        """The address of who has lent it."""
        return self._channel.peer

    async def unary(self, call: CallDetails) -> Any:
        await self._greeted(call)
        return await self._channel.unary(call)

    def stream(self, call: CallDetails) -> Results:
        return Results(cut := Cut(), functools.partial(self._stream, cut, call))

    async def _stream(self, cut: Cut, call: CallDetails) -> AsyncGenerator[Any, None]:
        with cut:
            await self._greeted(call)
            async with contextlib.aclosing(self._channel.stream(call)) as items:
                async for item in items:
                    yield item

    async def _greeted(self, call: CallDetails) -> None:
        """Wait until the other side has said what it has."""
        if self._channel.service or self._channel.refusal is not None:
            return
        try:
            async with asyncio.timeout_at(call.deadline):
                await asyncio.shield(self._hello)
        except TimeoutError:
            raise not_begun(late()) from None

    async def close(self) -> None:
        """Let go of the object. Calls that are pending get CANCELLED, and so do later ones."""
        await self._channel.close()

    def __del__(self) -> None:
        channel = self._channel
        if not channel.link.is_over and not channel.loop.is_closed():
            channel.loop.call_soon_threadsafe(channel.link.close)


def _seen(hello: asyncio.Task[None]) -> None:
    if not hello.cancelled():
        hello.exception()  # the calls have it: nobody need be told that it was never retrieved


def borrowing(
    callee: Callee, methods: list[tuple[Method, Callable[..., Any]]], interceptors: Sequence[Interceptor]
) -> list[tuple[Method, Any]]:
    """The methods of a service for one connection: those that take objects get clients in the place of numbers.

    :param interceptors: run around calls of these clients
    """
    borrower = Borrower(callee, interceptors)
    return [
        (method, _with_objects(borrower, method, function) if method.objects else function)
        for method, function in methods
    ]


def _with_objects(borrower: Borrower, method: Method, function: Callable[..., Any]) -> Callable[..., Any]:
    places: list[tuple[int | str, Any]] = []
    for index in method.objects:
        parameter, at = method.parameters[index], index
        if parameter.by_keyword:
            places.append((parameter.name, parameter.service))
            continue
        if method.stream_at is not None and index >= method.stream_at:
            at += 1  # the stream is before it
        places.append((at, parameter.service))

    def call(*arguments: Any, **by_name: Any) -> Any:
        given = list(arguments)
        for place, service in places:
            into: Any = by_name if isinstance(place, str) else given
            if type(into[place]) is int:  # else it is the default
                into[place] = borrower.get(into[place], service)
        return function(*given, **by_name)

    return call
