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
from rdmanet.rpc.describe import text
from rdmanet.rpc.item_types import item_type
from rdmanet.rpc.schema import schema_of
from rdmanet.stream.options import StreamConfig
from rdmanet.verbs import SGE, find_device
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


class Answering(rpc.Service):
    async def answer(self) -> int:
        return 42


CALLS = {
    "read_into of a buffer": lambda memory: asyncio.run(rpc.Buffer(bytearray(LONG)).read_into(memory)),
    "limits": lambda memory: rpc.Limits(calls=memory),
    "retry": lambda memory: rpc.Retry(attempts=memory),
    "the text of an error": lambda memory: rpc.Error(rpc.Code.ABORTED, memory),
    "metadata": lambda memory: checked_metadata({"key": bytearray(memory)}, 1 << 10),
    "an array's type": lambda memory: RemoteMemory(0, 8, 1).array(memory),
    "a stream's options": lambda memory: StreamConfig(keepalive=memory),
    "a GID": lambda memory: find_device(gid=bytearray(memory)),
    "an address of a device": lambda memory: find_device(ip=bytearray(memory)),
    "a device's number": lambda memory: find_device(guid=memory.decode()),
    "a name of metadata": lambda memory: checked_metadata({memory.decode(): "value"}, 1 << 10),
    "an option of a connection": lambda memory: asyncio.run(
        rdmanet.start_rdma_server(asyncio.Protocol, "127.0.0.1", 0, **{memory.decode(): 1})
    ),
    "a parameter of a call": lambda memory: (
        schema_of(Answering).methods["answer"].bind((), {memory.decode(): 1})
    ),
    "a number in a work request": lambda memory: SGE(10 ** len(memory[:10_000]), 1, 1),
    "a service": lambda memory: asyncio.run(rpc.serve(memory, "127.0.0.1", 0)),
    "an address": lambda memory: asyncio.run(
        rdmanet.create_rdma_connection(asyncio.Protocol, "127.0.0.1", 1, local_addr=memory)
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_memory_that_is_passed_by_mistake_is_not_in_the_error(call):
    with pytest.raises((TypeError, ValueError, AttributeError, OverflowError)) as caught:
        call(bytes(LONG))
    assert len(str(caught.value)) < 1000


def test_a_type_with_many_fields_is_short_in_the_error():
    fields = numpy.dtype([(f"field {number}", "i4") for number in range(20_000)])
    with pytest.raises(TypeError, match="a record has 1 to") as caught:
        item_type(fields)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "description",
    [["one of", "x" * LONG], ["within", "str", {"pattern": "x" * LONG}]],
    ids=["literal", "limit"],
)
def test_a_parameter_is_described_shortly(description):
    assert len(text(description)) < 500
