"""Several processes on one port: one of them has RDMA's listeners, and when it dies another has.

It deals connections out: at its door on the embedded device, and by refusals on an adapter. Some workers here treat the
embedded device as one.
"""

import asyncio
import contextlib
import errno
import functools
import os
import signal
import socket
from collections import Counter

import pytest
from loop_harness import peer, workers_on

import rdmanet
from rdmanet.base import log_rate
from rdmanet.base.accounts import DoorInfo, ServerInfo
from rdmanet.cli import asking, ss
from rdmanet.loop import doors, kernel, serving, workers
from rdmanet.loop.trust import Speaker
from tests.support.waiting import readable, until_seen


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    pid, fabric = (await reader.readline()).split()
    return reader, writer, int(pid), fabric.decode()


async def kill(worker) -> None:
    """Returns when the kernel has closed all that it had."""
    worker.send_signal(signal.SIGKILL)
    await asyncio.get_running_loop().run_in_executor(None, worker.process.wait)


async def test_another_worker_takes_over(tmp_path):
    with socket.socket() as reserved, contextlib.ExitStack() as stack:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        workers = {}
        for _ in range(3):
            worker = stack.enter_context(peer("worker.py", port))
            assert await worker.line() == "ready"
            workers[worker.pid] = worker
        kept = []
        while workers:
            reader, writer, pid, fabric = await connect(port)
            assert fabric == "rdma" and pid in workers
            kept.append((reader, writer, pid))
            # Each of those before has lost its connections, and nobody else's.
            await kill(workers.pop(pid))
            assert await reader.read() == b""
            if workers:
                await until_seen(lambda: doors.owner("127.0.0.1", port) in workers)
        assert len({pid for _, _, pid in kept}) == 3
        for _, writer, _ in kept:
            writer.close()


async def test_meanwhile_others_are_reached_by_tcp():
    with socket.socket() as reserved, contextlib.ExitStack() as stack:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        first, second = (stack.enter_context(peer("worker.py", port)) for _ in range(2))
        for worker in (first, second):
            assert await worker.line() == "ready"
        holder = doors.owner("127.0.0.1", port)
        assert holder in (first.pid, second.pid)
        holder, other = (first, second) if holder == first.pid else (second, first)
        other.stop()
        await kill(holder)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert writer.get_extra_info("fabric") == "tcp"
        other.send_signal(signal.SIGCONT)
        assert await reader.readline() == b"%d tcp\n" % other.pid
        writer.close()


async def who_serves(port: int, connections: int) -> Counter:
    """How many of so many connections each worker gets."""
    served: Counter = Counter()
    for _ in range(connections):
        _, writer, pid, fabric = await connect(port)
        assert fabric == "rdma"
        served[pid] += 1
        writer.close()
        await writer.wait_closed()
    return served


async def until_all_serve(port: int, there: dict) -> None:
    """A worker may be ready before the front has heard of it."""
    for worker in there.values():
        assert await worker.line() == "ready"
    served: set[int] = set()
    while served != set(there):
        served.update(await who_serves(port, 1))


@pytest.mark.parametrize("kind", [(), ("adapter",)], ids=["embedded", "adapter"])
async def test_connections_are_dealt_out_in_turn(kind):
    with workers_on("127.0.0.1", 3, *kind) as (port, there):
        await until_all_serve(port, there)
        assert await who_serves(port, 6) == dict.fromkeys(there, 2)
        # One that is no front ends: the two others share.
        front = doors.owner("127.0.0.1", port)
        ended = next(pid for pid in there if pid != front)
        await kill(there.pop(ended))
        assert await who_serves(port, 4) == dict.fromkeys(there, 2)
        # The front ends: the last serves alone, at the port that all know.
        await kill(there.pop(front))
        await until_seen(lambda: doors.owner("127.0.0.1", port) in there)
        assert await who_serves(port, 2) == dict.fromkeys(there, 2)


@pytest.mark.parametrize("kind", [(), ("adapter",)], ids=["embedded", "adapter"])
async def test_a_busy_worker_gets_no_connections(kind):
    """It is stopped here. The first that is sent to it goes elsewhere, and nobody else is sent there."""
    with workers_on("127.0.0.1", 3, *kind) as (port, there):
        await until_all_serve(port, there)
        front = doors.owner("127.0.0.1", port)
        busy = next(pid for pid in there if pid != front)
        there[busy].stop()
        served = await who_serves(port, 6)
        assert busy not in served and len(served) == 2
        there[busy].send_signal(signal.SIGCONT)
        served = Counter()
        while busy not in served:
            served += await who_serves(port, 1)


