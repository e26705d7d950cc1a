"""aiohttp's own tests of its client, server, connector and graceful ends, from its source distribution, on both loops.

`make libraries` unpacks them into build/libraries/aiohttp; switched.py switches the loops. What passes over TCP passes
here, but for what LEFT_OUT names. aiohttp's conftest is content without blockbuster, which comes without a wheel.
"""

from pathlib import Path

import pytest
from helpers import run_suite

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "build/libraries/aiohttp/tests"

# {module: at least so many tests, and connections by RDMA}. Counted were 159 by RDMA and none by TCP in
# test_web_functional, 2 and 7 in test_connector, most of whose connections are mocks, and 15 and none in test_run_app.
MODULES = {
    "test_client_functional": (330, 300),
    "test_web_functional": (155, 140),
    "test_connector": (175, 2),
    "test_run_app": (60, 15),
}
# {loop: {one that is left out: why}}
EITHER = {
    "descriptor_cost and oversized": "it counts descriptors of deleted files, and memory that a connection grows into "
    "is a memfd",
}
LEFT_OUT = {
    "pyloop": EITHER,
    "uvloop": {
        **EITHER,
        # These fail on uvloop by TCP as well.
        "do_not_raise_connector_ssl_error": "it looks at attributes of asyncio's TLS",
        "keepalive_expires_on_time": "it replaces loop.time(), and uvloop's timers do not ask that",
    },
}


@pytest.mark.parametrize("loop", LEFT_OUT)
@pytest.mark.parametrize("module", MODULES)
def test_those_of_aiohttp(module, loop):
    least, connections = MODULES[module]
    passed, by_rdma = run_suite(TESTS, [f"{module}.py", "--aiohttp-loop", loop], LEFT_OUT[loop])
    assert passed >= least and by_rdma >= connections
