"""gRPC over a Unix socket, as benchmarks.rpc measures it: grpc.aio, and grpclib, which is written in Python.

Both pass bytes as they are, without protobuf. `serve_*` returns what has to be kept; `connect_*` gives the one method,
which returns what it gets, or the length of what is large, or as many bytes as the request says.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

INSTALLED = Path(__file__).parents[1] / "build/rpc-peers"
LARGE = 1 << 20
GIVE = b"give "
Method = Callable[[bytes], Awaitable[bytes]]

sys.path.append(str(INSTALLED))  # behind our own packages


@functools.cache
def filled(size: int) -> bytes:
    """So many bytes, which have pages: memory that was never written is one page of zeros, which stays in the cache."""
    return b"r" * size


def answer(request: bytes) -> bytes:
    if request.startswith(GIVE):
        return filled(int(request[len(GIVE) :]))
    return request if len(request) < LARGE else b"%d" % len(request)


# ---- grpc.aio -----------------------------------------------------------------------------------------------


async def serve_grpc_aio(path: str) -> Any:
    import grpc.aio  # type: ignore[import-not-found]

    async def echo(request: bytes, context: Any) -> bytes:
        return answer(request)

    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(options=unlimited)
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Echo", {"echo": handler})])
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    return server


@contextlib.asynccontextmanager
async def connect_grpc_aio(path: str) -> AsyncIterator[Method]:
    import grpc.aio

    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"unix:{path}", unlimited) as channel:
        yield channel.unary_unary("/Echo/echo")


# ---- grpclib ------------------------------------------------------------------------------------------------


class Plain:
    """A codec that leaves bytes alone."""

    __content_subtype__ = "plain"

    def encode(self, message: Any, message_type: Any) -> Any:
        return message

    def decode(self, data: Any, message_type: Any) -> Any:
        return data


class Echo:
    async def echo(self, stream: Any) -> None:
        await stream.send_message(answer(await stream.recv_message()))

    def __mapping__(self) -> dict[str, Any]:
        from grpclib.const import Cardinality, Handler  # type: ignore[import-not-found]

        return {"/Echo/echo": Handler(self.echo, Cardinality.UNARY_UNARY, bytes, bytes)}


async def serve_grpclib(path: str) -> Any:
    from grpclib.server import Server  # type: ignore[import-not-found]

    server = Server([Echo()], codec=Plain())
    await server.start(path=path)
    return server


@contextlib.asynccontextmanager
async def connect_grpclib(path: str) -> AsyncIterator[Method]:
    from grpclib.client import Channel, UnaryUnaryMethod  # type: ignore[import-not-found]

    async with Channel(path=path, codec=Plain()) as channel:
        yield UnaryUnaryMethod(channel, "/Echo/echo", bytes, bytes)


PEERS = {"grpc.aio": (serve_grpc_aio, connect_grpc_aio), "grpclib": (serve_grpclib, connect_grpclib)}


def lacks(kind: str) -> str | None:
    """Why one of them cannot be measured; None if it can."""
    import importlib

    try:
        importlib.import_module(kind)
    except ImportError as exc:
        return f"{kind} is not measured ({exc}): make bench-rpc installs it"
    return None
