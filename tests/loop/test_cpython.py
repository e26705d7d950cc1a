"""CPython's own tests of asyncio's connections, from the interpreter's test package, with every loop switched."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("suite.py")

# {module: (at least so many tests, {one that is left out: why})}
MODULES: dict[str, tuple[int, dict[str, str]]] = {
    "test_streams": (
        60,
        {
            "test_unhandled_exceptions": "it expects that the server's handler has run when the client's connection is "
            "closed. Ours is closed when the peer's device has the end of file, of which the server may hear later",
        },
    ),
    "test_server": (
        3,
        {
            # Both are of Python 3.13; the first would wait for ever.
            "test_abort_clients": "it waits until the reader's transport has paused reading. Ours leaves what nobody "
            "reads in the receive slots, and never pauses",
            "test_close_clients": "it expects connection_lost() two turns of the loop after close(). Ours comes when "
            "the peer's device has the end of file",
        },
    ),
    "test_buffered_proto": (1, {}),  # of two, one is for Windows
    "test_sendfile": (55, {}),
}


needs_tests = pytest.mark.skipif(
    importlib.util.find_spec("test") is None or importlib.util.find_spec("test.test_asyncio") is None,
    reason="this interpreter came without CPython's tests",
)


@needs_tests
@pytest.mark.parametrize("module", MODULES)
def test_those_of_cpython(module):
    least, left_out = MODULES[module]
    assert ran(module, left_out)[0] >= least


RELAYED = "its peer is the relay, and it looks at the peer's address"
MOCKED = "it mocks the sockets of asyncio's loop"
UVLOOPS = "uvloop fails it without us, too"
OF_EVENTS: dict[tuple[str, bool], dict[str, str]] = {
    ("asyncio", False): {},
    ("asyncio", True): {
        "test_create_server_ssl": RELAYED,
        "test_create_server_ssl_verified": RELAYED,
        "test_create_ssl_connection": RELAYED,
        "test_create_server_multiple_hosts_*": MOCKED,
    },
}
OF_EVENTS |= {
    ("uvloop", relayed): OF_EVENTS["asyncio", True]
    | {
        "test_create_connection_local_addr_in_use": UVLOOPS,
        "test_sock_client_racing": UVLOOPS,
        "test_create_server_trsock": UVLOOPS,
    }
    for relayed in (False, True)
}


@needs_tests
@pytest.mark.parametrize(
    "relayed", [pytest.param(False, id="direct", marks=pytest.mark.long), pytest.param(True, id="relayed")]
)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_those_of_any_loop(loop, relayed):
    """The tests of connections and servers that CPython has for every loop; suite.py says what the relay is for."""
    options = ["--loop", loop] + ["--relay"] * relayed
    left_out = OF_EVENTS[loop, relayed]
    tests, connections = ran("test_events", left_out, *options)
    assert tests >= 14 and connections >= (8 if relayed else 1)
    assert ran("test_sock_lowlevel", left_out, *options)[0] >= 7


def ran(module: str, left_out: Iterable[str], *options: str) -> list[int]:
    """Run a module's tests, which must pass; how many there were, and how many connections by RDMA."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SUITE, f"test.test_asyncio.{module}", *options]
        + [f"--omit={name}" for name in left_out],
        env={**os.environ, "PYTHONASYNCIODEBUG": "0", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.splitlines()[-1].split()[1:]]
