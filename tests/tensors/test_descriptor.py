"""Descriptors and addresses from strangers: what is none raises one type of error, and what is one stays the same."""

import random
from typing import Any

import msgspec
import pytest

from rdmanet.tensors import Address, AddressError, Descriptor, DescriptorError
from rdmanet.tensors.descriptor import BYTES_MOST

ID, OTHER = b"e" * 16, b"g" * 16
PLAIN = [1, ID, OTHER, "r", 0, 4096, None, None]
ARRAY = [1, ID, OTHER, "rw", 0, 4096, "<f4", [32, 32]]
ADDRESS = [1, ID, "127.0.0.1", 7471]


def changed(fields: list[Any], at: int, value: Any) -> bytes:
    return msgspec.msgpack.encode([*fields[:at], value, *fields[at + 1 :]])


@pytest.mark.parametrize("fields", [PLAIN, ARRAY, [*ARRAY[:5], 0, "<f4", [0, 7]], [*ARRAY[:5], 8, "|S8", []]])
def test_a_descriptor_comes_back(fields: list[Any]):
    data = msgspec.msgpack.encode(fields)
    found = Descriptor.from_bytes(data)
    assert bytes(found) == data
    assert Descriptor.from_bytes(bytearray(data)) == found == Descriptor.from_bytes(memoryview(data))


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, 2, "^a descriptor of version 2: this release reads version 1$"),
        (0, "1", "are not a descriptor"),
        (1, ID[1:], "are not a descriptor"),
        (2, ID + b"x", "are not a descriptor"),
        (3, "x", "are not a descriptor"),
        (3, "wr", "are not a descriptor"),
        (4, -1, "are not a descriptor"),
        (4, 1 << 63, "are not a descriptor"),
        (4, (1 << 62) - 1, "are more than any memory has"),
        (5, -1, "are not a descriptor"),
        (5, 4095, r"^an array of the shape \(32, 32\) and '<f4' does not have 4095 bytes$"),
        (6, None, "^a descriptor of None and the shape"),
        (6, "|O8", "^a descriptor of '|O8', which is no plain type of items$"),
        (6, "<f4" * 20, "are not a descriptor"),
        (7, None, "^a descriptor of '<f4' and the shape None$"),
        (7, [32, -32], "are not a descriptor"),
        (7, [1] * 33, "are not a descriptor"),
        (7, [1 << 61, 1 << 61, 0], "does not have 4096 bytes"),
    ],
)
def test_what_is_wrong_with_a_descriptor(at: int, value: Any, says: str):
    with pytest.raises(DescriptorError, match=says):
        Descriptor.from_bytes(changed(ARRAY, at, value))


@pytest.mark.parametrize(
    ("at", "value"), [(0, 9), (1, b""), (2, ""), (2, "h" * 256), (2, 5), (3, 0), (3, 1 << 16), (3, "a")]
)
def test_what_is_wrong_with_an_address(at: int, value: Any):
    with pytest.raises(AddressError):
        Address.from_bytes(changed(ADDRESS, at, value))


@pytest.mark.parametrize(("type_", "error"), [(Descriptor, DescriptorError), (Address, AddressError)])
def test_rubbish(type_: Any, error: type[Exception]):
    for data in (
        b"",
        b"\xc1",
        b"\x90",
        b"\x91\x01",
        bytes(BYTES_MOST),
        b"a" * 60,
        msgspec.msgpack.encode({}),
    ):
        with pytest.raises(error):
            type_.from_bytes(data)
    with pytest.raises(
        error, match=f"^{BYTES_MOST + 1} bytes are not an? .*: none has more than {BYTES_MOST}$"
    ):
        type_.from_bytes(bytes(BYTES_MOST + 1))
    with pytest.raises(TypeError, match="it is not bytes"):
        type_.from_bytes("text")
    more = msgspec.msgpack.encode([*(PLAIN if type_ is Descriptor else ADDRESS), 1, 1])
    with pytest.raises(error):
        type_.from_bytes(more)


@pytest.mark.parametrize(
    ("fields", "type_", "error"),
    [
        (ARRAY, Descriptor, DescriptorError),
        (PLAIN, Descriptor, DescriptorError),
        (ADDRESS, Address, AddressError),
    ],
)
def test_changed_bytes_are_refused_or_are_a_message(fields: list[Any], type_: Any, error: type[Exception]):
    chance = random.Random(len(fields))
    whole = msgspec.msgpack.encode(fields)
    refused = 0
    for _ in range(20_000):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 2, 5))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        try:
            found = type_.from_bytes(data)
        except error:
            refused += 1
        else:
            assert type_.from_bytes(bytes(found)) == found
            assert repr(found)
    assert refused > 5000


def test_slices():
    whole = Descriptor.from_bytes(msgspec.msgpack.encode(ARRAY))
    part = whole[4:8]
    assert (len(whole), len(part), part.offset, part.nbytes, part.shape) == (32, 4, 512, 512, (4, 32))
    assert part[1:2].offset == 640 and whole[:] == whole and whole[-1:].offset == 31 * 128
    assert Descriptor.from_bytes(bytes(part)) == part
    assert whole[5:5].nbytes == 0
    plain = Descriptor.from_bytes(msgspec.msgpack.encode(PLAIN))
    assert (plain[10:20].offset, plain[10:20].nbytes, plain[10:20].shape) == (10, 10, None)
    for wrong, error in (
        (slice(0, 33), IndexError),
        (slice(8, 4), IndexError),
        (slice(0, 8, 2), ValueError),
        (3, TypeError),
    ):
        with pytest.raises(error):
            whole[wrong]
    with pytest.raises(TypeError, match="^an array without dimensions has no rows$"):
        Descriptor.from_bytes(msgspec.msgpack.encode([*ARRAY[:5], 4, "<f4", []]))[0:1]
