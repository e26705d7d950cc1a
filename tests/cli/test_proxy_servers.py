"""PostgreSQL and Redis behind two proxies: the programs speak TCP, and between the proxies there is RDMA.

`make proxy-servers` runs these, and fails where something is missing that they need; elsewhere they are skipped.
"""

import contextlib
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support.ports import free_port
from tests.support.processes import Process

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
HOST = "127.0.0.1"
PATIENCE_S = 100


def program(name: str) -> str:
    """Where a program is; Debian keeps those of PostgreSQL's server out of the path."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = shutil.which(name, path=os.pathsep.join([*map(str, versions), os.environ["PATH"]]))
    if found is None:
        do_without(f"{name} is not installed: apt-get install postgresql redis-server")
    return found


def do_without(what: str) -> NoReturn:
    if os.environ.get("RDMANET_TEST_SERVERS") == "required":
        pytest.fail(what)
    pytest.skip(what)


def run(*command: object, **options) -> str:
    """What a program prints, which must end well."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        **options,
    )
    assert done.returncode == 0, done
    return done.stdout


@contextlib.contextmanager
def listening(*command: object, ready: Callable[[], bool], eventually, **options) -> Iterator[Process]:
    """A server that runs, once it does what `ready` asks for."""
    with Process(*command, keep_errors=True, **options) as server:

        def is_ready() -> bool:
            assert server.process.poll() is None, server.errors()
            return ready()

        eventually(is_ready, what=str(command[0]))
        yield server


