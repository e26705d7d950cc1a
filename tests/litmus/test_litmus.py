"""The protocols of shared memory hold with the orders that they have, and not with weaker ones: `make litmus`."""

from pathlib import Path

import pytest

from .protocols import PROTOCOLS, Protocol
from .rc11 import ACQUIRE, RELAXED, RELEASE, SEQ_CST, Change, Fence, Read, Write, run

SOFT = Path(__file__).parents[2] / "rdmanet" / "soft"


def named(changed):
    return ", ".join(f"{name} {order.name.lower()}" for name, order in changed.items())


def cases(kind):
    return [
        pytest.param(protocol, changed, id=f"{protocol.name}: {named(changed)}")
        for protocol in PROTOCOLS
        for changed in getattr(protocol, kind)
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_nothing_bad_happens(protocol: Protocol):
    assert protocol.bad_results() == []


@pytest.mark.parametrize(("protocol", "changed"), cases("weakened"))
def test_a_weaker_order_is_found(protocol: Protocol, changed):
    assert changed.keys() <= protocol.orders.keys()
    assert protocol.bad_results(**changed)
    for name in changed if len(changed) > 1 else ():
        but_one = {other: order for other, order in changed.items() if other != name}
        assert protocol.bad_results(**but_one) == [], f"{named(but_one)}: this alone is wrong"


@pytest.mark.parametrize(("protocol", "changed"), cases("spare"))
def test_what_is_stronger_than_needed(protocol: Protocol, changed):
    assert changed.keys() <= protocol.orders.keys()
    assert protocol.bad_results(**changed) == []


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_each_order_is_tried_weaker(protocol: Protocol):
    tried = [changed for kind in (protocol.weakened, protocol.spare) for changed in kind]
    assert {name for changed in tried for name in changed} == protocol.orders.keys()
    for changed in tried:
        assert all(order & protocol.orders[name] == order for name, order in changed.items())


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_the_device_has_these_orders(protocol: Protocol):
    for file, line in protocol.source:
        assert (SOFT / file).read_text().count(line) == 1, (
            f"{file} has changed: change {protocol.name} in protocols.py likewise"
        )


# --- the checker itself, by tests whose results are known ---------------------------------------------------


def results(first, *threads):
    return {ends for ends, _ in run(first, list(threads))}


def two_words(order_of_writes, order_of_reads, fence=None):
    """Each thread writes one word, and reads the other's (store buffering)."""

    def thread(mine, other):
        def steps():
            yield Write(mine, 1, order_of_writes)
            if fence is not None:
                yield Fence(fence)
            return (yield Read(other, order_of_reads))

        return steps

    return results({"x": 0, "y": 0}, thread("x", "y"), thread("y", "x"))


def test_store_buffering():
    assert (0, 0) in two_words(RELEASE, ACQUIRE)
    assert (0, 0) in two_words(SEQ_CST, ACQUIRE)
    assert (0, 0) not in two_words(SEQ_CST, SEQ_CST)
    assert (0, 0) not in two_words(RELAXED, RELAXED, fence=SEQ_CST)
    assert two_words(SEQ_CST, SEQ_CST) == {(0, 1), (1, 0), (1, 1)}


def test_message_passing():
    def passed(release, acquire):
        def writer():
            yield Write("data", 1)
            yield Write("flag", 1, release)

        def reader():
            flag = yield Read("flag", acquire)
            return flag, (yield Read("data"))

        return {seen for _, seen in results({"data": 0, "flag": 0}, writer, reader)}

    assert (1, 0) not in passed(RELEASE, ACQUIRE)
    assert (1, 0) in passed(RELAXED, ACQUIRE)
    assert (1, 0) in passed(RELEASE, RELAXED)


@pytest.mark.parametrize("order", [ACQUIRE, SEQ_CST])
def test_independent_readers_agree_only_by_seq_cst(order):
    write = SEQ_CST if order is SEQ_CST else RELEASE

    def writer(word):
        def steps():
            yield Write(word, 1, write)

        return steps

    def reader(first, second):
        def steps():
            a = yield Read(first, order)
            return a, (yield Read(second, order))

        return steps

    seen = results({"x": 0, "y": 0}, writer("x"), writer("y"), reader("x", "y"), reader("y", "x"))
    assert ((None, None, (1, 0), (1, 0)) in seen) == (order is ACQUIRE)


def test_one_word_has_one_order_and_changes_are_whole():
    def adding():
        return (yield Change("x", lambda x: x + 1, RELAXED))

    ends = run({"x": 0}, [adding, adding])
    assert {(*got, last["x"]) for got, last in ends} == {(0, 1, 2), (1, 0, 2)}
