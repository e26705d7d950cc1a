"""Tests of rdmanet.rpc. Those that use connections run on asyncio's loop and on uvloop; each has a time limit."""

import asyncio
import functools
import os
from collections.abc import Callable

import pytest
import uvloop
from hypothesis import settings

settings.register_profile("rdmanet", derandomize=True, deadline=None, database=None)
settings.load_profile("rdmanet")

# libuv opens a pipe for signals once a process; before the first test, so that none seems to leak it.
uvloop.new_event_loop().close()

LIMIT_S = float(os.environ.get("RDMANET_TEST_LIMIT", 60))

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_asyncio_loop_factories(config, item):
    return LOOPS


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if asyncio.iscoroutinefunction(getattr(item, "obj", None)):
        item.obj = limited(item.obj)


def limited(test):
    @functools.wraps(test)
    async def run(*args, **kwargs):
        async with asyncio.timeout(LIMIT_S):
            await test(*args, **kwargs)

    return run
