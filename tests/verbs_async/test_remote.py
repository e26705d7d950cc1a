"""RemoteMemory, parts of regions, and lists of buffers that are cut differently on both sides."""

import copy
import ctypes
import os
import pickle

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loops import OwnLoop

from rdmanet.verbs import AccessFlags, QPCap, RemoteMemory, SendFlags, SendWR, WROpcode
from rdmanet.verbs_async import AsyncCQ

REMOTE = RemoteMemory(0x1000, 1000, 7)

# Devices of the kernel are tested on an emulated processor, where Python takes ten or twenty times as long.
SLOWER = 4 if "RDMANET_DEVICE" in os.environ else 1


class Entry(ctypes.Structure):
    _fields_ = [("flag", ctypes.c_uint8), ("key", ctypes.c_uint64), ("counts", ctypes.c_uint32 * 4)]


class Derived(Entry):
    _fields_ = [("first", Entry), ("bits", ctypes.c_uint32, 3), ("memory", ctypes.c_uint16)]


class Dtype:
    """What numpy's have; numpy is not needed to have them."""

    def __init__(self, itemsize, fields=None, subdtype=None):
        self.itemsize, self.fields, self.subdtype = itemsize, fields, subdtype


# ---- Its forms -----------------------------------------------------------------------------------------

remotes = st.builds(
    lambda address, length, rkey: RemoteMemory(min(address, 2**64 - length), length, rkey),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
)


