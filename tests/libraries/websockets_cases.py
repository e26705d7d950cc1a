"""websockets' own tests of its asyncio client, server and connection, with every loop switched.

Its source distribution has none, so they are those of the release that Debian keeps, run on that release's own code.
`make libraries` unpacks both into build/libraries/websockets; switched.py switches the loops. There is no difference:
what passes over TCP passes here. Tests of SOCKS and HTTP proxies are skipped: these are not installed.
"""

from pathlib import Path

import pytest
from helpers import run_suite

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "build/libraries/websockets"

# {module: at least so many tests, and connections by RDMA}. Counted were 89 by RDMA and 3 by TCP in all. Those of
# test_connection are Unix sockets' pairs, or mocks.
MODULES = {"test_client": (40, 30), "test_server": (50, 40), "test_connection": (200, 0)}


@pytest.mark.parametrize("module", MODULES)
def test_those_of_websockets(module):
    least, connections = MODULES[module]
    passed, by_rdma = run_suite(
        SOURCES, [f"websockets_tests/asyncio/{module}.py"], {}, path=[str(SOURCES / "src")]
    )
    assert passed >= least and by_rdma >= connections
