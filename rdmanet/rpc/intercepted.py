"""A client's calls with what goes around them: interceptors, and context variables that are sent along.

`Intercepted` looks like a channel, and passes calls on to one, or to a pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from rdmanet.rpc.around import CallInfo, Interceptor, Stepped, chained, hand
from rdmanet.rpc.carried import Metadata, checked_metadata
from rdmanet.rpc.limits import Limits
from rdmanet.rpc.pending import CallOptions
from rdmanet.rpc.schema import Method, Schema
from rdmanet.rpc.streaming import Cut, Results


class Caller(Protocol):
    """What makes calls: a channel, a pool, or one of these with interceptors."""

    schema: Schema

    @property
    def peer(self) -> Any: ...

    def unary(
        self,
        method: Method,
        arguments: tuple[Any, ...],
        by_name: dict[str, Any],
        deadline: float | None,
        options: CallOptions,
    ) -> Coroutine[Any, Any, Any]: ...

    def stream(
        self,
        method: Method,
        arguments: tuple[Any, ...],
        by_name: dict[str, Any],
        deadline: float | None,
        options: CallOptions,
    ) -> Results: ...

    async def close(self) -> None: ...


class Intercepted:
    """Calls with interceptors.

    :param carry: context variables; each that has a value is sent as metadata of its name
    """

    def __init__(
        self,
        inner: Caller,
        interceptors: Sequence[Interceptor],
        carry: Sequence[ContextVar[Any]],
        limits: Limits,
    ) -> None:
        self.schema = inner.schema
        self.inner = inner
        self._interceptors = interceptors
        self._carry = carry
        self._limits = limits

    @property
    def peer(self) -> Any:
        return self.inner.peer

    async def close(self) -> None:
        await self.inner.close()

    def unary(
        self,
        method: Method,
        arguments: tuple[Any, ...],
        by_name: dict[str, Any],
        deadline: float | None,
        options: CallOptions,
    ) -> Coroutine[Any, Any, Any]:
        """Make a call that has one result; as for `Channel`."""
        call = self._info(method, deadline, options)

        async def proceed() -> Any:
            return await self.inner.unary(method, arguments, by_name, deadline, self._sent(call, options))

        return chained(self._interceptors, call, proceed)()

    def stream(
        self,
        method: Method,
        arguments: tuple[Any, ...],
        by_name: dict[str, Any],
        deadline: float | None,
        options: CallOptions,
    ) -> Results:
        """Make a call that streams its results; as for `Channel`."""
        call, cut = self._info(method, deadline, options), Cut()

        async def proceed() -> None:
            items = self.inner.stream(method, arguments, by_name, deadline, self._sent(call, options))
            async with contextlib.aclosing(items):
                async for item in items:
                    await hand(item)

        return Results(cut, _stream(cut, chained(self._interceptors, call, proceed)))

    def _info(self, method: Method, deadline: float | None, options: CallOptions) -> CallInfo:
        found: Metadata = {}
        for variable in self._carry:
            if (value := variable.get(None)) is not None:
                found[variable.name] = value
        found |= options.metadata or {}
        return CallInfo(self.schema.name, method.name, found, deadline, lambda: self.inner.peer)

    def _sent(self, call: CallInfo, options: CallOptions) -> CallOptions:
        """What goes with the call, when the interceptors have had their say."""
        return CallOptions(checked_metadata(call.metadata, self._limits.metadata_bytes), options.into)


async def _stream(cut: Cut, begin: Callable[[], Coroutine[Any, Any, Any]]) -> AsyncGenerator[Any, None]:
    with cut:
        async with contextlib.aclosing(Stepped(begin())) as items:
            async for item in items:
                yield item
