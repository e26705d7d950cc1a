"""rdmanet.fabric() of what libraries for HTTP give, by RDMA and by TCP; the programs are those of the manual."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import rdmanet
from tests.libraries.helpers import is_open, port_of
from tests.support.certificates import CERTIFICATES, of_client
from tests.support.ports import free_port
from tests.support.waiting import until_seen

PAGE = Path(__file__).parents[2] / "docs/howto/event-loop.md"
BY_CLIENT = {
    "rdma": rdmanet.FabricInfo("rdma", "the client came by RDMA", "soft0"),
    "tcp": rdmanet.FabricInfo("tcp", "the client came by TCP"),
}
REASONS = {
    "rdma": "the server on this host offers RDMA",
    "tcp": "the peers that RDMA is for do not include it",
}


def of_the_manual() -> dict[str, Any]:
    """What the programs of its section define."""
    section = PAGE.read_text().partition("\n## Which fabric a request took\n")[2].partition("\n## ")[0]
    programs = re.findall(r"^```py\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert len(programs) == 3
    found: dict[str, Any] = {"__name__": "of_the_manual"}
    for program in programs:
        exec(compile(program, str(PAGE), "exec"), found)
    return found


MANUAL = of_the_manual()


class Application:
    """ASGI: answers two bytes, and remembers what the scope said, and the manual's context variable."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, str]] = []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        self.seen.append((rdmanet.fabric(scope), MANUAL["FABRIC"].get()))
        logging.getLogger("handled").info("a request")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"hi"})


@contextlib.asynccontextmanager
async def uvicorn_serving(app: Any, **options: Any) -> AsyncIterator[int]:
    import uvicorn

    config = uvicorn.Config(app, lifespan="off", log_level="error", **({"port": 0} | options))
    server = uvicorn.Server(config)
    serving = asyncio.ensure_future(server.serve())
    await until_seen(lambda: server.started)
    yield 0 if "uds" in options else port_of(server.servers[0])
    server.should_exit = True
    await serving


@contextlib.asynccontextmanager
async def hypercorn_serving(app: Any, certificate: str | None = None) -> AsyncIterator[int]:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config, port, over = Config(), free_port(), asyncio.Event()
    config.bind, config.loglevel = [f"127.0.0.1:{port}"], "ERROR"
    config.certfile = config.keyfile = certificate
    serving = asyncio.ensure_future(serve(app, config, shutdown_trigger=over.wait))
    await until_seen(lambda: is_open(port))
    yield port
    over.set()
    await serving


def by_tcp_from_now_on(fabric: str) -> None:
    if fabric == "tcp":
        rdmanet.patch_loop(asyncio.get_running_loop(), peers="!*")


@pytest.fixture(params=["rdma", "tcp"])
def fabric(request) -> str:
    return request.param


@pytest.fixture(params=["h11", "httptools", "hypercorn"])
def serving(request) -> Any:
    if request.param == "hypercorn":
        return hypercorn_serving
    return lambda app: uvicorn_serving(app, http=request.param)


def said(fabric: str) -> tuple[str, str]:
    return fabric, REASONS[fabric]


def logged(caplog) -> list[str]:
    """What the manual's hooks have logged."""
    return [each.getMessage() for each in caplog.records if each.name == "fabric"]


def test_httpx_and_an_asgi_scope(run, serving, fabric, caplog):
    async def main():
        app = Application()
        async with serving(MANUAL["KnowFabric"](app)) as port:
            by_tcp_from_now_on(fabric)
            url = f"http://127.0.0.1:{port}/"
            async with MANUAL["httpx_client"]() as client:
                for _ in range(2):
                    answer = await client.get(url)
                    found = rdmanet.fabric(answer)
                    assert (found.fabric, found.reason) == said(fabric)
                await client.get(url, headers={"connection": "close"})
            assert app.seen == [(BY_CLIENT[fabric], fabric)] * 3
            assert logged(caplog) == [f"{url} {fabric}"] * 3

    with caplog.at_level(logging.INFO):
        run(main())


def test_a_response_of_httpx_that_has_closed_its_connection(run, fabric):
    """By TCP its socket is closed; that which stands for an RDMA connection says it while it is kept."""

    async def main():
        import httpx

        async with uvicorn_serving(Application()) as port, httpx.AsyncClient() as client:
            by_tcp_from_now_on(fabric)
            answer = await client.get(f"http://127.0.0.1:{port}/", headers={"connection": "close"})
            assert MANUAL["fabric_of"](answer) in ("unknown", fabric)

    run(main())


