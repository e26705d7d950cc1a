"""A process at its limit of descriptors refuses newcomers, with the reason, and keeps what it has.

A connection between linked processes gives its descriptor back once it stands, so most of these are without that: as
connections are with other hosts.
"""

import contextlib
import signal
import socket

import pytest

LIMIT = 256
KEPT = "handover"  # the guard without which each connection keeps its descriptor
# A quarter of them is for those who wait for their turn: more at once are told so.
REASONS = ("no descriptors left", "too many connections are being made")


def connect(crowds, how="at once"):
    """All processes at once, and each all its clients at once, or one after the other."""
    for crowd in crowds:
        crowd.hear()
    for crowd in crowds:
        crowd.tell(connect=how)
    return [crowd.hear() for crowd in crowds]


def echoes(crowds):
    for crowd in crowds:
        crowd.tell(echo=True)
    return [crowd.hear() for crowd in crowds]


def check(server, crowds, results, least=LIMIT / 2, limit=LIMIT):
    """Every client gets an answer, and keeps its connection if it got one; the server can go on."""
    accepted = sum(result["accepted"] for result in results)
    errors = [error for result in results for error in result["errors"]]
    assert least < accepted < limit
    assert all(
        "ConnectionRefusedError" in error and any(reason in error for reason in REASONS) for error in errors
    ), errors
    assert (
        max(result["seconds"] for result in results) < 5
    )  # a second, where the machine has nothing else to do
    for _ in range(2):
        assert echoes(crowds) == [{"echoes": result["accepted"], "others": []} for result in results]
    server.tell()
    assert server.hear() == {"connections": accepted, "can_open": True}
    return accepted


def test_the_last_descriptors_are_the_programs(stage, guarded):
    """Without a reserve a server accepts until it can't any more, and later clients are not told why."""
    count = LIMIT + 4
    without = KEPT if guarded else f"{KEPT},reserve"
    server = stage.start("echo_server", "127.0.0.1", LIMIT, without=without)
    port = server.hear()["port"]
    impatient = {} if guarded else {"RDMANET_SOFT_CM_TIMEOUT": "200"}
    crowd = stage.start("crowd", port, count, 0, **impatient)
    results = connect([crowd], "in turn")
    assert results[0]["accepted"] + sum(results[0]["errors"].values()) == count
    if not guarded:
        assert any("no descriptors left" not in error for error in results[0]["errors"]), results
        return
    check(server, [crowd], results)
    errors = server.finish()
    assert (
        f"none of the {LIMIT} descriptors (RLIMIT_NOFILE) is left for new connections: one was refused"
        in errors
    )


@pytest.mark.parametrize(
    "limit, least, each, processes",
    [
        (LIMIT, LIMIT / 4, 100, 4),
        pytest.param(1024, 256, 300, 4, marks=pytest.mark.long),
    ],
)
def test_all_at_once(stage, limit, least, each, processes):
    server = stage.start("echo_server", "127.0.0.1", limit, without=KEPT)
    port = server.hear()["port"]
    crowds = [stage.start("crowd", port, each, 0) for _ in range(processes)]
    results = connect(crowds)
    refused = sum(sum(result["errors"].values()) for result in results)
    assert check(server, crowds, results, least, limit) + refused == each * processes
    server.finish()


@pytest.mark.parametrize("processes", [*(pytest.param(few, marks=pytest.mark.long) for few in (1, 2)), 4])
def test_who_was_accepted_can_work(stage, processes):
    """A process takes descriptors beside those of its connections, most of them while it is met.

    They are kept for the ones that are accepted, however many ask before the first of them gets on.
    """
    limit, each = 64, 120 // processes
    for _ in range(3):
        server = stage.start("echo_server", "127.0.0.1", limit, without=KEPT)
        port = server.hear()["port"]
        crowds = [stage.start("crowd", port, each, 0) for _ in range(processes)]
        for crowd in crowds:
            crowd.hear()
        server.stop()
        for crowd in crowds:
            crowd.tell(connect="at once", tell=True)
        for crowd in crowds:
            assert crowd.hear() == {"asking": True}
        server.send_signal(signal.SIGCONT)
        results = [crowd.hear() for crowd in crowds]
        refused = sum(sum(result["errors"].values()) for result in results)
        assert check(server, crowds, results, 0, limit) + refused == 120
        for crowd in crowds:
            crowd.finish()
        server.finish()