@settings(deadline=None, max_examples=100 // SLOWER)
@given(remotes)
def test_there_and_back(remote):
    assert len(bytes(remote)) == 20
    assert RemoteMemory.from_bytes(bytes(remote)) == remote
    assert RemoteMemory.from_msgpack(remote.to_msgpack()) == remote
    assert pickle.loads(pickle.dumps(remote)) == remote
    assert msgspec.json.decode(msgspec.json.encode(remote), type=RemoteMemory) == remote


@settings(deadline=None, max_examples=100 // SLOWER)
@given(st.binary(max_size=30))
def test_what_a_peer_may_say(data):
    """Whatever comes is a RemoteMemory of sound numbers, or a ValueError."""
    for parse in (RemoteMemory.from_bytes, RemoteMemory.from_msgpack):
        try:
            remote = parse(data)
        except ValueError:
            continue
        assert 0 <= remote.address <= remote.address + remote.length <= 2**64
        assert 0 <= remote.rkey < 2**32


@pytest.mark.parametrize("numbers", [(-1, 0, 0), (0, -1, 0), (2**64 - 1, 2, 0), (0, 0, 2**32), (0, 0, -1)])
def test_wrong_numbers(numbers):
    with pytest.raises(ValueError):
        RemoteMemory(*numbers)
    with pytest.raises(ValueError):
        RemoteMemory.from_msgpack(msgspec.msgpack.encode(numbers) if max(numbers) < 2**64 else b"")


# ---- Finding one's way -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100 // SLOWER)
@given(st.integers(-1100, 1100) | st.none(), st.integers(-1100, 1100) | st.none())
def test_slices_are_those_of_a_list_or_an_error(start, stop):
    """And never silently less than what was asked for."""
    places = list(range(1000))
    inside = all(bound is None or -1000 <= bound <= 1000 for bound in (start, stop))
    first, last, _ = slice(start, stop).indices(1000)
    if inside and first <= last:
        part = REMOTE[start:stop]
        assert [*range(part.address - 0x1000, part.address - 0x1000 + part.length)] == places[start:stop]
        assert part.rkey == 7
    else:
        with pytest.raises(IndexError, match="is not within 1000 bytes"):
            REMOTE[start:stop]


def test_the_numbers_are_in_the_error():
    for wrong, message in (
        (lambda: REMOTE[990:1001], "990:1001 is not within 1000 bytes"),
        (lambda: REMOTE[1000], "index 1000 is not within 1000 bytes"),
        (lambda: REMOTE.array("<u8")[125], "index 125 is not within 125 items of 8 bytes"),
        (lambda: REMOTE.struct_array(Entry)[31], "index 31 is not within 31 items of 32 bytes"),
        (lambda: REMOTE.struct(Entry).counts[4], "index 4 is not within 4 items of 4 bytes"),
        (lambda: REMOTE[:31].struct(Entry), "a structure of 32 bytes leaves"),
    ):
        with pytest.raises(IndexError, match=message):
            wrong()
    with pytest.raises(ValueError, match="contiguous"):
        REMOTE[::2]


def test_arrays():
    assert REMOTE.array("<u8")[4] == RemoteMemory(0x1020, 8, 7)
    assert REMOTE.array(ctypes.c_uint16)[-1] == RemoteMemory(0x1000 + 998, 2, 7)
    assert len(REMOTE.array(">f4")[10:20]) == 10
    assert REMOTE.array(">f4")[10:20].memory == REMOTE[40:80]
    assert REMOTE.array("d").itemsize == 8
    for wrong in ("u", "<q8", "", "V0"):
        with pytest.raises(ValueError):
            REMOTE.array(wrong)
    with pytest.raises(TypeError, match="neither a dtype"):
        REMOTE.array(3.5)


def test_structures():
    entry = REMOTE.struct_array(Entry)[3]
    assert entry.key == RemoteMemory(0x1000 + 3 * 32 + Entry.key.offset, 8, 7)
    assert entry.counts[2] == RemoteMemory(0x1000 + 3 * 32 + Entry.counts.offset + 8, 4, 7)
    derived = REMOTE.struct(Derived)
    assert derived.key.address == 0x1000 + Derived.key.offset
    assert derived.first.key.address == 0x1000 + Derived.first.offset + Entry.key.offset
    assert derived["memory"].length == 2  # where `memory` is the range itself
    assert derived.memory.length == ctypes.sizeof(Derived)
    assert "counts" in dir(derived)
    for missing in ("bits", "nothing"):
        with pytest.raises(AttributeError, match=missing):
            getattr(derived, missing)
    with pytest.raises(TypeError):
        REMOTE.struct(ctypes.c_uint64)


def test_a_structure_with_a_field_called_fields():
    class Header(ctypes.Structure):
        _fields_ = [("fields", ctypes.c_uint32), ("items", ctypes.c_uint32)]

    assert REMOTE.struct(Header).fields.address == 0x1000
    assert REMOTE.struct(Header)["items"].address == 0x1004


def test_dtypes():
    row = Dtype(24, subdtype=(Dtype(4), (2, 3)))
    table = Dtype(40, {"id": (Dtype(8), 0), "cells": (row, 8)})
    record = REMOTE.struct_array(table)[1]
    assert record.id == RemoteMemory(0x1000 + 40, 8, 7)
    assert record.cells[1][2] == RemoteMemory(0x1000 + 40 + 8 + 12 + 8, 4, 7)


def test_unchecked():
    assert REMOTE.unchecked(2000, 8) == RemoteMemory(0x1000 + 2000, 8, 7)
    assert REMOTE.unchecked(-0x1000, 8).address == 0
    assert REMOTE.array("<u8", unchecked=True)[1000].address == 0x1000 + 8000
    assert len(list(REMOTE.array("<u8", unchecked=True))) == 125
    assert REMOTE[:8].struct(Entry, unchecked=True).key.length == 8
    assert REMOTE.struct_array(Entry, unchecked=True)[100].key.address == 0x1000 + 3200 + 8


# ---- Parts of regions -------------------------------------------------------------------------------------


def test_parts_of_a_region(verbs):
    mr = verbs.mr(768)
    assert (mr.at[512:].addr, mr.at[512:].length) == (mr.address + 512, 256)
    assert mr.at[-1].addr == mr.address + 767
    with pytest.raises(IndexError, match="512:1024 is not within 768 bytes"):
        mr.at[512:1024]
    with pytest.raises(ValueError, match="contiguous"):
        mr.at[::2]
    assert mr.to_remote(8, 8) == RemoteMemory(mr.address + 8, 8, mr.rkey)
    assert mr.to_remote(768).length == 0
    for offset, length in ((769, None), (760, 9), (0, -1)):
        with pytest.raises(IndexError):
            mr.to_remote(offset, length)


def test_views_of_a_region(verbs):
    """memoryview(mr)[a:b] is as good as a part of it, and does not keep the region from being closed."""
    mr = verbs.mr(64)
    request = SendWR(WROpcode.SEND, [memoryview(mr)[8:16], mr.at[:4]])
    assert [(sge.addr - mr.address, sge.length, sge.lkey) for sge in request.sg_list] == [
        (8, 8, mr.lkey),
        (0, 4, mr.lkey),
    ]
    with pytest.raises(BufferError):
        SendWR(WROpcode.SEND, memoryview(mr)[::2])
    mr.close()


# ---- Gather and scatter ---------------------------------------------------------------------------------


def partition(data, total, most, empty):
    """Lengths of up to `most` parts that are `total` together, some of them perhaps empty."""
    places = sorted(data.draw(st.lists(st.integers(0, total), max_size=most - 1)))
    return [b - a for a, b in zip([0, *places], [*places, total], strict=True) if b > a or empty] or [0]


@settings(
    max_examples=60 // SLOWER, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), total=st.integers(0, 300), inline=st.booleans())
def test_any_cut_meets_any_cut(verbs, data, total, inline):
    """Only the total counts: what is gathered from some parts arrives, in order, in whatever parts are there."""
    loop = OwnLoop()
    payload = data.draw(st.binary(min_size=total, max_size=total))
    gather, scatter = (partition(data, total, verbs.max_sge, verbs.empty_parts) for _ in range(2))
    with verbs.pd.alloc_mr(1024) as source, verbs.pd.alloc_mr(1024) as target:
        places, at, done = [], 0, 0
        for length in gather:  # with gaps, so that the parts are parts indeed
            places.append(source.at[at : at + length])
            source[at : at + length] = payload[done : done + length]
            done += length
            at += length + 3
        sink, at, holes = [], 0, []
        for length in scatter:
            sink.append(target.at[at : at + length])
            holes.append((at, length))
            at += length + 5

        async def transfer():
            with AsyncCQ(verbs.context, 64, notifier=loop) as cq:
                closing = len(verbs.closing)
                a, b = verbs.pair(cq, depth=4, max_inline_data=verbs.max_inline)
                try:
                    receiving = loop.spawn(b.recv(sink))
                    await loop.turn()
                    await a.send(
                        places, flags=SendFlags.INLINE if inline and total <= verbs.max_inline else 0
                    )
                    return (await receiving.join()).byte_len
                finally:
                    while len(verbs.closing) > closing:
                        verbs.closing.pop().close()

        received = []
        loop.run(_into(received, transfer()))
        assert received == [len(payload)]
        assert b"".join(target[at : at + length] for at, length in holes) == payload


async def _into(found, coroutine):
    found.append(await coroutine)


@pytest.mark.not_on_siw("completes a WRITE or SEND when it is sent; a refusal ends the connection")
def test_too_long_a_message_is_an_error_of_both(verbs):
    loop = OwnLoop()

    async def transfer():
        cq = verbs.cq(loop)
        a, b = verbs.pair(cq)
        mr = verbs.mr()
        receiving = loop.spawn(b.recv([mr.at[:10], mr.at[20:30]]))
        await loop.turn()
        with pytest.raises(OSError):
            await a.send(mr.at[:21])
        with pytest.raises(OSError, match="local"):  # a length error; rxe calls it another one
            await receiving.join()

    loop.run(transfer())


def test_read_only_memory_is_sent_and_not_received_into(verbs):
    with verbs.pd.reg_mr(b"constant") as mr:
        assert mr.access == AccessFlags(0)
        with pytest.raises(BufferError):
            verbs.pd.reg_mr(b"constant", AccessFlags.REMOTE_WRITE)
    assert QPCap().max_send_sge == 1


# ---- They are values ------------------------------------------------------------------------------------


class Bits(ctypes.Union):
    _fields_ = [("number", ctypes.c_uint32), ("real", ctypes.c_float)]


class Tagged(ctypes.Structure):
    _anonymous_ = ("bits",)
    _fields_ = [
        ("tag", ctypes.c_uint8),
        ("bits", Bits),
        ("flags", ctypes.c_uint64, 3),
        ("end", ctypes.c_uint16),
    ]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_copies(copied):
    remote = RemoteMemory(4096, 1024, 7)
    assert copied(remote) == remote
    assert copied(remote.struct(Tagged)).end.memory == remote.struct(Tagged).end
    assert copied(remote.array("<u8"))[3] == remote.array("<u8")[3]
    assert copied(remote.struct_array(Tagged))[3].tag == remote.struct_array(Tagged)[3].tag


def test_fields_without_a_name_of_their_own():
    """Those of an anonymous member are the outer structure's, as in ctypes."""
    tagged = RemoteMemory(0, 64, 7).struct(Tagged)
    assert tagged.number == tagged.real == tagged.bits.number == RemoteMemory(4, 4, 7)
    with pytest.raises(AttributeError, match="no field 'flags'"):  # bits have no address
        _ = tagged.flags
