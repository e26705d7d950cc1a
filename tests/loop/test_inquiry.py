"""Connections that wait for a server on this host: one of them asks whether its loop still turns, for all."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from loop_harness import serving

from rdmanet.loop import doors, inquiry
from rdmanet.loop.base import Base
from rdmanet.loop.inquiry import Inquiry
from tests.support.waiting import until_seen

MANY = 5


class Waiting:
    """Connections that wait, as far as inquiries know, and who knocks for them."""

    def __init__(self, port: int) -> None:
        self.base = Base(asyncio.get_running_loop(), None)
        place = doors.Place("127.0.0.1", port, 0)
        self.inquiries = [Inquiry(self.base, port, place, False) for _ in range(MANY)]
        self.may_go_on = asyncio.Event()
        self.failure: Callable[[doors.Found], OSError] | None = None
        """What knocks raise, if they do."""
        self.knocks = 0

    def others(self) -> int:
        """How many wait for the answer that another one gets."""
        return sum(map(len, self.base.asking.values()))


@pytest.fixture
async def waiting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Waiting]:
    async with serving() as (_, port):
        monkeypatch.setattr(inquiry, "ASK_S", 0.01)
        knock, these = doors.knock, Waiting(port)

        async def held(found: doors.Found, loop: asyncio.AbstractEventLoop) -> Any:
            these.knocks += 1
            try:
                await these.may_go_on.wait()
            except BaseException:
                found.socket.close()
                raise
            if these.failure is not None:
                raise these.failure(found)
            return await knock(found, loop)

        monkeypatch.setattr(doors, "knock", held)
        yield these
        for each in these.inquiries:
            each.close()
        await until_seen(lambda: not these.base.tasks)


async def test_one_asks_for_all(waiting: Waiting) -> None:
    await until_seen(lambda: waiting.others() == MANY - 1)
    assert waiting.knocks == 1
    waiting.may_go_on.set()
    await until_seen(lambda: not waiting.others())
    assert all(each.answer is None for each in waiting.inquiries)


async def test_another_one_asks_if_who_asks_has_its_connection(waiting: Waiting) -> None:
    await until_seen(lambda: waiting.others() == MANY - 1)
    waiting.inquiries[1].close()  # one that waits
    waiting.inquiries[0].close()
    await until_seen(lambda: waiting.knocks == 2)
    assert waiting.others() == MANY - 3


async def test_all_hear_that_there_is_no_answer(waiting: Waiting) -> None:
    """Each with a connection of its own, which becomes readable when the server's loop answers."""
    waiting.failure = lambda found: doors.SilentError(found.socket)
    await until_seen(lambda: waiting.others() == MANY - 1)
    waiting.may_go_on.set()
    await until_seen(lambda: all(isinstance(each.answer, doors.SilentError) for each in waiting.inquiries))
    assert waiting.knocks == 1
    knocks = [each.answer.knock.fileno() for each in waiting.inquiries]  # type: ignore[union-attr]
    assert len({*knocks}) == MANY and min(knocks) >= 0


async def test_all_hear_why_it_is_no_answer_of_ours(waiting: Waiting) -> None:
    def failure(found: doors.Found) -> OSError:
        found.socket.close()
        return ConnectionResetError("the server closed its door")

    waiting.failure = failure
    await until_seen(lambda: waiting.others() == MANY - 1)
    waiting.may_go_on.set()
    await until_seen(lambda: all(each.answer is not None for each in waiting.inquiries))
    assert {str(each.answer) for each in waiting.inquiries} == {"the server closed its door"}
    assert len({id(each.answer) for each in waiting.inquiries}) == MANY
