"""The end of a loop sends what was written, and sleeps until then."""

import asyncio
import threading

import pytest
from harness import HOST, Recorder

import rdmanet

WRITTEN = 8 << 20  # more than a peer takes that does not read


class LateReader(Recorder):
    """Reads nothing until the test says so."""

    def connection_made(self, transport):
        transport.pause_reading()
        super().connection_made(transport)


class Reader:
    """A server in a thread, with a loop of its own, that reads when `begin` is set."""

    def __init__(self) -> None:
        self.begin, self.port, self.received = threading.Event(), 0, 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self) -> None:
        protocol = LateReader()
        server = await rdmanet.start_rdma_server(lambda: protocol, HOST, 0)
        async with server:
            self.port = server.sockets[0].getsockname()[1]
            self._ready.set()
            await asyncio.get_running_loop().run_in_executor(None, self.begin.wait, 60)
            await asyncio.sleep(0.05)  # time to look at it again and again, for who does so
            protocol.transport.resume_reading()
            await protocol.until_lost()
            self.received = protocol.received

    def join(self) -> int:
        self._thread.join(60)
        return self.received


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closing"])
@pytest.mark.filterwarnings("ignore:unclosed transport:ResourceWarning")
def test_the_end_of_a_loop_sleeps_until_what_was_written_is_sent(closed):
    reader = Reader()
    loop = asyncio.new_event_loop()

    async def write() -> None:
        transport, _ = await rdmanet.create_rdma_connection(asyncio.Protocol, HOST, reader.port)
        transport.write(bytes(WRITTEN))
        if closed:
            transport.close()

    loop.run_until_complete(write())
    timers, call_later = [], loop.call_later

    def counted(delay, callback, *arguments, **options):
        timers.append(delay)
        reader.begin.set()
        return call_later(delay, callback, *arguments, **options)

    loop.call_later = counted
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    assert reader.join() == WRITTEN
    assert len(timers) <= 3, timers
