"""Calls as gRPC's interoperability tests make them, over each transport: sizes, streams, metadata, and errors.

Those of cancelling, deadlines, and the ends of servers are in test_interop_ends.py.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from interop import PATTERN, SMALL, WINDOW, Quota, Source, Work, items_and_error, listed, outcome, pair, said
from net import Net

from rdmanet import rpc
from rdmanet.rpc import Code
from rdmanet.rpc.calls import ITEM_BYTES
from rdmanet.rpc.lending import LEND_BYTES
from rdmanet.rpc.messages import TEXT_MOST
from rdmanet.rpc.messenger import COLLECT_BYTES
from tests.support.waiting import begin, loop_turns

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

REQUESTS = [(31415, 27182), (9, 8), (2653, 1828), (58979, 45904)]
"""Sizes of results, and of arguments."""


def around(size: int) -> range:
    """Lengths of arguments whose messages are shorter and longer than that: a message has some bytes more."""
    return range(size - 24, size + 3)


# -- calls with one result -----------------------------------------------------------------------------------


async def test_empty_unary(net: Net):
    client, _, _ = await pair(net)
    assert await outcome(client.empty()) is None


async def test_large_unary(net: Net):
    client, _, _ = await pair(net)
    assert await client.answer(bytes(PATTERN[:271828]), 314159) == PATTERN[:314159]


@pytest.mark.parametrize("size", [0, 1, 255, LEND_BYTES - 1, LEND_BYTES, LEND_BYTES + 1, 2 << 20])
async def test_large_unary_of_size(net: Net, size: int):
    """In a message, from LEND_BYTES on by reference over RDMA, and from 2 MiB on into memory that is used again."""
    client, _, _ = await pair(net)
    assert await client.mirror(PATTERN[:size]) == PATTERN[:size]


async def test_large_unary_around_what_is_written_at_once(net: Net):
    client, _, _ = await pair(net)
    for size in around(COLLECT_BYTES):
        assert await client.mirror(PATTERN[:size]) == PATTERN[:size]


async def test_messages_of_one_turn_around_what_is_collected(net: Net):
    """Four in a turn, of which all but the first are collected, to a little less and more than is written together."""
    client, _, _ = await pair(net)
    for size in range(COLLECT_BYTES // 3 - 16, COLLECT_BYTES // 3 + 4):
        found = await asyncio.gather(*(client.mirror(PATTERN[at : at + size]) for at in range(4)))
        assert found == [PATTERN[at : at + size] for at in range(4)]


@pytest.mark.parametrize("side", ["argument", "result"])
async def test_large_unary_around_message_bytes(net: Net, side: str):
    """The longest message arrives. One byte more is an error that names the limit, and the connection stays."""
    small = rpc.Limits(message_bytes=70_000)
    server = await net.serve(Work(), limits=small if side == "argument" else rpc.Limits())
    client = await net.connect(Work, server, limits=small if side == "result" else rpc.Limits())
    found = []
    for size in around(70_000):
        result = await outcome(
            client.answer(bytes(PATTERN[:size]), 1) if side == "argument" else client.answer(b"", size)
        )
        found.append("limit message_bytes is 70000" if "limit message_bytes is 70000" in str(result) else "")
        assert found[-1] or result == PATTERN[: 1 if side == "argument" else size]
    assert found == sorted(found) and len(set(found)) == 2


async def test_a_buffer_beyond_message_bytes(net: Net):
    """It arrives by reference. What has no RDMA has the limit."""
    client, _, _ = await pair(net, limits=rpc.Limits(message_bytes=LEND_BYTES // 2))
    found = await outcome(client.mirror(PATTERN[:LEND_BYTES]))
    if net.transport == "rdma":
        assert found == PATTERN[:LEND_BYTES]
    else:
        assert said(found) == (Code.RESOURCE_EXHAUSTED, False)


async def test_200_calls_of_all_kinds_at_once(net: Net):
    client, _, _ = await pair(net)
    chance = random.Random(200)

    async def one(kind: int) -> bool:
        sizes = [chance.randrange(5000) for _ in range(chance.randrange(10))]
        if kind == 0:
            size = chance.choice((10, 100_000, LEND_BYTES))
            return bool(await client.mirror(PATTERN[:size]) == PATTERN[:size])
        if kind == 1:
            return await client.aggregate(chunks(sizes)) == sum(sizes)
        if kind == 2:
            return await listed(client.give(sizes)) == [PATTERN[:size] for size in sizes]
        if kind == 3:
            pairs = [(size, 100) for size in sizes]
            return await listed(client.duplex(requests(pairs))) == [PATTERN[:size] for size in sizes]
        return bool(await outcome(client.fail(5, f"{sizes}")) == rpc.Error(Code.NOT_FOUND, f"{sizes}"))

    assert await asyncio.gather(*(one(number % 5) for number in range(200))) == [True] * 200


async def test_more_calls_than_the_server_takes(net: Net):
    """Here gRPC's clients wait. Ours get an error that says that nothing has begun."""
    client, service, _ = await pair(net, limits=rpc.Limits(calls=3))
    calls = await begin(*(outcome(client.wait()) for _ in range(5)))
    await service.journal.until("begins", 3)
    service.gate.set()
    found = await asyncio.gather(*calls)
    assert [each if isinstance(each, str) else said(each) for each in found] == [
        *["waited"] * 3,
        *[(Code.RESOURCE_EXHAUSTED, False)] * 2,
    ]


