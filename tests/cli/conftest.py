"""What the tests of commands share."""

import inspect
import os
import signal

import pytest
import uvloop

from tests.support.limits import limited

# libuv opens a pipe for signals once a process; before the first test, so that none seems to leak it.
uvloop.new_event_loop().close()

LIMIT_S = float(os.environ.get("RDMANET_TEST_LIMIT", 60))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """A coroutine test that waits for too long shows where."""
    if inspect.iscoroutinefunction(getattr(item, "obj", None)):
        item.obj = limited(item.obj, LIMIT_S)


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request) -> str:
    """The loop of a command that has an option for it; a coroutine test's own is asyncio's."""
    return request.param


@pytest.fixture
def interruptible():
    """Let children be interrupted, even if the tests run in a shell's background, where SIGINT is ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
