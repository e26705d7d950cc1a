"""The queue of senders: in order, with few wake-ups for each, and whatever is cancelled."""

import asyncio
from collections.abc import Callable

import pytest

from rdmanet.rpc.turns import Turns
from tests.support.waiting import begin, loop_turns, until_seen


class Counting(Turns):
    wakeups = 0

    def _has_run(self) -> None:
        self.wakeups += 1
        super()._has_run()


class Pipe:
    """A transport that takes so many messages until it is paused."""

    def __init__(self, room: int) -> None:
        self.turns = Counting(asyncio.get_running_loop())
        self.room = self.left = room
        self.written: list[int] = []
        self.turns.pause()

    async def send(self, number: int) -> None:
        if self.turns.busy:
            await self.turns.wait()
        self.written.append(number)
        self.left -= 1
        if self.left == 0:
            self.turns.pause()

    def drained(self) -> None:
        self.left = self.room
        self.turns.resume()

    async def drain_until(self, condition: Callable[[], object]) -> int:
        """It empties in each turn of the loop in which it is full. Returns how many turns that took."""
        turns = 0

        def is_over() -> bool:
            nonlocal turns
            if condition():
                return True
            if not self.turns._is_open:
                self.drained()
            turns += 1
            return False

        await until_seen(is_over)
        return turns


@pytest.mark.parametrize("room", [1, 2, 7, 1000])
async def test_all_write_in_order_and_few_are_woken_in_vain(room: int):
    pipe, count = Pipe(room), 500
    senders = await begin(*(pipe.send(number) for number in range(count)))
    turns = await pipe.drain_until(lambda: len(pipe.written) == count)
    assert pipe.written == list(range(count))
    assert pipe.turns.wakeups <= 3 * count
    assert turns <= 5 * (count / room + 10)  # one by one, they would take 500 turns and more
    await asyncio.gather(*senders)
    pipe.drained()
    await until_seen(lambda: not pipe.turns.busy)


async def test_who_comes_later_goes_behind():
    pipe = Pipe(1000)
    senders = await begin(*(pipe.send(number) for number in range(10)))
    pipe.drained()
    await loop_turns(1)
    senders += await begin(pipe.send(10))
    await asyncio.gather(*senders)
    assert pipe.written == list(range(11))


async def test_one_comes_in_each_of_many_turns():
    """The transport takes all, and there is never a turn in which nobody waits."""
    pipe, count = Pipe(1000), 300
    senders = await begin(pipe.send(0))
    pipe.drained()
    for number in range(1, count):
        assert pipe.turns.busy
        senders += await begin(pipe.send(number))
    await until_seen(lambda: len(pipe.written) == count)
    await asyncio.gather(*senders)
    await until_seen(lambda: not pipe.turns.busy)


@pytest.mark.parametrize("turns", range(4))
async def test_cancelled_ones_hold_up_nobody(turns: int):
    pipe = Pipe(2)
    senders = await begin(*(pipe.send(number) for number in range(40)))
    pipe.drained()
    await loop_turns(turns)
    for sender in senders[:20]:
        sender.cancel()
    await pipe.drain_until(lambda: all(sender.done() for sender in senders))
    assert pipe.written[-20:] == list(range(20, 40))
    pipe.drained()
    await until_seen(lambda: not pipe.turns.busy)


async def test_the_end_lets_all_go():
    pipe = Pipe(1)
    senders = await begin(*(pipe.send(number) for number in range(10)))
    pipe.drained()
    senders[5].cancel()
    pipe.turns.end()
    done = await asyncio.gather(*senders, return_exceptions=True)
    assert len(done) == 10 and not pipe.turns.busy
    pipe.turns.pause()
    await pipe.send(10)
