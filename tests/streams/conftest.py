"""Stream tests run on asyncio's loop, in debug mode (tests/support/debug_mode.py), and on uvloop, without; each gets a
Net that ends what it began. (Peers in other processes run on asyncio's loop without debug mode.)

Every coroutine test has a time limit (`@pytest.mark.limit(seconds)` moves it): a transport that
loses a wake-up shows as TimeoutError with the place where the test waited.
"""

import asyncio
import inspect
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import uvloop

from tests.support import debug_mode
from tests.support.limits import limited
from tests.support.nursery import nursery

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from harness import Net

# libuv opens a pipe for signals once a process; before the first test, so that none seems to leak it.
uvloop.new_event_loop().close()

# The nursery of the peers begins before the first test, too.
nursery()

# So that reads of the tests' sizes are placed; for the tests' other processes, too.
os.environ.setdefault("RDMANET_PLACE_BYTES", "65536")

# Sanitizers and emulators want more.
LIMIT_S = float(os.environ.get("RDMANET_TEST_LIMIT", 30))

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_configure(config):
    config.addinivalue_line("markers", "limit(seconds): how long a coroutine test may take")


def pytest_asyncio_loop_factories(config, item):
    return LOOPS


@pytest.fixture(params=LOOPS.values(), ids=LOOPS.keys())
def loop_factory(request) -> Callable[[], asyncio.AbstractEventLoop]:
    """For tests that run loops themselves (and are no coroutines)."""
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if inspect.iscoroutinefunction(getattr(item, "obj", None)):
        marker = item.get_closest_marker("limit")
        item.obj = limited(item.obj, max(marker.args[0] if marker else 0, LIMIT_S))


@pytest_asyncio.fixture
async def net() -> AsyncIterator["Net"]:
    from harness import Net

    net = Net()
    net.loop.set_debug(isinstance(net.loop, asyncio.SelectorEventLoop) and debug_mode.wanted())
    try:
        yield net
    finally:
        async with asyncio.timeout(LIMIT_S):
            await net.aclose()
