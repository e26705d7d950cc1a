"""The transports, behind one pair of functions: how a client connects, and how a server listens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rdmanet.errors import shown
from rdmanet.rpc import in_memory
from rdmanet.rpc.peers import Peer
from rdmanet.stream.admission import source_of
from rdmanet.transport import create_rdma_connection, start_rdma_server

Factory = Callable[[], asyncio.BaseProtocol]


async def connect(
    factory: Factory, host: str, port: int | None, transport: str, options: dict[str, Any]
) -> None:
    """Make a connection whose protocol the factory gives.

    :param transport: "rdma", "tcp", "unix" or "memory"; for the last two, `host` is a path or a name
    """
    loop = asyncio.get_running_loop()
    check("connect", transport, port)
    if transport == "memory":
        _no_options("connect", options)
        await in_memory.connect(factory, host)
    elif transport == "rdma":
        await create_rdma_connection(factory, host, port, **options)
    elif transport == "tcp":
        assert port is not None
        await loop.create_connection(factory, host, port, **options)
    else:
        await loop.create_unix_connection(factory, host, **options)


async def listen(
    factory: Factory, host: Any, port: int | None, transport: str, options: dict[str, Any]
) -> asyncio.AbstractServer:
    """Listen for connections whose protocols the factory gives."""
    loop = asyncio.get_running_loop()
    check("serve", transport, port)
    if transport == "memory":
        _no_options("serve", options)
        return await in_memory.listen(factory, host)
    if transport == "rdma":
        return await start_rdma_server(factory, host, port, **options)
    if transport == "tcp":
        return await loop.create_server(factory, host, port, **options)
    return await loop.create_unix_server(factory, host, **options)


def check(call: str, transport: str, port: int | None) -> None:
    """Raise ValueError if there is no such transport, or if it wants another kind of address."""
    if transport not in ("rdma", "tcp", "unix", "memory"):
        raise ValueError(f'rpc.{call}: transport={shown(transport)} is not "rdma", "tcp", "unix" or "memory"')
    if (port is None) != (transport in _WANTS):
        wants = _WANTS.get(transport, "a host and a port")
        raise ValueError(f"rpc.{call}: transport={shown(transport)} wants {wants}")


_WANTS = {"unix": "a path, and no port", "memory": "a name, and no port"}


def _no_options(call: str, options: dict[str, Any]) -> None:
    for name in options:
        raise TypeError(f'rpc.{call}: transport="memory" has no option {shown(name)}')


def source(peer: Peer) -> str:
    """Who is at the other end of a connection that a server has accepted; see admission.source_of."""
    user, address = peer.user, peer.address
    return source_of(address[0] if user is None and isinstance(address, tuple) else "", user)
