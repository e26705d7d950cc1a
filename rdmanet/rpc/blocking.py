"""A client for programs that have no event loop: scripts, threads, the cells of a notebook.

Theory
------
Each client has an event loop of its own, which runs only during calls (private_loop.py), in the thread that calls. No
thread is started. It follows that:

* Between calls nothing happens. What the server sends waits; that the connection is over is noticed by the next call;
  and a server's Ping is answered by it. So a server with ``keepalive=`` ends the connection of a client that makes no
  call for that long, and a client of it has ``retry=``.
* One call at a time: another thread's call meanwhile raises RuntimeError. Each thread has a client of its own.
* Ctrl-C ends what waits, by KeyboardInterrupt: the call is cancelled, at the server, too, and the client goes on
  working. A second one, before the call has ended, is raised at any line of the loop, and may cost the connection.
* In a thread where a loop runs, a call would stop that loop, and raises RuntimeError. The loop of a notebook waits for
  the cell in any case, so there a call may stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from types import MethodType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, cast, overload

from rdmanet.errors import shown
from rdmanet.rpc import client as on_loop
from rdmanet.rpc.method import Kind, Method
from rdmanet.rpc.response import Response
from rdmanet.rpc.schema import Service, schema_of
from rdmanet.rpc.stats import MethodStats
from rdmanet.streams.private_loop import PrivateLoop

__all__ = ["Client", "Items", "call", "connect", "options", "peer", "run", "stats", "take_back"]

_S = TypeVar("_S", bound=Service)
_T = TypeVar("_T")
_P = ParamSpec("_P")

_AS_IT_IS: Final[Any] = on_loop._SAME
_END: Final = object()
_STREAMS_BACK: Final = frozenset({Kind.SERVER_STREAM, Kind.BOTH})


def connect(service: type[_S], host: Any, port: int | None = None, **how: Any) -> Client[_S]:
    """Connect to a server: ``with rpc.blocking.connect(Store, host, port) as store: store.get("w")``.

    What it gives has the methods of the class. Each waits for its result. One that streams its results gives an
    iterator of them (`Items`). A parameter that is a stream takes any iterable, too, which must not use this client.
    Leaving the block closes the connection, and so does ``store.close()``. Type checkers know the arguments and the
    result of ``rpc.blocking.call(store, Store.get, "w")``, which is the same call.

    :param service: the class
    :param host: as for ``rpc.connect``, and so are all others
    :raises RuntimeError: an event loop runs in this thread
    :raises Error: as ``rpc.connect``
    """
    loop = _CallLoop()
    try:
        inner: _S = loop.waits(lambda: on_loop.connect(service, host, port, **how)._opened())
    except BaseException:
        loop.close()
        raise
    return Client(service, inner, loop)


class Client(Generic[_S]):
    """What `connect` gives. It has the methods of the service's class, and ``close()``."""

    _is_closed = True  # Python deletes an object even if its __init__ raised

    def __init__(
        self, service: type[_S], inner: _S, loop: _CallLoop, owner: Client[_S] | None = None
    ) -> None:
        self._service = service
        self._inner = inner
        self._loop = loop
        self._owner = owner  # of the loop, if this is one of its copies
        self._is_closed = owner is not None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = None if name.startswith("_") else schema_of(self._service).methods.get(name)
        if method is None:
            raise AttributeError(f"{self._service.__name__} has no method {shown(name)}")

        def calls(*arguments: Any, **by_name: Any) -> Any:
            return _called(self, method, arguments, by_name)

        calls.__name__, calls.__qualname__, calls.__doc__ = name, method.label, method.function.__doc__
        calls.__wrapped__ = MethodType(method.function, self)  # type: ignore[attr-defined]  # see client.py
        return calls

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *schema_of(self._service).methods})

    @property
    def _transport(self) -> Any:
        return self._inner._transport  # type: ignore[attr-defined]

    def close(self) -> None:
        """Close the connection, and wait until it is gone. A second call does nothing, nor does that of a copy.

        After Ctrl-C it is closed, too.
        """
        if self._is_closed:
            return
        if self._loop.foreign:
            self._is_closed = True
            return
        self._loop.check()
        self._is_closed = True
        try:
            self._loop.waits(self._closed)
        finally:
            self._loop.close()

    async def _closed(self) -> None:
        await on_loop._checked(self._inner)._caller.close()
        await asyncio.get_running_loop().shutdown_asyncgens()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._is_closed:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
            if not self._loop.foreign:
                self._loop.close()

    def __repr__(self) -> str:
        return f"<blocking {repr(self._inner).strip('<>')}>"


