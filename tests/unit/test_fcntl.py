"""Every descriptor that a library hands out is made non-blocking, and an object is not made if that fails.

A failing fcntl(2) cannot be had by asking for it, so a library that is loaded before all others brings one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler (cc)")

FCNTL = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>

int failing = -1, failures; /* of which command, and how often it was asked for */

int fcntl(int fd, int command, ...)
{
	va_list list;
	long argument;

	va_start(list, command);
	argument = va_arg(list, long);
	va_end(list);
	if (command == failing) {
		failures++;
		errno = EPERM;
		return -1;
	}
	return (int)syscall(SYS_fcntl, fd, command, argument);
}

int fcntl64(int fd, int command, ...) __attribute__((alias("fcntl")));
"""

PROGRAM = r"""
import asyncio, ctypes, errno, fcntl, gc, os, sys

import rdmanet
from rdmanet.cm import CMEventChannel
from rdmanet.verbs import CompChannel, Library, live_objects

unraisable = []
sys.unraisablehook = unraisable.append  # warnings are errors, and this is where those of destructors go
failing = ctypes.c_int.in_dll(ctypes.CDLL(None), "failing")
failures = ctypes.c_int.in_dll(ctypes.CDLL(None), "failures")
library = Library.embedded()
(device,) = library.devices()


def context_of_an_identifier():
    # A context of its own would need none: the connection manager opens it, and we only come to see it.
    with CMEventChannel(library) as channel, channel.create_id() as id:
        id.bind_addr(("127.0.0.1", 0))
        failing.value = command
        id.context


async def connect():
    await rdmanet.create_rdma_connection(asyncio.Protocol, "127.0.0.1", 1, device="soft0")


def connects():
    with asyncio.Runner() as runner:
        runner.run(asyncio.sleep(0))
        failing.value = command
        runner.run(connect())


def channel():
    with device.open() as context:
        failing.value = command
        CompChannel(context)


def count():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), live_objects(), library.live()


def attempt(make):
    try:
        make()
    except OSError as exc:
        failing.value = -1
        assert exc.errno == errno.EPERM and "fcntl" in str(exc), exc
    else:
        raise AssertionError(f"{make.__name__} has not failed")


def device_open():
    failing.value = command
    device.open()


def event_channel():
    failing.value = command
    CMEventChannel(library)


makers = (channel, device_open, event_channel, context_of_an_identifier, connects)
for command in (fcntl.F_GETFL, fcntl.F_SETFL):
    for make in makers:
        with device.open():  # whatever the first one of all keeps is there before we count
            before = count()
            asked = failures.value
            attempt(make)
            assert failures.value == asked + 1, make.__name__
            assert count() == before, (make.__name__, before, count())
assert not unraisable, unraisable
print("ok")
"""


def test_a_failing_fcntl_fails_the_constructor(tmp_path: Path) -> None:
    """OSError, and nothing is left: no descriptor, no object, no warning of one that was not closed."""
    source, library = tmp_path / "fcntl.c", tmp_path / "fcntl.so"
    source.write_text(FCNTL)
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env=os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "ok\n")
