"""Tests of rdmanet.tensors. Those that use connections run on asyncio's loop and on uvloop; each has a time limit."""

import asyncio
import inspect
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop

from rdmanet import tensors
from tests.support.limits import limited

sys.path.insert(0, str(Path(__file__).parent))

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
    if inspect.iscoroutinefunction(getattr(item, "obj", None)):
        item.obj = limited(item.obj, LIMIT_S)


@pytest.fixture(scope="session")
def host() -> str:
    """An address of the device under test, on this host."""
    from places import HOST  # this file is read before the options that choose it

    return HOST


@pytest_asyncio.fixture
async def owner(host: str) -> AsyncIterator[tensors.Endpoint]:
    async with tensors.open(host) as endpoint:
        yield endpoint


@pytest_asyncio.fixture
async def user(host: str) -> AsyncIterator[tensors.Endpoint]:
    async with tensors.open(host) as endpoint:
        yield endpoint


@pytest_asyncio.fixture
async def peer(owner: tensors.Endpoint, user: tensors.Endpoint) -> tensors.Peer:
    """The owner, as the user has it."""
    return await user.connect(owner.address())
