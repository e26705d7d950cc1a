"""The engine and its loop: neither keeps the other alive, and whatever waits when a loop ends is told."""

import asyncio
import gc
import os
import warnings
import weakref

import pytest
from harness import HOST, Echo, Recorder

import rdmanet
from rdmanet import _core

MIB = 1 << 20


def run(loop_factory, main):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


async def echo_pair():
    server = await rdmanet.start_rdma_server(Echo, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    _, client = await rdmanet.create_rdma_connection(Recorder, HOST, port)
    client.transport.write(b"x")
    await client.until_received(1)
    return server, client


@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")
@pytest.mark.parametrize("ending", ["closed", "left open", "loop closed at once"])
def test_a_loop_is_not_kept_alive(loop_factory, ending):
    kept = []

    async def main():
        server, client = await echo_pair()
        kept.append(weakref.ref(asyncio.get_running_loop()))
        kept.append(weakref.ref(client.transport))
        if ending == "closed":
            client.transport.close()
            await client.until_lost()
            server.close()
            await server.wait_closed()

    if ending == "loop closed at once":
        loop = loop_factory()
        loop.run_until_complete(main())
        loop.close()
        del loop
    else:
        run(loop_factory, main)
    for _ in range(3):
        gc.collect()
    assert [reference() for reference in kept] == [None, None]


@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")
def test_engines_are_collected(loop_factory):
    def engines():
        return sum(type(found) is _core.StreamEngine for found in gc.get_objects())

    async def main():
        await echo_pair()

    gc.collect()
    before = engines()
    run(loop_factory, main)
    gc.collect()
    assert engines() == before


@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")
def test_a_generator_that_waits_for_the_end_when_the_loop_ends(loop_factory):
    """Asynchronous generators are closed beside the loop context; one that awaits wait_closed() gets it."""
    ended = []
    kept = []

    async def lines(port):
        reader, writer = await rdmanet.open_rdma_connection(HOST, port)
        try:
            while True:
                writer.write(b"line\n")
                yield await reader.readline()
        finally:
            writer.close()
            try:
                await writer.wait_closed()
            except OSError as error:
                ended.append(error)
            else:
                ended.append(None)

    async def main():
        server = await rdmanet.start_rdma_server(Echo, HOST, 0)
        generator = lines(server.sockets[0].getsockname()[1])
        kept.append(generator)
        assert await anext(generator) == b"line\n"

    run(loop_factory, main)
    assert len(ended) == 1


def test_connection_lost_comes_when_the_loop_ends(loop_factory):
    kept = []

    async def main():
        kept.extend(await echo_pair())

    with pytest.warns(ResourceWarning, match="unclosed transport"):
        run(loop_factory, main)
    client = kept[1]
    assert client.events == ["made", "data", "lost"]
    assert isinstance(client.error, ConnectionAbortedError)
    assert client.transport.is_closing()
    # All of it stays harmless, as after any other end.
    client.transport.write(b"too late")
    client.transport.close()
    client.transport.abort()
    client.transport.resume_reading()


def test_a_connection_that_is_closed_as_the_loop_ends_arrives_and_warns_of_nothing(loop_factory):
    async def main():
        far = Recorder()
        server = await rdmanet.start_rdma_server(lambda: far, HOST, 0)
        _, writer = await rdmanet.open_rdma_connection(HOST, server.sockets[0].getsockname()[1])
        await far.until(lambda: far.transport)
        server.close()
        far.transport.close()
        writer.write(b"last words")
        writer.close()
        if os.environ.get("RDMANET_SOFT_DEFER"):
            await asyncio.sleep(0.05)  # such a device is late on purpose

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(loop_factory, main)
        gc.collect()


def test_a_loop_ends_when_all_is_sent_whatever_asyncio_sleep_is(loop_factory, monkeypatch):
    """Programs' tests replace it by what does not wait. What was written is more than the peer's ring holds."""
    far = Recorder()

    async def main():
        server = await rdmanet.start_rdma_server(lambda: far, HOST, 0)
        _, writer = await rdmanet.open_rdma_connection(HOST, server.sockets[0].getsockname()[1])
        server.close()
        await far.until(lambda: far.transport)
        writer.write(bytes(MIB))
        writer.write(bytes(MIB))
        writer.close()
        monkeypatch.setattr(asyncio, "sleep", instantly)

    async def instantly(delay, result=None):
        return result

    run(loop_factory, main)
    assert far.received == 2 * MIB and far.error is None
    assert far.events[-2:] == ["eof", "lost"]


def test_regions_that_the_loop_leaves_behind(loop_factory):
    """They keep their protection domain, and nothing else."""
    kept = []

    async def main():
        server, client = await echo_pair()
        kept.append(client.transport.get_extra_info("rdma_pd").alloc_mr(4096))
        client.transport.close()
        await client.until_lost()
        server.close()
        await server.wait_closed()

    run(loop_factory, main)
    live = _core.live_objects()
    assert live["mrs"] == live["pds"] == 1 and live["cqs"] == live["event_channels"] == 0, live
    kept.pop().close()
    gc.collect()
    # The connection manager closes the device with its last identifier that finds it unused.
    run(loop_factory, nothing)


async def nothing():
    server = await rdmanet.start_rdma_server(Echo, HOST, 0)
    server.close()
