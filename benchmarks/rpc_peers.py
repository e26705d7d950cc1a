"""Other RPC libraries over a Unix socket, as benchmarks.rpc measures them.

gRPC by grpc.aio, and by grpclib, which is written in Python: both pass bytes as they are, without protobuf. Cap'n Proto
by pycapnp, and Thrift by thriftpy2, with its asyncio part. A Thrift connection makes one call at a time, so several
calls at a time take as many connections. 64 MiB take it a quarter of a minute, and are left out.

`serve_*` returns what has to be kept; `connect_*` gives the one method, which returns what it gets, or the length of
what is large, or as many bytes as the request says.

Ray's calls are those of a driver to an actor of its node. The CPU time of these two processes is counted, and not that
of Ray's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import sys
import tempfile
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


# ---- pycapnp ------------------------------------------------------------------------------------------------


CAPNP = """@0xb3c1d7a5e0f24c69;
interface Echo { echo @0 (request :Data) -> (answer :Data); }
"""
UNLIMITED_WORDS = 1 << 40
"""Cap'n Proto refuses to read more than 64 MiB of a message by default."""


@functools.cache
def capnp_schema() -> Any:
    import capnp  # type: ignore[import-not-found]

    with tempfile.NamedTemporaryFile("w", suffix=".capnp") as file:
        file.write(CAPNP)
        file.flush()
        return capnp.load(file.name)


async def serve_pycapnp(path: str) -> Any:
    import capnp

    class Echo(capnp_schema().Echo.Server):  # type: ignore[misc]
        async def echo(self, request: bytes, **_: Any) -> bytes:
            return answer(request)

    async def serve(stream: Any) -> None:
        await capnp.TwoPartyServer(
            stream, bootstrap=Echo(), traversal_limit_in_words=UNLIMITED_WORDS
        ).on_disconnect()

    stack = contextlib.AsyncExitStack()
    await stack.enter_async_context(capnp.kj_loop())
    return stack, await capnp.AsyncIoStream.create_unix_server(serve, path)


@contextlib.asynccontextmanager
async def connect_pycapnp(path: str) -> AsyncIterator[Method]:
    import capnp

    async with capnp.kj_loop():
        stream = await capnp.AsyncIoStream.create_unix_connection(path)
        client = capnp.TwoPartyClient(stream, traversal_limit_in_words=UNLIMITED_WORDS)
        echo = client.bootstrap().cast_as(capnp_schema().Echo)

        async def method(request: bytes) -> bytes:
            return (await echo.echo(request)).answer  # type: ignore[no-any-return]

        yield method


# ---- thriftpy2 ----------------------------------------------------------------------------------------------


THRIFT = "service Echo { binary echo(1: binary request) }"


@functools.cache
def thrift_service() -> Any:
    import thriftpy2  # type: ignore[import-not-found]

    return thriftpy2.load_fp(io.StringIO(THRIFT), "echo_thrift").Echo


async def serve_thriftpy2(path: str) -> Any:
    from thriftpy2.contrib.aio.rpc import make_server  # type: ignore[import-not-found]

    class Handler:
        async def echo(self, request: bytes) -> bytes:
            return answer(request)

    server = make_server(thrift_service(), Handler(), unix_socket=path, loop=asyncio.get_running_loop())
    server.trans.client_timeout = None  # by default it ends a connection on which a call takes 3 s
    server.trans.listen()
    return await server.trans.accept(server.handle)


@contextlib.asynccontextmanager
async def connect_thriftpy2(path: str) -> AsyncIterator[Method]:
    from thriftpy2.contrib.aio.rpc import make_client

    clients: list[Any] = []
    idle: list[Any] = []

    async def method(request: bytes) -> bytes:
        if not idle:
            clients.append(await make_client(thrift_service(), unix_socket=path, timeout=None))
            idle.append(clients[-1])
        client = idle.pop()
        found = await client.echo(request)
        idle.append(client)
        return found  # type: ignore[no-any-return]

    yield method
    for client in clients:
        client.close()


# ---- Ray's actors -------------------------------------------------------------------------------------------


class Actor:
    """Ray starts its process, on the CPUs of the driver: it takes another one."""

    async def begin(self) -> int:
        others = set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)
        os.sched_setaffinity(0, others or os.sched_getaffinity(0))
        return os.getpid()

    async def echo(self, request: bytes) -> bytes:
        return answer(request)


async def serve_ray(path: str) -> Any:
    """The client begins all of Ray."""


@contextlib.asynccontextmanager
async def connect_ray(path: str) -> AsyncIterator[Method]:
    import ray

    ray.init(num_cpus=1, object_store_memory=1 << 30, include_dashboard=False, logging_level="error")
    actor = ray.remote(Actor).remote()
    Path(path).write_text(str(await actor.begin.remote()))

    async def method(request: bytes) -> bytes:
        return await actor.echo.remote(request)  # type: ignore[no-any-return]

    yield method
    ray.shutdown()


PEERS = {
    "grpc.aio": (serve_grpc_aio, connect_grpc_aio),
    "grpclib": (serve_grpclib, connect_grpclib),
    "pycapnp": (serve_pycapnp, connect_pycapnp),
    "thriftpy2": (serve_thriftpy2, connect_thriftpy2),
    "ray": (serve_ray, connect_ray),
}

MOST_BYTES = {"thriftpy2": 4 << 20}
"""Of one call, for those to which more would take too long."""


def lacks(kind: str) -> str | None:
    """Why one of them cannot be measured; None if it can."""
    import importlib

    try:
        importlib.import_module({"pycapnp": "capnp"}.get(kind, kind))
    except ImportError as exc:
        how = "pip install ray" if kind == "ray" else "make bench-rpc installs it"
        return f"{kind} is not measured ({exc}): {how}"
    return None
