"""forked_listener.py: listens, forks a child, and says what becomes of the child's copy of the listener.

The child runs its parent's loop, as programs do that fork workers behind a listening socket; it ends
when the device's first word comes there: the test connects. The parent serves that connection then.
"""

import asyncio
import logging
import os

from script import HOST, port_of, say, until_told_to_end

import rdmanet


class Echo(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.transport.write(data)


class Logged(logging.Handler):
    def __init__(self, loop):
        super().__init__(logging.ERROR)
        self.loop, self.text = loop, ""

    def emit(self, record):
        self.text += record.getMessage()
        self.loop.stop()


def in_the_child(loop, server):
    assert not server.is_serving()
    assert "forked" in repr(server), repr(server)
    for call in (server.start_serving, server.serve_forever):
        try:
            loop.run_until_complete(call())
        except RuntimeError as error:
            assert "after fork" in str(error) and str(port_of(server)) in str(error), error
        else:
            raise AssertionError(f"{call} in a child")
    server.close_clients()
    server.abort_clients()
    logged = Logged(loop)
    logging.getLogger("rdmanet").addHandler(logged)
    say("port", port_of(server))
    loop.run_forever()
    assert "after fork" in logged.text and str(os.getppid()) in logged.text, logged.text
    server.close()
    loop.run_until_complete(server.wait_closed())


def main():
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(rdmanet.start_rdma_server(Echo, HOST, 0))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            in_the_child(loop, server)
            status = 0
        finally:
            os._exit(status)
    say("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert server.is_serving()
    loop.run_until_complete(until_told_to_end())
    server.close()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


main()
