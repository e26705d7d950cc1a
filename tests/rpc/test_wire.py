"""The wire format: the vectors of its page, every cut of the bytes, and what is refused."""

import re
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from rdmanet.errors import ProtocolError
from rdmanet.rpc import framing, messages
from rdmanet.rpc.limits import Limits
from rdmanet.rpc.messages import (
    Framer,
    Lent,
    OutCall,
    OutCallWith,
    OutGoaway,
    OutItem,
    OutReply,
    OutReplyReturning,
    Parts,
    frame,
)

PAGE = Path(__file__).parents[2] / "docs/reference/rpc-protocol.md"
VECTORS = re.findall(r"^\| `(\w+\(.*\))` \| `([0-9a-f]+)` \|$", PAGE.read_text(), re.MULTILINE)
KINDS = {cls.__name__: cls for cls in messages.Message.__args__}
RAW = {
    "Hello": {7},
    "Call": {3, 4},
    "Reply": {1, 4},
    "Failure": {3, 6},
    "Item": {1},
    "End": {1},
    "Initial": {1},
}
"""Which items of a message are msgpack of their own."""


OldHello = msgspec.defstruct(
    "OldHello",
    messages.Hello.__struct_fields__[:8],
    tag=0,
    array_like=True,
)
OldHelloOfNone = msgspec.defstruct(
    "OldHelloOfNone",
    messages.Hello.__struct_fields__[:9],
    tag=0,
    array_like=True,
)
"""Those of versions without `offers`."""


def message_of(text: str) -> Any:
    """The message that a row of the page shows."""

    def make(name: str) -> Any:
        def build(*items: Any) -> Any:
            raw = RAW.get(name, ())
            found = [
                Raw(msgspec.msgpack.encode(each)) if at in raw else each for at, each in enumerate(items)
            ]
            return getattr(messages, name)(*found)

        return build

    return eval(
        text, {name: make(name) for name in (*KINDS, "Lent", "Array", "Placed", "Field", "Part", "Parts")}
    )


def as_sent(message: Any) -> Any:
    """A Call without metadata is sent without a place for it, as peers of older versions do. So are others."""
    if isinstance(message, messages.Hello) and message.services is None:
        items = msgspec.structs.astuple(message)
        return messages.OutHello(*items) if message.offers else OldHello(*items[:-2])
    if isinstance(message, messages.Hello) and not message.offers:
        return OldHelloOfNone(*msgspec.structs.astuple(message)[:-1])
    if isinstance(message, messages.Item) and message.memory is None:
        return OutItem(message.number, message.item)
    if isinstance(message, messages.Reply) and message.metadata is messages.NIL:
        if message.memory is not None:
            return messages.OutReplyBringing(*msgspec.structs.astuple(message)[:-1])
        return (OutReplyReturning if message.returned else OutReply)(message.number, message.result)
    if isinstance(message, messages.Call) and not message.asks:
        out = message.number, message.method, message.timeout_us, message.arguments
        if message.memory is not None:
            return messages.OutCallBringing(*out, message.metadata, message.memory)
        return OutCall(*out) if message.metadata is messages.NIL else OutCallWith(*out, message.metadata)
    if isinstance(message, messages.Failure) and message.metadata is messages.NIL:
        return messages.OutFailure(*msgspec.structs.astuple(message)[:-1])
    if isinstance(message, messages.End) and message.metadata is messages.NIL:
        return messages.OutEnd(message.number)
    if isinstance(message, messages.Goaway) and message.taken is None:
        return OutGoaway(message.reason)
    return message


def plain(message: Any) -> Any:
    """Something to compare: two Raws of the same bytes are not equal."""
    fields = [bytes(field) if isinstance(field, Raw) else field for field in msgspec.structs.astuple(message)]
    return [Parts(field.offer, field.length) if type(field) is Lent else field for field in fields]


@pytest.mark.parametrize(("text", "encoded"), VECTORS)
def test_vectors(text: str, encoded: str):
    assert frame(as_sent(message_of(text))).hex() == encoded
    (found,) = Framer(1 << 20).feed(bytes.fromhex(encoded))
    assert type(found) is type(message_of(text))
    assert plain(found) == plain(message_of(text))