async def listed(process: int) -> ServerInfo:
    """The one server of a process, as `rdmanet ss` lists it."""
    asked = asyncio.get_running_loop().run_in_executor(None, asking.ask_all, process)
    [loop] = ss._merged(await asked)
    [server] = loop.servers
    return server


@pytest.mark.parametrize("kind", [(), ("adapter",)], ids=["embedded", "adapter"])
async def test_ss_lists_who_has_the_door_and_who_gets_what(kind):
    """A worker's own port is no server of its own. Who is told of a connection and does not turn is busy."""
    with workers_on("127.0.0.1", 3, *kind) as (port, there):
        await until_all_serve(port, there)
        front = doors.owner("127.0.0.1", port)
        others = [pid for pid in there if pid != front]
        [door] = (await listed(front)).doors
        assert (door.place, door.missing, door.front) == (("127.0.0.1", port), "", 0)
        assert sorted(worker.pid for worker in door.workers) == sorted(others)
        for worker in door.workers:
            server = await listed(worker.pid)
            assert server.doors == [DoorInfo(("127.0.0.1", port), front=front, port=worker.port)]
            assert server.fabric == "rdma and tcp" and not worker.busy
        there[others[0]].stop()
        await who_serves(port, 6)
        found = {worker.pid: worker for worker in (await listed(front)).doors[0].workers}
        assert found[others[0]].busy and not found[others[1]].busy
        await kill(there[others[0]])
        while len(found) == 2:
            found = {worker.pid: worker for worker in (await listed(front)).doors[0].workers}
        assert list(found) == [others[1]]


async def test_a_door_that_closed_with_its_device_is_missing():
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    [door] = server.info().doors
    assert not door.missing
    server._rdma[0].close()  # as when the device is removed
    assert "the device is removed" in server.info().doors[0].missing
    server.close()
    assert server.info().doors == []
    await server.wait_closed()


async def test_a_server_without_a_door_says_why():
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    server = await loop.create_server(asyncio.Protocol, sock=listener, start_serving=False)
    assert server.info().doors == []
    listener.setsockopt(socket.IPPROTO_IP, workers.IP_MINTTL, 255)
    await server.start_serving()
    [door] = server.info().doors
    assert "IP_MINTTL" in door.missing and f"\nno door at 127.0.0.1:{door.place[1]}: " in server.explain()
    server.close()
    await server.wait_closed()
    rdmanet.patch_loop(loop, peers="!*")
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    assert "the peers that RDMA is for do not include it" in server.info().doors[0].missing
    server.close()
    await server.wait_closed()


async def test_all_workers_but_the_front_are_busy():
    with workers_on("127.0.0.1", 3) as (port, there):
        await until_all_serve(port, there)
        front = doors.owner("127.0.0.1", port)
        for pid in there:
            if pid != front:
                there[pid].stop()
        assert await who_serves(port, 4) == {front: 4}


