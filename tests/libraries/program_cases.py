"""More libraries, as their users run them: each over RDMA, and over TCP in the same test.

Servers that are no programs of asyncio's (PostgreSQL, NATS) are reached through `rdmanet proxy`. Where one is not
installed its test is skipped; RDMANET_TEST_SERVERS=required makes that a failure.
"""

import asyncio
import contextlib
import os
import shutil
import smtplib
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from email.message import EmailMessage
from pathlib import Path

import pytest

import rdmanet
from benchmarks.resp import resp
from tests.libraries.helpers import MUCH, pipeline, port_of
from tests.support.certificates import CERTIFICATES, of_client, of_server
from tests.support.ports import free_port
from tests.support.processes import Process
from tests.support.waiting import until_seen

ROOT = Path(__file__).parents[2]
TEN_MB = os.urandom(10_000_000)


async def on_both(connections, use) -> None:
    """Call it over RDMA, which makes one connection, and then over TCP, which makes none."""
    await use()
    assert len(connections) == 1
    rdmanet.patch_loop(asyncio.get_running_loop(), peers="!*")
    await use()
    assert len(connections) == 1


def test_valkey(run, connections):
    from valkey.asyncio import Valkey

    async def main():
        server = await asyncio.start_server(resp, "127.0.0.1", 0)

        async def use():
            client = Valkey(port=port_of(server), protocol=2)
            assert await client.ping()
            await client.set("key", TEN_MB)
            assert await client.get("key") == TEN_MB
            await pipeline(client)
            await client.aclose()

        await on_both(connections, use)
        server.close()

    run(main())


def test_asyncssh(run, connections, tmp_path):
    import asyncssh

    class Anybody(asyncssh.SSHServer):
        def begin_auth(self, username):
            return False

    async def shout(process):
        process.stdout.write((await process.stdin.read()).upper() + process.command)
        process.exit(3)

    async def main():
        key = asyncssh.generate_private_key("ssh-ed25519")
        server = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=Anybody,
            server_host_keys=[key],
            process_factory=shout,
            sftp_factory=True,
        )
        sent, back = tmp_path / "sent", tmp_path / "back"
        sent.write_bytes(TEN_MB)

        async def use():
            async with asyncssh.connect(
                "127.0.0.1", server.get_port(), known_hosts=None, username="x"
            ) as ssh:
                done = await ssh.run("command", input="hello ")
                assert (done.stdout, done.exit_status) == ("HELLO command", 3)
                async with ssh.start_sftp_client() as sftp:
                    await sftp.put(sent, tmp_path / "there")
                    await sftp.get(tmp_path / "there", back)
            assert back.read_bytes() == TEN_MB

        await on_both(connections, use)
        server.close()
        await server.wait_closed()

    run(main())


def test_aiosmtpd(run, connections):
    """STARTTLS, by aiosmtplib over both fabrics, and by smtplib, which blocks, over TCP."""
    import aiosmtplib
    from aiosmtpd.smtp import SMTP

    got = []

    class Handler:
        async def handle_DATA(self, server, session, envelope):
            assert session.ssl is not None
            got.append(envelope.content)
            return "250 OK"

    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = "a@example.org", "b@example.org", "much"
    mail.set_content("much\n" * 100_000)

    def by_smtplib(port):
        with smtplib.SMTP("localhost", port, timeout=30) as client:
            client.starttls(context=of_client())
            client.send_message(mail)

    async def main():
        def factory():
            return SMTP(Handler(), tls_context=of_server(), require_starttls=True)

        server = await asyncio.get_running_loop().create_server(factory, "localhost", 0)
        port = port_of(server)

        async def use():
            async with aiosmtplib.SMTP(
                hostname="localhost", port=port, start_tls=True, tls_context=of_client(), timeout=30
            ) as client:
                await client.send_message(mail)

        await on_both(connections, use)
        await asyncio.to_thread(by_smtplib, port)
        server.close()

    run(main())
    assert len(got) == 3 and all(content.count(b"much") > 100_000 for content in got)


# ---- uvicorn's program -------------------------------------------------------------------------------

APPLICATION = """
import os

async def application(scope, receive, send):
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"WORD %d" % os.getpid()})
"""


@contextlib.contextmanager
def uvicorn(directory: Path, *options: str) -> Iterator[tuple[int, int]]:
    """The port and the process of `uvicorn` that serves the application of this directory."""
    (directory / "served.py").write_text(APPLICATION)
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "served:application",
        "--loop",
        "rdmanet:loop_factory",
        "--port",
        port,
    ]
    with Process(
        *command, "--app-dir", directory, "--no-access-log", *options,
        keep_errors=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=directory,
    ) as program:  # fmt: skip
        yield port, program.pid
        program.process.terminate()
        program.wait()


