"""A host that vanishes while a connection is idle is noticed; a program that is stopped is not taken for one."""

import signal
import time

import pytest

pytestmark = pytest.mark.long

KEEPALIVE = "(1.0, 0.5, 4)"
WRONG_VERDICT_S = 6  # who takes the silent for dead has done so by then


@pytest.fixture
def cut(hosts):
    """Take the wire between the hosts down, and put it up again afterwards."""
    here, there = hosts
    yield lambda: here.ip("link", "set", "wire", "down")
    here.ip("link", "set", "wire", "up")
    here.give_address(6)  # the kernel takes it away with the link, and leaves that of IPv4
    here.wait_for_route(there.addresses[6])


def connected(hosts, server_keepalive, client_keepalive, how="idle"):
    here, there = hosts
    address = there.addresses[4]
    server = there.python("keeper.py", address, server_keepalive)
    client = here.python("client.py", how, address, int(server.line()), client_keepalive)
    assert client.line() == "connected"
    assert server.line() == "echoed"
    return server, client


@pytest.mark.parametrize("how", ["idle", "idle_blocking"])
def test_a_host_that_vanishes_is_noticed_by_both(hosts, cut, how):
    server, client = connected(hosts, KEEPALIVE, KEEPALIVE, how)
    cut()
    for side in (server, client):
        kind, _, text = side.line().partition(" ")
        assert kind == "CompletionResetError" and "transport retries exceeded" in text


@pytest.mark.parametrize("to", ["client", "server"])
def test_a_stopped_program_is_not_taken_for_dead(hosts, to):
    """Its host answers for it: what comes when it goes on is an echo, not an error."""
    server, client = connected(hosts, KEEPALIVE, KEEPALIVE, "idle_then_echo")
    stopped = client if to == "client" else server
    stopped.process.send_signal(signal.SIGSTOP)
    time.sleep(WRONG_VERDICT_S)
    stopped.process.send_signal(signal.SIGCONT)
    client.say("go on")
    assert client.line() == "echo"
    assert server.line() == "echoed"
