"""`connect` gives an object with the methods of the service's class.

Type checkers take it for an instance of that class. It has the methods and nothing else: each begins a call on the
object's `Channel` (channel.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Generic, TypeVar, cast

from rdmanet.rpc import endpoints
from rdmanet.rpc.channel import Channel
from rdmanet.rpc.lending import Into
from rdmanet.rpc.limits import DEFAULT, Limits
from rdmanet.rpc.schema import Kind, Method, Schema, Service, schema_of

__all__ = ["connect", "options"]

_S = TypeVar("_S", bound=Service)


@contextlib.asynccontextmanager
async def connect(
    service: type[_S],
    host: str,
    port: int | None = None,
    *,
    transport: str = "rdma",
    timeout: float | None = None,
    limits: Limits = DEFAULT,
    **transport_options: Any,
) -> AsyncIterator[_S]:
    """Connect to a server: ``async with rpc.connect(Store, host, port) as store: await store.get("w")``.

    What it gives has the methods of the class, and nothing else; type checkers see the class. Calls may run at the same
    time, and end in any order. Leaving the block closes the connection. Calls that are pending then get CANCELLED.

    :param service: the class, as the server has it or another version of it
    :param host: the server's host; with ``transport="unix"`` the path of its socket
    :param transport: "rdma", "tcp" or "unix"
    :param timeout: how long a call may take, in seconds; see `options`. None: no limit but the caller's own deadline
    :param limits: what this side accepts
    :param transport_options: for ``create_rdma_connection``, or asyncio's ``create_connection`` and
        ``create_unix_connection``
    :raises OSError: there is no connection
    :raises Error: FAILED_PRECONDITION if the server's version of the class does not fit, and says what differs;
        UNAVAILABLE if the server does not say Hello in time
    """
    channel = Channel(schema_of(service), limits)
    await endpoints.connect(lambda: channel.link, host, port, transport, transport_options)
    try:
        await channel.greeted()
        yield cast(_S, _client_class(channel.schema)(channel, timeout))
    finally:
        await channel.close()


_SAME: Final[Any] = object()


def options(client: _S, *, timeout: float | None = _SAME, into: Any = None) -> _S:
    """The same client, whose calls differ in this: ``await rpc.options(store, timeout=0.5).get("w")``.

    :param timeout: how long a call may take, in seconds; by default, as long as with this client. When it takes longer,
        it fails with DEADLINE_EXCEEDED, and the method is cancelled. Called from within a method of a service, a call
        ends at that call's deadline at the latest
    :param into: memory of yours for the result, which is an array or a memoryview: ``await rpc.options(store,
        into=weights).get("w")``. Over RDMA the device writes a large result there itself. An array must have the type
        and the shape of the result, and is what the call returns. Other memory may be longer than the result; the call
        returns a memoryview of what was written. Use the client again, and the memory need not be registered again. If
        a call is cancelled, the device may still write until its transfer has ended
    :raises TypeError: it is not what `connect` has given, or `into` is read-only or no buffer
    :raises BufferError: `into` is not C-contiguous

    A call with ``into=`` raises TypeError if its result is of another type, and Error (OUT_OF_RANGE) if the result does
    not fit.
    """
    if not isinstance(client, _Client):
        raise TypeError(f"{client!r} is not a client of rdmanet.rpc.connect()")
    timeout = client._timeout if timeout is _SAME else timeout
    return cast(_S, type(client)(client._channel, timeout, None if into is None else Into(into)))


# ---- The object that has the methods ------------------------------------------------------------------------


class _Client(Generic[_S]):
    """What `connect` gives. Its subclasses have the methods."""

    __slots__ = ("_channel", "_into", "_timeout")

    def __init__(self, channel: Channel, timeout: float | None, into: Into | None = None) -> None:
        self._channel = channel
        self._timeout = timeout
        self._into = into

    def __repr__(self) -> str:
        return f"<client of {self._channel.schema.name} at {self._channel.link.peer}>"


def _client_class(schema: Schema) -> type[_Client[Any]]:
    found: type[_Client[Any]] | None = vars(schema).get("client_class")
    if found is None:
        methods = {name: _stub(method) for name, method in schema.methods.items()}
        found = type(f"{schema.name}Client", (_Client,), {"__slots__": (), **methods})
        vars(schema)["client_class"] = found
    return found


def _stub(method: Method) -> Callable[..., Any]:
    if method.kind in (Kind.UNARY, Kind.CLIENT_STREAM):

        def call(self: _Client[Any], /, *arguments: Any, **by_name: Any) -> Any:
            return self._channel.unary(method, arguments, by_name, self._timeout, self._into)

    else:

        def call(self: _Client[Any], /, *arguments: Any, **by_name: Any) -> Any:
            if self._into is not None:
                raise TypeError(f"{method.label}: into= is for one result, not for a stream")
            return self._channel.stream(method, arguments, by_name, self._timeout)

    call.__name__, call.__qualname__, call.__doc__ = method.name, method.label, method.function.__doc__
    return call
