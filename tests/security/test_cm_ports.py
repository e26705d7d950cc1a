"""No other process can take a listener's port, at any moment between its first call and its last."""

import contextlib
import errno
import os
import socket

import pytest

from tests.security.conftest import ATTACKER, VICTIM, unfit

CYCLES = 5


def until_refused(cycler):
    """What it says of each cycle, until all are done or it does not get its port again."""
    cycles = [cycler.hear()]
    while len(cycles) < CYCLES and not cycles[-1]["errno"]:
        cycles.append(cycler.hear())
    return cycles


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_no_other_user_has_the_port(stage, guarded, moments, tmp_path, address):
    """The listener closes its connections first, so that its port is full of old ones when it comes again."""
    name = f"moments-{tmp_path}"
    thief = stage.start("port_thief", name, "first", user=ATTACKER)
    thief.hear()
    victim = stage.start(
        "port_cycler",
        address,
        CYCLES,
        user=VICTIM,
        without="" if guarded else "port-sharing",
        LD_PRELOAD=moments,
        MOMENTS=name,
    )
    cycles = until_refused(victim)
    thief.tell()
    result = thief.hear()
    assert result["tried"] >= 4 * 5, "with each set of options, at five moments at least"
    assert result["calls"] == ["bind", "listen", "setsockopt"]
    if guarded:
        assert result["got"] == []
        assert cycles == [{"port": cycles[0]["port"], "errno": 0}] * CYCLES
        victim.finish()
    else:
        assert result["got"]


def left_by_tcp():
    """A port that a TCP server has just left: its connections, which it has ended itself, have SO_REUSEADDR."""
    with socket.socket() as listener, contextlib.ExitStack() as ends:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        there = ends.enter_context(socket.create_connection(("127.0.0.1", port)))
        here = ends.enter_context(listener.accept()[0])
        here.shutdown(socket.SHUT_WR)
        assert there.recv(1) == b""
        there.close()
        assert here.recv(1) == b""
    return port


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_no_other_user_has_a_port_that_tcp_has_left(stage, guarded, moments, tmp_path, address):
    """To bind it takes SO_REUSEADDR, which shares with everybody. So it must be the listener's by the next call."""
    name = f"moments-{tmp_path}"
    thief = stage.start("port_thief", name, "first", "late", user=ATTACKER)
    thief.hear()
    victim = stage.start(
        "port_cycler",
        address,
        CYCLES,
        port := left_by_tcp(),
        user=VICTIM,
        without="" if guarded else "port-sharing",
        LD_PRELOAD=moments,
        MOMENTS=name,
    )
    cycles = until_refused(victim)
    thief.tell()
    result = thief.hear()
    assert result["calls"] == ["listen", "setsockopt"]
    if guarded:
        assert result["tried"] >= 4 * 5
        assert result["got"] == []
        assert cycles == [{"port": port, "errno": 0}] * CYCLES
        victim.finish()
    else:
        assert result["got"]


@pytest.mark.parametrize("how", ["listens", "quiet"])
def test_a_port_that_was_taken_first_is_not_believed_to_be_ours(stage, moments, tmp_path, how):
    """Between the listener's bind and its listen, the port that TCP has left is nobody's: who listens first has it, and
    the other is told so.
    """
    if how == "quiet" and tuple(map(int, os.uname().release.split(".")[:2])) < (6, 8):
        unfit("before Linux 6.8 the kernel does not tell of a socket that is only bound")
    name = f"moments-{tmp_path}"
    thief = stage.start("port_thief", name, "first", how, user=ATTACKER)
    thief.hear()
    port = left_by_tcp()
    victim = stage.start("port_cycler", "127.0.0.1", 1, port, user=VICTIM, LD_PRELOAD=moments, MOMENTS=name)
    assert victim.hear() == {"port": port, "errno": errno.EADDRINUSE}
    thief.tell()
    result = thief.hear()
    assert result["got"][0] == ["bind", "127.0.0.1", "SO_REUSEADDR", how == "listens"]
    assert {got[0] for got in result["got"]} == {"bind"}