def test_every_kind_has_a_vector():
    kinds = {bytes.fromhex(encoded)[5] for _, encoded in VECTORS}
    tags = {cls.__struct_config__.tag for cls in KINDS.values()}
    assert kinds == tags == set(range(16))


def test_what_is_encoded_in_one_step_is_the_same():
    assert frame(OutCall(1, 0, None, ("w",))) == frame(as_sent(message_of('Call(1, 0, None, ["w"])')))
    with_metadata = OutCallWith(1, 0, None, ("w",), {"tenant": "a"})
    assert frame(with_metadata) == frame(as_sent(message_of('Call(1, 0, None, ["w"], {"tenant": "a"})')))
    assert frame(OutReply(1, {"a": 1.5})) == frame(as_sent(message_of('Reply(1, {"a": 1.5})')))
    assert frame(OutReplyReturning(1, None)) == frame(as_sent(message_of("Reply(1, None, True)")))
    assert frame(OutItem(1, -3)) == frame(as_sent(message_of("Item(1, -3)")))


@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_every_cut_of_the_bytes(items: list[bytes], data: st.DataObject):
    stream = b"".join(frame(OutItem(index, item)) for index, item in enumerate(items))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    framer, found = Framer(1000), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += framer.feed(stream[start:stop])
    assert [(item.number, msgspec.msgpack.decode(item.item)) for item in found] == list(enumerate(items))


@pytest.mark.parametrize(
    ("hexadecimal", "says"),
    [
        ("000003e9", "a message of 1001 bytes: the limit message_bytes is 1000"),
        ("ffffffff", "a message of 4294967295 bytes"),
        ("47455420", "a message of 1195725856 bytes"),  # GET
        ("00000000", "what is no message"),
        ("00000001c0", "what is no message"),
        ("0000000190", "what is no message"),
        ("000000029163", "what is no message"),  # of the kind 99
        ("0000000292070101", "what is no message"),  # cut in the middle
        ("0000000792 07cf0000000100".replace(" ", ""), "what is no message"),
        ("000000039207ff", "what is no message"),  # call -1
        ("0000000b9207cf0000000100000000", "what is no message"),  # call 2 ** 32
        ("0000000392090a", "what is no message"),
        ("000000059209a2c328", "what is no message"),  # not UTF-8
    ],
)
def test_what_is_refused(hexadecimal: str, says: str):
    with pytest.raises(ProtocolError, match=re.escape(says)):
        Framer(1000).feed(bytes.fromhex(hexadecimal))


def test_depth_is_refused():
    body = b"\x95\x01\x01\x00\xc0" + b"\x91" * 900_000 + b"\xc0"
    with pytest.raises(ProtocolError, match="nested too deep"):
        Framer(1 << 20).feed(len(body).to_bytes(4, "big") + body)


def test_an_announced_length_takes_no_memory():
    """Only addresses, which a small machine has for what the limit allows by default."""
    most = Limits().message_bytes
    framer = Framer(most)
    tracemalloc.start()
    assert framer.feed(most.to_bytes(4, "big") + b"x" * 10) == []
    for _ in range(1000):
        assert framer.feed(b"x") == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_a_length_that_no_memory_is_left_for_is_refused(monkeypatch):
    def unfilled(nbytes: int) -> bytearray:
        raise MemoryError(f"there is no memory for {nbytes} bytes")

    monkeypatch.setattr(framing, "unfilled", unfilled)
    with pytest.raises(ProtocolError, match="announces a message of 65535 bytes: there is no memory"):
        Framer(1 << 20).feed(b"\x00\x00\xff\xffx")


@given(st.binary(max_size=200))
def test_any_bytes_give_messages_or_a_protocol_error(data: bytes):
    try:
        found = Framer(1000).feed(data)
    except ProtocolError:
        return
    assert all(type(message) in KINDS.values() for message in found)


@given(st.sampled_from([bytes.fromhex(encoded) for _, encoded in VECTORS]), st.data())
def test_spoiled_vectors(encoded: bytes, data: st.DataObject):
    spoiled = bytearray(encoded)
    for _ in range(data.draw(st.integers(1, 4))):
        spoiled[data.draw(st.integers(4, len(spoiled) - 1))] = data.draw(st.integers(0, 255))
    try:
        Framer(1000).feed(bytes(spoiled))
    except ProtocolError:
        pass
