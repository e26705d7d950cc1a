"""The paths of Unix listeners: stale ones are no hindrance, and those of others stay."""

import asyncio
import errno
import os
import socket
import ssl
import sys

import pytest
import uvloop

from rdmanet.cli import endpoints
from rdmanet.cli.endpoints import EndpointError
from tests.support.waiting import begin, loop_turns

NO_TLS = endpoints.Tls(None, ssl.create_default_context())


async def listen(path) -> endpoints.Listener:
    return await endpoints.listen(endpoints.parse(f"unix:{path}"), asyncio.Protocol, None)


@pytest.fixture
def path(tmp_path):
    """A path with a socket that a killed program has left behind."""
    made = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(made))
    return made


def connects(path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


@pytest.fixture
def meanwhile(monkeypatch):
    """What happens after somebody has found out that the socket is stale, and before he removes it."""
    happenings = []
    original = endpoints._is_stale

    def is_stale(path):
        result = original(path)
        if happenings:
            happenings.pop()()
        return result

    monkeypatch.setattr(endpoints, "_is_stale", is_stale)
    return happenings


async def test_another_is_faster_and_stays(path, meanwhile):
    """Both have found the stale socket. The slower one must not remove the faster one's."""
    others = socket.socket(socket.AF_UNIX)

    def faster():
        path.unlink()
        others.bind(str(path))
        others.listen()

    meanwhile.append(faster)
    with others:
        with pytest.raises(EndpointError, match="another program listens there"):
            await listen(path)
        assert connects(path)
    assert os.listdir(path.parent) == ["socket"]


async def test_it_is_removed_by_another(path, meanwhile):
    meanwhile.append(path.unlink)
    listener = await listen(path)
    assert connects(path)
    listener.close()
    assert os.listdir(path.parent) == []


async def test_of_many_at_once_one_listens(path):
    """In processes, which start together."""
    code = """
import asyncio, sys
from rdmanet.cli import endpoints
async def main():
    sys.stdin.readline()
    try:
        listener = await endpoints.listen(endpoints.parse(sys.argv[1]), asyncio.Protocol, None)
    except endpoints.EndpointError as exc:
        print(exc, flush=True)
    else:
        print("listens", flush=True)
    sys.stdin.readline()
asyncio.run(main())
"""

    started = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, f"unix:{path}", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        for _ in range(4)
    ]  # fmt: skip
    for process in started:
        process.stdin.write(b"\n")
    said = [(await process.stdout.readline()).decode().strip() for process in started]
    assert said.count("listens") == 1
    assert set(said) == {"listens", f"cannot listen on unix:{path}: another program listens there"}
    assert connects(path)
    assert os.listdir(path.parent) == ["socket"]
    for process in started:
        process.stdin.write(b"\n")
        assert await process.wait() == 0
        process._transport.close()


async def test_what_is_no_socket_stays(path):
    path.unlink()
    path.write_text("something else")
    with pytest.raises(EndpointError, match="is no socket"):
        await listen(path)
    assert path.read_text() == "something else"


async def test_a_name_that_is_taken(tmp_path):
    name = f"@{tmp_path}"
    listener = await listen(name)
    with pytest.raises(EndpointError, match="another program listens there") as info:
        await listen(name)
    assert info.value.__cause__.errno in (None, errno.EADDRINUSE)
    listener.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine function on a loop."""
    factory = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}[request.param]

    def run(main):
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(main())

    return run


@pytest.fixture
def full(path):
    """A listener whose backlog is full, and the client that fills it."""
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        yield listener


def test_a_full_backlog_is_waited_for(run, full, path):
    async def main():
        made = asyncio.get_running_loop().create_future()

        class Client(asyncio.Protocol):
            def connection_made(self, transport):
                transport.write(b"hello")
                made.set_result(transport)

        [connecting] = await begin(endpoints.connect(endpoints.parse(f"unix:{path}"), Client, NO_TLS, 30))
        await loop_turns(5)
        assert not connecting.done()
        full.accept()[0].close()
        await connecting
        (await made).close()
        served, _ = full.accept()
        with served:
            assert served.recv(9) == b"hello"

    run(main)


def test_a_backlog_that_stays_full_ends_in_the_timeout(run, full, path):
    async def main():
        with pytest.raises(TimeoutError, match="no connection within 0.05 s"):
            await endpoints.connect(endpoints.parse(f"unix:{path}"), asyncio.Protocol, NO_TLS, 0.05)

    run(main)
