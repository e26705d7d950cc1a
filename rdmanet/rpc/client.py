"""`connect` gives an object with the methods of the service's class.

Type checkers take it for an instance of that class. It has the methods and nothing else: each begins a call on the
object's `Channel` (channel.py). A client that reconnects, or that has several connections, has a `Pool` (pool.py) in
the place of that, and one with interceptors an `Intercepted` (client_interceptors.py) before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, Generic, Literal, TypeVar, cast, overload

from rdmanet.base import watching
from rdmanet.base.call_accounts import CallsInfo
from rdmanet.errors import shown
from rdmanet.rpc import context, endpoints
from rdmanet.rpc.call_metadata import checked_metadata
from rdmanet.rpc.channel import Channel
from rdmanet.rpc.client_interceptors import Caller, Intercepted
from rdmanet.rpc.dialing import Address, Weighted, first_of
from rdmanet.rpc.errors import no_connection
from rdmanet.rpc.explaining import of_client
from rdmanet.rpc.interceptors import Interceptor
from rdmanet.rpc.keepalive import checked_keepalive
from rdmanet.rpc.lending import Into
from rdmanet.rpc.lending_objects import LendingChannel
from rdmanet.rpc.limits import DEFAULT, Limits, seconds
from rdmanet.rpc.peers import Peer
from rdmanet.rpc.pool import Pool
from rdmanet.rpc.resolving import Resolver, Servers, addresses_of
from rdmanet.rpc.response import Response
from rdmanet.rpc.retry import OF_SEVERAL, Retry
from rdmanet.rpc.schema import Schema, Service, schema_of
from rdmanet.rpc.stats import Counter, MethodStats, counted, counters_of
from rdmanet.rpc.stubs import Bound, Options, stub
from rdmanet.rpc.totals import keep

__all__ = ["connect", "explain", "options", "peer", "stats", "take_back"]

_S = TypeVar("_S", bound=Service)


class _Same:
    def __repr__(self) -> str:
        return "<as it is>"


_RETRY: Final = Retry()
_SAME: Final[Any] = _Same()


def connect(
    service: type[_S],
    host: str | Servers | Resolver,
    port: int | None = None,
    *,
    transport: str = "rdma",
    timeout: float | None = None,
    wait: bool = False,
    limits: Limits = DEFAULT,
    retry: Retry | None = None,
    lazy: bool = False,
    policy: Literal["first", "spread"] = "first",
    keepalive: float | None = None,
    interceptors: Sequence[Interceptor] = (),
    callback_interceptors: Sequence[Interceptor] = (),
    carry: Sequence[ContextVar[Any]] = (),
    **transport_options: Any,
) -> Connecting[_S]:
    """Connect to a server: ``async with rpc.connect(Store, host, port) as store: await store.get("w")``.

    What it gives has the methods of the class, and nothing else; type checkers see the class. Calls may run at the same
    time, and end in any order. Leaving the block closes the connection. Calls that are pending then get CANCELLED, and
    so do later ones. Whoever has no block for it writes ``store = await rpc.connect(...)``, and at the end ``await
    store.aclose()``.

    With `retry` the client connects again when a call needs it. A call that was not sent is sent then. One that was is
    made again if its method is marked with ``@rpc.method(idempotent=True)``, and fails with UNAVAILABLE otherwise.

    :param service: the class, as the server has it or another version of it
    :param host: the server's host; with ``transport="unix"`` the path of its socket. Or a list of several servers, as
        ``[(host, port), ...]``, or of paths. With ``policy="spread"`` they may have weights, ``[(host, port, 2), ...]``
        or ``[(path, None, 2), ...]``: one of weight 2 gets twice as many calls as one of 1. Or a `Resolver`, if these
        change; then `retry` is ``Retry()`` by default
    :param transport: "rdma", "tcp" or "unix"; for tests "memory": servers of this loop, by names (docs/testing.md)
    :param timeout: how long a call may take, in seconds; see `options`. None: no limit but the caller's own deadline
    :param wait: whether calls beyond ``Limits.calls`` of either side wait, in their order, until others have ended or
        their time is over. Else they fail with RESOURCE_EXHAUSTED
    :param limits: what this side accepts
    :param retry: how to reconnect; this includes the first connection. None: connect once
    :param lazy: whether the first call connects, and `connect` itself does not, so it waits for no server. Then `retry`
        is ``Retry()`` by default, too
    :param policy: with several servers, "first": connect to the first that answers; "spread": connect to each, and send
        each call to the one that has the fewest unfinished calls for its weight, where those that failed of late count,
        too. One that fails five calls in a row gets none for a second, and longer each time
    :param keepalive: send Ping to a server from which nothing has come for so many seconds, and count the connection as
        lost if nothing comes for that long again. None: only the transport looks, for a host that has vanished
    :param interceptors: functions that run around each call, the first one outside: ``async def log(call, proceed)``
    :param callback_interceptors: the same around the server's calls of objects that this client lends. These see what a
        server's see: a span that they begin is a method's
    :param carry: context variables that are sent along with each call, as metadata of their names. Their values are
        texts or bytes. The server carries them, too, or its methods read `metadata`
    :param transport_options: for ``create_rdma_connection``, or asyncio's ``create_connection`` and
        ``create_unix_connection``
    :raises ValueError: an argument is none of the above, or the time-out is NaN
    :raises Error: UNAVAILABLE if there is no connection, which is an OSError, too, with the number and the cause of
        what the system says, or if the server does not say Hello in time; UNIMPLEMENTED if it does not have the
        service; FAILED_PRECONDITION if its version of the class does not fit, and says what differs
    """

    async def opened() -> _S:
        options = Options(seconds(timeout), wait)
        schema = schema_of(service)
        resolver = host if isinstance(host, Resolver) else None
        how = (retry or _RETRY) if resolver is not None or lazy else retry
        servers = [] if isinstance(host, Resolver) else _addresses(host, port)
        counters = counters_of(schema)
        silence = checked_keepalive("connect", keepalive)
        if policy not in ("first", "spread"):
            raise ValueError(f'rpc.connect: policy={shown(policy)} is not "first" or "spread"')

        async def dial(address: Address) -> Channel:
            make = LendingChannel if schema.lends else Channel
            channel = make(schema, limits, silence, counters)
            if isinstance(channel, LendingChannel):
                channel.callback_interceptors = callback_interceptors
            await endpoints.connect(lambda: channel.link, *address, transport, transport_options)
            try:
                await channel.greeted()
            except BaseException:
                await channel.close()
                raise
            return channel

        caller: Channel | Pool
        try:
            if how is not None:
                for name in sorted(how.methods):
                    if name not in schema.methods:
                        raise ValueError(f"rpc.connect: Retry: {schema.name} has no method {shown(name)}")
                for name in OF_SEVERAL if policy != "spread" else ():
                    if getattr(how, name) != getattr(_RETRY, name):
                        raise ValueError(
                            f'rpc.connect: Retry({name}=) is for several servers: add policy="spread"'
                        )
            if resolver is not None:
                _no_port(port)
                servers = await resolver.addresses()
            if policy != "spread" and any(weight != 1.0 for _, weight in servers):
                raise ValueError('rpc.connect: weights are for calls that are spread: add policy="spread"')
            if how is not None or policy == "spread":
                for address, _ in servers:
                    endpoints.check("connect", transport, address[1])
                caller = Pool(schema, dial, servers, how, policy == "spread", resolver)
                try:
                    if not lazy:
                        await caller.opened()
                except BaseException:
                    await caller.close()
                    raise
            elif len(servers) == 1:
                caller = await dial(servers[0][0])
            else:
                caller = await first_of([address for address, _ in servers], dial, _RETRY.connect_seconds)
        except OSError as exc:
            raise no_connection(exc) from exc
        calls: Caller = Intercepted(caller, interceptors, carry, limits) if interceptors or carry else caller
        return cast(_S, _client_class(schema)(calls, options, limits, counters, Known(calls, counters)))

    return Connecting(opened)


class Connecting(Generic[_S]):
    """What `connect` returns: a block in which there is a client, or to be awaited for one."""

    def __init__(self, opened: Callable[[], Coroutine[Any, Any, _S]]) -> None:
        self._opened = opened
        self._client: _S | None = None

    def __await__(self) -> Generator[Any, Any, _S]:
        return self._opened().__await__()

    async def __aenter__(self) -> _S:
        self._client = await self._opened()
        return self._client

    async def __aexit__(self, *_: object) -> None:
        client, self._client = self._client, None
        if client is not None:
            await _checked(client)._caller.close()


def options(
    client: _S,
    *,
    timeout: float | None = _SAME,
    wait: bool = _SAME,
    metadata: Mapping[str, str | bytes] = _SAME,
    into: Any = _SAME,
    response: Response | None = _SAME,
) -> _S:
    """The same client, whose calls differ in this: ``await rpc.options(store, timeout=0.5).get("w")``.

    What is not given stays as it is with this client.

    :param timeout: how long a call may take, in seconds. When it takes longer, it fails with DEADLINE_EXCEEDED, and the
        method is cancelled. Called from within a method of a service, a call ends at that call's deadline at the
        latest. 0 or less: the call fails at once; None, ``math.inf`` or more than 285 years: no limit
    :param wait: at the limit of unfinished calls; see `connect`
    :param metadata: sent along with each call, instead of what was sent before; the method reads it by ``metadata()``
    :param into: memory of yours for the result, which is an array or a memoryview: ``await rpc.options(store,
        into=weights).get("w")``. Over RDMA the device writes a large result there itself. An array must have the type
        and the shape of the result, and is what the call returns. Other memory may be longer than the result; the call
        returns a memoryview of what was written. Use the client again, and the memory need not be registered again. If
        a call is cancelled, the device may still write until its transfer has ended. None: into new memory
    :param response: a `Response`, from which you read what the method says beside its result. Each call that runs needs
        its own. None: nobody reads it
    :raises TypeError: it is not what `connect` has given, `into` is read-only or no buffer, `response` is none, or the
        metadata is no map from texts to texts or bytes
    :raises ValueError: the time-out is NaN
    :raises BufferError: `into` is not C-contiguous
    :raises Error: RESOURCE_EXHAUSTED if the metadata is longer than ``Limits.metadata_bytes``

    A call with ``into=`` raises TypeError if its result is of another type, and Error (OUT_OF_RANGE) if the result does
    not fit. One with ``response=`` raises RuntimeError if the `Response` is of another call that has not ended.
    """
    this = _checked(client)
    if response is not _SAME and response is not None and not isinstance(response, Response):
        raise TypeError(
            f"rpc.options: response={shown(response)} is no rpc.Response: make one, rpc.Response()"
        )
    before, limits = this._options, this._limits
    changed = Options(
        before.timeout if timeout is _SAME else seconds(timeout),
        before.wait if wait is _SAME else wait,
        before.metadata if metadata is _SAME else checked_metadata(metadata, limits.metadata_bytes),
        before.into if into is _SAME else None if into is None else Into(into),
        before.response if response is _SAME else response,
    )
    return cast(_S, type(this)(this._caller, changed, limits, this._counters, this._known))


@overload
def peer() -> Peer | None: ...
@overload
def peer(client: Service) -> Any: ...
def peer(client: Service | None = None) -> Any:
    """In a method: who calls it, a `Peer`; else None.

    With a client: the address of its server, as ``get_extra_info("peername")`` of asyncio. If it has several, that of
    the last call's.

    :raises TypeError: it is not what `connect` has given
    """
    if client is None:
        return context.peer()
    return _checked(client)._caller.peer


def stats(client: Service) -> dict[str, MethodStats]:
    """What a client has counted of each method since `connect`, by the names of the methods.

    All of its connections count together, and so do its copies by `options`.

    :raises TypeError: it is not what `connect` has given
    """
    this = _checked(client)
    return counted(this._caller.schema, this._counters)


async def take_back(client: Service, lent: Service) -> None:
    """Lend an object no more that was an argument of this client's calls: ``await rpc.take_back(builder, listener)``.

    Without this it is lent for as long as its peer keeps it, and then nothing refers to it here any more. Calls of it
    that run are cancelled, unless the method is marked with ``outlives_connection``, and this waits for them. (In a
    callback it does not.) The peer's calls get UNAVAILABLE then. Cancelling this ends only the wait.

    An object that is not lent is left as it is. One that is may be lent again.

    :param lent: the object
    :raises TypeError: the client is none that `connect` has given, or has no method that takes an object
    """
    caller = _checked(client)._caller
    if not caller.schema.lends:
        raise TypeError(f"rpc.take_back: no method of {caller.schema.name} takes an object")
    if isinstance(caller, Intercepted):
        caller = caller.inner
    channels = caller.channels if isinstance(caller, Pool) else [caller]
    lending = [channel for channel in channels if isinstance(channel, LendingChannel)]
    await asyncio.gather(*(channel.take_back(lent) for channel in lending))


def explain(client: Service) -> str:
    """Which calls of a client are under way, for how long, and why others wait: a few lines of text.

    It says of its servers, too, which of them cannot be reached, or get no calls for a while, and why; and of objects
    that the client has lent, which of their methods run. `rdmanet ss` says the same of another process.

    :raises TypeError: it is not what `connect` has given
    """
    info = of_client(_checked(client)._caller)
    return "the client is closed, or its connection is over" if info is None else info.explain()


def _checked(client: object) -> _Client[Any]:
    if not isinstance(client, _Client):
        raise TypeError(f"{shown(client)} is not a client of rdmanet.rpc.connect()")
    return client


def _addresses(host: str | Servers, port: int | None) -> list[Weighted]:
    if isinstance(host, str):
        return [((host, port), 1.0)]
    _no_port(port)
    return addresses_of(host, "rpc.connect")


def _no_port(port: int | None) -> None:
    if port is not None:
        raise ValueError("rpc.connect: a list of servers has their ports in it: [(host, port), ...]")


# ---- The object that has the methods ------------------------------------------------------------------------


class Known:
    """What makes a client's calls, known to who looks at the process while the client or a copy of it lives."""

    __slots__ = ("__weakref__", "caller", "loop")

    def __init__(self, caller: Caller, counters: list[Counter]) -> None:
        self.caller = caller
        self.loop = asyncio.get_running_loop()
        watching.callers[self] = _told
        keep(self, "client", [(caller.schema, counters)])


