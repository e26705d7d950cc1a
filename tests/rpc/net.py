"""What tests of connections share: servers and clients of one transport, which are ended and counted afterwards."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rdmanet import rpc
from rdmanet.rpc.callee import Callee
from rdmanet.rpc.channel import Channel
from rdmanet.rpc.link import Link
from rdmanet.stream.bindings import Binding
from tests.support.waiting import Conditions

HOST = os.environ.get("RDMANET_TEST_HOST", "127.0.0.1")

S = TypeVar("S", bound=rpc.Service)


class Net:
    """Servers and clients over one transport."""

    def __init__(self, transport: str, folder: Path) -> None:
        self.transport = transport
        self._folder = folder
        self._stack = contextlib.AsyncExitStack()
        self._servers: list[rpc.Server] = []

    @property
    def is_by_name(self) -> bool:
        """Whether an address is a text: a path, or a name."""
        return self.transport in ("unix", "memory")

    async def serve(self, service: rpc.Service, **options: Any) -> rpc.Server:
        name = str(self._folder / f"s{len(self._servers)}")
        where = (name,) if self.is_by_name else (HOST, 0)
        server = await rpc.serve(service, *where, transport=self.transport, **options)
        self._servers.append(server)
        return await self._stack.enter_async_context(server)

    def address(self, server: rpc.Server) -> tuple[Any, ...]:
        name = server.sockets[0].getsockname()
        return (name,) if self.is_by_name else name[:2]

    def connecting(self, service: type[S], server: rpc.Server, **options: Any) -> Any:
        """The context manager that connects."""
        return rpc.connect(service, *self.address(server), transport=self.transport, **options)

    async def connect(self, service: type[S], server: rpc.Server, **options: Any) -> S:
        return await self._stack.enter_async_context(self.connecting(service, server, **options))

    async def pair(self, service: S, **options: Any) -> tuple[S, rpc.Server]:
        """A client of a service that is served."""
        server = await self.serve(service, **options)
        return await self.connect(type(service), server), server

    async def aclose(self) -> None:
        await self._stack.aclose()
        for server in self._servers:
            assert not server.running and not server.callees
            assert server.shares.calls == server.shares.held_bytes == 0 and not server.shares._connections


def channel(client: rpc.Service) -> Channel:
    """What is behind a client."""
    return client._caller  # type: ignore[attr-defined, no-any-return]


def callee(server: rpc.Server) -> Callee:
    """The server's side of its only connection."""
    (found,) = server.callees
    return found


def bindings(*links: Link) -> set[Binding]:
    """What these sides lend to their peers."""
    lending = [link.transport._regions for link in links if link.lends]  # type: ignore[attr-defined]
    return {binding for regions in lending for binding in regions._bindings}


async def idle(server: rpc.Server) -> bool:
    """Wait until no method runs; returns True."""
    while server.running:
        await asyncio.wait([running.task for running in server.running])
    return True


async def failure(call: Awaitable[object]) -> rpc.Error:
    """The Error that a call raises."""
    with pytest.raises(rpc.Error) as caught:
        await call
    return caught.value


class Journal:
    """What has happened, in order. Tests wait for entries."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self._conditions = Conditions()

    def __call__(self, entry: str) -> None:
        self.entries.append(entry)
        self._conditions.look()

    async def until(self, entry: str, count: int = 1) -> None:
        await self._conditions.until(lambda: self.entries.count(entry) >= count)
