"""The embedded device's warnings, from its pipe to Python's logging. What it warns of, tests/security shows."""

import asyncio
import logging
import os
import subprocess
import sys
import threading

import pytest

import rdmanet
from rdmanet.verbs import device_log
from tests.support.waiting import Conditions

pytestmark = pytest.mark.embedded_only("the devices of the kernel say what they have to say in dmesg")


@pytest.fixture
def logged():
    """The lines that were logged, as (thread, text); `event` is set by each, `conditions` looked at."""

    class Lines(logging.Handler):
        def __init__(self):
            super().__init__()
            self.lines = []
            self.event = threading.Event()
            self.conditions = Conditions()

        def emit(self, record):
            assert (record.name, record.levelname) == ("rdmanet.device", "WARNING")
            self.lines.append((record.thread, record.getMessage()))
            self.event.set()
            self.conditions.look()

    lines = Lines()
    logging.getLogger("rdmanet.device").addHandler(lines)
    yield lines
    logging.getLogger("rdmanet.device").removeHandler(lines)


def warn(text):
    """As the device does."""
    os.write(device_log._pipe[1], text)


async def serve():
    return await rdmanet.start_rdma_server(asyncio.Protocol, "127.0.0.1", 0)


async def test_a_line_is_a_warning(logged):
    async with await serve():
        logged.event.clear()
        warn(b"somebody at %s speaks another language")
        warn(b"and more")
        await logged.conditions.until(lambda: len(logged.lines) == 2)
    assert [text for _, text in logged.lines] == ["somebody at %s speaks another language", "and more"]


@pytest.mark.parametrize(
    ("setup", "line"),
    [("pass", "rdmanet: somebody\n"), ("logging.basicConfig()", "WARNING:rdmanet.device:somebody\n")],
)
def test_a_line_says_whose_it_is(setup, line):
    """Also in a program that has not set logging up."""
    program = f"import logging\nfrom rdmanet.verbs import device_log\n{setup}\ndevice_log._log([b'somebody'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == line


def test_one_of_several_loops_logs_it_and_the_last_one_what_is_left(logged):
    """Loops of two threads watch; the pipe lives as long as either."""
    ready, over = threading.Barrier(2), threading.Event()

    async def other():
        async with await serve():
            ready.wait()
            await asyncio.get_running_loop().run_in_executor(None, over.wait)

    async def ours():
        async with await serve():
            ready.wait()
            warn(b"first")
            await asyncio.get_running_loop().run_in_executor(None, logged.event.wait)

    thread = threading.Thread(target=asyncio.run, args=(other(),))
    thread.start()
    asyncio.run(ours())
    pipe = device_log._pipe
    assert pipe is not None
    over.set()
    thread.join()
    assert device_log._pipe is None
    assert [text for _, text in logged.lines] == ["first"]

    async def leave():
        async with await serve():
            warn(b"last words")  # nobody comes to read them before the end

    asyncio.run(leave())
    assert [text for _, text in logged.lines] == ["first", "last words"]


async def test_a_forked_child_has_no_part_in_it(logged):
    async with await serve():
        pipe = device_log._pipe
        child = os.fork()
        if child == 0:
            closed = 0
            for fd in pipe:
                try:
                    os.fstat(fd)
                except OSError:
                    closed += 1
            os._exit(0 if closed == 2 and device_log._pipe is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        warn(b"of the parent")
        await logged.conditions.until(lambda: logged.lines)
    assert [text for _, text in logged.lines] == ["of the parent"]


def test_without_descriptors_it_stays_where_it_was(monkeypatch, logged):
    """A loop context does not fail for it."""

    def none(flags):
        raise OSError(24, "Too many open files")

    async def nothing():
        async with await serve():
            assert device_log._pipe is None

    monkeypatch.setattr(device_log.os, "pipe2", none)
    asyncio.run(nothing())