class Items(Iterator[_T]):
    """The results of a call that streams them. Ending the block, or ``close()``, ends the call."""

    def __init__(self, client: Client[Any], items: Any) -> None:
        self._client = client  # which closes its connection when nobody has it any more
        self._loop = client._loop
        self._items = items

    def __next__(self) -> _T:
        if (item := self._loop.waits(self._next)) is _END:
            raise StopIteration
        return cast(_T, item)

    async def _next(self) -> Any:
        return await anext(self._items, _END)

    def close(self) -> None:
        """End the call. After the client's end this does nothing, nor in a forked child, which has no call."""
        if not (self._loop.foreign or self._loop.loop.is_closed()):
            self._loop.waits(self._items.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@overload
def call(
    client: Client[_S],
    method: Callable[Concatenate[_S, _P], Coroutine[Any, Any, _T]],
    *arguments: _P.args,
    **by_name: _P.kwargs,
) -> _T: ...
@overload
def call(
    client: Client[_S],
    method: Callable[Concatenate[_S, _P], AsyncIterator[_T]],
    *arguments: _P.args,
    **by_name: _P.kwargs,
) -> Items[_T]: ...
def call(client: Client[Any], method: Any, *arguments: Any, **by_name: Any) -> Any:
    """Call a method, and wait for its result: ``rpc.blocking.call(store, Store.get, "w")``.

    :param method: of the service's class
    :raises TypeError: it is none, or the arguments do not fit
    :raises Error: as the method of the client of ``rpc.connect``
    """
    found = schema_of(_checked(client)._service).methods.get(getattr(method, "__name__", ""))
    if found is None:
        raise TypeError(f"call: {shown(method)} is no method of {client._service.__name__}")
    return _called(client, found, arguments, by_name)


def run(
    client: Client[Any],
    function: Callable[_P, Coroutine[Any, Any, _T]],
    *arguments: _P.args,
    **by_name: _P.kwargs,
) -> _T:
    """Wait for a coroutine function, on the client's loop: ``run(store, buffer.read, 0, 100)``, of an `rpc.Buffer`."""
    return _checked(client)._loop.waits(lambda: function(*arguments, **by_name))


def options(
    client: Client[_S],
    *,
    timeout: float | None = _AS_IT_IS,
    wait: bool = _AS_IT_IS,
    metadata: Mapping[str, str | bytes] = _AS_IT_IS,
    into: Any = _AS_IT_IS,
    response: Response | None = _AS_IT_IS,
) -> Client[_S]:
    """The same client, whose calls differ in this; see ``rpc.options``."""
    this = _checked(client)
    given = {"timeout": timeout, "wait": wait, "metadata": metadata, "into": into, "response": response}
    inner = on_loop.options(this._inner, **given)
    return Client(this._service, inner, this._loop, this._owner or this)


def peer(client: Client[Any]) -> Any:
    """The address of its server; see ``rpc.peer``."""
    return on_loop.peer(_checked(client)._inner)


def stats(client: Client[Any]) -> dict[str, MethodStats]:
    """What it has counted of each method; see ``rpc.stats``."""
    return on_loop.stats(_checked(client)._inner)


def take_back(client: Client[Any], lent: Service) -> None:
    """Lend an object no more; see ``rpc.take_back``."""
    run(client, on_loop.take_back, _checked(client)._inner, lent)


def _checked(client: object) -> Client[Any]:
    if not isinstance(client, Client):
        raise TypeError(f"{shown(client)} is not a client of rdmanet.rpc.blocking.connect()")
    return client


def _called(client: Client[Any], method: Method, arguments: tuple[Any, ...], by_name: dict[str, Any]) -> Any:
    if method.stream is not None:
        name, at = method.stream[0], method.stream_at
        if name in by_name:
            by_name[name] = _stream(by_name[name])
        elif at is not None and at < len(arguments):
            arguments = (*arguments[:at], _stream(arguments[at]), *arguments[at + 1 :])

    streams_back = method.kind in _STREAMS_BACK

    async def made() -> Any:
        found = getattr(client._inner, method.name)(*arguments, **by_name)
        return found if streams_back else await found

    result = client._loop.waits(made)
    return Items(client, result) if streams_back else result


def _stream(items: Any) -> Any:
    """What a caller's stream is made of."""
    return items if hasattr(items, "__aiter__") else _taken(items)


async def _taken(items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


class _CancelledError(Exception):
    """The CancelledError of a task that nobody has cancelled."""


async def _not_cancelled(function: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """The loop takes each CancelledError for Ctrl-C, so another one is changed to `_CancelledError`."""
    try:
        return await function()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _CancelledError from None


class _CallLoop(PrivateLoop):
    """The loop of a client."""

    def check(self) -> None:
        """Raise RuntimeError if there may be no call now."""
        with self._alone(), self.entered("this client"):
            pass

    def waits(self, function: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run it until this has ended, with the context variables of whoever calls.

        :raises KeyboardInterrupt: Ctrl-C has cancelled it
        :raises asyncio.CancelledError: something else has, in the program's own coroutines
        """
        with self._alone(), self.entered("this client"):
            if self.loop.is_closed():
                raise RuntimeError("this client is closed")
            try:
                return self._run(_not_cancelled(function), contextvars.copy_context())
            except _CancelledError:
                raise asyncio.CancelledError from None

    def refusal(self, what: str) -> RuntimeError:
        if not self.foreign and asyncio._get_running_loop() is not None:
            return RuntimeError(
                "an event loop runs in this thread, and a call that blocks would stop it: await rpc.connect() there"
            )
        return super().refusal(what)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """In a notebook, stop its loop."""
        loop = asyncio._get_running_loop()
        if loop is None or loop is self.loop or not _in_notebook():
            yield
            return
        swap = getattr(asyncio.tasks, "_swap_current_task", None)  # before Python 3.12 each loop has its own
        task = asyncio.current_task(loop)
        try:
            if swap is not None:
                swap(loop, None)
            asyncio._set_running_loop(None)
            yield
        finally:
            asyncio._set_running_loop(loop)
            if swap is not None:
                swap(loop, task)


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and shell.get_ipython() is not None
