"""The books of calls: the tables of calls.py, cell by cell, and both sides played against each other."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmanet.errors import ProtocolError
from rdmanet.rpc.calls import CalleeBook, CallerBook, Inflow, Outflow
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.method import Kind

K = Kind
BACK = {K.SERVER_STREAM, K.BOTH}
THERE = {K.CLIENT_STREAM, K.BOTH}


def caller(kind: Kind) -> tuple[CallerBook, int]:
    book: CallerBook = CallerBook(10)
    inflow = Inflow(100) if kind in BACK else None
    outflow = Outflow(100) if kind in THERE else None
    return book, book.begin(kind, "owner", inflow, outflow)


def callee(kind: Kind) -> CalleeBook:
    book: CalleeBook = CalleeBook(10)
    inflow = Inflow(100) if kind in THERE else None
    outflow = Outflow(100) if kind in BACK else None
    book.begin(7, kind, "owner", inflow, outflow)
    return book


RECEIVED_BY_CALLER = {
    "reply": ({K.UNARY, K.CLIENT_STREAM}, True),
    "failure": ({*Kind}, True),
    "item": (BACK, False),
    "end": (BACK, True),
    "window": (THERE, False),
}
"""For which kinds a message is allowed, and whether it is the last one."""


def receive(book: CallerBook | CalleeBook, name: str, number: int) -> str | None:
    arguments = {"item": (10,), "window": (100,)}.get(name, ())
    return getattr(book, name)(number, *arguments)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("name", RECEIVED_BY_CALLER)
def test_what_a_caller_receives(name: str, kind: Kind):
    kinds, is_last = RECEIVED_BY_CALLER[name]
    for abandoned in (False, True):
        book, number = caller(kind)
        if abandoned:
            assert book.abandon(number) and not book.abandon(number)
        if kind not in kinds:
            with pytest.raises(ProtocolError, match=f"for call {number}, which is {kind.name}"):
                receive(book, name, number)
            assert book.lost() == ([] if abandoned else ["owner"])  # who is told of the end
            continue
        assert receive(book, name, number) == (None if abandoned else "owner")
        assert len(book) == (0 if is_last else 1)
        if is_last:
            assert not book.abandon(number)
            with pytest.raises(ProtocolError, match="is not pending"):
                receive(book, name, number)


@pytest.mark.parametrize("kind", Kind)
def test_what_a_callee_receives(kind: Kind):
    book = callee(kind)
    with pytest.raises(ProtocolError, match="begins call 7, which is pending"):
        book.check_unused(7)
    assert book.cancel(7) == book.cancel(7) == "owner"
    for name, kinds in (("item", THERE), ("end", THERE), ("window", BACK)):
        if kind in kinds:
            assert receive(book, name, 7) == "owner"
        else:
            with pytest.raises(ProtocolError, match=f"for call 7, which is {kind.name}"):
                receive(book, name, 7)
    with pytest.raises(ProtocolError, match="has none yet"):
        book.release(7)
    book.answered(7)
    for name in ("cancel", "item", "end", "window", "release"):
        assert receive(book, name, 7) is None
    book.begin(7, K.UNARY, "again")


@pytest.mark.parametrize("name", RECEIVED_BY_CALLER)
def test_a_caller_receives_nothing_for_a_call_that_it_has_not_made(name: str):
    with pytest.raises(ProtocolError, match="for call 3, which is not pending"):
        receive(CallerBook(10), name, 3)


@pytest.mark.parametrize("side", ["caller", "callee"])
def test_both_books_keep_count_of_credit(side: str):
    book, number = caller(K.BOTH) if side == "caller" else (callee(K.BOTH), 7)
    assert book.item(number, 100) == "owner"
    with pytest.raises(ProtocolError, match="no credit"):
        book.item(number, 1)
    assert book.window(number, 200) == "owner"
    with pytest.raises(ProtocolError, match="takes back credit"):
        book.window(number, 199)


def test_a_result_on_loan():
    book = callee(K.UNARY)
    book.answered(7, lending=True)
    assert len(book) == 1
    book.begin(8, K.UNARY, "runs")
    assert len(book) == 2
    book.answered(8)
    with pytest.raises(ProtocolError, match="which is pending"):
        book.check_unused(7)
    assert book.cancel(7) is None
    assert book.release(7) == "owner"
    assert book.release(7) is None and len(book) == 0


def test_too_many_calls():
    book: CallerBook = CallerBook(2)
    numbers = [book.begin(K.UNARY, index) for index in range(2)]
    with pytest.raises(Error, match="2 unfinished calls: the limit calls is 2") as caught:
        book.begin(K.UNARY, 2)
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    book.abandon(numbers[0])  # its answer is still due
    with pytest.raises(Error):
        book.begin(K.UNARY, 2)
    book.failure(numbers[0])
    book.begin(K.UNARY, 2)
    there: CalleeBook = CalleeBook(1)
    there.begin(1, K.UNARY, 1)
    with pytest.raises(Error, match="the limit calls is 1"):
        there.begin(2, K.UNARY, 2)


def test_numbers_come_round():
    book: CallerBook = CallerBook(10)
    book._last = (1 << 32) - 3
    numbers = [book.begin(K.UNARY, index) for index in range(4)]
    assert numbers == [(1 << 32) - 2, (1 << 32) - 1, 0, 1]
    book._last = (1 << 32) - 3  # all of those are in use
    assert book.begin(K.UNARY, 4) == 2


def test_a_call_that_was_not_sent():
    book, number = caller(K.UNARY)
    book.withdraw(number)
    assert len(book) == 0


def test_the_connection_is_lost():
    book, number = caller(K.UNARY)
    other = book.begin(K.UNARY, "other")
    book.abandon(number)
    assert book.lost() == ["other"] and len(book) == 0 and not book.abandon(other)
    there = callee(K.UNARY)
    there.begin(8, K.UNARY, "lends")
    there.answered(8, lending=True)
    assert there.lost() == ["owner", "lends"] and len(there) == 0


def test_a_stream_without_credit():
    inflow = Inflow(100)
    inflow.arrived(1, 99)
    inflow.arrived(1, 1000)  # it was begun with credit left
    with pytest.raises(ProtocolError, match="no credit"):
        inflow.arrived(1, 1)


def test_credit_is_given_by_half_windows():
    inflow = Inflow(100)
    assert inflow.taken(49) is None
    assert inflow.taken(1) == 150
    assert inflow.taken(49) is None
    inflow.end(1)
    assert inflow.taken(500) is None, "nothing more comes"


def test_a_stream_after_its_end():
    inflow = Inflow(100)
    inflow.end(1)
    with pytest.raises(ProtocolError, match="after the end"):
        inflow.arrived(1, 1)
    with pytest.raises(ProtocolError, match="twice"):
        inflow.end(1)


def test_credit_is_not_taken_back():
    outflow = Outflow(100)
    outflow.allow(1, 100)
    with pytest.raises(ProtocolError, match="takes back credit"):
        outflow.allow(1, 99)


@given(st.integers(1, 1000), st.lists(st.integers(1, 500), max_size=100), st.randoms())
def test_a_stream_goes_on_as_long_as_items_are_taken(window: int, sizes: list[int], random):
    """Whatever the order: the receiver holds at most a window and an item, and the sender never stops for good."""
    inflow, outflow = Inflow(window), Outflow(window)
    to_send, unread, grants = deque(sizes), deque[int](), deque[int]()
    while to_send or unread:
        steps = [to_send and outflow.open, unread, grants]
        assert any(steps), "both sides wait"
        step = random.choice([index for index, possible in enumerate(steps) if possible])
        if step == 0:
            outflow.sent(size := to_send.popleft())
            inflow.arrived(1, size)
            unread.append(size)
            assert sum(unread) < window + max(sizes)
        elif step == 1:
            if (total := inflow.taken(unread.popleft())) is not None:
                grants.append(total)
        else:
            outflow.allow(1, grants.popleft())
