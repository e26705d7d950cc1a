"""What a service says about a method, beside its types: ``@rpc.method(...)`` above it."""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from rdmanet.errors import shown
from rdmanet.rpc.limits import seconds

__all__ = ["method"]

_F = TypeVar("_F", bound=Callable[..., Any])


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `method` says about a method."""

    details: Any = None
    outlives_connection: bool = False
    idempotent: bool = False
    timeout: float | None = None
    calls: int | None = None


def method(
    *,
    details: Any = None,
    outlives_connection: bool = False,
    idempotent: bool = False,
    timeout: float | None = None,
    calls: int | None = None,
) -> Callable[[_F], _F]:
    """Say more about a method of a service: ``@rpc.method(...)`` above it.

    :param details: the type of ``Error.details`` that it raises, as its callers are to get them
    :param outlives_connection: it goes on when the connection of its caller is lost; otherwise it is cancelled then
    :param idempotent: calling it twice is as good as once. So a client that reconnects (`Retry`) may call it again when
        the connection was lost during the call
    :param timeout: how many seconds a call may take at the server, however long its caller would wait. A longer one
        fails with DEADLINE_EXCEEDED, and is cancelled
    :param calls: how many calls of it a server executes at a time, of all connections together. A further one fails
        with RESOURCE_EXHAUSTED, and has not begun
    :raises TypeError: `timeout` is no number, or `calls` no whole number
    :raises ValueError: one of them is not more than 0
    """
    if (timeout := seconds(timeout)) is not None and not timeout > 0:
        raise ValueError(f"rpc.method: timeout={shown(timeout)} is not more than 0 seconds")
    if calls is not None:
        if isinstance(calls, bool) or not isinstance(calls, int):
            raise TypeError(f"rpc.method: calls={shown(calls)} is no whole number")
        if calls < 1:
            raise ValueError(f"rpc.method: calls={shown(calls)} is not 1 or more")
    options = Options(
        details=details,
        outlives_connection=outlives_connection,
        idempotent=idempotent,
        timeout=timeout,
        calls=calls,
    )

    def mark(function: _F) -> _F:
        function.__rpc_options__ = options  # type: ignore[attr-defined]
        return function

    return mark