async def fabric_of(port: int) -> tuple[str, str]:
    """Of a connection that says nothing: which it takes, and why."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    return writer.get_extra_info("fabric"), writer.get_extra_info("fabric_reason")


async def test_a_busy_front_is_waited_for_once():
    """One connection waits for the answer at its door. The others take TCP at once, until it has been answered."""
    with workers_on("127.0.0.1", 2) as (port, there):
        await until_all_serve(port, there)
        front = there[doors.owner("127.0.0.1", port)]
        front.stop()
        fabric, why = await fabric_of(port)
        assert fabric == "tcp" and "did not answer" in why
        for _ in range(3):
            assert await fabric_of(port) == ("tcp", "the server's loop has not answered yet")
        front.send_signal(signal.SIGCONT)
        while (await fabric_of(port))[0] != "rdma":
            pass


async def test_who_ends_takes_only_its_own_connections():
    """First a worker that is not the front, then the front."""
    with workers_on("127.0.0.1", 3) as (port, there):
        await until_all_serve(port, there)
        kept = [await connect(port) for _ in range(6)]
        assert Counter(pid for _, _, pid, _ in kept) == dict.fromkeys(there, 2)
        front = doors.owner("127.0.0.1", port)
        for ended in (next(pid for pid in there if pid != front), front):
            await kill(there.pop(ended))
            for reader, writer, pid, fabric in kept:
                assert fabric == "rdma"
                if pid == ended:
                    assert await reader.read() == b""
                    writer.close()
            kept = [each for each in kept if each[2] != ended]
            for reader, writer, _, _ in kept:
                writer.write(b"hello\n")
                assert await reader.readline() == b"hello\n"
        for _, writer, _, _ in kept:
            writer.close()


async def test_a_front_ends_while_a_worker_registers(monkeypatch):
    """The worker takes its place, and sends nobody to itself."""
    with workers_on("127.0.0.1", 1) as (port, there):
        [front] = there.values()
        assert await front.line() == "ready"
        listen = serving.DualServer._listen

        async def listen_late(server, at, place, by=None):
            if place[1] != port and there:
                await kill(there.popitem()[1])
                await until_seen(lambda: doors.owner("127.0.0.1", port) == os.getpid())
            return await listen(server, at, place, by)

        monkeypatch.setattr(serving.DualServer, "_listen", listen_late)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", port, reuse_port=True)
        assert not there and len(server._rdma) == 1
        assert not server._beside and not server._heirs
        server.close()
        await server.wait_closed()


def refuse_filter(_: socket.socket) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("may_filter", [True, False], ids=["filter", "hops"])
@pytest.mark.parametrize(
    ("address", "there"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("::", "::1"), ("::", "::ffff:127.0.0.1")],
)  # fmt: skip
async def test_nobody_reaches_a_reserved_port_by_tcp(address, there, may_filter, monkeypatch):
    """On loopback the kernel answers within connect(): an open port is connected to when it returns.

    There are hosts that leave packet filters to root.
    """
    if not may_filter:
        monkeypatch.setattr(workers, "_attach_filter", refuse_filter)
    states = []
    with workers.reserve(address, address == "::") as reserved:
        with socket.create_server(
            (address, 0), family=reserved.family, dualstack_ipv6=address == "::"
        ) as reachable:
            for listener in (reserved, reachable):
                with socket.socket(reserved.family) as client:
                    client.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        client.connect((there, listener.getsockname()[1]))
                    states.append(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])
    assert states == [2, 1]  # SYN_SENT, ESTABLISHED


class Device:
    """What the register asks of a loop context."""

    def __init__(self, embedded: bool) -> None:
        self.library = self
        self.embedded_device = embedded


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


async def test_a_register_believes_only_what_it_understands(listener, monkeypatch):
    loop = asyncio.get_running_loop()
    port, descriptor = listener.getsockname()[1], listener.fileno()
    name = b"\0rdmanet-stream/127.0.0.1/%d/workers" % port
    register = workers.Register(loop, "127.0.0.1", port, descriptor)
    adapter, embedded = Device(False), Device(True)

    def register_from(own_port: int) -> workers.Registration:
        return workers.Registration(loop, "127.0.0.1", port, descriptor, own_port)

    try:
        with pytest.raises(OSError, match="in use"):
            workers.Register(loop, "127.0.0.1", port, descriptor)
        assert register.elsewhere(adapter) == 0
        strangers = []
        for word in (
            b"GET / HTTP/1.1",
            b"rdmanet-worker 2 0 0 %d" % descriptor,
            b"rdmanet-worker 2 65536 0 %d" % descriptor,
            b"rdmanet-worker 1 80 0 %d" % descriptor,
            b"rdmanet-worker 2 80 0 %d" % (descriptor + 1000),  # it does not have the TCP listener
        ):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            strangers.append(stranger)
            stranger.connect(name)
            await until_seen(lambda: register._callers)
            assert register.elsewhere(adapter) == 0  # it has said nothing
            stranger.send(word)
            await until_seen(lambda: not register._callers)
        first, second = (register_from(own_port) for own_port in (1001, 1002))
        await until_seen(lambda: len(register._places) == 2)
        assert [register.elsewhere(adapter) for _ in range(6)] in ([0, 1001, 1002] * 2, [0, 1002, 1001] * 2)
        assert [register.elsewhere(embedded) for _ in range(3)] == [0] * 3
        first.close()
        assert sorted(register.elsewhere(adapter) for _ in range(4)) == [0, 0, 1002, 1002]
        await until_seen(lambda: len(register._places) == 1)
        # Processes without a name of their own are not registered, and do not register.
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "overflow_user", functools.partial(int, os.geteuid()))
            with pytest.raises(PermissionError):
                register_from(1003)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(name)
                await readable(stranger.fileno())
                sent_away = [b"rdmanet-front 2 no\n", b""]
                assert [stranger.recv(64) for _ in range(2)] == sent_away
        second.close()
        await until_seen(lambda: not register._places)
        for stranger in strangers:
            stranger.close()
    finally:
        register.close()
    register.close()
    with pytest.raises(ConnectionRefusedError):
        register_from(1001)


@pytest.mark.parametrize(
    "word", [b"rdmanet-front 2 1000", b"rdmanet-front 1 %d", b"rdmanet-front 2", b"hello"]
)
async def test_a_worker_leaves_a_register_that_is_not_to_be_trusted(listener, word):
    """It may be anybody's: only who has the TCP listener deals out its connections."""
    port, descriptor = listener.getsockname()[1], listener.fileno()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind(b"\0rdmanet-stream/127.0.0.1/%d/workers" % port)
        taken.listen()
        worker = workers.Registration(asyncio.get_running_loop(), "127.0.0.1", port, descriptor, 1001)
        caller, _ = taken.accept()
        with caller:
            assert caller.recv(64) == b"rdmanet-worker 2 1001 0 %d\n" % descriptor
            caller.send(word % descriptor if b"%" in word else word)
            await readable(caller.fileno())
            assert caller.recv(64) == b""
        assert worker._rest is None  # for good
        worker.close()