# -- streams -------------------------------------------------------------------------------------------------


async def chunks(sizes: list[int]) -> AsyncIterator[bytes]:
    for size in sizes:
        yield bytes(PATTERN[:size])


async def requests(pairs: list[tuple[int, int]]) -> AsyncIterator[tuple[int, bytes]]:
    for size, length in pairs:
        yield size, bytes(length)


async def test_client_streaming(net: Net):
    client, _, _ = await pair(net)
    assert await client.aggregate(chunks([27182, 8, 1828, 45904])) == 74922


async def test_server_streaming(net: Net):
    client, _, _ = await pair(net)
    sizes = [31415, 9, 2653, 58979]
    assert await listed(client.give(sizes)) == [PATTERN[:size] for size in sizes]


async def test_ping_pong(net: Net):
    """The next request goes when the answer to the one before is there."""
    client, _, _ = await pair(net)
    answers: asyncio.Queue[bytes] = asyncio.Queue()
    found: list[bytes] = []

    async def asking() -> AsyncIterator[tuple[int, bytes]]:
        for size, length in REQUESTS:
            yield size, bytes(length)
            found.append(await answers.get())

    async for answer in client.duplex(asking()):
        answers.put_nowait(answer)
    assert found == [PATTERN[:size] for size, _ in REQUESTS]


async def test_ping_pong_that_the_server_begins(net: Net):
    client, _, _ = await pair(net)
    questions: asyncio.Queue[int] = asyncio.Queue()

    async def answering() -> AsyncIterator[int]:
        while True:
            yield await questions.get() + 1

    found = []
    async for question in client.ask(answering()):
        found.append(question)
        questions.put_nowait(question)
    assert found == list(range(10))


async def test_empty_stream(net: Net):
    client, _, _ = await pair(net)
    assert await listed(client.duplex(requests([]))) == []


async def test_empty_client_stream(net: Net):
    client, _, _ = await pair(net)
    assert await client.aggregate(chunks([])) == 0


async def test_empty_server_stream(net: Net):
    client, _, _ = await pair(net)
    assert await listed(client.give([])) == []


async def test_empty_items(net: Net):
    """Each costs credit, though it has no bytes."""
    client, _, _ = await pair(net)
    assert await listed(client.give([0] * 1000)) == [b""] * 1000


async def test_half_close_early(net: Net):
    """The server has more to say than its credit is, after the client has said all."""
    client, _, _ = await pair(net)
    assert await listed(client.total_first(Source(3))) == [3, *range(200)]


async def test_an_answer_before_the_end_of_the_clients_stream(net: Net):
    client, _, _ = await pair(net)
    source = Source(None)
    assert (await client.first(source), source.is_closed) == (0, True)


async def test_a_stream_that_ends_before_the_clients_stream(net: Net):
    client, _, _ = await pair(net)
    source = Source(None)
    assert (await listed(client.first_back(source)), source.is_closed) == ([0], True)


async def test_items_longer_than_the_window(net: Net):
    client, _, _ = await pair(net)
    pairs = [(10 * WINDOW, 10 * WINDOW)] * 5
    assert await listed(client.duplex(requests(pairs))) == [PATTERN[: 10 * WINDOW]] * 5