async def page(port: int) -> bytes:
    """The page by httpx; nothing until the server is there."""
    import httpx

    async with httpx.AsyncClient() as client:
        with contextlib.suppress(httpx.TransportError):
            return (await client.get(f"http://127.0.0.1:{port}/")).content
    return b""


async def by_curl(port: int) -> bytes:
    curl = await asyncio.create_subprocess_exec(
        "curl", "--silent", "--max-time", "30", f"http://127.0.0.1:{port}/", stdout=subprocess.PIPE
    )
    return (await curl.communicate())[0]


async def page_by_rdma(port: int, connections, word: bytes) -> None:
    """Wait until a page with this word comes over RDMA; curl gets it at the same time, on the same port."""
    while True:
        before = len(connections)
        if (await page(port)).startswith(word) and len(connections) == before + 1:
            break
        await asyncio.sleep(0.05)
    pages = await asyncio.gather(by_curl(port), page(port), by_curl(port), page(port))
    assert all(each.startswith(word) for each in pages)
    assert len(connections) == before + 3


def test_uvicorn_with_workers(run, connections, tmp_path):
    """When all are there, RDMA's connections are spread over them evenly."""

    async def main(port):
        await page_by_rdma(port, connections, b"WORD")
        seen = set()
        while len(seen) < 4:
            before = len(connections)
            answer = await page(port)
            if len(connections) > before:
                seen.add(answer)
        before = len(connections)
        answers = Counter([await page(port) for _ in range(12)])
        assert answers == dict.fromkeys(seen, 3)
        assert len(connections) == before + 12

    with uvicorn(tmp_path, "--workers", "4") as (port, _):
        run(main(port))


def test_uvicorn_that_reloads(run, connections, tmp_path):
    async def main(port, process):
        await page_by_rdma(port, connections, b"WORD")
        # It begins to watch only a quarter of a second after it has started its server.
        await until_seen(lambda: watches_files(process))
        (tmp_path / "served.py").write_text(APPLICATION.replace("WORD", "CHANGED"))
        await page_by_rdma(port, connections, b"CHANGED")

    with uvicorn(tmp_path, "--reload") as (port, process):
        run(main(port, process))


async def get(port: int) -> bytes:
    """The page, by a connection of its own; nothing if it was dropped."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        answer = await reader.read()
    except ConnectionResetError:
        answer = b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert not answer or (head.startswith(b"HTTP/1.1 200") and body), answer
    return body


def test_reloads_drop_only_what_is_under_way(run, connections, tmp_path):
    """uvicorn closes connections whose request it has not read yet, and so drops some over TCP, too.

    Each request has a connection of its own; RDMANET_TEST_REQUESTS says how many there are in five reloads.
    """
    requests, at_once = int(os.environ.get("RDMANET_TEST_REQUESTS", 500)), 4

    async def main(port, process):
        await page_by_rdma(port, connections, b"WORD")
        await until_seen(lambda: watches_files(process))
        for number in range(5):
            word = b"NUMBER%d" % number
            (tmp_path / "served.py").write_text(APPLICATION.replace("WORD", word.decode()))
            made, dropped, before, has_come = 0, 0, len(connections), False
            while made < requests // 5 or not has_come or len(connections) == before:
                pages = await asyncio.gather(*(get(port) for _ in range(at_once)))
                made += len(pages)
                dropped += pages.count(b"")
                has_come = has_come or any(body.startswith(word) for body in pages)
            assert dropped <= at_once

    with uvicorn(tmp_path, "--reload") as (port, process):
        run(main(port, process))


def test_a_browser(run, connections, tmp_path):
    """Headless Chromium loads the page while others load it over RDMA, on the same port."""
    chromium = program("chromium", "chromium")

    async def by_browser(port: int) -> bytes:
        browser = await asyncio.create_subprocess_exec(
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path}/profile", "--dump-dom", f"http://127.0.0.1:{port}/",
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return (await browser.communicate())[0]

    async def main(port):
        await page_by_rdma(port, connections, b"WORD")
        before = len(connections)
        shown, *pages = await asyncio.gather(by_browser(port), *(page(port) for _ in range(5)))
        assert b"WORD" in shown
        assert all(each.startswith(b"WORD") for each in pages)
        assert len(connections) == before + 5

    with uvicorn(tmp_path) as (port, _):
        run(main(port))


def watches_files(process: int) -> bool:
    """Whether it waits for changes of files, by inotify(7)."""
    for info in Path(f"/proc/{process}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a descriptor that was closed meanwhile
            if "inotify wd" in info.read_text():
                return True
    return False


# ---- Servers behind a proxy --------------------------------------------------------------------------


def program(name: str, packages: str = "postgresql nats-server") -> str:
    """Where a program is, which may be one of Debian's PostgreSQL. The test is skipped if it is not installed."""
    places = [
        *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)),
        os.environ["PATH"],
        "/usr/sbin",
    ]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        missing = pytest.fail if os.environ.get("RDMANET_TEST_SERVERS") == "required" else pytest.skip
        missing(f"{name} is not installed: apt-get install {packages}")
    return found


