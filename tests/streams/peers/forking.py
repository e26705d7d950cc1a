"""forking.py PORT: connects to an echo server, forks children that collect garbage and exit.

The loop stands still at each fork; the child drops everything, runs the collector, and leaves
through the whole of the interpreter's finalisation. Then the parent must find its connection as
it was, and a last child opens rdmanet afresh and echoes too.
"""

import asyncio
import gc
import os
import sys

from script import THERE, say

import rdmanet


class Connected(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.answer = None

    def data_received(self, data):
        self.text += data
        if len(self.text) == len(self.sent) and self.answer:
            self.answer.set_result(self.text)

    async def ask(self, text):
        self.sent, self.text = text, b""
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(text)
        assert await self.answer == text


def new_loop():
    if os.environ.get("RDMANET_TEST_LOOP") == "uvloop":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.SelectorEventLoop()


def ended_well(pid):
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"child ended with {status}"


port = int(sys.argv[1])
loop = new_loop()
_, protocol = loop.run_until_complete(rdmanet.create_rdma_connection(Connected, THERE, port))
loop.run_until_complete(protocol.ask(b"before"))

for _ in range(3):
    pid = os.fork()
    if pid == 0:
        # The loop's own destructor would take its wake-up pipe out of the epoll set that both
        # processes share; that is asyncio's affair, so the child keeps the loop and only the loop.
        del protocol, _
        gc.collect()
        sys.exit(0)
    ended_well(pid)
    loop.run_until_complete(protocol.ask(b"after a child" * 1000))

pid = os.fork()
if pid == 0:
    try:
        protocol.transport.write(b"not mine")
    except RuntimeError as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError("a child wrote to its parent's connection")
    fresh = new_loop()
    asyncio._set_running_loop(None)
    _, mine = fresh.run_until_complete(rdmanet.create_rdma_connection(Connected, THERE, port))
    fresh.run_until_complete(mine.ask(b"from the child"))
    mine.transport.abort()
    os._exit(0)
ended_well(pid)
loop.run_until_complete(protocol.ask(b"at last"))
protocol.transport.close()
loop.run_until_complete(asyncio.sleep(0))
loop.close()
say("well")
