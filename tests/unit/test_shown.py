"""What errors show of a program's own values: enough to know what it was, and never all of its memory."""

import array
import asyncio
import collections
import ctypes
import mmap

import numpy
import pytest

import rdmanet
from rdmanet import rpc
from rdmanet.errors import shown
from rdmanet.rpc.call_metadata import checked_metadata
from rdmanet.stream.options import StreamConfig
from rdmanet.wire.remote import RemoteMemory

LONG = 8 << 20


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (bytes(LONG), f"bytes of {LONG} bytes"),
        (bytearray(LONG), f"bytearray of {LONG} bytes"),
        (memoryview(bytes(LONG)), f"memoryview of {LONG} bytes"),
        (mmap.mmap(-1, LONG), f"mmap of {LONG} bytes"),
        (array.array("d", range(3)), "array of 24 bytes"),
        (numpy.zeros((3, 3)), "ndarray of 72 bytes"),
        ((ctypes.c_char * LONG)(), f"c_char_Array_{LONG} of {LONG} bytes"),
        (b"host", "b'host'"),
        ("host", "'host'"),
        (-1.5, "-1.5"),
        (numpy.float64(2), repr(numpy.float64(2))),
        (("::1", 80), "('::1', 80)"),
        (None, "None"),
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_it_is_shown_so(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(
    "make",
    [
        lambda: "x" * LONG,
        lambda: list(range(LONG)),
        lambda: 10**10_000,
        lambda: collections.deque(range(LONG)),
        lambda: {"a": "x" * LONG},
    ],
    ids=["str", "list", "int", "deque", "dict"],
)
def test_it_is_short(make):
    assert len(shown(make())) < 500


def test_a_released_view_is_shown():
    view = memoryview(bytes(100))
    view.release()
    assert "released" in shown(view)


CALLS = {
    "read_into of a buffer": lambda memory: asyncio.run(rpc.Buffer(bytearray(LONG)).read_into(memory)),
    "limits": lambda memory: rpc.Limits(calls=memory),
    "retry": lambda memory: rpc.Retry(attempts=memory),
    "the text of an error": lambda memory: rpc.Error(rpc.Code.ABORTED, memory),
    "metadata": lambda memory: checked_metadata({"key": bytearray(memory)}, 1 << 10),
    "an array's type": lambda memory: RemoteMemory(0, 8, 1).array(memory),
    "a stream's options": lambda memory: StreamConfig(keepalive=memory),
    "a service": lambda memory: asyncio.run(rpc.serve(memory, "127.0.0.1", 0)),
    "an address": lambda memory: asyncio.run(
        rdmanet.create_rdma_connection(asyncio.Protocol, "127.0.0.1", 1, local_addr=memory)
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_memory_that_is_passed_by_mistake_is_not_in_the_error(call):
    with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
        call(bytes(LONG))
    assert len(str(caught.value)) < 1000
