# cython: annotation_typing=False, nonecheck=True, auto_pickle=False
"""The deadlines of a connection: for how long it waits for its peer.

Theory
------
Each wait for the peer that could last forever has a limit here (waits.py). A close() may take ``close_timeout``, but
the time begins again as long as bytes move. A read that was cancelled, whose memory the peer may still write to, has
the same time for each answer that is owed. That the time is up is reported, and decides nothing here. How long an Abort
of ours may take is known to teardown.py.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Protocol, TypeVar

from rdmanet.protocol import State
from rdmanet.stream.connection import Connection
from rdmanet.stream.machine import Machine
from rdmanet.stream.waits import Wait, Waits

_L = TypeVar("_L")


class DeadlinesOwner(Protocol):
    """What learns that a time is up."""

    def never_made(self) -> None: ...

    def closing_is_late(self, error: TimeoutError) -> None: ...

    def cut_off(self, error: BaseException) -> None: ...


class Deadlines:
    """The limits of one connection's waits.

    :ivar close: of a close(), also of one that waits for the connection to be made
    :ivar answer: of a cancelled read, whose peer has yet to let go of memory
    :ivar first_word: of the wait for the client's first frame
    """

    def __init__(
        self,
        waits: Waits,
        machine: Machine,
        connection: Connection,
        close_timeout: float | None,
        owner: DeadlinesOwner,
    ) -> None:
        self._waits = waits
        self._machine = machine
        self._connection = connection
        self._close_timeout = close_timeout
        self._owner: DeadlinesOwner | None = owner  # until `disown`
        self.close: Wait | asyncio.TimerHandle | None = None
        self.answer: Wait | asyncio.TimerHandle | None = None
        self.first_word: Wait | asyncio.TimerHandle | None = None

    def begin_first_word(self, seconds: float, late: Callable[[_L], None], life: _L) -> None:
        """The accepting side waits for the client's first frame, for so many seconds."""
        self.first_word = self._waits.begin(seconds, late, life)

    def end_first_word(self) -> None:
        """It has come, or is late."""
        if self.first_word is not None:
            self.first_word.cancel()
            self.first_word = None

    def begin_close_when_made(self, seconds: float) -> None:
        """close() waits for the connection to be made; a second call changes nothing."""
        if self.close is None:
            self.close = self._waits.begin(seconds, self._made_late)

    def _made_late(self) -> None:
        self.close = None
        if self._machine.opening and self._owner is not None:
            self._owner.never_made()

    def begin_close(self) -> None:
        """close() has begun, or waits for TLS; a second call changes nothing."""
        if self._close_timeout is not None and self.close is None:
            progress = self._connection.progress
            self.close = self._waits.begin(self._close_timeout, self._close_is_late, progress)

    def _close_is_late(self, progress: int) -> None:
        self.close = None
        if self._machine.state is State.CLOSED or self._owner is None:
            return
        if self._connection.progress != progress:
            self.begin_close()
            return
        self._owner.closing_is_late(
            TimeoutError(
                errno.ETIMEDOUT,
                f"closing made no progress for {self._close_timeout} s, "
                f"{self._connection.get_write_buffer_size()} bytes were not sent",
            )
        )

    def begin_answer(self) -> None:
        """The peer owes an answer to a read that was given up. One that never comes would hold that read forever."""
        if self._close_timeout is not None and self.answer is None:
            awaited = self._connection.placing_unanswered
            self.answer = self._waits.begin(self._close_timeout, self._answer_is_late, awaited)

    def _answer_is_late(self, awaited: int) -> None:
        self.answer = None
        self._connection.engine.drain()
        unanswered = self._connection.placing_unanswered
        if not unanswered or self._machine.over or self._owner is None:
            return
        if unanswered != awaited:  # that one was answered
            self.begin_answer()
            return
        self._owner.cut_off(
            TimeoutError(
                errno.ETIMEDOUT,
                f"the peer has not let go of a cancelled read's memory for {self._close_timeout} s",
            )
        )

    def stop(self) -> None:
        """Nothing is waited for any more."""
        if self.close is not None:
            self.close.cancel()
            self.close = None
        if self.answer is not None:
            self.answer.cancel()
            self.answer = None
        if self.first_word is not None:
            self.end_first_word()

    def disown(self) -> None:
        """Forget the owner, which refers to us."""
        self._owner = None
