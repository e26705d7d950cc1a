"""What can be known and said of a call while it runs: its method, its deadline, its metadata and its other side.

Interceptors get it, at either side. At a server it is also in a context variable of the method's task, so tasks that
the method starts have it, too, and calls that they make inherit the deadline. When the call has its answer, that is
over: a task that goes on has no deadline, and no caller.
"""

from __future__ import annotations

import asyncio
import datetime  # noqa: F401  before msgspec, see credit.py
from collections.abc import Mapping
from concurrent.futures import Executor
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Protocol, cast

import msgspec

from rdmanet.rpc.call_metadata import Metadata, checked_metadata
from rdmanet.rpc.limits import Limits
from rdmanet.rpc.peers import Peer
from rdmanet.rpc.response import Response

__all__ = [
    "CallInfo",
    "deadline",
    "metadata",
    "peer",
    "is_active",
    "send_initial_metadata",
    "set_trailing_metadata",
]


class Side(Protocol):
    """What knows the other side of a call: a connection, or a client that has several."""

    @property
    def peer(self) -> Any: ...


class Answering(Side, Protocol):
    """The same at a server."""

    server: Any
    limits: Limits
    executor: Executor | None

    def leave(self, call: CallInfo, thread: asyncio.Future[None]) -> None: ...

    async def say(self, call: CallInfo, metadata: Metadata) -> None: ...


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
    _number: int = -1
    """At a server, the call's on its connection."""
    _said: Response | None = None
    _work: Any = None
    """At a server, what runs in a thread for it now, or waits for one (threads.py)."""

    @property
    def peer(self) -> Any:
        """At a server, who calls: a `Peer`. At a client, the address of the server to which the call was sent last.

        Before that, if there are several, the address of the last call's.
        """
        peer = None if self._said is None else self._said._peer
        return self._side.peer if peer is None else peer

    @property
    def initial_metadata(self) -> Mapping[str, str | bytes]:
        """At a server, what `send_initial_metadata` has sent; at a client, what has come of it."""
        return MappingProxyType(self._response.initial_metadata)

    @property
    def trailing_metadata(self) -> dict[str, str | bytes]:
        """A dict. At a server, what goes with the answer: an interceptor may add to it before and after it proceeds.

        At a client, what has come with the answer, when ``proceed()`` has returned or raised.
        """
        return self._response.trailing_metadata

    @property
    def _response(self) -> Response:
        if self._said is None:
            self._said = Response()
        return self._said

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


def is_active() -> bool:
    """In a method: whether its call has no answer yet. Else False.

    A method that computes in a thread (``@rpc.method(thread=True)``) cannot be cancelled. It may ask this from time to
    time, and return when it is False: its caller has been answered, by a deadline or because it has cancelled the call,
    and whatever the method returns is dropped.
    """
    return current() is not None


async def send_initial_metadata(metadata: Mapping[str, str | bytes]) -> None:
    """In a method: tell its caller something now, before the result and before the items of a stream.

    The caller reads it from its `Response` while the method still works; if it has given none, nothing is sent. Several
    calls add up, and the last one counts of those that give the same name. It waits as long as the peer does not read;
    cancelling it ends that, and nothing was sent.

    :raises TypeError: it is no map from names to texts or bytes
    :raises RuntimeError: this is no method of a call that has no answer yet, or an item of its stream was sent
    :raises Error: RESOURCE_EXHAUSTED if it is longer than ``Limits.metadata_bytes`` together with what was sent
    """
    call, side = _answering("send_initial_metadata")
    found = dict(metadata)
    said = checked_metadata({**call.initial_metadata, **found}, side.limits.metadata_bytes)
    await side.say(call, found)
    call._response.initial_metadata = said or {}


def set_trailing_metadata(metadata: Mapping[str, str | bytes]) -> None:
    """In a method: tell its caller something with the answer, be that a result or an error.

    The caller reads it from its `Response`, or from ``Error.trailing_metadata``. Several calls add up, and the last one
    counts of those that give the same name.

    :raises TypeError, RuntimeError, Error: as for `send_initial_metadata`
    """
    call, side = _answering("set_trailing_metadata")
    found = call.trailing_metadata | dict(metadata)
    checked_metadata(found, side.limits.metadata_bytes)
    call.trailing_metadata.update(metadata)


def server_side(call: CallInfo) -> Answering:
    """The connection of a call that is being executed."""
    return cast(Answering, call._side)


def _answering(what: str) -> tuple[CallInfo, Answering]:
    if (found := current()) is None:
        raise RuntimeError(
            f"rpc.{what}: this does not run in a method, or its call has its answer: call it before the method returns"
        )
    return found, server_side(found)


def deadline_in(timeout: float | None) -> float | None:
    """When a call that may take so long has to end. It inherits the deadline of the call that is being executed."""
    inherited = deadline()
    if timeout is None:
        return inherited
    own = asyncio.get_running_loop().time() + timeout
    return own if inherited is None else min(own, inherited)
