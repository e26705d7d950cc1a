"""`rdmanet perf` between two machines, as far as one machine shows: strangers, limits, and what fails there."""

import asyncio
import concurrent.futures
import contextlib
import json
import re
import signal
import socket
import subprocess

import msgspec
import pytest

import rdmanet
from rdmanet.cli import workloads
from rdmanet.cli.fabrics import FABRICS, forget, loop_factory
from rdmanet.cli.perf import client as perf_client
from rdmanet.cli.perf import guard, streams
from rdmanet.cli.perf import server as perf_server
from rdmanet.cli.perf.control import (
    Address,
    Control,
    Done,
    Failed,
    Go,
    Hello,
    PerfError,
    Run,
    Settings,
    Stop,
    Verbs,
)
from rdmanet.cli.perf.pairs import Place, Side
from rdmanet.errors import CompletionError
from rdmanet.verbs import TransportType
from tests.support.perf import COMMAND, ENVIRONMENT, SHORT, one_line, perf, results
from tests.support.processes import Process

# ---- Between two machines, as far as one machine shows ---------------------------------------------------------


@pytest.fixture
def server():
    with Process(*COMMAND, "server", "-p", "0", env=ENVIRONMENT, keep_errors=True) as process:
        process.port = re.search(r"port (\d+)", process.line())[1]
        yield process


def test_between_two_processes_that_know_only_a_port(server):
    for tests in (["write_bw", "send_lat", "stream_bw"], ["write_lat", "tcp_bw", "rpc_tcp_lat"]):
        found = results("127.0.0.1", "-p", server.port, *tests, *SHORT)
        assert [result["messages"] for result in found] == [200] * 3
    assert server.line() == server.line() == "client 127.0.0.1"


def test_a_stranger_does_not_disturb_the_server(server):
    hello = {"type": "Hello", "version": rdmanet.__version__, "pid": 1}
    run = {"type": "Run", "kind": "write_bw", "size": 64, "settings": {}}
    for lines in (
        [b"GET / HTTP/1.1"],
        [b"\xff" * 1000],
        [b"x" * (1 << 21)],
        [json.dumps(hello | {"version": "0.0.1"}).encode()],
        [json.dumps(hello).encode(), b"[]"],
        [json.dumps(hello).encode(), json.dumps(run | {"size": 1 << 50}).encode()],
        [json.dumps(hello).encode(), json.dumps(run | {"settings": {"queue_pairs": -1}}).encode()],
        [json.dumps(hello).encode(), json.dumps(run).encode()],
    ):
        with socket.create_connection(("127.0.0.1", int(server.port))) as stranger:
            with contextlib.suppress(ConnectionError):
                for line in lines:
                    stranger.sendall(line + b"\n")
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(1 << 16):
                    pass
    [result] = results("127.0.0.1", "-p", server.port, "write_lat", *SHORT)
    assert result["messages"] == 200


@pytest.mark.parametrize("address", [(1 << 64) - 1, 1 << 100])
def test_an_address_that_no_memory_has(server, address):
    """The server adds an offset to it."""
    hello = {"type": "Hello", "version": rdmanet.__version__, "pid": 1}
    run = {"type": "Run", "kind": "write_lat", "size": 64, "settings": {}}
    with (
        socket.create_connection(("127.0.0.1", int(server.port))) as client,
        client.makefile("rwb") as lines,  # while it is open, so is the socket
    ):
        lines.write(json.dumps(hello).encode() + b"\n" + json.dumps(run).encode() + b"\n")
        lines.flush()
        lines.readline()
        verbs = json.loads(lines.readline())
        verbs["pairs"][0]["address"] = address
        lines.write(json.dumps(verbs).encode() + b"\n")
        lines.flush()
        assert json.loads(lines.readline())["type"] == "Failed"
    [result] = results("127.0.0.1", "-p", server.port, "write_lat", *SHORT)
    assert result["messages"] == 200


@pytest.fixture
def small_server():
    limits = ["--most-seconds", "60", "--most-memory", "1m"]
    with Process(*COMMAND, "server", "-p", "0", *limits, env=ENVIRONMENT, keep_errors=True) as process:
        process.port = re.search(r"port (\d+)", process.line())[1]
        yield process


@pytest.mark.parametrize(
    ("kind", "size", "change", "why"),
    [
        ("write_lat", 64, {"seconds": 5.0}, r"at most 1 s are allowed \(--most-seconds\)"),
        ("write_lat", 64, {"iterations": 5, "warm_up_s": 2.0}, r"\(--most-seconds\)"),
        ("write_bw", 1 << 20, {}, r"at most 1048576 are allowed \(--most-memory\)"),
        ("stream_rr", 64, {"connections": 100}, r"\(--most-memory\)"),
        ("rpc_bw", 1 << 16, {"iterations": 5}, r"\(--most-memory\)"),
    ],
)
def test_what_a_client_may_ask_for(kind, size, change, why):
    settings = msgspec.structs.replace(Settings(warm_up_s=0.0), **change)
    with pytest.raises(PerfError, match=why):
        guard.Guard(guard.Limits(1.0, 1 << 20, 600.0), None, None).begin(Run(kind, size, settings))