def eat_all(server):
    """The program takes all descriptors, also those that the engine had at first. Returns how many it has taken."""
    ate, more = 0, True
    while more:
        server.tell(eat=True)
        more = server.hear()["ate"]
        ate += more
    return ate


def test_none_left_at_all(stage):
    """The program has taken them itself, the last ones too: newcomers are told so all the same."""
    server = stage.start("echo_server", "127.0.0.1", LIMIT, without=KEPT)
    port = server.hear()["port"]
    friend, crowd = stage.start("crowd", port, 10, 0), stage.start("crowd", port, 50, 0)
    (result,) = connect([friend])
    assert result["accepted"] == 10
    # The link between the two is being made, for which the engine has descriptors that it closes soon.
    for _ in range(2):
        assert echoes([friend]) == [{"echoes": 10, "others": []}]
    assert eat_all(server) > 100
    (result,) = connect([crowd])
    assert (result["accepted"], sum(result["errors"].values())) == (0, 50)
    assert all("no descriptors left" in error for error in result["errors"]), result
    assert result["seconds"] < 1
    assert echoes([friend]) == [{"echoes": 10, "others": []}]
    server.close()  # it can't do anything any more


def test_linked_processes_need_none(stage):
    """More connections than descriptors; the end of a process is noticed at once, and the others stay."""
    count = 2 * LIMIT
    server = stage.start("echo_server", "127.0.0.1", LIMIT)
    port = server.hear()["port"]
    crowds = [stage.start("crowd", port, count, LIMIT) for _ in range(2)]
    results = connect(crowds, "in turn")
    assert [(result["accepted"], result["errors"]) for result in results] == [(count, {})] * 2
    for _ in range(2):
        assert echoes(crowds) == [{"echoes": count, "others": []}] * 2
    server.tell()
    assert server.hear() == {"connections": 2 * count, "can_open": True}
    crowds[0].close()
    connections = 2 * count
    while connections > count:
        server.tell()
        connections = server.hear()["connections"]
    assert connections == count
    assert echoes(crowds[1:]) == [{"echoes": count, "others": []}]
    crowds[1].finish()
    server.finish()


def test_a_client_at_its_own_limit(stage):
    """Its next connection fails at once, and says why; the others go on."""
    server = stage.start("echo_server", "127.0.0.1", 0)
    port = server.hear()["port"]
    crowd = stage.start("crowd", port, 100, 64, without=KEPT)
    (result,) = connect([crowd], "in turn")
    assert 10 < result["accepted"] < 64
    assert result["accepted"] + sum(result["errors"].values()) == 100
    assert all("Errno 24" in error for error in result["errors"]), result
    said = f"no file descriptor left for a connection to 127.0.0.1:{port} (RLIMIT_NOFILE, `ulimit -n`)"
    assert any(said in error for error in result["errors"]), result
    assert result["seconds"] < 1
    for _ in range(2):
        assert echoes([crowd]) == [{"echoes": result["accepted"], "others": []}]
    server.finish()


def while_some_wait(stage, listener, *options, **how):
    """What a server without descriptors does in a second, at which some wait to be accepted."""
    server = stage.start("exhausted", *options, **how)
    place = server.hear()[listener]
    kind = socket.SOCK_SEQPACKET if listener in ("register", "queue_pair") else socket.SOCK_STREAM
    family = socket.AF_INET if listener == "tcp" else socket.AF_UNIX
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stranger = stack.enter_context(socket.socket(family, kind))
            stranger.connect(("127.0.0.1", place) if listener == "tcp" else f"\0{place}")
        server.tell()
        return server.hear()


@pytest.mark.parametrize("listener", ["door", "register"])
def test_who_waits_where_the_loop_cannot_accept(stage, guarded, listener):
    """A listener stays readable then. Whoever looks again in each turn takes all of a CPU that it can get.

    How much that is depends on what else runs here. So looks are counted.
    """
    done = while_some_wait(stage, listener, *([] if guarded else ["restless"]))
    assert (done["looks"] <= 3) is guarded, done


@pytest.mark.parametrize("listener", ["name", "queue_pair", "tcp"])
def test_who_waits_where_the_device_cannot_accept(stage, guarded, accepts, listener):
    """The engine tries ten times a second. It has no spare descriptor yet, with which it would refuse them."""
    options = ["connected"] if listener == "queue_pair" else []
    without = "" if guarded else "accept-rest"
    done = while_some_wait(stage, listener, *options, without=without, LD_PRELOAD=accepts)
    assert done["accepts_in_vain"]
    assert (done["accepts_in_vain"] < 100) is guarded, done