async def test_nobody_is_sent_to_a_worker_that_has_ended(listener):
    """Its port may be anybody's by then, and the loop may hear of its end later than of a client."""
    port, descriptor = listener.getsockname()[1], listener.fileno()
    loop = asyncio.get_running_loop()
    register = workers.Register(loop, "127.0.0.1", port, descriptor)
    worker = workers.Registration(loop, "127.0.0.1", port, descriptor, 1001)
    await until_seen(lambda: register._places)
    assert {register.turn(), register.turn()} == {None, workers.Place(1001, 0)}
    worker.close()
    assert [register.turn() for _ in range(4)] == [None] * 4
    register.close()


@pytest.fixture
def log(caplog, monkeypatch):
    """Each cause has its line, also if another test has just had one."""
    monkeypatch.setattr(log_rate, "_said", {})
    return caplog


async def test_a_worker_that_is_not_believed_stays_away(listener, log):
    loop = asyncio.get_running_loop()
    port, descriptor = listener.getsockname()[1], listener.fileno()
    register = workers.Register(loop, "127.0.0.1", port, descriptor)
    worker = workers.Registration(loop, "127.0.0.1", port, descriptor + 1000, 1001)
    await until_seen(lambda: worker._socket is None)
    assert worker._rest is None and not register._workers()
    assert f"a process is not taken for a worker of port {port}" in log.text
    worker.close()
    register.close()


@pytest.fixture
def lacking(request, monkeypatch):
    """The first worker's port of this process is not to be had, for want of descriptors."""
    failures = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]
    reserve, listen = workers.reserve, serving.DualServer._listen

    def reserve_later(*args):
        if failures:
            raise failures.pop()
        return reserve(*args)

    async def listen_later(server, at, place, by=None):
        is_workers = place[1] != server.sockets[0].getsockname()[1]
        return failures.pop() if is_workers and failures else await listen(server, at, place, by)

    if request.param == "reserve":
        monkeypatch.setattr(workers, "reserve", reserve_later)
    else:
        monkeypatch.setattr(serving.DualServer, "_listen", listen_later)


@pytest.mark.parametrize("lacking", ["reserve", "listen"], indirect=True)
@pytest.mark.parametrize("ends", [False, True], ids=["descriptors again", "it ends before"])
async def test_a_worker_that_lacks_descriptors_registers_later(lacking, ends, monkeypatch, log):
    with workers_on("127.0.0.1", 1) as (port, there):
        [front] = there.values()
        assert await front.line() == "ready"
        monkeypatch.setattr(serving, "REST_S", 3600.0 if ends else 0.02)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", port, reuse_port=True)
        assert f"the server on 127.0.0.1 port {port} registers later as a worker: " in log.text
        assert "Too many open files" in log.text and not server._beside
        if not ends:
            await until_seen(lambda: server._beside and not server._tasks)
        server.close()
        await server.wait_closed()
        await until_seen(lambda: not server._tasks)


