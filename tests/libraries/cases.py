"""Libraries, unmodified, on rdmanet's event loop: `make libraries` runs this in an environment of their own.

Each case has a server and a client of a library in one process. It checks what came over, and counts the connections
that took RDMA, because a library that reconnects for each request, or falls back, would pass otherwise.
"""

import asyncio
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rdmanet
from benchmarks.resp import resp
from tests.libraries.helpers import MUCH, is_open, pipeline, port_of
from tests.support.certificates import CERTIFICATES, of_client, of_server
from tests.support.ports import free_port
from tests.support.waiting import until_seen


def test_the_table_in_the_manual_is_of_these_versions():
    page = (Path(__file__).parents[2] / "docs/howto/event-loop.md").read_text()
    listed = dict(re.findall(r"^\| ([a-z-]+) ([\d.]+) \|", page, re.MULTILINE))
    assert listed == {name: importlib.metadata.version(name) for name in listed} and len(listed) == 14


def test_the_benchmark_runs():
    """Its clients fail if a connection takes TCP that should not."""
    from benchmarks.library_worker import CASES

    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.libraries", "--quick"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert all(title in done.stdout for cases in CASES.values() for _, title in cases.values())


# ---- HTTP --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_aiohttp(run, connections, tmp_path, encrypted):
    from aiohttp import ClientSession, TCPConnector, web

    file = tmp_path / "file"
    file.write_bytes(MUCH * 10)

    async def echo(request):
        return web.Response(body=await request.read())

    async def sent_file(request):
        return web.FileResponse(file)

    async def socket(request):
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        async for message in ws:
            await ws.send_bytes(message.data)
        return ws

    async def main():
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/", echo)
        app.router.add_get("/file", sent_file)
        app.router.add_get("/socket", socket)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "localhost", 0, ssl_context=of_server() if encrypted else None)
        await site.start()
        port = port_of(site._server)
        connector = TCPConnector(ssl=of_client() if encrypted else True)
        async with ClientSession(f"http{'s' * encrypted}://localhost:{port}", connector=connector) as session:
            for _ in range(5):
                async with session.post("/", data=MUCH) as answer:
                    assert await answer.read() == MUCH
            async with session.get("/file") as answer:
                assert await answer.read() == file.read_bytes()
            assert len(connections) == 1
            async with session.ws_connect("/socket") as ws:
                for size in (5, 1000, 200_000):
                    await ws.send_bytes(MUCH[:size])
                    assert (await ws.receive()).data == MUCH[:size]
        await runner.cleanup()

    run(main())
    assert len(connections) == 1