def succeeds(*command: object) -> bool:
    return subprocess.run([str(word) for word in command], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def proxies(target: str, *options: str) -> Iterator[tuple[int, Process]]:
    """TCP to RDMA to this server: the port, and the outer proxy. The inner one has these options."""

    def proxy(*arguments: str) -> Process:
        return Process(
            sys.executable, "-m", "rdmanet", "proxy", *arguments, keep_errors=True, env=ENVIRONMENT
        )

    with proxy(*options, f"rdma://{HOST}:0", target) as inner:
        middle = inner.line().partition(" ")[0]
        with proxy(f"tcp://{HOST}:0", middle) as outer:
            yield int(outer.line().partition(" ")[0].rpartition(":")[2]), outer
            for each in (outer, inner):
                each.process.terminate()
                assert each.wait() == 0
                assert each.errors() == ""


# ---- Redis


@pytest.fixture
def redis(tmp_path, eventually) -> Iterator[str]:
    """An endpoint of a server that keeps nothing."""
    server, client = program("redis-server"), program("redis-cli")
    port = free_port()
    command = [server, "--bind", HOST, "--port", port, "--save", "", "--dir", tmp_path]
    ready = [client, "-h", HOST, "-p", port, "ping"]
    with listening(*command, ready=lambda: succeeds(*ready), eventually=eventually):
        yield f"tcp://{HOST}:{port}"


def test_redis_cli(redis, tmp_path):
    """Small and large values, and a client that pipes its commands and waits for the last answer."""
    large = tmp_path / "large"
    large.write_bytes(os.urandom(32 << 20))
    with proxies(redis) as (port, _):
        client = (program("redis-cli"), "-h", HOST, "-p", port)
        assert run(*client, "set", "key", "value") == "OK\n"
        assert run(*client, "get", "key") == "value\n"
        with large.open("rb") as data:
            assert run(*client, "-x", "set", "large", stdin=data) == "OK\n"
        got = subprocess.run([*map(str, client), "get", "large"], capture_output=True, check=True).stdout
        assert got == large.read_bytes() + b"\n"
        piped = "".join(f"*3\r\n$3\r\nSET\r\n$5\r\n{n:05}\r\n$5\r\n{n:05}\r\n" for n in range(20_000))
        assert "errors: 0, replies: 20000" in run(*client, "--pipe", input=piped)
        assert run(*client, "get", "19999") == "19999\n"


@pytest.mark.parametrize(
    "options, tests",
    [
        pytest.param("-n 5000 -c 20", "ping_inline,set,get,lrange_100,mset", marks=pytest.mark.long),
        ("-n 5000 -c 20 -P 16", "ping_inline,set,get,lrange_100,mset"),
        ("-n 500 -c 5 -d 100000", "set,get,mset"),  # an lrange_100 would be answered with 10 MB
    ],
    ids=["one at a time", "pipelines", "large values"],
)
def test_redis_benchmark(redis, options, tests):
    with proxies(redis) as (port, _):
        benchmark = (program("redis-benchmark"), "-h", HOST, "-p", port, "--csv")
        said = run(*benchmark, *options.split(), "-t", tests)
    rates = re.findall(r'^"(\w[^"]*)","([\d.]+)"', said, re.MULTILINE)
    assert len(rates) >= len(tests.split(",")) and all(float(rate) > 0 for _, rate in rates), said


# ---- PostgreSQL


@pytest.fixture
def postgres(eventually) -> Iterator[str]:
    """An endpoint of a server with nothing in it: a Unix socket."""
    initdb, server, is_ready = program("initdb"), program("postgres"), program("pg_isready")
    with tempfile.TemporaryDirectory(prefix="rdmanet-") as directory:
        # The server refuses to be root's.
        options = {}
        if os.getuid() == 0:
            try:
                user = pwd.getpwnam("postgres")
            except KeyError:
                do_without("there is no user postgres for the server to run as")
            os.chown(directory, user.pw_uid, user.pw_gid)
            options = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        data = Path(directory) / "data"
        superuser = ("--username", "postgres", "--auth", "trust")
        run(initdb, "--pgdata", data, *superuser, "--no-sync", cwd=directory, **options)
        command = [server, "-D", data, "-k", directory, "-c", "listen_addresses=", "-c", "fsync=off"]
        ready = (is_ready, "-h", directory)
        with listening(
            *command, ready=lambda: succeeds(*ready), eventually=eventually, cwd=directory, **options
        ):
            yield f"unix:{directory}/.s.PGSQL.5432"


# Root's proxy does not take a server below /tmp for the right one, whoever's directory it is in.
OF_POSTGRES = ("--server-user", "postgres") if os.getuid() == 0 else ()


def test_psql(postgres):
    with proxies(postgres, *OF_POSTGRES) as (port, outer):
        client = (program("psql"), "-h", HOST, "-p", port, "-U", "postgres", "-Atq")
        assert run(*client, "-c", "select 6 * 7") == "42\n"
        # Much in both directions by COPY, a large value, a notice, an error.
        rows = "".join(f"{n}\t{'x' * 200}\n" for n in range(50_000))
        run(*client, "-c", "create table t (n int, text text)")
        run(*client, "-c", "copy t from stdin", input=rows)
        assert run(*client, "-c", "copy (select * from t order by n) to stdout") == rows
        large = run(*client, "-c", "select repeat('abcdefgh', 4000000)")
        assert large == "abcdefgh" * 4_000_000 + "\n"
        wrong = subprocess.run(
            [*map(str, client), "-c", "select 1/0"], capture_output=True, text=True, check=False
        )
        assert "division by zero" in wrong.stderr


@pytest.mark.long
def test_pgbench(postgres):
    with proxies(postgres, *OF_POSTGRES) as (port, _):
        bench = (program("pgbench"), "-h", HOST, "-p", port, "-U", "postgres")
        run(*bench, "-i", "-s", 1, "postgres")
        for options in (("-c", 4, "-j", 2), ("-c", 4, "-S", "-M", "prepared"), ("-c", 2, "-S", "-C")):
            said = run(*bench, "-t", 100, *options, "postgres")
            clients = options[1]
            done = f"number of transactions actually processed: {100 * clients}/{100 * clients}"
            assert done in said and "number of failed transactions: 0" in said, said
