"""Run a suite of tests that others wrote for their event loops, with every loop switched.

usage: python suite.py MODULE [OPTION ...]    (--help has the options)

MODULE is one of the interpreter's test package, as `test.test_asyncio.test_streams`, or of uvloop's sources. --loop
chooses the loop of those of CPython's tests that are written for any loop. In many tests one end is a blocking socket,
so their connections are TCP's; with --relay, a relay stands before the socket, and the loop's end is RDMA's. The last
line says how many tests ran, and how many connections by RDMA were made.
"""

import argparse
import asyncio
import importlib
import sys
import unittest
from fnmatch import fnmatchcase
from typing import Any

import uvloop

from rdmanet import transport
from rdmanet.cli.everywhere import switch_every_loop

BASES: dict[str, Any] = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.Loop}
# Tests of connections and servers, in a mixin that has tests of signals, pipes and subprocesses as well.
OF_CONNECTIONS = ("connection", "accepted_socket", "_server", "server_close", "sock", "huge", "recv")
NOT_OF_TCP = ("unix", "datagram", "sendto", "recvfrom")


def counted() -> list[None]:
    """An entry for each connection by RDMA that is made from now on."""
    made: list[None] = []
    connect = transport.connect

    async def count(*args):
        connected = await connect(*args)
        made.append(None)
        return connected

    transport.connect = count  # type: ignore[assignment]
    return made


def cases_of(module: Any, new_loop: Any) -> list[type[unittest.TestCase]]:
    """The module's cases; if it has a mixin for any loop, that one on ours."""
    mixins = [
        kind for name, kind in vars(module).items() if name in ("EventLoopTestsMixin", "BaseSockTestsMixin")
    ]
    if not mixins:
        return [k for k in vars(module).values() if isinstance(k, type) and issubclass(k, unittest.TestCase)]
    from test.test_asyncio import utils

    found = []
    for mixin in mixins:
        case: Any = type(
            mixin.__name__, (mixin, utils.TestCase), {"create_event_loop": lambda self: new_loop()}
        )
        for name in dir(case):
            if name.startswith("test_") and (
                not any(part in name for part in OF_CONNECTIONS) or any(part in name for part in NOT_OF_TCP)
            ):
                setattr(case, name, None)
        found.append(case)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("--loop", choices=BASES, default="asyncio")
    parser.add_argument("--relay", action="store_true")
    parser.add_argument("--asyncio-tls", action="store_true", help="leave out what only uvloop's TLS does")
    parser.add_argument("--plain", action="store_true", help="without the switch, to compare")
    parser.add_argument("--omit", action="append", default=[])
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--case", action="append", default=[])
    options = parser.parse_args()

    if not options.plain:
        switch_every_loop()
    if options.relay:
        from tests.support import relay

        relay.run_relays()
        for kind in BASES.values():
            construct = kind.__init__

            def __init__(self, *args, _construct=construct, **kwds):
                _construct(self, *args, **kwds)
                relay.relay(self)

            kind.__init__ = __init__
    uvloop.Loop._default_executor = None  # what runs CPython's tests looks at it
    made = counted()
    cases = cases_of(importlib.import_module(options.module), BASES[options.loop])
    suite = unittest.TestSuite()
    for case in cases:
        if options.case and case.__name__ not in options.case:
            continue
        if options.asyncio_tls:
            case.implementation = "asyncio"  # which the tests look at
        for name in unittest.defaultTestLoader.getTestCaseNames(case):
            if not any(fnmatchcase(name, pattern) for pattern in options.omit) and (
                not options.only or name in options.only
            ):
                suite.addTest(case(name))
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    print("ran", result.testsRun, len(made))
    return not result.wasSuccessful()


if __name__ == "__main__":
    sys.exit(main())
