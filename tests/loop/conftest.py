"""Tests of the event loop that takes RDMA where it can, over asyncio's loop and uvloop's, on the embedded device."""

import asyncio
import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

import rdmanet
from tests.support.limits import limited

sys.path.insert(0, str(Path(__file__).parent))

# libuv opens a pipe for signals once a process; before the first test, so that none seems to leak it.
uvloop.new_event_loop().close()

LIMIT_S = float(os.environ.get("RDMANET_TEST_LIMIT", 30))

BASES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.Loop,
}
LOOPS = {name: functools.partial(rdmanet.loop_factory, base) for name, base in BASES.items()}


def pytest_asyncio_loop_factories(config, item):
    return LOOPS


@pytest.fixture(params=BASES.values(), ids=BASES.keys())
def base(request) -> Callable[[], asyncio.AbstractEventLoop]:
    """For tests that run loops themselves (and are no coroutines)."""
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if inspect.iscoroutinefunction(getattr(item, "obj", None)):
        item.obj = limited(item.obj, LIMIT_S)
