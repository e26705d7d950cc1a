"""What a service says about a method, beside its types: ``@rpc.method(...)`` above it."""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

__all__ = ["method"]

_F = TypeVar("_F", bound=Callable[..., Any])


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `method` says about a method."""

    details: Any = None
    outlives_connection: bool = False
    idempotent: bool = False


def method(
    *, details: Any = None, outlives_connection: bool = False, idempotent: bool = False
) -> Callable[[_F], _F]:
    """Say more about a method of a service: ``@rpc.method(...)`` above it.

    :param details: the type of ``Error.details`` that it raises, as its callers are to get them
    :param outlives_connection: it goes on when the connection of its caller is lost; otherwise it is cancelled then
    :param idempotent: calling it twice is as good as once. So a client that reconnects (`Retry`) may call it again when
        the connection was lost during the call
    """

    def mark(function: _F) -> _F:
        options = Options(details=details, outlives_connection=outlives_connection, idempotent=idempotent)
        function.__rpc_options__ = options  # type: ignore[attr-defined]
        return function

    return mark
