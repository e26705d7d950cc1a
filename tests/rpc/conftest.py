"""Tests of rdmanet.rpc. Those that use connections run on asyncio's loop and on uvloop; each has a time limit."""

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
from hypothesis import settings

from tests.support.limits import limited

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

if TYPE_CHECKING:
    from net import Net

settings.register_profile("rdmanet", derandomize=True, deadline=None, database=None)
settings.load_profile("rdmanet")

# libuv opens a pipe for signals once a process; before the first test, so that none seems to leak it.
uvloop.new_event_loop().close()

LIMIT_S = float(os.environ.get("RDMANET_TEST_LIMIT", 60))
LONG_LIMIT_S = 15 * LIMIT_S

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_asyncio_loop_factories(config, item):
    return LOOPS


def pytest_collection_modifyitems(config, items):
    """On a device of the kernel, run what uses it: TCP's and Unix's sockets are the same there.

    Connections in memory are tested on asyncio's loop only: of a loop they need no more than call_soon().
    """

    def is_twice(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return params.get("transport") == "memory" and "uvloop-" in item.callspec.id

    items[:] = [item for item in items if not is_twice(item)]
    if config.getoption("--device") == "embedded":
        return

    def is_by_rdma(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return not item.path.is_relative_to(HERE) or params.get("transport", "rdma") == "rdma"

    config.hook.pytest_deselected(items=[item for item in items if not is_by_rdma(item)])
    items[:] = [item for item in items if is_by_rdma(item)]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if inspect.iscoroutinefunction(getattr(item, "obj", None)):
        item.obj = limited(item.obj, LONG_LIMIT_S if item.get_closest_marker("long") else LIMIT_S)


@pytest.fixture(params=["rdma", "tcp", "unix", "memory"])
def transport(request) -> str:
    return request.param


@pytest_asyncio.fixture
async def net(transport: str, tmp_path: Path) -> AsyncIterator["Net"]:
    from net import Net

    net = Net(transport, tmp_path)
    yield net
    async with asyncio.timeout(LIMIT_S):
        await net.aclose()
