"""Parting: until nothing is being sent, or the time is over."""

import asyncio

import pytest

from rdmanet.stream import parting


class Connection:
    def __init__(self) -> None:
        self.sending, self.asked = True, 0

    def is_sending(self) -> bool:
        return self.sending

    def when_delivered(self) -> None:
        self.asked += 1


async def begun(connections):
    waiting = parting.Parting(asyncio.get_running_loop(), connections)
    task = asyncio.create_task(waiting.until_sent())
    await asyncio.sleep(0)
    return waiting, task


async def test_with_nothing_to_send_it_is_over_at_once():
    _, task = await begun(set())
    await task


async def test_it_waits_for_the_last_one_and_asks_again_meanwhile():
    first, last = Connection(), Connection()
    connections = {first, last}
    waiting, task = await begun(connections)
    assert first.asked == last.asked == 1
    first.sending = False
    waiting.look()
    await asyncio.sleep(0)
    assert not task.done()
    assert (first.asked, last.asked) == (1, 2)
    connections.discard(last)  # it is over
    waiting.look()
    await task


async def test_a_peer_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parting, "PARTING_S", 0.001)
    _, task = await begun({Connection()})
    await task


async def test_later_looks_do_nothing():
    waiting, task = await begun(set())
    await task
    waiting.look()
