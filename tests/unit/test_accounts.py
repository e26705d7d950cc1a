"""Who waits for whom, in words: what follows from which numbers."""

from dataclasses import replace

import pytest

from rdmanet.base.accounts import (
    ConnectionInfo,
    DoorInfo,
    ServerInfo,
    WorkerInfo,
    accepted_at,
    columns_of,
    loop_notes,
    place_text,
    quiet_rows,
    row_of,
    size_text,
    time_text,
)
from rdmanet.cli import columns
from rdmanet.protocol import State

QUIET = {
    "bytes_sent": 7,
    "bytes_received": 2048,
    "bytes_unsent": 0,
    "bytes_unread": 0,
    "credits": 16,
    "peer_slots": 16,
    "sends_in_flight": 0,
    "send_slots": 16,
    "slots_held": 0,
    "slots_leased": 0,
}
HERE, THERE = ("127.0.0.1", 5000), ("127.0.0.1", 40000)
OPEN = ConnectionInfo("rdma", "the program asked for RDMA", "client", HERE, THERE, "open", stats=QUIET)


def with_stats(info: ConnectionInfo = OPEN, **stats: int) -> ConnectionInfo:
    return replace(info, stats={**info.stats, **stats})


def test_nobody_waits():
    assert OPEN.waits() == []
    assert OPEN.explain().splitlines() == [
        "127.0.0.1:5000 to 127.0.0.1:40000 (client): open",
        "fabric: RDMA: the program asked for RDMA",
        "waits: nobody; 7 bytes sent, 2.0 KiB received",
    ]


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        (
            {"bytes_unsent": 81920, "credits": 0, "sends_in_flight": 16},
            "80.0 KiB that were written wait for the peer: credits 0 of 16: the peer does not read",
        ),
        (
            {"bytes_unsent": 100, "credits": 12, "sends_in_flight": 4, "send_slots": 4},
            "100 bytes that were written wait for the device: 4 of 4 send slots are in flight: the send queue is full",
        ),
        (
            {"bytes_unsent": 100},
            "100 bytes that were written wait for the device to read them, or for the next pass",
        ),
        (
            {"bytes_unread": 1, "slots_held": 3},
            "bytes have come, in 3 receive slots, and this program has not read",
        ),
        ({"slots_leased": 3}, "3 receive slots are leased by this program"),
    ],
)
def test_one_waits(stats, words):
    [said] = with_stats(**stats).waits()
    assert words in said


def test_what_has_slowed_it():
    assert OPEN.notes() == []
    times = {"waits_for_credits": 3, "us_without_credits": 1_500_000, "us_open": 60_000_000}
    [note] = with_stats(**times).notes()
    assert note.startswith(
        "bytes have waited for credits 3 times, 1.5 s in all of 60.0 s: the peer reads more slowly"
    )
    assert f"note: {note}" in with_stats(**times).explain()
    assert "credits once, 1.5 s" in with_stats(**{**times, "waits_for_credits": 1}).notes()[0]
    assert not with_stats(**{**times, "us_open": 600_000_000}).notes()  # a moment of a long time
    [note] = with_stats(bytes_sent=4 << 20, frames_sent=1024, frame_bytes=4096).notes()
    assert note.startswith(
        "the peer's receive slots hold 4096 bytes, so 4.0 MiB took 1024 frames: small slots"
    )
    assert not with_stats(bytes_sent=4 << 20, frames_sent=64, frame_bytes=1 << 16).notes()
    assert not with_stats(bytes_sent=4 << 20, frames_sent=1 << 20, frame_bytes=4096).notes()  # small messages


def test_what_slows_a_loop():
    quiet = {"messages": 1000, "wakeups": 400, "registrations": 200, "registrations_reused": 300}
    assert loop_notes(quiet) == loop_notes({"messages": 9, "wakeups": 9, "registrations": 9}) == []
    held = {
        "long_stretches": 3,
        "us_in_long_stretches": 90_000,
        "us_longest_stretch": 60_000,
        "us_asleep": 100_000,
    }
    [note] = loop_notes({**quiet, **held})
    assert (
        "did not look at its connections for 10 ms or more 3 times, 90.0 ms in all, 60.0 ms at most: " in note
    )
    assert not loop_notes({**held, "us_polling": 1_000_000}) + loop_notes({**held, "long_stretches": 2})
    assert loop_notes({"messages": 0, "wakeups": 900}) == []
    [note] = loop_notes({**quiet, "wakeups": 900})
    assert note.startswith("900 wake-ups for 1000 messages: it sleeps before nearly each")
    [note] = loop_notes({**quiet, "registrations": 400})
    assert note.startswith(
        "memory was registered 400 times to read or write a peer's, and found registered 300 times"
    )


