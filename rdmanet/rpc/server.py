"""The server: `serve` listens for clients of a service, and executes their calls.

What happens on one connection is in callee.py. The server has what they share: the service, the limits, the tasks of
all calls, and the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextvars import ContextVar
from typing import Any, Self

from rdmanet.base import watching
from rdmanet.errors import shown
from rdmanet.rpc import endpoints
from rdmanet.rpc.borrowed_objects import borrowing
from rdmanet.rpc.builtin import HealthStatus, Served, builtin_of, names_of, served_by_name
from rdmanet.rpc.callee import Callee
from rdmanet.rpc.explaining import of_server
from rdmanet.rpc.first_steps import FirstSteps
from rdmanet.rpc.interceptors import Interceptor
from rdmanet.rpc.keepalive import checked_keepalive
from rdmanet.rpc.limits import DEFAULT, Limits, seconds
from rdmanet.rpc.method import Method
from rdmanet.rpc.running import Running
from rdmanet.rpc.schema import Service
from rdmanet.rpc.shares import Shares
from rdmanet.rpc.stats import MethodStats, counted
from rdmanet.rpc.threads import check_executor
from rdmanet.rpc.totals import keep

__all__ = ["Server", "serve"]


async def serve(
    service: Service | Sequence[Service],
    host: str | Sequence[str] | None = None,
    port: int | None = None,
    *,
    transport: str = "rdma",
    limits: Limits = DEFAULT,
    send_tracebacks: bool = False,
    keepalive: float | None = None,
    interceptors: Sequence[Interceptor] = (),
    intercept_builtin: bool = False,
    callback_interceptors: Sequence[Interceptor] = (),
    carry: Sequence[ContextVar[Any]] = (),
    executor: Executor | None = None,
    **transport_options: Any,
) -> Server:
    """Serve the methods of an object: ``server = await rpc.serve(Store(), host, port)``.

    Each call runs as a task of its own. It is cancelled when its caller cancels it, when its time is over, and when the
    connection is lost, unless the method is marked with ``@rpc.method(outlives_connection=True)``.

    A method raises `Error` for what the caller is to know. Of any other exception the caller learns only that it is
    INTERNAL; it is logged here, by the logger "rdmanet.rpc".

    :param service: an instance of a subclass of `Service`, or a list of several: a client finds its own by the name of
        the class, and gets UNIMPLEMENTED if there is none
    :param host: as for ``start_rdma_server`` or asyncio's ``create_server``; with ``transport="unix"`` a path
    :param port: 0 for a free port, which ``server.sockets`` tells
    :param transport: "rdma", "tcp" or "unix"; for tests "memory": servers of this loop, by names (docs/testing.md)
    :param limits: what clients may make this server do
    :param send_tracebacks: whether callers get the traceback of an INTERNAL error, as ``Error.traceback``. It may
        contain secrets
    :param keepalive: send Ping to a client from which nothing has come for so many seconds, and count the connection as
        lost if nothing comes for that long again. None: only the transport looks, for a host that has vanished
    :param interceptors: functions that run around each call, the first one outside: ``async def log(call, proceed)``
    :param intercept_builtin: whether they run around calls of `Health` and `Reflection`, too
    :param callback_interceptors: the same around the calls that methods make of objects which clients lend them. These
        see what a client's see: a span that they begin is a caller's
    :param carry: context variables that methods get from their callers, if these carry them, too
    :param executor: whose threads run the methods that are marked with ``@rpc.method(thread=True)``, for example a
        ``concurrent.futures.ThreadPoolExecutor``. It stays yours: shut it down after the server's end. None: the loop's
        default executor
    :param transport_options: for ``start_rdma_server``, or asyncio's ``create_server`` and ``create_unix_server``
    :raises OSError: it cannot listen
    :raises TypeError: it is no service, or the executor has no threads
    :raises ValueError: two of the services have the same name, or an argument is none of the above
    """
    silence = checked_keepalive("serve", keepalive)
    check_executor(executor)
    services = [service] if isinstance(service, Service) or not isinstance(service, Sequence) else service
    server = Server(
        services, limits, send_tracebacks, silence, interceptors, carry, intercept_builtin, executor
    )
    server.callback_interceptors = callback_interceptors
    server._listener = await endpoints.listen(
        lambda: Callee(server).link, host, port, transport, transport_options
    )
    return server


class Server:
    """What `serve` returns. ``async with`` closes it at the end.

    :ivar services: what is served, by the names that clients may have for it
    :ivar limits: what clients may make it do
    """

    callback_interceptors: Sequence[Interceptor] = ()
    _listener: asyncio.AbstractServer

    def __init__(
        self,
        services: Sequence[Service],
        limits: Limits,
        send_tracebacks: bool,
        keepalive: float | None,
        interceptors: Sequence[Interceptor],
        carry: Sequence[ContextVar[Any]],
        intercept_builtin: bool = False,
        executor: Executor | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.services = served_by_name(services)
        self.builtin = builtin_of(self)
        self.health: dict[str, HealthStatus] = dict.fromkeys(("", *self.services), "SERVING")
        self.limits = limits
        self.shares = Shares(limits)
        self.send_tracebacks = send_tracebacks
        self.keepalive = keepalive
        self.interceptors = interceptors
        self.intercept_builtin = intercept_builtin
        self.carry = carry
        self.executor = executor
        self.callees: set[Callee] = set()
        self.running: set[Running] = set()
        self.first_steps = FirstSteps(self.loop)
        self.refusal: str | None = None
        """Why it takes no new calls."""
        self.unheard: set[Callee] = set()
        """The connections whose clients may not have heard that."""
        watching.callers[self] = of_server
        keep(
            self,
            "server",
            [(self.services[name].schema, self.services[name].counters) for name in names_of(self.services)],
        )
        self._idle: asyncio.Future[None] | None = None
        self._closing: asyncio.Future[None] = self.loop.create_future()

    @property
    def sockets(self) -> Any:
        """What it listens on, as asyncio's ``Server.sockets``."""
        return self._listener.sockets  # type: ignore[attr-defined]

    def is_serving(self) -> bool:
        """Whether it takes new calls."""
        return self.refusal is None

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._closing.done()

    def set_health(self, status: HealthStatus, service: str | None = None) -> None:
        """Say what `Health.check` answers: "SERVING", which is the default, or "NOT_SERVING".

        :param service: a part of the server, by any name; None for all of it. A client asks for parts by these names
        :raises ValueError: the status is neither
        """
        if status not in ("SERVING", "NOT_SERVING"):
            raise ValueError(f'set_health: {shown(status)} is not "SERVING" or "NOT_SERVING"')
        for name in ("", *self.services) if service is None else (service,):
            self.health[name] = status

    def stats(self) -> dict[str, MethodStats]:
        """What was counted of each method since the server began, by the names of the methods.

        If there are several services, the name of the service is before that: "Store.get".
        """
        names = names_of(self.services)
        found: dict[str, MethodStats] = {}
        for name in names:
            served = self.services[name]
            for method, stats in counted(served.schema, served.counters).items():
                found[method if len(names) == 1 else f"{name}.{method}"] = stats
        return found

    def explain(self) -> str:
        """Which calls are under way, for how long, and what each does or waits for: a few lines of text.

        Of a method that waits it names the line, and of one in a thread where that is. `rdmanet ss` says the same of
        another process.
        """
        return of_server(self).explain()

    async def serve_forever(self) -> None:
        """Wait until the server is closed, or drained. Cancelling this closes it."""
        # Not the listener's, which is cancelled when that is closed: calls may still run then.
        try:
            await asyncio.shield(self._closing)
        finally:
            self.close()
            await self.wait_closed()

    async def drain(self, timeout: float | None = None) -> None:
        """Take no new calls, let those that run end, and close the server then.

        Clients are told. A call that was sent before its client has heard it is executed, and each later one gets
        UNAVAILABLE. After ``timeout`` seconds, calls that still run are cancelled. A client that does not answer holds
        this up for some seconds at most. Threads of methods cannot be cancelled, and are waited for. If this is
        cancelled, the server goes on draining: close it.

        :raises RuntimeError: it is called by a method of this server, and would wait for that
        """
        self._check_caller("drain()")
        timeout = seconds(timeout)
        self._refuse("it is shutting down")
        try:
            async with asyncio.timeout(timeout):
                while self.running or self.unheard:
                    self._idle = self._idle or self.loop.create_future()
                    await asyncio.shield(self._idle)
        except TimeoutError:
            pass
        self.close()
        await self.wait_closed()

    def close(self) -> None:
        """Stop listening, cancel the calls that run, and close the connections when these have ended.

        `wait_closed` waits for that. A call that its client has sent meanwhile has surely not begun, and the client
        knows: `Error.begun` is false.
        """
        if not self._closing.done():
            self._closing.set_result(None)
        self._refuse("it is closed")
        for running in list(self.running):
            running.cancel()
        if not self.running:
            self._close_links()

    async def wait_closed(self) -> None:
        """Wait until the last call and the last connection have ended. Call `close` before.

        Cancelling it ends only the wait.

        :raises RuntimeError: it is called by a method of this server, and would wait for that
        """
        self._check_caller("wait_closed()")
        while self.running:
            await asyncio.wait([running.task for running in self.running])
        closing = [callee.link.closed for callee in self.callees]
        if closing:
            await asyncio.wait(closing)
        await self._listener.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await self.wait_closed()

    def is_idle(self) -> None:
        """The task of the last call is in its last step."""
        if self._idle is not None:
            self._look()
        if self._closing.done():
            self._close_links()

    def methods_for(self, callee: Callee, served: Served) -> list[tuple[Method, Callable[..., Any]]]:
        """The methods of a service, with the functions to call, for a connection."""
        if not served.schema.lends:
            return served.methods
        return borrowing(callee, served.methods, self.callback_interceptors)

    def has_heard(self, callee: Callee) -> None:
        """A connection takes no more calls, or is gone."""
        self.unheard.discard(callee)
        self._look()

    def _look(self) -> None:
        if self._idle is not None and not self.running and not self.unheard:
            self._idle.set_result(None)
            self._idle = None

    def _check_caller(self, what: str) -> None:
        task = asyncio.current_task()
        if any(running.task is task for running in self.running):
            raise RuntimeError(f"{what} in a method would wait for that method: start a task for it")

    def _refuse(self, reason: str) -> None:
        if self.refusal is None:
            self._listener.close()
        elif not self.is_closing:
            return  # it drains already
        self.refusal = reason
        for callee in self.callees:
            callee.drain(reason)

    def _close_links(self) -> None:
        assert self.refusal is not None
        for callee in list(self.callees):
            callee.finish(self.refusal)

    def __repr__(self) -> str:
        names = ", ".join(names_of(self.services))
        return f"<rpc.Server of {names}: {len(self.callees)} clients, {len(self.running)} calls>"
