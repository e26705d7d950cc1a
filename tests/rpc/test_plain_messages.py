"""Call and Reply as compiled code reads and writes them: the same bytes, and no more is accepted than by msgspec."""

import gc
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from net import Net, callee
from strangers import HELLO, Store, stranger
from strangers import NUMBERS as PLACES

from rdmanet.errors import ProtocolError
from rdmanet.rpc.framing import Outbox, PlainCall, PlainReply, call_head, framed, reply_head, with_tail
from rdmanet.rpc.messages import NIL, Call, Framer, OutCall, OutReply, Reply, bin_head, encode, frame
from tests.support.waiting import until_seen

U32 = (1 << 32) - 1
NUMBERS = st.sampled_from([0, 1, 127, 128, 255, 256, 65535, 65536, U32])
TIMES = st.none() | st.sampled_from([0, 1, 127, 128, 65536, 1 << 32, (1 << 53) - 1])
LEAVES = (
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(), inner, max_size=20)
)


def fields(message: Any) -> list[Any]:
    """What a message says, in whichever form it has come."""
    if isinstance(message, PlainCall):
        arguments = (
            bytes(message.arguments)
            if message.tail is None
            else with_tail(bytes(message.arguments), message.tail)
        )
        timeout_us = None if message.timeout_us < 0 else message.timeout_us
        return ["Call", message.number, message.method, timeout_us, arguments, True]
    if isinstance(message, PlainReply):
        result = (
            bytes(message.result) if message.tail is None else with_tail(bytes(message.result), message.tail)
        )
        return ["Reply", message.number, result, True]
    if isinstance(message, Call):
        is_plain = message.metadata is NIL and message.memory is None and not message.asks
        return [
            "Call",
            message.number,
            message.method,
            message.timeout_us,
            bytes(message.arguments),
            is_plain,
        ]
    if isinstance(message, Reply):
        is_plain = message.metadata is NIL and message.memory is None and not message.returned
        return ["Reply", message.number, bytes(message.result), is_plain]
    return [message]


def found(data: bytes, plain: bool, cuts: list[int] | None = None) -> Any:
    """What comes of these bytes: the fields of the messages, or None if they are refused."""
    framer, messages = Framer(1 << 20), []
    framer.gives_plain = plain
    try:
        for start, stop in zip([0, *(cuts or ())], [*(cuts or ()), len(data)], strict=True):
            messages += framer.feed(data[start:stop])
    except ProtocolError:
        return None
    return [fields(message) for message in messages]


@given(NUMBERS, NUMBERS, TIMES, st.lists(VALUES, max_size=20))
def test_a_call_is_the_same_in_both_forms(
    number: int, method: int, timeout_us: int | None, arguments: list[Any]
):
    whole = frame(OutCall(number, method, timeout_us, arguments))
    assert framed(encode(arguments), call_head(number, method, timeout_us)) == whole
    assert found(whole, plain=True) == found(whole, plain=False)


@given(st.lists(st.lists(st.tuples(st.binary(max_size=30), st.integers(0, 3000)), min_size=1), max_size=4))
def test_messages_that_are_written_together(turns: list[list[tuple[bytes, int]]]):
    outbox = Outbox()
    for messages in turns:
        for head, size in messages:
            outbox.put(head, bytes([size % 256]) * size)
        frames = [framed(bytes([size % 256]) * size, head) for head, size in messages]
        assert len(outbox) == outbox.nbytes == sum(map(len, frames))
        assert outbox.take() == b"".join(frames)
        assert len(outbox) == 0
    outbox.put(b"head", b"body")
    outbox.clear()
    outbox.put(b"", b"body")
    assert outbox.take() == framed(b"body")


@given(NUMBERS, VALUES)
def test_a_reply_is_the_same_in_both_forms(number: int, result: Any):
    whole = frame(OutReply(number, result))
    assert framed(encode(result), reply_head(number)) == whole
    assert found(whole, plain=True) == found(whole, plain=False)


@given(
    st.booleans(), VALUES, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=4), st.data()
)
def test_what_is_spoiled_is_taken_or_refused_alike(
    is_call: bool, value: Any, changes: list[tuple[int, int]], data: st.DataObject
):
    spoiled = bytearray(frame(OutCall(300, 2, 70_000, [value]) if is_call else OutReply(300, value))[4:])
    for at, byte in changes:
        spoiled[at % len(spoiled)] = byte
    body = bytes(spoiled[: data.draw(st.integers(0, len(spoiled)))] if data.draw(st.booleans()) else spoiled)
    whole = len(body).to_bytes(4, "big") + body
    assert found(whole, plain=True) == found(whole, plain=False)


@pytest.mark.parametrize("size", [4095, 4096, 65_535, 65_536, 200_000, 262_200])
@pytest.mark.parametrize("form", ["bin16", "bin32"])
@pytest.mark.parametrize("others", [0, 2, 14, 15])
def test_tails_in_pieces(size: int, form: str, others: int):
    tail = bytes(range(251)) * (size // 251) + bytes(size % 251)
    head = b"\xc5" + size.to_bytes(2, "big") if form == "bin16" and size < 1 << 16 else bin_head(size)
    before = encode([["a"] * 3] * others + [0])[:-1]
    for start in (call_head(7, 300, 5_000_000) + before, reply_head(300)):
        body = start + head + tail
        whole = len(body).to_bytes(4, "big") + body
        framer = Framer(1 << 20)
        framer.gives_plain = True
        (message,) = framer.feed(whole)
        has_tail = size >= 4096 and (start[1] == 2 or others < 15)
        assert (message.tail == tail) if has_tail else (message.tail is None)
        wanted = found(whole, plain=False)
        for cuts in (
            [3],
            [10],
            [4 + len(start) + 1],
            [4 + len(start) + len(head)],
            [5000, 5001],
            [len(whole) - 1],
        ):
            cuts = [each for each in cuts if each < len(whole)]
            assert found(whole, plain=True, cuts=cuts) == wanted
        assert found(whole + whole, plain=True, cuts=[len(whole) + 30]) == 2 * wanted


@pytest.mark.parametrize("size", [4096, 65_536])
def test_a_tail_that_has_come_by_itself_is_not_copied(size: int):
    whole = frame(OutCall(7, 300, None, [1, bytes(size)]))
    framer = Framer(1 << 20)
    framer.gives_plain = True
    start, tail = whole[:-size], whole[-size:]
    assert framer.feed(start) == []
    (message,) = framer.feed(tail)
    assert message.tail is tail
    assert framer.feed(start) == []
    (message,) = framer.feed(tail + start)
    assert message.tail == tail


@pytest.mark.parametrize("transport", ["tcp"])
@pytest.mark.parametrize("come", [10_000, 180_000])
async def test_a_tail_of_which_the_rest_never_comes(net: Net, come: int):
    """Its memory goes with the connection, also if the transport was to fill it, and without the collector."""
    server = await net.serve(Store())
    size = 200_000
    body = framed(encode([b"a" * size]), call_head(1, PLACES["hold"], None))

    def tails() -> int:
        return sum(size <= trace.size < size + 100 for trace in tracemalloc.take_snapshot().traces)

    tracemalloc.start()
    gc.disable()
    try:
        for _ in range(3):
            peer = await stranger(net, server, frame(HELLO), body[:come])
            await until_seen(lambda: server.callees and callee(server).link._framer.unfinished_bytes > 0)
            assert tails() == 1
            peer.writer.close()
            await until_seen(lambda: not server.callees)
            assert tails() == 0
    finally:
        gc.enable()
        tracemalloc.stop()