def test_when_the_last_bytes_went():
    said = with_stats(us_since_sent=3400, us_since_received=7).explain()
    assert said.endswith("waits: nobody; 7 bytes sent (3.4 ms ago), 2.0 KiB received (7 µs ago)")
    assert "0 bytes sent, 2.0 KiB" in with_stats(bytes_sent=0, us_since_sent=3, us_since_received=7).explain()
    [said] = with_stats(sends_in_flight=2, us_since_sent=5_000_000).waits()
    assert said.startswith("2 frames are in flight for 5.0 s: the peer's device does not acknowledge them")
    assert not with_stats(sends_in_flight=2, us_since_sent=5000).waits()


def test_the_program_has_paused():
    assert replace(OPEN, reading=False).waits() == ["reading is paused by this program (pause_reading)"]
    [said] = with_stats(replace(OPEN, reading=False), bytes_unread=1, slots_held=7).waits()
    assert (
        said == "bytes have come, in 7 receive slots, and reading is paused: they wait for resume_reading()"
    )
    assert "drain() waits" in replace(OPEN, paused=True).waits()[0]


def test_beginning_and_end():
    assert replace(OPEN, state="opening", stats={}).waits() == ["the connection is being made"]
    lost = replace(OPEN, state="closed", error="ConnectionResetError: the peer has ended")
    assert lost.waits() == ["the connection is over: ConnectionResetError: the peer has ended"]
    assert replace(OPEN, state="closed").waits() == ["the connection is over: it has ended in good order"]
    draining = with_stats(replace(lost, state="draining"), bytes_unread=5)
    assert [word.split(",")[0] for word in draining.waits()] == [
        "the connection is over: ConnectionResetError: the peer has ended",
        "bytes have come",
    ]
    closing = with_stats(replace(OPEN, state="closing"), bytes_unsent=5, credits=0)
    assert closing.waits()[0] == "close() waits until what was written is sent"


def test_the_client_has_said_nothing():
    [words] = replace(OPEN, state="unheard").waits()
    assert words.startswith("the client has not begun to speak")


@pytest.mark.parametrize("state", State)
def test_each_state_is_understood(state):
    info = replace(OPEN, state=state.name.lower())
    assert [*columns.Connections([info])] == [info]
    block = columns.Block(tuple(info.stats), 1, *columns_of([row_of(info)]))
    assert [*columns.checked_block(block).rows()] == [(*row_of(info)[:-1], tuple(info.stats.values()))]
    assert info.explain()


def test_connections_go_by_columns():
    """What all have in common stands once; places, of which some are not known, come back whole."""
    infos = [
        OPEN,
        replace(OPEN, local=None, reading=False),
        replace(with_stats(bytes_sent=9), peer=None, state="closed", qp=5),
    ]
    said, numbers = columns_of([*map(row_of, infos)])
    assert said[:3] == ["rdma", OPEN.reason, "client"] and said[8] == [True, False, True]
    assert numbers[:2] == [[7, 7, 9], 2048]
    block = columns.checked_block(columns.Block(tuple(OPEN.stats), 3, said, numbers))
    assert [columns.info_of(row, block.counters) for row in block.rows()] == infos


QUIET_TCP = ConnectionInfo("tcp", "why", "client", HERE, THERE, "open", stats={"bytes_unsent": 0})


@pytest.mark.parametrize(
    "info",
    [
        *(replace(OPEN, state=state.name.lower()) for state in State if state is not State.OPEN),
        replace(OPEN, reading=False),
        replace(OPEN, paused=True),
        replace(OPEN, far="far CPUs: ..."),
        replace(OPEN, stats={}),
        *(
            with_stats(**{name: 5})
            for name in ("bytes_unsent", "sends_in_flight", "bytes_unread", "slots_leased")
        ),
        with_stats(us_without_credits=5, us_open=7, waits_for_credits=1),
        with_stats(bytes_sent=4 << 20, frames_sent=1024, frame_bytes=4096),
        replace(QUIET_TCP, stats={"bytes_unsent": 5}),
    ],
)
def test_a_row_of_which_something_may_be_said_is_not_quiet(info):
    assert not quiet_rows(list(info.stats))(row_of(info))


