"""Parting: until nothing is being sent, or the time is over."""

import asyncio

import pytest

from rdmanet.stream import parting
from tests.support.waiting import loop_turns


class Connection:
    def __init__(self) -> None:
        self.sending, self.asked, self.looked_at = True, 0, 0

    def is_sending(self) -> bool:
        self.looked_at += 1
        return self.sending

    def when_delivered(self) -> None:
        self.asked += 1


async def begun(connections):
    waiting = parting.Parting(asyncio.get_running_loop(), connections)
    task = asyncio.create_task(waiting.until_sent())
    await loop_turns(3)
    return waiting, task


async def test_with_nothing_to_send_it_is_over_at_once():
    _, task = await begun(set())
    await task


@pytest.mark.parametrize("ends", [0, 1])
async def test_it_waits_for_the_last_one_and_asks_again_meanwhile(ends: int):
    connections = [Connection(), Connection()]
    waiting, task = await begun(connections)
    assert sum(each.asked for each in connections) == 1
    first, last = connections[ends], connections[1 - ends]
    first.sending = False
    waiting.look()
    await loop_turns(3)
    assert not task.done()
    asked = last.asked
    assert asked
    waiting.look()  # it has sent that, and written more
    assert last.asked == asked + 1
    connections.remove(last)  # it is over
    waiting.look()
    await task


async def test_one_that_has_written_again_is_waited_for():
    connections = [Connection(), Connection()]
    waiting, task = await begun(connections)
    for each, other in (connections, connections[::-1]):
        each.sending, other.sending = False, True
        waiting.look()
        await loop_turns(3)
        assert not task.done()
    connections.clear()  # they are over
    waiting.look()
    await task


async def test_many_that_end_cost_a_few_looks_each():
    connections = [Connection() for _ in range(500)]
    waiting, task = await begun(connections)
    for each in connections:
        each.sending = False
        waiting.look()
    await task
    assert sum(each.looked_at for each in connections) <= 5 * len(connections)


async def test_a_peer_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parting, "PARTING_S", 0.001)
    _, task = await begun({Connection()})
    await task


async def test_later_looks_do_nothing():
    waiting, task = await begun(set())
    await task
    waiting.look()
