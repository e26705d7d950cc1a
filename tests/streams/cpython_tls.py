"""CPython's own tests of asyncio's TLS, over RDMA: `python cpython_tls.py asyncio|uvloop`, from test_cpython.py.

In these tests one end is a program of blocking sockets, in a thread of its own, and the other end is asyncio's TLS.
Here the loop's create_connection() and create_server() are rdmanet's, and a relay between RDMA and TCP stands before
the sockets. So TLS's bytes, ends and losses go through rdmanet, and the streams read by RdmaStreamReader.
"""

import asyncio
import asyncio.streams
import sys
import unittest

import uvloop

import rdmanet
from rdmanet.streams import RdmaStreamReader
from tests.support.relay import RELAYS, BothServers, Relay, first_of_two, run_relays, there

# What is left out, and why.
OTHERS = {
    "test_connect_timeout_warning": "connects to a port where nobody listens, and before it the relay listens",
    "test_handshake_timeout": "wants all freed in the loop's next turn; here the peer is told of the end first",
    "test_handshake_timeout_handler_leak": "the same",
    "test_create_connection_memory_leak": "the same",
    "test_start_tls_client_reg_proto_1": "the same",
}


def relayed(loop):
    """A loop whose connections are RDMA's."""

    class Relayed(loop):
        _default_executor = None  # the tests look at it, and uvloop has none

        async def create_connection(self, factory, host=None, port=None, *, sock=None, **options):
            if sock is not None:
                return await super().create_connection(factory, sock=sock, **options)
            to_tcp = first_of_two(lambda: RELAYS.create_connection(Relay, host, port))
            listener = await there(rdmanet.start_rdma_server(to_tcp, host, 0))
            try:
                return await rdmanet.create_rdma_connection(
                    factory, host, listener.sockets[0].getsockname()[1], **options
                )
            finally:
                RELAYS.call_soon_threadsafe(listener.close)

        async def create_server(self, factory, host=None, port=None, *, reuse_address=None, **options):
            server = await rdmanet.start_rdma_server(factory, host, 0, **{"family": 0, "flags": 0} | options)
            its_port = server.sockets[0].getsockname()[1]
            to_rdma = first_of_two(lambda: rdmanet.create_rdma_connection(Relay, host, its_port))
            return BothServers(server, await there(RELAYS.create_server(to_rdma, host, port)))

        start_tls = staticmethod(rdmanet.start_tls)

    return Relayed


def main(loop: str, *arguments: str) -> None:
    from test.test_asyncio import test_ssl, test_sslproto

    factory = relayed({"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.Loop}[loop])
    run_relays()
    asyncio.new_event_loop = factory
    asyncio.StreamReader = asyncio.streams.StreamReader = RdmaStreamReader
    test_sslproto.SelectorStartTLSTests.new_loop = lambda self: factory()
    cases = [
        test
        for case in (test_ssl.TestSSL, test_sslproto.SelectorStartTLSTests)
        for test in unittest.defaultTestLoader.loadTestsFromTestCase(case)
        if (name := test.id().rpartition(".")[2]) not in OTHERS and name in (arguments or [name])
    ]
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(cases))
    print("ran", result.testsRun)
    sys.exit(not result.wasSuccessful())


if __name__ == "__main__":
    main(*sys.argv[1:])