def test_aiohttps_client(run, fabric, caplog):
    async def main():
        import aiohttp

        async with uvicorn_serving(Application()) as port:
            by_tcp_from_now_on(fabric)
            url, closed = f"http://127.0.0.1:{port}/", {"connection": "close"}
            seen = []

            async def ended(session, context, params):
                seen.append(rdmanet.fabric(params.response).fabric)

            trace = aiohttp.TraceConfig()
            trace.on_request_end.append(ended)
            async with aiohttp.ClientSession(trace_configs=[trace]) as session:
                async with session.get(url) as response:
                    assert response.connection is None  # its body is short
                    found = rdmanet.fabric(response)
                    assert (found.fabric, found.reason) == said(fabric)
                assert rdmanet.fabric(response) == found and seen == [fabric]
            with pytest.raises(LookupError, match="ClientResponse has no connection, or none any more"):
                rdmanet.fabric(response)
            async with MANUAL["aiohttp_session"]() as session:
                for headers in {}, closed:
                    async with session.get(url, headers=headers) as response:
                        assert await response.read() == b"hi"
        assert logged(caplog) == [f"{url} {fabric}"] * 2

    with caplog.at_level(logging.INFO):
        run(main())


def test_aiohttps_server_and_web_sockets(run, fabric):
    async def main():
        from aiohttp import ClientSession, web

        seen = []

        async def handle(request):
            seen.append(rdmanet.fabric(request))
            ws = web.WebSocketResponse()
            await ws.prepare(request)
            seen.append(rdmanet.fabric(ws))
            await ws.close()
            return ws

        app = web.Application()
        app.router.add_get("/", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = port_of(site._server)
        by_tcp_from_now_on(fabric)
        async with ClientSession() as session, session.ws_connect(f"http://127.0.0.1:{port}/") as ws:
            found = rdmanet.fabric(ws)
            assert (found.fabric, found.reason) == said(fabric)
            await ws.receive()
        await runner.cleanup()
        assert seen == [BY_CLIENT[fabric]] * 2

    run(main())


def test_tls_and_http2(run, fabric):
    async def main():
        import httpx
        from aiohttp import ClientSession, TCPConnector

        app = Application()
        async with hypercorn_serving(app, str(CERTIFICATES / "server.pem")) as port:
            by_tcp_from_now_on(fabric)
            url = f"https://localhost:{port}/"
            async with httpx.AsyncClient(http2=True, verify=of_client()) as client:
                answer = await client.get(url)
                found = rdmanet.fabric(answer)
                assert (answer.http_version, found.fabric, found.reason) == ("HTTP/2", *said(fabric))
            async with ClientSession(connector=TCPConnector(ssl=of_client())) as session:
                async with session.get(url) as response:
                    assert rdmanet.fabric(response) == found
        assert app.seen == [(BY_CLIENT[fabric], "")] * 2

    run(main())


def test_a_proxys_header(run):
    async def main():
        import httpx

        seen = []

        async def app(scope, receive, send):
            with pytest.raises(LookupError, match="a proxy's header has replaced the client"):
                rdmanet.fabric(scope)
            seen.append(MANUAL["fabric_of"](scope))
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        async with uvicorn_serving(app) as port, httpx.AsyncClient() as client:
            await client.get(f"http://127.0.0.1:{port}/", headers={"x-forwarded-for": "198.51.100.1"})
        assert seen == ["unknown"]

    run(main())


def test_unix_sockets(run, tmp_path):
    async def main():
        import httpx

        app, path = Application(), str(tmp_path / "socket")
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with uvicorn_serving(app, uds=path), httpx.AsyncClient(transport=transport) as client:
            answer = await client.get("http://localhost/")
            assert rdmanet.fabric(answer) == app.seen[0][0] == rdmanet.FabricInfo("unix")

    run(main())


def test_httpx_without_a_loop(run, fabric):
    """A client that blocks is the kernel's TCP; httpx that calls an application itself has no connection."""

    async def main():
        import httpx

        def get(url: str) -> rdmanet.FabricInfo:
            with httpx.Client() as client:
                return rdmanet.fabric(client.get(url))

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        async with uvicorn_serving(Application()) as port:
            assert (await asyncio.to_thread(get, f"http://127.0.0.1:{port}/")).fabric == "tcp"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            with pytest.raises(TypeError, match="Response does not lead to a connection"):
                rdmanet.fabric(await client.get("http://localhost/"))

    run(main())
