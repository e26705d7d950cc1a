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
