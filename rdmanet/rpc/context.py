"""What can be known of a call while it runs: its method, its deadline, its metadata and its other side.

Interceptors get it, at either side. At a server it is also in a context variable of the method's task, so tasks that
the method starts have it, too, and calls that they make inherit the deadline. When the call has its answer, that is
over: a task that goes on has no deadline, and no caller.
"""

from __future__ import annotations

import asyncio
import datetime  # noqa: F401  before msgspec, see credit.py
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from rdmanet.rpc.peers import Peer

__all__ = ["CallInfo", "deadline", "metadata", "peer"]


class Side(Protocol):
    """What knows the other side of a call: a connection, or a client that has several."""

    @property
    def peer(self) -> Any: ...


class CallInfo(msgspec.Struct, eq=False):
    """A call, as interceptors see it.

    :ivar service: the name of the service
    :ivar method: the name of the method
    :ivar metadata: a dict. What an interceptor of the client puts into it before it proceeds is sent; what one of the
        server puts into it the method finds there
    :ivar deadline: when its time is over, on the clock of the loop's ``time()``; None: it has no limit
    :ivar is_over: at a server, whether the call has its answer
    """

    service: str
    method: str
    metadata: dict[str, str | bytes]
    deadline: float | None
    _side: Side
    is_over: bool = False

    @property
    def peer(self) -> Any:
        """At a server, who calls: a `Peer`. At a client, its server's address; of several, that of the last call's."""
        return self._side.peer

    def __repr__(self) -> str:
        return f"<call of {self.service}.{self.method}>"


CURRENT: ContextVar[CallInfo | None] = ContextVar("rdmanet.rpc", default=None)


def current() -> CallInfo | None:
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


def peer() -> Peer | None:
    """In a method: who calls it; else None."""
    found = current()
    return None if found is None or not isinstance(who := found.peer, Peer) else who


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
