"""A worker that is busy, which a client can arrange, holds up no other client: connections are dealt to workers whose
loops turn. One connection learns that a worker does not answer, and the others go by it.

Busy workers are stopped here. The workers share one listening socket, so by TCP whoever is idle accepts.
"""

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

TIMES = 6


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def workers(stage, guarded):
    """Of three: what they said."""
    return stage.start("switch_workers", 3, *(() if guarded else ("blind",))).hear()


@pytest.fixture
def client(stage, guarded, workers):
    """It has been served by each of them."""
    client = stage.start("one_by_one", *(() if guarded else ("forgetful",)))
    served: set[int] = set()
    while served != set(workers["workers"]):
        served.update(each["served"] for each in ask(client, workers, 1))
    return client


def ask(client, workers, times):
    client.tell(port=workers["port"], times=times)
    return client.hear()["connections"]


def until_led_to(client, workers, port):
    """The next connection that is led to this port."""
    while True:
        [connection] = ask(client, workers, 1)
        if connection["led"][:1] == [port]:  # what follows are questions while it waits
            return connection


def test_one_is_busy(guarded, workers, client):
    """The control is led there again and again, and waits each time until it gives up RDMA."""
    busy, port = workers["workers"][1], workers["ports"][1]
    with stopped(busy):
        if guarded:
            connections = ask(client, workers, TIMES)
            assert sum(port in each["led"] for each in connections) <= 1
            assert {each["fabric"] for each in connections} == {"rdma"}
        else:
            connections = [until_led_to(client, workers, port) for _ in range(2)]
            assert {each["fabric"] for each in connections} == {"tcp"}
    assert busy not in {each["served"] for each in connections}


def test_who_deals_is_busy(guarded, workers, client):
    """The first waits for an answer. The control waits for it each time."""
    with stopped(workers["workers"][0]):
        connections = ask(client, workers, TIMES)
    assert {each["fabric"] for each in connections} == {"tcp"}
    assert sum("did not answer" in each["why"] for each in connections) == (1 if guarded else TIMES)