@pytest.mark.parametrize("at_once", [True, False], ids=["before it speaks", "its word is unread"])
async def test_who_is_refused_unheard_stays_away(listener, monkeypatch, log, at_once):
    """As by a front that may not trace it. The kernel says that the connection is reset, before what was said by it."""
    loop = asyncio.get_running_loop()
    port, descriptor = listener.getsockname()[1], listener.fileno()
    register = workers.Register(loop, "127.0.0.1", port, descriptor)

    def front_asks(*args):
        speaker = Speaker(*args)
        speaker.why_not = lambda: "it is in a sandbox"
        return speaker

    def worker_asks(*args):
        monkeypatch.setattr(workers, "Speaker", front_asks)
        if at_once:
            register._called(register._socket.accept()[0])
        return Speaker(*args)

    monkeypatch.setattr(workers, "Speaker", worker_asks)
    worker = workers.Registration(loop, "127.0.0.1", port, descriptor, 1001)
    await until_seen(lambda: worker._socket is None)
    assert worker._rest is None and not register._workers()
    assert f"a process is not taken for a worker of port {port}: it is in a sandbox" in log.text
    assert f"no RDMA client of port {port} is sent to this process: the front refuses it" in log.text
    worker.close()
    register.close()


@pytest.mark.parametrize("which", range(4))
async def test_a_worker_comes_again_after_a_want_of_descriptors(listener, monkeypatch, log, which):
    """Each of both asks the kernel about the other twice: when they meet, and when it has said its descriptor."""
    monkeypatch.setattr(workers, "REST_S", 0.02)
    asked = 0

    def ask(*args):
        nonlocal asked
        asked += 1
        if asked == which + 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return Speaker(*args)

    monkeypatch.setattr(workers, "Speaker", ask)
    loop = asyncio.get_running_loop()
    port, descriptor = listener.getsockname()[1], listener.fileno()
    register = workers.Register(loop, "127.0.0.1", port, descriptor)
    worker = workers.Registration(loop, "127.0.0.1", port, descriptor, 1001)
    await until_seen(lambda: asked >= 5 and register._places)
    assert {register.turn(), register.turn()} == {None, workers.Place(1001, 0)}
    assert f"port {port}" in log.text and "Too many open files" in log.text
    worker.close()
    register.close()


async def test_a_worker_comes_again_if_the_register_is_full(listener, monkeypatch):
    monkeypatch.setattr(workers, "REST_S", 0.02)
    port, descriptor = listener.getsockname()[1], listener.fileno()
    name = b"\0rdmanet-stream/127.0.0.1/%d/workers" % port
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as full, contextlib.ExitStack() as stack:
        full.bind(name)
        full.listen(0)
        for _ in range(2):
            caller = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            caller.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                caller.connect(name)
        worker = workers.Registration(asyncio.get_running_loop(), "127.0.0.1", port, descriptor, 1001)
        assert worker._socket is None
        full.accept()[0].close()
        await until_seen(lambda: worker._socket is not None)
        worker.close()


async def test_who_calls_and_says_nothing_is_not_kept(listener, monkeypatch):
    loop = asyncio.get_running_loop()
    port, descriptor = listener.getsockname()[1], listener.fileno()
    name = b"\0rdmanet-stream/127.0.0.1/%d/workers" % port
    register = workers.Register(loop, "127.0.0.1", port, descriptor)
    with contextlib.ExitStack() as stack:
        callers = [
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(70)
        ]
        for caller in callers:
            caller.connect(name)
        for dropped in callers[:6]:
            await readable(dropped.fileno())
            greeting = b"rdmanet-front 2 %d\n" % descriptor
            assert dropped.recv(64) == greeting
            await readable(dropped.fileno())
            assert dropped.recv(64) == b""
        await until_seen(lambda: len(register._callers) == 64)
        worker = workers.Registration(loop, "127.0.0.1", port, descriptor, 1001)
        await until_seen(lambda: register._places)
        assert len(register._callers) == 63
        monkeypatch.setattr(workers, "SPEAK_S", 0.001)
        caller = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        caller.connect(name)
        await readable(caller.fileno())
        await until_seen(lambda: len(register._callers) == 63)
        assert [caller.recv(64) for _ in range(2)] == [greeting, b""]
        worker.close()
    await until_seen(lambda: not register._workers())
    register.close()