def _told(known: Known) -> CallsInfo | None:
    return of_client(known.caller)


class _Client(Bound, Generic[_S]):
    """What `connect` gives. Its subclasses have the methods."""

    __slots__ = ("_counters", "_known", "_limits")

    def __init__(
        self,
        caller: Caller,
        options: Options,
        limits: Limits,
        counters: list[Counter],
        known: Known | None = None,
    ) -> None:
        super().__init__(caller, options)
        self._known = known
        self._limits = limits
        self._counters = counters

    async def aclose(self) -> None:
        """Close its connections; see `connect`."""
        await self._caller.close()

    def __copy__(self) -> Any:
        return type(self)(self._caller, self._options, self._limits, self._counters, self._known)

    @property
    def _transport(self) -> Any:
        """That of the last call; None if it has none any more (for `rdmanet.fabric`)."""
        caller: Any = self._caller
        if isinstance(caller, Intercepted):
            caller = caller.inner
        channels = caller.channels if isinstance(caller, Pool) else [getattr(caller, "_channel", caller)]
        return next((each.link.transport for each in channels if caller.peer in (None, each.peer)), None)

    def __repr__(self) -> str:
        return f"<client of {self._caller.schema.name} at {self._caller.peer}>"


def client_of(caller: Caller, limits: Limits, counters: list[Counter]) -> Any:
    """A client of the service that this calls."""
    return _client_class(caller.schema)(caller, Options(), limits, counters)


def _client_class(schema: Schema) -> type[_Client[Any]]:
    found: type[_Client[Any]] | None = vars(schema).get("client_class")
    if found is None:
        methods = {name: stub(method) for name, method in schema.methods.items()}
        found = type(f"{schema.name}Client", (_Client,), {"__slots__": (), **methods})
        vars(schema)["client_class"] = found
    return found