def test_a_server_has_limits(small_server):
    port = small_server.port
    status, out, err = perf("127.0.0.1", "-p", port, "write_lat", "-D", "61", "--json")
    assert (status, out) == (1, "")
    assert "perf: the server: write_lat: a run of 61.1 s" in one_line(err)
    [result] = results("127.0.0.1", "-p", port, "write_lat", *SHORT)
    assert result["messages"] == 200


@pytest.mark.parametrize("kind", ["write_lat", "read_bw", "stream_lat", "tcp_bw", "rpc_lat"])
def test_a_run_by_number_ends_at_the_limit_too(monkeypatch, kind):
    """Between two processes of this test: the limit is that of a client that nobody knows."""
    monkeypatch.setattr(guard, "SETUP_S", 0.0)
    ours, theirs = socket.socketpair()
    with (
        contextlib.closing(Control(ours)) as control,
        contextlib.closing(Control(theirs)) as client,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        client.send(Hello(rdmanet.__version__, 1))
        client.send(Run(kind, 64, Settings(iterations=1 << 40, warm_up_s=0.0)))
        limits = guard.Guard(guard.Limits(0.05, 1 << 28, 600.0), control, listener)

        def say_go():  # the client is there, and goes on for ever
            with (
                contextlib.closing(client),
                pytest.raises(PerfError, match=r"more than 0\.05 s is not allowed"),
            ):
                client.receive(Hello)
                if kind in ("write_lat", "read_bw"):
                    client.send(client.receive(Verbs))
                else:
                    client.receive(Address)
                client.receive(Go)
                client.send(Go())
                client.receive(Done)

        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            said = executor.submit(say_go)
            perf_server.session(control, Place(), None, asyncio.new_event_loop, guard=limits)
            said.result()


@pytest.mark.parametrize("kind", ["stream_lat", "stream_bw"])
def test_a_client_that_keeps_its_connection(monkeypatch, kind):
    """The session goes on without it."""
    monkeypatch.setattr(streams, "CLOSE_S", 0.05)
    ours, theirs = socket.socketpair()
    with contextlib.closing(Control(ours)) as control, contextlib.closing(Control(theirs)) as client:

        async def keep():
            client.send(Hello(rdmanet.__version__, 1))
            client.send(Run(kind, 64, Settings()))
            client.receive(Hello)
            address = client.receive(Address).where
            client.receive(Go)
            client.send(Go())
            _, writer = await FABRICS["rdmanet"]().open_streams(address)
            try:
                client.send(Stop())
                client.receive(Done)
                client.send(Run("nonsense", 64, Settings()))
                with pytest.raises(PerfError, match="there is no test 'nonsense'"):
                    client.receive(Done)
            finally:
                client.close()
                writer.transport.abort()

        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            kept = executor.submit(asyncio.run, keep())
            perf_server.session(control, Place(), None, asyncio.new_event_loop)
            kept.result()


@pytest.mark.parametrize("over", ["rdmanet", "tcp", "unix"])
@pytest.mark.parametrize("echo", [workloads.Echo, workloads.BufferedEcho])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_echo_waits_for_a_client_that_reads_nothing(over, echo, loop):
    """It would keep all that the client sends."""
    nbytes = 1 << 25

    async def flood():
        paused = asyncio.Event()
        echoes = []

        class Watched(echo):
            def pause_writing(self):
                super().pause_writing()
                echoes.append(self)
                paused.set()

        server, address = await FABRICS[over]().listen(Watched)
        reader, writer = await FABRICS[over]().open_streams(address)
        writer.write(bytes(nbytes))
        await paused.wait()
        assert not echoes[0].transport.is_reading()
        assert len(await reader.readexactly(nbytes)) == nbytes
        writer.close()
        await writer.wait_closed()
        server.close()
        forget(address)
        await server.wait_closed()

    with asyncio.Runner(loop_factory=loop_factory(loop)[0]) as runner:
        runner.run(flood())


def test_a_client_makes_room_for_the_next(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours, theirs = socket.socketpair()
        with contextlib.closing(Control(ours)) as control, contextlib.closing(Control(theirs)) as client:
            limits = guard.Guard(guard.Limits(1.0, 1 << 28, 0.0), control, listener)
            limits.check_turn()  # nobody waits
            with socket.create_connection(listener.getsockname()):
                client.send(Hello(rdmanet.__version__, 1))
                with pytest.raises(PerfError, match="another client waits"):
                    perf_server.session(control, Place(), None, asyncio.new_event_loop, guard=limits)
                client.receive(Hello)
                with pytest.raises(PerfError, match="another client waits"):
                    client.receive(Done)


# ---- What fails on the other side ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["write_lat", "stream_lat", "tcp_bw", "rpc_lat"])
@pytest.mark.parametrize(
    "says", [Failed("of its own"), Hello("1", 1), None], ids=["failed", "nonsense", "gone"]
)
def test_the_other_side_fails_before_it_begins(kind, says):
    """The client says what it has heard, whatever it was doing."""
    ours, theirs = socket.socketpair()
    with contextlib.closing(Control(ours)) as control, contextlib.closing(Control(theirs)) as server:
        session = perf_client.Session(control, Place(), asyncio.new_event_loop)
        if says is None:
            server.close()
        else:
            server.send(says)
        expected = {Failed: "of its own", Hello: "says Hello where", type(None): "the server has ended"}
        with pytest.raises(PerfError, match=expected[type(says)]):
            session.measure(Run(kind, 64, Settings(iterations=10)))


class Failing:
    """Traffic of which a request fails, as after the loss of its peer."""

    received = sent = in_flight = 0

    def flow(self, *args, **options):
        raise CompletionError(12, "send", why="the request failed")

    exchange = flow


@pytest.mark.parametrize("kind", ["write_lat", "send_bw"])
def test_a_request_that_fails_at_the_server_is_told(monkeypatch, kind):
    """And the server goes on: it was no failure of the connection to the client."""
    monkeypatch.setattr(Side, "traffic", lambda self, sends: Failing())
    ours, theirs = socket.socketpair()
    with contextlib.closing(Control(ours)) as control, contextlib.closing(Control(theirs)) as client:
        client.send(Hello(rdmanet.__version__, 1))
        client.send(Run(kind, 64, Settings()))

        def say_go():
            with contextlib.closing(client):
                client.receive(Hello)
                client.send(client.receive(Verbs))
                client.receive(Go)
                client.send(Go())
                with pytest.raises(PerfError, match="the server: .*the request failed"):
                    client.receive(Done)
                client.send(Stop())
                client.send(Run("nonsense", 64, Settings()))
                with pytest.raises(PerfError, match="there is no test 'nonsense'"):
                    client.receive(Verbs)

        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            said = executor.submit(say_go)
            perf_server.session(control, Place(), None, asyncio.new_event_loop)
            said.result()


class Refusing:
    """An adapter whose queue pairs cannot be connected by hand, and one of those."""

    name = "siw0"
    max_qp_rd_atom = 16

    def __init__(self, transport_type):
        self.transport_type = transport_type

    def query_device(self):
        return self

    def connect(self, info, **options):
        raise OSError(22, "ibv_modify_qp: RTR to RTS was refused")


def test_iwarp_needs_the_connection_manager():
    side = Side.__new__(Side)
    side.settings, side.context = Settings(), Refusing(TransportType.IWARP)
    with pytest.raises(
        PerfError, match="siw0 speaks iWARP, .* RTR to RTS was refused.*: measure it by streams"
    ):
        side._connect(side.context, None)
    side.context = Refusing(TransportType.IB)
    with pytest.raises(OSError, match="RTR to RTS"):
        side._connect(side.context, None)


def test_a_client_that_says_no_more(monkeypatch):
    monkeypatch.setattr(perf_server, "NEXT_S", 0.01)
    ours, theirs = socket.socketpair()
    with contextlib.closing(Control(ours)) as control, contextlib.closing(Control(theirs)) as client:
        client.send(Hello(rdmanet.__version__, 1))
        with pytest.raises(PerfError, match="has said nothing"):
            perf_server.session(control, Place(), None, asyncio.new_event_loop)


def test_what_the_server_cannot_do_it_says(server):
    hello = {"type": "Hello", "version": rdmanet.__version__, "pid": 1}
    for change, why in (
        ({"kind": "nonsense"}, "there is no test 'nonsense'"),
        ({"kind": "read_bw", "settings": {"connection": "UC"}}, "needs a reliable connection"),
        ({"size": 1 << 29, "settings": {"queue_pairs": 1024}}, "bytes of memory in all"),
    ):
        run = {"type": "Run", "kind": "write_bw", "size": 64, "settings": {}} | change
        with socket.create_connection(("127.0.0.1", int(server.port))) as client:
            lines = client.makefile("rwb")
            lines.write(json.dumps(hello).encode() + b"\n" + json.dumps(run).encode() + b"\n")
            lines.flush()
            assert json.loads(lines.readline())["type"] == "Hello"
            answer = json.loads(lines.readline())
            assert answer["type"] == "Failed" and why in answer["why"]


def test_the_server_ends_by_ctrl_c(server, interruptible):
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 130
    assert server.errors() == ""


def test_a_client_that_goes_leaves_the_server(server):
    arguments = ["127.0.0.1", "-p", server.port, "write_lat", "-s", "8,16", "-D", "100", "--warm-up", "0"]
    with subprocess.Popen([*COMMAND, *arguments], env=ENVIRONMENT) as client:
        assert server.line().startswith("client")
        client.kill()
    [result] = results("127.0.0.1", "-p", server.port, "write_lat", *SHORT)
    assert result["messages"] == 200


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    status, out, err = perf("127.0.0.1", "-p", port, "write_bw")
    assert (status, out) == (1, "")
    assert "start `rdmanet perf server` there" in one_line(err) and "tests are write_lat, " in err