@contextlib.contextmanager
def proxy(target: str) -> Iterator[int]:
    """The port of a proxy that serves both fabrics for this server: it runs on the switch itself."""
    with Process(
        sys.executable, "-m", "rdmanet", "run", "-m", "rdmanet", "proxy", "tcp://127.0.0.1:0", target,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        yield int(process.line().partition(" ")[0].rpartition(":")[2])


async def answers(port: int) -> None:
    """Wait until somebody listens there by TCP."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.get_running_loop()._rdmanet.base.create_connection(
                asyncio.Protocol, "127.0.0.1", port
            )
            return
        await asyncio.sleep(0.05)


def test_nats(run, connections, tmp_path):
    import nats

    port = free_port()

    async def use(port):
        client = await nats.connect(f"nats://127.0.0.1:{port}", allow_reconnect=False)

        async def echo(message):
            await message.respond(message.data)

        await client.subscribe("echo", cb=echo)
        for size in (1, 1000, 900_000):
            sent = (MUCH * 3)[:size]
            assert (await client.request("echo", sent, 30)).data == sent
        await client.close()

    async def main(inner):
        await answers(port)
        await use(inner)
        assert len(connections) == 1
        await use(port)
        assert len(connections) == 1

    with Process(program("nats-server"), "-a", "127.0.0.1", "-p", port, keep_errors=True):
        with proxy(f"tcp://127.0.0.1:{port}") as inner:
            run(main(inner))


@contextlib.contextmanager
def postgres() -> Iterator[int]:
    """The port of a server with TLS and nothing in it."""
    import pwd

    initdb, server = program("initdb"), program("postgres")
    with tempfile.TemporaryDirectory(prefix="rdmanet-") as directory:
        options, port = {}, free_port()
        key = Path(directory) / "server.pem"
        shutil.copy(CERTIFICATES / "server.pem", key)
        key.chmod(0o600)
        if os.getuid() == 0:  # the server refuses to be root's
            user = pwd.getpwnam("postgres")
            for path in (directory, key):
                os.chown(path, user.pw_uid, user.pw_gid)
            options = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        data = f"{directory}/data"
        made = [initdb, "--pgdata", data, "--username", "postgres", "--auth", "trust", "--no-sync"]
        subprocess.run(made, check=True, capture_output=True, cwd=directory, **options)
        settings = {
            "listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": directory, "fsync": "off",
            "ssl": "on", "ssl_cert_file": key, "ssl_key_file": key,
        }  # fmt: skip
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with Process(server, "-D", data, *words, keep_errors=True, cwd=directory, **options):
            yield port


def test_asyncpg(run, connections):
    import asyncpg

    rows = [(n, "x" * 200) for n in range(20_000)]

    async def use(port):
        client = await asyncpg.connect(
            host="127.0.0.1", port=port, user="postgres", database="postgres", ssl=insecure(), timeout=30
        )
        assert await client.fetchval("select ssl from pg_stat_ssl where pid = pg_backend_pid()")
        await client.execute("create temporary table t (n int, text text)")
        assert await client.copy_records_to_table("t", records=rows) == "COPY 20000"
        got = bytearray()

        async def keep(data):
            got.extend(data)

        await client.copy_from_query("select * from t order by n", output=keep)
        assert got == "".join(f"{n}\t{text}\n" for n, text in rows).encode()
        assert await client.fetchval("select repeat('abcdefgh', 1000000)") == "abcdefgh" * 1_000_000
        await client.close()

    async def main(port, inner):
        await ready(port)
        await use(inner)
        assert len(connections) == 1
        await use(port)
        assert len(connections) == 1

    async def ready(port):
        await answers(port)
        while True:
            with contextlib.suppress(asyncpg.CannotConnectNowError):
                await (await asyncpg.connect(host="127.0.0.1", port=port, user="postgres", ssl=False)).close()
                return
            await asyncio.sleep(0.05)

    with postgres() as port, proxy(f"tcp://127.0.0.1:{port}") as inner:
        run(main(port, inner))


def insecure():
    context = of_client()
    context.check_hostname = False  # the certificate is localhost's
    return context