@pytest.mark.parametrize("info", [OPEN, QUIET_TCP])
def test_a_row_of_which_nothing_is_said_is_quiet(info):
    assert quiet_rows(list(info.stats))(row_of(info)) and not info.waits() and not info.notes()


@pytest.mark.parametrize(
    "other", [replace(OPEN, state="closed"), replace(OPEN, paused=True), with_stats(slots_leased=1)]
)
def test_one_row_speaks_for_all_only_if_all_are_quiet(other):
    def is_quiet(*infos: ConnectionInfo) -> bool:
        said, numbers = columns_of([*map(row_of, infos)])
        row = columns.Block(tuple(OPEN.stats), len(infos), said, numbers).greatest()
        return row is not None and quiet_rows(list(OPEN.stats))(row)

    assert is_quiet(OPEN, replace(OPEN, qp=5, peer=None)) and not is_quiet(OPEN, other)


def test_by_tcp():
    tcp = ConnectionInfo("tcp", "no program offers RDMA there", "client", HERE, THERE, "open", stats={})
    assert "fabric: TCP: no program offers RDMA there" in tcp.explain()
    [said] = with_stats(tcp, bytes_unsent=2048, bytes_in_kernel=4096).waits()
    assert "2.0 KiB that were written wait for the peer: the kernel has 4.0 KiB more" in said
    assert not with_stats(tcp, bytes_sent=4 << 20).notes()
    [said] = with_stats(tcp, bytes_unread=9).waits()
    assert said.startswith("9 bytes have come, and this program has not read them")


def test_servers():
    server = ServerInfo([HERE, ("::1", 80)], "rdma and tcp", True, 3)
    assert server.explain().splitlines() == [
        "serving: 127.0.0.1:5000, [::1]:80 by RDMA and TCP",
        "connections: 3, of which 0 are not established yet",
    ]
    assert "waits: 7 requests (at most 100)" in replace(server, waiting=7, half_open=2, backlog=100).explain()
    assert replace(server, places=[]).explain() == "closed: connections that live on: 3"
    assert DoorInfo(HERE).explain() == "door at 127.0.0.1:5000: this process has it"
    doors = [
        DoorInfo(HERE, workers=[WorkerInfo(7, 4000), WorkerInfo(0, 4001, True)]),
        DoorInfo(HERE, front=6, port=4002),
        DoorInfo(HERE, front=6),
        DoorInfo(("::1", 80), "its TCP listener has a packet filter"),
    ]
    assert replace(server, doors=doors).explain().splitlines()[1:-1] == [
        "door at 127.0.0.1:5000: this process has it, and deals connections out to itself, process 7 (port 4000),"
        " a process of another pid namespace (port 4001, which is busy)",
        "door at 127.0.0.1:5000: process 6 has it, and sends connections to port 4002 of this one",
        "door at 127.0.0.1:5000: process 6 has it, and sends none to this one",
        "no door at [::1]:80: its TCP listener has a packet filter",
    ]
    assert replace(server, serving=False).explain().startswith("idle: start_serving()")


@pytest.mark.parametrize(
    "place", [HERE, ("0.0.0.0", 5000), ("::", 5000), ("127.0.0.1", 1), ("10.0.0.1", 5000)]
)
def test_what_a_server_has_is_counted_without_a_look_at_each(place):
    made = [
        replace(OPEN, role=role, local=local)
        for role in ("client", "server", "")
        for local in (HERE, THERE, None)
    ]
    for places in ([place], [place, HERE], [place, place]):
        server = ServerInfo(places, "tcp", True, 0)
        assert server.accepted(accepted_at(made)) == sum(map(server.has, made))


def test_numbers_with_units():
    assert [size_text(n) for n in (0, 1023, 1024, 3 << 20, 5 << 30)] == [
        "0 bytes", "1023 bytes", "1.0 KiB", "3.0 MiB", "5.0 GiB",
    ]  # fmt: skip
    assert [time_text(n) for n in (999, 1000, 999_949, 119_999_999, 120_000_000, 7_200_000_000)] == [
        "999 µs", "1.0 ms", "999.9 ms", "120.0 s", "2 min", "2 h",
    ]  # fmt: skip
    assert (place_text(None), place_text(("fe80::1%eth0", 1))) == ("?", "[fe80::1%eth0]:1")