@pytest.mark.parametrize("over", [-1, 0, 1])
async def test_items_that_end_at_the_window(net: Net, over: int):
    """Two items whose cost is the credit or a byte beside it, and a third one."""
    client, _, _ = await pair(net)
    head = 3  # of bytes in msgpack, from 256 of them on
    sizes = [WINDOW // 2 - ITEM_BYTES - head, WINDOW // 2 - ITEM_BYTES - head + over, 10]
    assert await listed(client.give(sizes)) == [PATTERN[:size] for size in sizes]


async def test_an_item_around_message_bytes(net: Net):
    """The call fails, after the items before it, and names the limit."""
    server = await net.serve(Work())
    client = await net.connect(Work, server, limits=rpc.Limits(message_bytes=70_000))
    found, error = await items_and_error(client.give([69_900, 70_001]))
    assert found == [PATTERN[:69_900]] and "the limit message_bytes is 70000" in str(error)


async def test_a_slow_reader_bounds_what_the_server_gives(net: Net):
    client, service, _ = await pair(net)
    stream: Any = client.count()
    assert await anext(stream) == 0
    await client.empty()  # what was to come has come
    await loop_turns(10)
    assert service.given <= WINDOW // ITEM_BYTES + 2
    await stream.aclose()
    await service.journal.until("cancelled")


async def test_a_slow_method_bounds_what_the_client_gives(net: Net):
    client, service, _ = await pair(net)
    source = Source(None)
    (call,) = await begin(outcome(client.take_none(source)))
    await service.journal.until("begins")
    await client.empty()
    await loop_turns(10)
    assert source.sent <= WINDOW // ITEM_BYTES + 2
    service.gate.set()
    await call


async def test_a_slow_stream_does_not_hold_up_others(net: Net):
    """Their credit is their own."""
    client, service, _ = await pair(net)
    slow: Any = client.count()
    await anext(slow)
    assert await listed(client.give([WINDOW] * 20)) == [PATTERN[:WINDOW]] * 20
    await slow.aclose()
    await service.journal.until("cancelled")


# -- metadata ------------------------------------------------------------------------------------------------

METADATA = {
    "x-grpc-test-echo-initial": "test_initial_metadata_value",
    "x-grpc-test-echo-trailing-bin": b"\xab" * 3,
}


async def test_custom_metadata(net: Net):
    client, _, _ = await pair(net)
    assert await rpc.options(client, metadata=METADATA).metadata() == METADATA


async def test_custom_metadata_of_streams(net: Net):
    client, _, _ = await pair(net)

    async def names() -> AsyncIterator[str]:
        for name in METADATA:
            yield name

    named = rpc.options(client, metadata=METADATA)
    assert await listed(named.metadata_by_items(names())) == list(METADATA.values())


async def test_metadata_of_the_longest_kind(net: Net):
    client, _, _ = await pair(net)
    metadata = {"x" * 256: "ü" * 3900}
    assert await rpc.options(client, metadata=metadata).metadata() == metadata


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", Code, ids=lambda code: code.name)
async def test_status_code_and_message(net: Net, code: Code):
    """Of a call with one result, after items, and of the caller's own stream."""
    client, _, _ = await pair(net)
    error = rpc.Error(code, "test status message")
    unary = await outcome(client.fail(code, error.text))
    after = await items_and_error(client.fail_after(code, error.text, Source(3)))
    own = await outcome(client.take_all(Source(3, error)))
    assert (unary, after, own) == (error, ([0, 1, 2], error), error)


TEXTS = {
    "empty": "",
    "blank": " ",
    "unicode": "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n",
    "control": "e\u0301\u202e\ufeff\0%25",
    "longest": "☺" * TEXT_MOST,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
async def test_special_status_message(net: Net, text: str):
    client, _, _ = await pair(net)
    assert await outcome(client.fail(Code.UNKNOWN, text)) == rpc.Error(Code.UNKNOWN, text)


async def test_a_status_message_that_is_too_long(net: Net):
    """It is cut, and the call ends by its code."""
    client, _, _ = await pair(net)
    found = await outcome(client.fail(Code.UNKNOWN, "😈" * (TEXT_MOST + 1)))
    assert found == rpc.Error(Code.UNKNOWN, "😈" * TEXT_MOST)


async def test_details_of_a_type(net: Net):
    client, _, _ = await pair(net)
    assert (await outcome(client.exceed())).details == Quota(3, ["a", "ä"])


async def test_details_after_items(net: Net):
    client, _, _ = await pair(net)
    found, error = await items_and_error(client.exceed_untyped())
    assert found == [0] and error is not None and error.details == {"left": 3, "at": [1.5, None, b"\xff"]}


async def test_an_error_of_the_method_while_the_client_sends(net: Net):
    client, _, _ = await pair(net)
    source = Source(None)
    assert (await outcome(client.fail_while(source)), source.is_closed) == (
        rpc.Error(Code.ABORTED, "at 0"),
        True,
    )


async def test_an_error_of_the_client_while_the_method_takes(net: Net):
    """The call raises it, and the method is cancelled: it does not take the items for all."""
    client, service, _ = await pair(net)

    async def numbers() -> AsyncIterator[int]:
        for number in range(3):
            yield number
        await service.journal.until("begins")  # what is cancelled before that never runs
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await client.take_all(numbers())
    await service.journal.until("cancelled")
    assert service.journal.entries == ["begins", "cancelled"]


async def test_unimplemented_method(net: Net):
    def newer() -> type[rpc.Service]:
        class Work(rpc.Service):
            async def empty(self) -> None: ...

            async def unimplemented(self) -> None: ...

        return Work

    client: Any = await net.connect(newer(), await net.serve(Work(), limits=SMALL))
    assert said(await outcome(client.unimplemented())) == (Code.UNIMPLEMENTED, False)


async def test_unimplemented_service(net: Net):
    """It is refused where it is connected."""

    class Unimplemented(rpc.Service):
        async def unimplemented(self) -> None: ...

    server = await net.serve(Work())
    with pytest.raises(rpc.Error, match="UNIMPLEMENTED: the server has Work, and no Unimplemented") as caught:
        await net.connect(Unimplemented, server)
    assert caught.value.code is Code.UNIMPLEMENTED
