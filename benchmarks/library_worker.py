"""One side of one library, for benchmarks/libraries.py: `python -m benchmarks.library_worker SIDE LIBRARY FABRIC CPU`.

Both sides are pinned to a CPU and run on uvloop, or on asyncio's loop (ON_ASYNCIO). The loop is switched to RDMA where
FABRIC is rdma. They answer lines of their standard input with lines of JSON. A server prints its port first, and
answers `cpu` with the processor time that it has used. A client gets the port, and answers `CASE SECONDS` with what it
did in that time.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvloop

import rdmanet
from benchmarks.resp import resp
from tests.support.certificates import of_client, of_server

HOST = "127.0.0.1"
SMALL, LARGE, CHUNK = 64, 10_000_000, 1 << 16
Operation = Callable[[], Awaitable[object]]

# library: {case: (operations at a time, what one is)}
CASES: dict[str, dict[str, tuple[int, str]]] = {
    "aiohttp": {
        "get": (1, "GET of 64 B"),
        "get 32": (32, "GET of 64 B, 32 connections"),
        "get anew": (1, "GET of 64 B, each by a new connection"),
        "upload": (1, "streamed upload of 10 MB"),
        "download": (1, "streamed download of 10 MB"),
    },
    "aiohttp-tls": {
        "get": (1, "HTTPS GET of 64 B"),
        "get 32": (32, "HTTPS GET of 64 B, 32 connections"),
    },
    "uvicorn-httpx": {
        "get": (1, "GET of 64 B"),
        "get 32": (32, "GET of 64 B, 32 connections"),
        "get anew": (1, "GET of 64 B, each by a new connection"),
    },
    "redis": {
        "get": (1, "GET of 64 B"),
        "get 32": (32, "GET of 64 B, 32 connections"),
        "get anew": (1, "GET of 64 B, each by a new connection"),
        "pipeline": (1, "pipeline of 100 GETs of 64 B"),
        "set large": (1, "SET of 10 MB"),
        "get large": (1, "GET of 10 MB"),
    },
    "websockets": {"echo": (1, "echo of 64 B")},
    "grpclib": {
        "unary": (1, "unary call of 64 B"),
        "unary 32": (32, "unary call of 64 B, 32 connections"),
    },
}


# Those whose name is not that of one package.
PACKAGES = {"aiohttp-tls": ("aiohttp",), "uvicorn-httpx": ("uvicorn", "httpx")}
# uvloop has a TLS of its own, which its transports alone can use. asyncio's is the one that rdmanet uses.
ON_ASYNCIO = {"aiohttp-tls"}


def port_of(server: Any) -> int:
    return int(server.sockets[0].getsockname()[1])


# ---- aiohttp -----------------------------------------------------------------------------------------


async def chunks() -> AsyncIterator[bytes]:
    left, chunk = LARGE, bytes(CHUNK)
    while left:
        yield chunk[:left]
        left -= min(left, CHUNK)


async def serve_aiohttp(ssl_context: ssl.SSLContext | None = None) -> int:
    from aiohttp import web

    async def page(request: Any) -> Any:
        return web.Response(body=bytes(SMALL))

    async def upload(request: Any) -> Any:
        got = 0
        async for chunk in request.content.iter_any():
            got += len(chunk)
        return web.Response(body=b"%d" % got)

    async def download(request: Any) -> Any:
        response = web.StreamResponse()
        response.content_length = LARGE
        await response.prepare(request)
        async for chunk in chunks():
            await response.write(chunk)
        return response

    app = web.Application(client_max_size=2 * LARGE)
    app.add_routes([web.get("/", page), web.post("/", upload), web.get("/download", download)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, HOST, 0, ssl_context=ssl_context)
    await site.start()
    return port_of(site._server)


async def use_aiohttp(
    port: int, case: str, count: int, ssl_context: ssl.SSLContext | None = None
) -> list[Operation]:
    from aiohttp import ClientSession, TCPConnector

    connector = TCPConnector(limit=count, ssl=ssl_context or True, force_close=case == "get anew")
    session = ClientSession(f"http{'s' * bool(ssl_context)}://{HOST}:{port}", connector=connector)

    async def get() -> None:
        async with session.get("/") as answer:
            assert len(await answer.read()) == SMALL

    async def upload() -> None:
        async with session.post("/", data=chunks()) as answer:
            assert await answer.read() == b"%d" % LARGE

    async def download() -> None:
        got = 0
        async with session.get("/download") as answer:
            async for chunk in answer.content.iter_any():
                got += len(chunk)
        assert got == LARGE

    return [{"upload": upload, "download": download}.get(case, get)] * count


async def serve_aiohttp_tls() -> int:
    return await serve_aiohttp(of_server())


async def use_aiohttp_tls(port: int, case: str, count: int) -> list[Operation]:
    context = of_client()
    context.check_hostname = False  # the certificate is localhost's
    return await use_aiohttp(port, case, count, context)


# ---- uvicorn and httpx -------------------------------------------------------------------------------


async def page(scope: Any, receive: Any, send: Any) -> None:
    """ASGI."""
    head = [(b"content-length", b"%d" % SMALL)]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": bytes(SMALL)})


async def serve_uvicorn_httpx() -> int:
    import uvicorn

    config = uvicorn.Config(page, host=HOST, port=0, lifespan="off", log_level="error", access_log=False)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    return port_of(server.servers[0])


async def use_uvicorn_httpx(port: int, case: str, count: int) -> list[Operation]:
    import httpx

    kept = 0 if case == "get anew" else count
    client = httpx.AsyncClient(limits=httpx.Limits(max_connections=count, max_keepalive_connections=kept))

    async def get() -> None:
        answer = await client.get(f"http://{HOST}:{port}/")
        assert len(answer.content) == SMALL

    return [get] * count


# ---- redis-py ----------------------------------------------------------------------------------------


async def serve_redis() -> int:
    values = {b"small": bytes(SMALL), b"large": bytes(LARGE)}
    return port_of(await asyncio.start_server(functools.partial(resp, first=values), HOST, 0))


async def use_redis(port: int, case: str, count: int) -> list[Operation]:
    from redis.asyncio import Redis

    large = bytes(LARGE)

    def of(client: Any) -> Operation:
        async def get() -> None:
            assert len(await client.get("small")) == SMALL

        async def get_many() -> None:
            pipeline = client.pipeline(transaction=False)
            for _ in range(100):
                pipeline.get("small")
            assert [len(value) for value in await pipeline.execute()] == [SMALL] * 100

        async def get_large() -> None:
            assert len(await client.get("large")) == LARGE

        async def set_large() -> None:
            assert await client.set("large", large)

        async def get_anew() -> None:
            await get()
            await client.aclose()

        others = {"pipeline": get_many, "get large": get_large, "set large": set_large, "get anew": get_anew}
        return others.get(case, get)

    return [of(Redis(port=port, protocol=2, single_connection_client=True)) for _ in range(count)]


# ---- websockets, grpclib -----------------------------------------------------------------------------


async def serve_websockets() -> int:
    from websockets.asyncio.server import serve

    async def echo(ws: Any) -> None:
        async for message in ws:
            await ws.send(message)

    return port_of(await serve(echo, HOST, 0, compression=None))


async def use_websockets(port: int, case: str, count: int) -> list[Operation]:
    from websockets.asyncio.client import connect

    ws = await connect(f"ws://{HOST}:{port}", compression=None)

    async def echo() -> None:
        await ws.send(bytes(SMALL))
        assert len(await ws.recv()) == SMALL

    return [echo]


def plain_codec() -> Any:
    from grpclib.encoding.base import CodecBase

    class Plain(CodecBase):
        __content_subtype__ = "bytes"

        def encode(self, message: Any, message_type: Any) -> Any:
            return message

        def decode(self, data: Any, message_type: Any) -> Any:
            return data

    return Plain()


async def serve_grpclib() -> int:
    from grpclib.const import Cardinality, Handler
    from grpclib.server import Server

    class Service:
        async def echo(self, stream: Any) -> None:
            await stream.send_message(await stream.recv_message())

        def __mapping__(self) -> Any:
            return {"/Service/Echo": Handler(self.echo, Cardinality.UNARY_UNARY, bytes, bytes)}

    server = Server([Service()], codec=plain_codec())
    await server.start(HOST, 0)
    return port_of(server._server)


async def use_grpclib(port: int, case: str, count: int) -> list[Operation]:
    from grpclib.client import Channel, UnaryUnaryMethod

    def of(channel: Any) -> Operation:
        call = UnaryUnaryMethod(channel, "/Service/Echo", bytes, bytes)

        async def unary() -> None:
            assert len(await call(bytes(SMALL))) == SMALL

        return unary

    return [of(Channel(HOST, port, codec=plain_codec())) for _ in range(count)]


# ---- Both sides --------------------------------------------------------------------------------------


async def lines() -> AsyncIterator[str]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb")
    )
    while line := await reader.readline():
        yield line.decode().strip()


def named(side: str, library: str) -> Any:
    return globals()[f"{side}_{library.replace('-', '_')}"]


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


async def serve(library: str) -> None:
    say(await named("serve", library)())
    async for _ in lines():
        say(time.process_time())


async def use(library: str, fabric: str) -> None:
    made = counted() if fabric == "rdma" else []
    ready: dict[str, list[Operation]] = {}
    port = 0
    async for line in lines():
        if not port:
            port = int(line)
            continue
        case, _, seconds = line.rpartition(" ")
        if case not in ready:
            count = CASES[library][case][0]
            ready[case] = await named("use", library)(port, case, count)
            before = len(made)
            await asyncio.gather(*(operation() for operation in ready[case]))  # connects
            if fabric == "rdma" and library != "websockets" and len(made) - before != count:
                raise RuntimeError(
                    f"{library}, {case}: {len(made) - before} of {count} connections took RDMA"
                )
            if fabric == "rdma" and not made:
                raise RuntimeError(f"{library}, {case}: no connection took RDMA")
        say(await measure(ready[case], float(seconds)))


def counted() -> list[None]:
    """An entry for each connection by RDMA that is made from now on."""
    from rdmanet import transport

    made: list[None] = []
    connect: Any = transport.connect

    async def count(*args: Any) -> Any:
        connected = await connect(*args)
        made.append(None)
        return connected

    transport.connect = count  # type: ignore[assignment]
    return made


async def measure(operations: list[Operation], seconds: float) -> dict[str, float]:
    done = 0
    began, used = time.perf_counter(), time.process_time()
    until = began + seconds

    async def repeat(operation: Operation) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await operation()
            done += 1

    await asyncio.gather(*map(repeat, operations))
    return {"done": done, "seconds": time.perf_counter() - began, "cpu": time.process_time() - used}


def main(side: str, library: str, fabric: str, cpu: str) -> None:
    os.sched_setaffinity(0, [int(cpu)])
    running = serve(library) if side == "server" else use(library, fabric)
    base = asyncio.SelectorEventLoop if library in ON_ASYNCIO else uvloop.Loop
    if fabric == "rdma":
        rdmanet.run(running, loop_factory=base)
    else:
        with asyncio.Runner(loop_factory=base) as runner:
            runner.run(running)


if __name__ == "__main__":
    main(*sys.argv[1:])
