"""What a service says about a method, beside its types, by ``@rpc.method(...)`` above it (threads.py)."""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
from typing import Any

import msgspec

from rdmanet.errors import shown
from rdmanet.rpc.limits import seconds


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What ``rpc.method`` says about a method."""

    details: Any = None
    outlives_connection: bool = False
    idempotent: bool = False
    timeout: float | None = None
    calls: int | None = None
    thread: bool = False


def checked(options: Options) -> Options:
    """The same options, if they may be.

    :raises TypeError, ValueError: as ``rpc.method``
    """
    calls = options.calls
    if (timeout := seconds(options.timeout)) is not None and not timeout > 0:
        raise ValueError(f"rpc.method: timeout={shown(timeout)} is not more than 0 seconds")
    if calls is not None:
        if isinstance(calls, bool) or not isinstance(calls, int):
            raise TypeError(f"rpc.method: calls={shown(calls)} is no whole number")
        if calls < 1:
            raise ValueError(f"rpc.method: calls={shown(calls)} is not 1 or more")
    return msgspec.structs.replace(options, timeout=timeout)