async def application(scope, receive, send):
    """ASGI: sends back the body."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def five_posts(port: int, http2: bool = False) -> None:
    """:param http2: by HTTP/2, which needs TLS"""
    import httpx

    url = f"https://localhost:{port}/" if http2 else f"http://127.0.0.1:{port}/"
    async with httpx.AsyncClient(http2=http2, verify=of_client() if http2 else True) as client:
        for _ in range(5):
            answer = await client.post(url, content=MUCH)
            assert answer.content == MUCH
            assert answer.http_version == ("HTTP/2" if http2 else "HTTP/1.1")


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_uvicorn_and_httpx(run, connections, http):
    import uvicorn

    async def main():
        config = uvicorn.Config(application, port=0, http=http, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve())
        await until_seen(lambda: server.started)
        await five_posts(port_of(server.servers[0]))
        server.should_exit = True
        await serving

    run(main())
    assert len(connections) == 1


@pytest.mark.parametrize("http2", [False, True], ids=["h11", "h2"])
def test_hypercorn_and_httpx(run, connections, http2):
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    async def main():
        config = Config()
        port = free_port()
        config.bind = [f"127.0.0.1:{port}"]
        if http2:
            config.certfile = config.keyfile = str(CERTIFICATES / "server.pem")
        over = asyncio.Event()
        serving = asyncio.ensure_future(serve(application, config, shutdown_trigger=over.wait))
        await until_seen(lambda: is_open(port))
        await five_posts(port, http2)
        over.set()
        await serving

    run(main())
    assert len(connections) == 1


def test_websockets(run, connections):
    from websockets.asyncio.client import connect
    from websockets.asyncio.server import serve

    async def echo(ws):
        async for message in ws:
            await ws.send(message)

    async def main():
        async with serve(echo, "127.0.0.1", 0) as server:
            async with connect(f"ws://127.0.0.1:{port_of(server)}") as ws:
                for size in (5, 1000, 300_000, 900_000):
                    await ws.send((MUCH * 3)[:size])
                    assert await ws.recv() == (MUCH * 3)[:size]

    run(main())
    assert len(connections) == 1


# ---- Other protocols ---------------------------------------------------------------------------------


def test_redis(run, connections):
    from redis.asyncio import Redis

    async def main():
        server = await asyncio.start_server(resp, "127.0.0.1", 0)
        client = Redis(port=port_of(server), protocol=2)
        assert await client.ping()
        for size in (1, 1000, 300_000):
            await client.set("key", MUCH[:size])
            assert await client.get("key") == MUCH[:size]
        await pipeline(client)
        await client.aclose()
        server.close()

    run(main())
    assert len(connections) == 1


def test_grpclib(run, connections):
    from grpclib.client import Channel, UnaryUnaryMethod
    from grpclib.const import Cardinality, Handler
    from grpclib.encoding.base import CodecBase
    from grpclib.server import Server

    class Plain(CodecBase):
        __content_subtype__ = "bytes"

        def encode(self, message, message_type):
            return message

        def decode(self, data, message_type):
            return data

    class Service:
        async def echo(self, stream):
            await stream.send_message(await stream.recv_message())

        def __mapping__(self):
            return {"/Service/Echo": Handler(self.echo, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def main():
        server = Server([Service()], codec=Plain())
        await server.start("127.0.0.1", 0)
        async with Channel("127.0.0.1", port_of(server._server), codec=Plain()) as channel:
            call = UnaryUnaryMethod(channel, "/Service/Echo", bytes, bytes)
            assert await call(MUCH) == MUCH
            answers = await asyncio.gather(*(call(b"%d" % n) for n in range(64)))
            assert answers == [b"%d" % n for n in range(64)]
        server.close()
        await server.wait_closed()

    run(main())
    assert len(connections) == 1


def test_anyio(run, connections):
    import anyio

    async def main():
        server = await asyncio.start_server(lambda r, w: copy(r, w), "127.0.0.1", 0)
        async with await anyio.connect_tcp("127.0.0.1", port_of(server)) as stream:
            for size in (1, 1000, 100_000):
                await stream.send(MUCH[:size])
                got = b""
                while len(got) < size:
                    got += await stream.receive()
                assert got == MUCH[:size]
        server.close()

    async def copy(reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    run(main())
    assert len(connections) == 1


def test_an_anyio_listener(run, connections):
    """It accepts sockets itself. Its first client comes by TCP, and shows that it makes transports of them."""
    import anyio

    async def serve(stream):
        async with stream:
            async for data in stream:
                await stream.send(data)

    async def main():
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, serve)
            for _ in range(3):
                async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                    await stream.send(b"hello")
                    assert await stream.receive() == b"hello"
                await until_seen(lambda: is_open(port))
            tasks.cancel_scope.cancel()
        await listener.aclose()

    run(main())
    assert len(connections) == 2


def test_asyncpg_falls_back(run, connections):
    """PostgreSQL is no program of asyncio's: this shows that a server that knows nothing of RDMA gets none of it."""
    import asyncpg

    async def refuse(reader, writer):
        # As PostgreSQL without TLS answers, and then one that is shutting down.
        assert await reader.readexactly(8) == b"\x00\x00\x00\x08\x04\xd2\x16/"
        writer.write(b"N")
        length = int.from_bytes(await reader.readexactly(4), "big")
        await reader.readexactly(length - 4)
        text = b"SFATAL\0C57P03\0Mthe database system is shutting down\0\0"
        writer.write(b"E" + (len(text) + 4).to_bytes(4, "big") + text)
        writer.close()

    async def main():
        loop = asyncio.get_running_loop()
        rdmanet.patch_loop(loop, peers="!*")  # so that the server does not offer RDMA
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        rdmanet.patch_loop(loop, peers="auto")
        with pytest.raises(asyncpg.CannotConnectNowError, match="shutting down"):
            await asyncpg.connect(
                host="127.0.0.1", port=port_of(server), user="x", database="x", password="x"
            )
        server.close()

    run(main())
    assert not connections
