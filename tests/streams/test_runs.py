"""Loops come and go, connections come and go: the process stays as it was."""

import asyncio
import gc
import importlib
import os
import threading
import warnings
import weakref
from collections import Counter

import pytest
import uvloop
from harness import HOST, Echo, Net, Recorder

import rdmanet
from rdmanet import _core
from rdmanet._core import Library
from tests.support import threads

pytestmark = pytest.mark.once


def holdings() -> tuple[dict[str, int], int, int]:
    """What leaks would raise: live verbs objects, descriptors, lines of the memory map."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        return _core.live_objects(), len(os.listdir("/proc/self/fd")), sum(1 for _ in maps)


def kinds() -> Counter[str]:
    """How many objects there are of each class."""
    gc.collect()
    classes = (type(found) for found in gc.get_objects())
    return Counter(f"{each.__module__}.{each.__qualname__}" for each in classes)


def dead_references(library: Library) -> int:
    """In what the library remembers."""
    remembered = [thing for thing in gc.get_referents(library) if isinstance(thing, dict)]
    references = [value for each in remembered for value in each.values() if isinstance(value, weakref.ref)]
    return sum(reference() is None for reference in references)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


async def exchange() -> None:
    """A server, a client and one echo; both are left open."""
    server = await rdmanet.start_rdma_server(Echo, HOST, 0)
    _, client = await rdmanet.create_rdma_connection(Recorder, HOST, server.sockets[0].getsockname()[1])
    client.transport.write(b"x")
    await client.until_received(1)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.long
def test_a_thousand_runs_that_leave_connections_open(loop_factory):
    # Each of the two loops has its half.
    def runs(count: int) -> None:
        for _ in range(count):
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(exchange())

    runs(20)
    before, before_bytes = holdings(), resident_bytes()
    runs(480)
    objects, descriptors, mappings = holdings()
    assert objects == before[0]
    assert descriptors == before[1]
    assert mappings <= before[2] + 10  # the allocator's own
    assert resident_bytes() < before_bytes + (16 << 20)


async def exchange_by_the_switch() -> str:
    """The same by asyncio's streams; all is closed. Returns the fabric."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(1))
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, HOST, 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        writer.write(b"x")
        assert await reader.read() == b"x"
        writer.close()
        await writer.wait_closed()
        fabric: str = writer.get_extra_info("fabric")
        return fabric


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("base", [asyncio.SelectorEventLoop, uvloop.Loop], ids=["asyncio", "uvloop"])
@pytest.mark.embedded_only("the switch finds servers of this host")
def test_runs_of_the_switch_leave_nothing(base, count):
    def runs(count: int) -> None:
        for _ in range(count):
            assert rdmanet.run(exchange_by_the_switch(), loop_factory=base) == "rdma"

    def look() -> tuple[Counter[str], Counter[str], tuple[dict[str, int], int, int], int]:
        return kinds(), Counter(threads.names()), holdings(), resident_bytes()

    # Other tests may run `rdmanet ss` meanwhile, and whoever is looked at imports this.
    importlib.import_module("rdmanet.loop.tcp_infos")
    runs(20)
    look()  # which leaves something itself, the first time
    kinds_before, threads_before, (live_before, descriptors_before, mappings_before), bytes_before = look()
    runs(count)
    kinds_after, threads_after, (live, descriptors, mappings), bytes_after = look()
    more = kinds_after - kinds_before
    assert not [kind for kind in more if kind.startswith(("rdmanet.", "asyncio.", "_asyncio.", "uvloop."))]
    assert sum(more.values()) < 20  # of the look's own
    assert dead_references(Library.embedded()) == 0
    assert threads_after == threads_before
    assert live == live_before  # registered regions are among them
    assert descriptors == descriptors_before
    assert mappings <= mappings_before + 10  # the allocator's own
    # The allocator takes 5 MiB in the first two thousand runs, and then no more. (The address sanitizer keeps what is
    # freed for a while.)
    assert "ASAN_OPTIONS" in os.environ or bytes_after < bytes_before + (8 << 20)


def test_a_run_that_leaves_a_connection_open_warns_of_it(loop_factory):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(exchange())
        gc.collect()
    texts = [str(warning.message) for warning in caught if warning.category is ResourceWarning]
    assert any("unclosed transport" in text for text in texts), texts


