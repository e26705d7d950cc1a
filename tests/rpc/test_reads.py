"""Memory on loan of which nothing comes: a peer that does not deliver loses its connection, and no other does."""

import asyncio
import math
from typing import Any

import pytest

from rdmanet.rpc.reads import LATE_PART, Reads
from tests.support.waiting import begin

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])


class Loan:
    """Memory of the peer's."""

    def __init__(self) -> None:
        self.under_way = 0
        self.comes = asyncio.Event()
        self.error: OSError | None = None

    @property
    def is_used(self) -> bool:
        return self.under_way > 0

    async def read_into(self, memory: Any, offset: int) -> None:
        self.under_way += 1
        await self.comes.wait()  # when this is cancelled, the device goes on
        self.under_way -= 1
        if self.error is not None:
            raise self.error


class Link:
    """Its timers are kept, and fired by hand."""

    is_over = False
    moved = 0

    def __init__(self) -> None:
        self.loop = self
        self.timers: list[tuple[float, Any]] = []
        self.error: BaseException | None = None

    def call_later(self, seconds: float, look: Any) -> Any:
        self.timers.append((seconds, look))
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def abort(self, error: BaseException) -> None:
        self.error = error

    def look(self) -> float:
        """Fire the only timer; returns its seconds."""
        [(seconds, look)] = self.timers
        self.timers.clear()
        look()
        return seconds


def made(seconds: float = 30.0) -> tuple[Link, Reads]:
    link = Link()
    return link, Reads(link, seconds)  # type: ignore[arg-type]


async def reading(reads: Reads, loan: Loan) -> asyncio.Task[None]:
    (task,) = await begin(reads.read(loan, bytearray(8), 0))  # type: ignore[arg-type]
    return task


@pytest.mark.parametrize("cancelled", [False, True])
async def test_nothing_comes(cancelled: bool):
    """Also if the call has ended: its memory is kept until the device has it back."""
    link, reads = made()
    task = await reading(reads, Loan())
    if cancelled:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [link.look() for _ in range(2)] == [30.0] * 2 and link.error is None
    assert link.look() == 30.0 * LATE_PART
    assert "nothing has come" in str(link.error) and not link.timers
    task.cancel()


async def test_what_is_progress():
    """Pieces of a long READ, and the end of another."""
    link, reads = made()
    slow, quick = Loan(), Loan()
    tasks = [await reading(reads, slow)]
    link.look()
    for turn in range(4):
        if turn % 2:
            link.moved += 1
        else:
            quick.comes.set()
            await reads.read(quick, bytearray(8), 0)  # type: ignore[arg-type]
        assert link.look() == 30.0 and link.error is None
    link.look()
    link.moved += 1  # this side was busy
    assert link.look() == 30.0 * LATE_PART and link.error is None
    slow.comes.set()
    await asyncio.gather(*tasks)
    link.look()
    assert not link.timers and link.error is None


async def test_another_loan_each_time():
    """None of them is there at two looks."""
    link, reads = made()
    for _ in range(5):
        loan = Loan()
        task = await reading(reads, loan)
        assert link.look() == 30.0 and link.error is None
        loan.error = ConnectionError("no")
        loan.comes.set()
        with pytest.raises(ConnectionError):
            await task
    link.look()
    assert not link.timers and not reads._read


async def test_there_may_be_no_limit():
    link, reads = made(math.inf)
    task = await reading(reads, Loan())
    assert not link.timers
    task.cancel()


async def test_the_connection_is_over():
    link, reads = made()
    task = await reading(reads, Loan())
    reads.stop()
    assert not link.timers
    task.cancel()
