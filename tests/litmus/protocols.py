"""The protocols between processes of the embedded device, as litmus tests.

Each has the words and threads of docs/developers/shared-words.md, cut down to two or three steps, and says which
results must not happen. Its orders have names. `weakened` has, for each order that is needed, something weaker with
which the checker finds a bad result; where either of two orders will do, both weaker, of which neither does harm alone.
`spare` has those that the source has stronger than RC11 needs: with these no bad result is found either. `source` has
lines of the device from which the orders are taken, each of which is there once; a test compares them, so who changes
one changes it here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from .rc11 import (
    ACQ_REL,
    ACQUIRE,
    RELAXED,
    RELEASE,
    SEQ_CST,
    Action,
    Change,
    Fence,
    Order,
    Read,
    Thread,
    Write,
    run,
)

Orders = dict[str, Order]
Steps = Generator[Action, Any, Any]


@dataclass(frozen=True)
class Protocol:
    name: str
    orders: Orders
    words: dict[str, Any]
    threads: Callable[[Orders], list[Thread]]
    bad: Callable[[tuple[Any, ...], dict[str, Any]], bool]
    weakened: list[Orders]
    source: list[tuple[str, str]]
    spare: list[Orders] = field(default_factory=list)

    def bad_results(self, **changed: Order) -> list[tuple[Any, ...]]:
        ends = run(self.words, self.threads(self.orders | changed))
        assert ends, f"{self.name}: no execution comes to its end"
        return [results for results, last in ends if self.bad(results, last)]


def equals(value: Any) -> Callable[[Any], bool]:
    return lambda found: bool(found == value)


def swap(old: Any, new: Any) -> Callable[[Any], Any]:
    """Compare and exchange."""
    return lambda found: new if found == old else None


# --- the slot ring: owner_sequence --------------------------------------------------------------------------
# A receive is offered (10), completed (11), and its slot is offered again (12).


def slot_ring(o: Orders) -> list[Thread]:
    def owner() -> Steps:
        yield Write("sge", 1)
        yield Write("sequence", 10, o["offer"])
        yield Read("sequence", o["poll"], equals(11))
        length = yield Read("length")
        yield Write("sge", 2)
        yield Write("sequence", 12, o["offer"])
        return length

    def peer() -> Steps:
        yield Read("sequence", o["look"], equals(10))
        first = yield Read("sge")
        yield Write("length", first + 100)
        yield Write("sequence", 11, o["complete"])
        yield Read("sequence", o["look"], equals(12))
        second = yield Read("sge")
        return first, second

    return [owner, peer]


SLOT_RING = Protocol(
    "slot ring",
    {"offer": RELEASE, "look": ACQUIRE, "complete": RELEASE, "poll": ACQUIRE},
    {"sequence": 0, "sge": 0, "length": 0},
    slot_ring,
    lambda results, last: results != (101, (1, 2)),
    [{"offer": RELAXED}, {"look": RELAXED}, {"complete": RELAXED}, {"poll": RELAXED}],
    [
        ("requester/post.c", "atomic_store_explicit(&slot->owner_sequence, index, memory_order_release)"),
        (
            "responder/responder.c",
            "atomic_load_explicit(&slot->owner_sequence, memory_order_acquire) == ctx->done",
        ),
        (
            "responder/responder.c",
            "atomic_store_explicit(&slot->owner_sequence, ++ctx->done, memory_order_release)",
        ),
        (
            "objects/qp.h",
            "atomic_load_explicit(&rn_rq_slot(qp, index)->owner_sequence, memory_order_acquire)",
        ),
    ],
)


# --- a pool's word: posted, claimed, given back, claimed by another -----------------------------------------


def pool_claim(o: Orders) -> list[Thread]:
    def owner() -> Steps:
        yield Write("sge", 1)
        yield Write("word", "posted", o["post"])

    def claimer() -> Steps:
        if (yield Change("word", swap("posted", "first"), o["claim"])) == "posted":
            yield Change("word", swap("first", "posted"), o["give back"])

    def another() -> Steps:
        if (yield Change("word", swap("posted", "second"), o["claim"])) == "posted":
            return (yield Read("sge"))
        return None

    return [owner, claimer, another]


POOL_CLAIM = Protocol(
    "a pool's word, claimed",
    {"post": SEQ_CST, "claim": SEQ_CST, "give back": SEQ_CST},
    {"word": "free", "sge": 0},
    pool_claim,
    lambda results, last: results[2] == 0,
    [{"post": RELAXED}, {"claim": RELAXED}],
    [
        ("shm/pool.c", "atomic_store(&entry->word, rn_ring_posted(pool->rings, at))"),
        ("shm/claim.c", "atomic_compare_exchange_strong(&entry->word, &posted, claim->claimed)"),
        ("shm/claim.c", "atomic_compare_exchange_strong(&claim->entry->word, &word, claim->posted)"),
    ],
    # A read-modify-write carries on the release of the word that it changes.
    [{"post": RELEASE, "claim": ACQUIRE, "give back": RELAXED}],
)


# --- a pool's list: two claimers finish, the owner collects -------------------------------------------------


def pool_finish(o: Orders) -> list[Thread]:
    def claimer(name: str) -> Thread:
        def finish() -> Steps:
            yield Write(f"length {name}", 7)
            below = yield Read("finished")
            yield Write(f"below {name}", below)
            if (yield Change("finished", swap(below, name), o["push"])) == below:
                yield Change(f"word {name}", swap("claimed", "done"), o["done"])

        return finish

    def owner() -> Steps:
        seen: list[Any] = []
        at = yield Change("finished", lambda _: "", o["collect"])
        while at and at != "stale":
            word = yield Read(f"word {at}", o["look"])
            length = yield Read(f"length {at}")
            seen.append((at, word, length))
            at = yield Read(f"below {at}")
        return seen, at

    return [claimer("a"), claimer("b"), owner]


POOL_FINISH = Protocol(
    "a pool's list of what has finished",
    {"push": SEQ_CST, "done": SEQ_CST, "collect": SEQ_CST, "look": SEQ_CST},
    {"finished": ""}
    | {
        f"{what} {name}": value
        for name in "ab"
        for what, value in [("length", 0), ("below", "stale"), ("word", "claimed")]
    },
    pool_finish,
    lambda results, last: results[2][1] == "stale" or any(length != 7 for _, _, length in results[2][0]),
    [{"push": RELAXED}, {"collect": RELAXED}],
    [
        ("shm/claim.c", "while (!atomic_compare_exchange_weak(finished, &below, reference));"),
        ("shm/pool_arrive.c", "at = atomic_exchange(arrivals->finished, 0)"),
    ],
    [{"push": RELEASE, "done": RELEASE, "collect": ACQUIRE, "look": ACQUIRE}],
)


# --- store, fence, load: who is inside, and who wants it out ------------------------------------------------
# Either the requester sees that the key is withdrawn, or the owner sees it busy, and then what it did.


def withdrawal(o: Orders) -> list[Thread]:
    def requester() -> Steps:
        yield Change("busy", lambda busy: busy + 1, o["begin"])
        key = yield Read("key", o["find"])
        if key:
            yield Write("memory", "message")
        yield Write("busy", 2, o["end"])
        return key

    def owner() -> Steps:
        yield Write("key", 0, o["withdraw"])
        if o["fence"] is not RELAXED:
            yield Fence(o["fence"])
        busy = yield Read("busy", o["wait"])
        return None if busy & 1 else (yield Read("memory"))

    return [requester, owner]


WITHDRAWAL = Protocol(
    "busy, and a key or generation_state",
    {
        "begin": SEQ_CST,
        "find": SEQ_CST,
        "end": RELEASE,
        "withdraw": RELEASE,
        "fence": SEQ_CST,
        "wait": SEQ_CST,
    },
    {"busy": 0, "key": 1, "memory": "the owner's"},
    withdrawal,
    lambda results, last: results[0] == 1 and results[1] == "the owner's",
    [
        {"begin": ACQ_REL},
        {"find": ACQUIRE},
        {"end": RELAXED},
        {"fence": ACQ_REL},
        {"fence": RELAXED},
        {"wait": RELAXED},
    ],
    [
        ("requester/execute.c", "atomic_compare_exchange_strong(&ctx->block->busy, &idle, ctx->busy + 1)"),
        (
            "requester/execute.c",
            "atomic_store_explicit(&ctx->block->busy, ++ctx->busy, memory_order_release)",
        ),
        ("objects/mr.h", "atomic_load(&entry->key) == key"),
        ("responder/responder.h", "uint64_t generation_state = atomic_load(&ctx->facts->generation_state);"),
        ("objects/quiesce.c", "rn_fence();\n\treturn wait_for_domain("),
        ("objects/quiesce.c", "rn_fence();\n\tfor (uint32_t i = first; i < end; i++) {"),
        ("objects/quiesce.c", "rn_fence();\n\tif (self)"),
        ("objects/quiesce.c", "uint32_t seen = atomic_load(word);"),
        ("objects/qp_block.c", "rn_fence();"),
    ],
    [{"withdraw": RELAXED}],
)


# --- facts that are read without being inside: a datagram's sender ------------------------------------------
# They change after the generation. Who sees a new one sees the new generation afterwards.


def facts(o: Orders) -> list[Thread]:
    def owner() -> Steps:
        yield Write("generation", 2, o["begin anew"])
        yield Write("rq_offset", "new", o["tell"])

    def sender() -> Steps:
        before = yield Read("generation", o["look"])
        offset = yield Read("rq_offset", o["read"])
        yield Change("word", lambda _: "claimed", o["claim"])
        after = yield Read("generation", o["look"])
        return before, offset, after

    return [owner, sender]


FACTS = Protocol(
    "the facts of a generation",
    {"begin anew": SEQ_CST, "tell": RELEASE, "look": SEQ_CST, "read": ACQUIRE, "claim": SEQ_CST},
    {"generation": 1, "rq_offset": "old", "word": "posted"},
    facts,
    lambda results, last: results[1] == (1, "new", 1),
    [{"tell": RELAXED}, {"read": RELAXED}],
    [
        ("shm/own.c", "__atomic_store_n(&to[i], value, __ATOMIC_RELEASE);"),
        ("shm/arena.h", "#define READ_FACT(word) __atomic_load_n(&(word), __ATOMIC_ACQUIRE)"),
        ("responder/ctx.c", "uint64_t offset = READ_FACT(facts->rq_offset);"),
    ],
    # Others need these for other reasons.
    [{"begin anew": RELAXED, "look": RELAXED, "claim": RELAXED}],
)


# --- and those of a queue pair that is open: its state is told last -----------------------------------------
# Who sees the new state sees all facts that go with it.


def told_last(o: Orders) -> list[Thread]:
    def owner() -> Steps:
        yield Write("rq_offset", "new", o["tell"])
        yield Write("generation_state", "open", o["tell last"])

    def requester() -> Steps:
        state = yield Read("generation_state", o["look"])
        return state, (yield Read("rq_offset", o["read"]))

    return [owner, requester]


TOLD_LAST = Protocol(
    "the facts, and the state that is told last",
    {"tell": RELEASE, "tell last": RELEASE, "look": SEQ_CST, "read": ACQUIRE},
    {"generation_state": "closed", "rq_offset": "old"},
    told_last,
    lambda results, last: results[1] == ("open", "old"),
    [{"tell last": RELAXED}, {"look": RELAXED}],
    [
        ("shm/own.c", "for (size_t i = bytes / sizeof(word); i--;) {"),  # the state is the first word
        ("shm/arena.h", "alignas(128) _Atomic uint64_t generation_state;"),
        ("datagram/datagram.c", "ctx->generation = atomic_load(&ctx->facts->generation_state) >> 8;"),
        (
            "requester/execute.c",
            "generation_state = atomic_load(&ctx->facts->generation_state);\n\tctx->generation =",
        ),
    ],
    [{"tell": RELAXED, "look": ACQUIRE, "read": RELAXED}],
)


# --- the doorbell: no wake-up is lost -----------------------------------------------------------------------
# The owner arms the queue, looks once more, and sleeps. The pusher says that there is a completion, and looks whether
# anybody sleeps.


def doorbell(o: Orders) -> list[Thread]:
    def pusher() -> Steps:
        yield Write("length", 7)
        yield Write("sequence", 11, o["complete"])
        yield Change("dirty", lambda bits: bits | 1, o["dirty"])
        yield Change("summary", lambda bits: bits | 1, o["summary"])
        return (yield Read("armed", o["asleep?"]))

    def owner() -> Steps:
        yield Change("armed", lambda _: 1, o["arm"])
        yield Fence(o["fence"])
        if not (yield Read("summary", o["look"])):
            return "asleep"
        yield Change("summary", lambda _: 0, o["collect"])
        yield Change("dirty", lambda _: 0, o["collect"])
        yield Read("sequence", o["poll"])
        return (yield Read("length"))

    return [pusher, owner]


DOORBELL = Protocol(
    "the doorbell",
    {
        "complete": RELEASE,
        "dirty": SEQ_CST,
        "summary": SEQ_CST,
        "asleep?": SEQ_CST,
        "arm": SEQ_CST,
        "fence": SEQ_CST,
        "look": SEQ_CST,
        "collect": SEQ_CST,
        "poll": ACQUIRE,
    },
    {"summary": 0, "dirty": 0, "armed": 0, "sequence": 10, "length": 0},
    doorbell,
    lambda results, last: results in ((0, "asleep"), (0, 0), (1, 0)),
    [
        {"asleep?": ACQUIRE},
        {"summary": ACQ_REL},
        {"arm": RELAXED, "fence": RELAXED},
        {"fence": RELAXED, "look": RELAXED},
        {"look": RELAXED, "collect": RELAXED},
    ],
    [
        ("responder/ctx.c", "atomic_fetch_or(ctx->dirty, ctx->dirty_bit);"),
        ("responder/ctx.c", "atomic_fetch_or(&ctx->cq->summary, ctx->summary_bit);"),
        (
            "objects/cq_event.c",
            "uint32_t armed = atomic_load(&block->armed), kind = armed & RN_ARMED_KIND, channel;",
        ),
        ("objects/cq_event.c", "while (!atomic_compare_exchange_weak(&cq->block->armed, &before, after));"),
        ("objects/cq_poll.c", "if (likely(!atomic_load(&block->summary)))"),
    ],
    # The slot may also be looked at without the bits: SLOT_RING.
    [
        {"fence": RELAXED},
        {"arm": RELAXED, "look": RELAXED},
        {"dirty": ACQ_REL, "collect": ACQ_REL},
        {"complete": RELAXED, "poll": RELAXED},
    ],
)


# --- the summary's bit is set already: it need not be set again ---------------------------------------------


def summary(o: Orders) -> list[Thread]:
    def pusher() -> Steps:
        yield Change("dirty", lambda bits: bits | 1, o["dirty"])
        if not (yield Read("summary", o["set already?"])):
            yield Change("summary", lambda bits: bits | 1, o["summary"])

    def owner() -> Steps:
        yield Change("summary", lambda _: 0, o["collect"])
        return (yield Change("dirty", lambda _: 0, o["collect"]))

    return [pusher, owner]


SUMMARY = Protocol(
    "a bit of dirty, and the summary's",
    {"dirty": SEQ_CST, "set already?": SEQ_CST, "summary": SEQ_CST, "collect": SEQ_CST},
    {"dirty": 0, "summary": 1},
    summary,
    lambda results, last: bool(last["dirty"]) and not last["summary"],
    [{"dirty": RELEASE}, {"collect": ACQUIRE}],
    [
        ("responder/ctx.c", "if (!(atomic_load(&ctx->cq->summary) & ctx->summary_bit))"),
        (
            "objects/cq_poll.c",
            "for (summary = atomic_exchange(&block->summary, 0); summary; summary &= summary - 1)",
        ),
        ("objects/cq_poll.c", "for (word = atomic_exchange(&block->dirty[at], 0); word; word &= word - 1)"),
    ],
    [{"dirty": ACQ_REL, "set already?": RELAXED, "summary": RELAXED, "collect": ACQ_REL}],
)


# --- the limit of a pool: its owner is woken ----------------------------------------------------------------
# Either the claimer sees the limit, or the owner sees that a receive was taken.


def limit(o: Orders) -> list[Thread]:
    def claimer() -> Steps:
        yield Change("head", lambda head: head + 1, o["claim"])
        return (yield Read("limit", o["limit?"]))

    def owner() -> Steps:
        yield Write("limit", 1, o["tell"])
        yield Fence(o["fence"])
        return (yield Read("head", o["left?"]))

    return [claimer, owner]


LIMIT = Protocol(
    "a pool's limit",
    {"claim": SEQ_CST, "limit?": SEQ_CST, "tell": RELEASE, "fence": SEQ_CST, "left?": SEQ_CST},
    {"head": 0, "limit": 0},
    limit,
    lambda results, last: results == (0, 0),
    [{"limit?": RELAXED}, {"fence": RELAXED}, {"claim": ACQ_REL}],
    [
        ("shm/claim.c", "atomic_compare_exchange_strong(&pool->head, &head, at + 1);"),
        ("shm/claim.c", "limit = atomic_load(&facts->limit);"),
        ("shm/pool.c", "rn_fence(); /* the caller looks at the head next"),
    ],
    [{"tell": RELAXED, "left?": RELAXED}],
)


# --- the link: a notice that a segment has gone, while requests look for it ---------------------------------
# The engine gives the node of segment 1 to segment 2; a thread without the lock must find either whole, or neither.


def notice(o: Orders) -> list[Thread]:
    def engine() -> Steps:
        yield Write("base", None, o["gone"])
        yield Write("id", 2, o["id"])
        yield Write("size", 20, o["size"])
        yield Write("base", "second", o["mapped"])

    def finding(wanted: int) -> Thread:
        def requester() -> Steps:
            if (yield Read("id", o["find"])) != wanted:
                return None
            base = yield Read("base", o["find"])
            size = yield Read("size", o["find size"])
            if base and (yield Read("base", o["again"])) == base and (yield Read("id", o["again"])) == wanted:
                return wanted, base, size
            return None

        return requester

    return [engine, finding(1), finding(2)]


NOTICE = Protocol(
    "the link's notice of a segment",
    dict.fromkeys(["gone", "id", "size", "mapped", "find", "find size", "again"], SEQ_CST),
    {"base": "first", "id": 1, "size": 10},
    notice,
    lambda results, last: not {*results} <= {None, (1, "first", 10), (2, "second", 20)},
    [{"find": RELAXED}, {"find size": RELAXED}, {"size": RELAXED}, {"mapped": RELAXED}, {"id": RELAXED}],
    [
        ("peer/segments.c", "if (base && segment->base == base && segment->id == id)"),
        ("peer/segments.c", "segment->base = base; /* the size was there before */"),
        ("peer/peers.h", "char *_Atomic base;"),
    ],
    [
        dict.fromkeys(["gone", "id", "size", "mapped"], RELEASE)
        | dict.fromkeys(["find", "find size"], ACQUIRE)
        | {"again": RELAXED}
    ],
)


# --- a READ that both carry: the owner's piece is in place --------------------------------------------------


def shared_read(o: Orders) -> list[Thread]:
    def owner() -> Steps:
        if (yield Change("shared", swap("free", "owner's"), o["take"])) == "free":
            yield Write("piece", "bytes")
            yield Write("given", 1, o["give"])

    def requester() -> Steps:
        if (yield Change("shared", swap("free", "ended"), o["stop"])) != "owner's":
            return "alone"
        yield Read("given", o["complete?"], equals(1))
        return (yield Read("piece"))

    return [owner, requester]


SHARED_READ = Protocol(
    "a READ that both carry",
    dict.fromkeys(["take", "give", "stop", "complete?"], SEQ_CST),
    {"shared": "free", "given": 0, "piece": "none"},
    shared_read,
    lambda results, last: results[1] == "none" or (results[1] == "alone" and last["piece"] == "bytes"),
    [{"give": RELAXED}, {"complete?": RELAXED}],
    [
        (
            "responder/help.c",
            "atomic_store(&qp->block->given, (uint64_t)help->serial << 32 | ++help->given);",
        ),
        ("objects/share.c", "uint64_t given = count ? atomic_load(&ctx->block->given) : 0;"),
    ],
    [{"take": RELAXED, "give": RELEASE, "stop": RELAXED, "complete?": ACQUIRE}],
)


# --- mail: a slot is filled, and taken out by the reader, or back by the writer -----------------------------
# The slot is at position 0 (turn 0), has a message (1), and is at its next position (64). If the reader has the first,
# the writer puts another one there (65).


def mail(o: Orders) -> list[Thread]:
    def writer() -> Steps:
        yield Write("message", "first")
        yield Write("turn", 1, o["fill"])
        if (yield Change("turn", swap(1, 64), o["take back"])) == 1:
            return "taken back"
        yield Read("turn", o["free?"], equals(64))
        yield Write("message", "second")
        yield Write("turn", 65, o["fill"])
        return "sent"

    def reader() -> Steps:
        if (yield Read("turn", o["filled?"])) != 1:
            return ()
        first = yield Read("message")
        if (yield Change("turn", swap(1, 64), o["take"])) != 1:
            return ()
        yield Read("turn", o["filled?"], equals(65))
        second = yield Read("message")
        return first, second

    return [writer, reader]


MAIL = Protocol(
    "mail in a ring",
    {"fill": RELEASE, "take back": SEQ_CST, "free?": ACQUIRE, "filled?": ACQUIRE, "take": SEQ_CST},
    {"turn": 0, "message": "none"},
    mail,
    lambda results, last: results not in [("taken back", ()), ("sent", ("first", "second"))],
    [{"fill": RELAXED}, {"filled?": RELAXED}],
    [
        (
            "peer/mail.c",
            "atomic_store_explicit(&slot->turn, turn(ring, ring->position), memory_order_release);",
        ),
        (
            "peer/mail.c",
            "atomic_load_explicit(&slot->turn, memory_order_acquire) != turn(ring, ring->position)",
        ),
        (
            "peer/mail.c",
            "atomic_load_explicit(&slot_of(process->arena, ring, ring->position)->turn, memory_order_acquire) ==",
        ),
        (
            "peer/mail.c",
            "atomic_compare_exchange_strong(&slot->turn, &filled, turn(ring, position + SLOTS))",
        ),
        (
            "peer/mail.c",
            "atomic_compare_exchange_strong(&slot->turn, &filled, turn(ring, ring->position - 1 + SLOTS))",
        ),
    ],
    # Arm needs them: a message is read before its slot is given back, and written after that was seen. RC11 forbids
    # anything else whatever their orders are (rc11.py: load buffering).
    [{"take back": ACQUIRE, "free?": RELAXED, "take": RELEASE}, {"take back": RELAXED}, {"take": RELAXED}],
)


PROTOCOLS = [
    SLOT_RING, POOL_CLAIM, POOL_FINISH, WITHDRAWAL, FACTS, TOLD_LAST, DOORBELL, SUMMARY, LIMIT, NOTICE, SHARED_READ,
    MAIL,
]  # fmt: skip
