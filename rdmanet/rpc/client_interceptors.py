"""A client's calls with what goes around them: interceptors, and context variables that are sent along.

`Intercepted` looks like a channel, and passes calls on to one, or to a pool.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from rdmanet.rpc.call_metadata import Metadata, checked_metadata
from rdmanet.rpc.context import CallInfo
from rdmanet.rpc.interceptors import Interceptor, Stepped, chained, hand
from rdmanet.rpc.limits import Limits
from rdmanet.rpc.pending import CallDetails
from rdmanet.rpc.response import Response
from rdmanet.rpc.schema import Schema
from rdmanet.rpc.streaming import Cut, Results


class Caller(Protocol):
    """What makes calls: a channel, a pool, or one of these with interceptors."""

    schema: Schema

    @property
    def peer(self) -> Any: ...

    def unary(self, call: CallDetails) -> Coroutine[Any, Any, Any]: ...

    def stream(self, call: CallDetails) -> Results: ...

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

    def unary(self, call: CallDetails) -> Coroutine[Any, Any, Any]:
        """Make a call that has one result; as for `Channel`."""
        info = self._info(call)

        async def proceed() -> Any:
            return await self.inner.unary(self._changed(call, info))

        return chained(self._interceptors, info, proceed)()

    def stream(self, call: CallDetails) -> Results:
        """Make a call that streams its results; as for `Channel`."""
        info, cut = self._info(call), Cut()

        async def proceed() -> None:
            items = self.inner.stream(self._changed(call, info))
            async with contextlib.aclosing(items):
                async for item in items:
                    await hand(item)

        return Results(cut, functools.partial(_stream, cut, chained(self._interceptors, info, proceed)))

    def _info(self, call: CallDetails) -> CallInfo:
        found: Metadata = {}
        for variable in self._carry:
            if (value := variable.get(None)) is not None:
                found[variable.name] = value
        found |= call.metadata or {}
        info = CallInfo(self.schema.name, call.method.name, found, call.deadline, self.inner)
        info._said = call.response or (Response() if self._interceptors else None)
        return info

    def _changed(self, call: CallDetails, info: CallInfo) -> CallDetails:
        """The call, when the interceptors have had their say."""
        metadata = checked_metadata(info.metadata, self._limits.metadata_bytes)
        return call.carrying(metadata, info._said)


async def _stream(cut: Cut, begin: Callable[[], Coroutine[Any, Any, Any]]) -> AsyncGenerator[Any, None]:
    with cut:
        async with contextlib.aclosing(Stepped(begin())) as items:
            async for item in items:
                yield item