def test_a_run_that_closes_everything_warns_of_nothing(loop_factory):
    async def main():
        net = Net()
        client, _ = await net.pair(server=Echo)
        client.transport.write(b"x")
        await client.until_received(1)
        client.transport.close()
        await client.until_lost()
        await net.aclose()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())
        gc.collect()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_loop_closed_without_ceremony(loop_factory):
    """No shutdown_asyncgens, no asyncio.run: still nothing stays once the loop is gone."""
    for _ in range(3):
        loop = loop_factory()
        loop.run_until_complete(exchange())
        loop.close()
        del loop
        gc.collect()


@pytest.mark.long
async def test_a_thousand_connects_and_closes(net: Net):
    """Descriptors, maps and memory are where they were."""
    _, port = await net.serve(Echo)

    async def turn(number: int) -> None:
        client = await net.connect(port)
        client.transport.write(b"x" * 100)
        await client.until_received(100)
        (client.transport.close if number % 3 else client.transport.abort)()
        await client.until_lost()

    async def turns(count: int) -> None:
        for number in range(count):
            await turn(number)
        for recorder in net.recorders:
            await recorder.until_lost()
        net.recorders.clear()

    await turns(50)
    before, before_bytes = holdings(), resident_bytes()
    for _ in range(10):  # at no time are there more of them than before
        await turns(50)
    objects, descriptors, mappings = holdings()
    assert objects == before[0]
    assert descriptors == before[1]
    assert mappings <= before[2] + 10
    assert resident_bytes() < before_bytes + (8 << 20)


@pytest.mark.long
async def test_a_thousand_connects_and_closes_of_another_process(net: Net, eventually):
    peer = net.spawn("echo.py")
    port = await peer.port()
    for number in range(300):
        client = await net.connect(port)
        client.transport.write(b"x" * 100)
        await client.until_received(100)
        client.transport.close()
        assert await client.until_lost() is None
        if number == 20:
            before = holdings()
    net.recorders.clear()
    # A young connection's socket is closed when the peer has answered that it has heard of the end.
    eventually(lambda: holdings()[1] <= before[1])
    objects, _, mappings = holdings()
    assert objects == before[0]
    assert mappings <= before[2] + 10


def test_two_loops_in_two_threads(loop_factory):
    """Each loop has a context of its own; their connections cross between the threads."""
    ports: dict[int, int] = {}
    meet = threading.Barrier(2, timeout=20)
    failures: list[BaseException] = []

    async def main(me: int) -> None:
        net = Net()
        _, ports[me] = await net.serve(Echo)
        meet.wait()
        clients = [await net.connect(ports[1 - me]) for _ in range(5)]
        for turn in range(1, 51):
            for client in clients:
                client.transport.write(bytes([me]) * 10_000)
            for client in clients:
                assert (await client.until_received(turn * 10_000))[-1] == me
        for client in clients:
            client.transport.close()
            assert await client.until_lost() is None
        # The other side's clients are this side's connections.
        await asyncio.gather(*(recorder.until_lost() for recorder in net.recorders))
        meet.wait()
        await net.aclose()

    def run(me: int) -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(main(me))
        except BaseException as error:
            failures.append(error)
            meet.abort()

    threads = [threading.Thread(target=run, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_one_loop_after_another_in_one_thread(loop_factory):
    """Connections of a loop that stands still keep; two loops take turns."""
    loops = [loop_factory() for _ in range(2)]
    nets, pairs = [], []

    async def begin():
        net = Net()
        nets.append(net)
        pairs.append(await net.pair(server=Echo))

    async def echo(client):
        client.transport.write(b"turn")
        await client.until_received(client.received + 4)

    for loop in loops:
        loop.run_until_complete(begin())
    for _ in range(20):
        for loop, (client, _) in zip(loops, pairs, strict=True):
            loop.run_until_complete(echo(client))
    for loop, net in zip(loops, nets, strict=True):
        loop.run_until_complete(net.aclose())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def test_python_starts_no_thread(net: Net):
    before = threading.active_count()
    client, _ = await net.pair(server=Echo)
    client.transport.write(b"x" * 1_000_000)
    await client.until_received(1_000_000)
    assert threading.active_count() == before
