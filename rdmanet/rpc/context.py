"""What a running method knows of its call: its deadline and its caller.

It is in a context variable of the method's task, so tasks that the method starts have it, too, and calls that they make
inherit the deadline. When the call has its answer, that is over: a task that goes on has no deadline, and no caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

__all__ = ["deadline", "metadata", "peer"]


class Current:
    """The call that a method is executing.

    :ivar deadline: when its time is over, on the clock of the loop's time(); None if it has no limit
    :ivar peer: the address of the caller
    :ivar metadata: what the caller has sent along
    :ivar is_over: it has its answer
    """

    __slots__ = ("deadline", "is_over", "metadata", "peer")

    def __init__(self, deadline: float | None, peer: Any, metadata: Mapping[str, str | bytes]) -> None:
        self.deadline = deadline
        self.peer = peer
        self.metadata = metadata
        self.is_over = False


CURRENT: ContextVar[Current | None] = ContextVar("rdmanet.rpc", default=None)


def current() -> Current | None:
    """The call for which this task runs, if that has no answer yet."""
    found = CURRENT.get()
    return None if found is None or found.is_over else found


def deadline() -> float | None:
    """In a method: when the time of its call is over, on the clock of the loop's ``time()``; None: it has no limit.

    The method is cancelled then. Calls that it makes end then, too, unless they are to end sooner.

    In a task that goes on when the call has its answer there is no deadline any more.
    """
    found = current()
    return None if found is None else found.deadline


def peer() -> Any:
    """In a method: the address of its caller's connection, as ``get_extra_info("peername")`` of asyncio; else None."""
    found = current()
    return None if found is None else found.peer


def metadata() -> Mapping[str, str | bytes]:
    """In a method: the metadata that its caller has sent (``rpc.options(store, metadata=...)``); else nothing.

    It comes from the peer, and nobody has checked what it says.
    """
    found = current()
    return MappingProxyType({} if found is None else dict(found.metadata))


def deadline_in(timeout: float | None) -> float | None:
    """When a call that may take so long has to end. It inherits the deadline of the call that is being executed."""
    inherited = deadline()
    if timeout is None:
        return inherited
    own = asyncio.get_running_loop().time() + timeout
    return own if inherited is None else min(own, inherited)
