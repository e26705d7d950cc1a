"""One process of the soak: a server, and as many conversations with others as it is told.

A conversation is one connection. Who begins it says in a header how much each side sends and how each ends; from then
on both do the same: write the pattern in pieces of random sizes, compare what comes with the pattern, pause now and
then. A side that sends more than LONGEST lends what is above it: it writes memory that it changes as soon as it may.
Nothing may be wrong in what comes. All of it must come if both sides mean to go on to the end, and neither of the two
processes is killed. And it must be over in time: a conversation that isn't is a hang.

It is told what to do by lines of JSON on its standard input, and says what it did by lines on its standard output:

    {"peers": {INDEX: [PORT, LIFE], ...}}   who there is, by index; the life counts who had the index before
    {"mortal": INDEX}                       who will be killed now; answered, since all have to know before
    {"quiet": true}                         begin nothing any more; answered when nothing is left
    (end of file)                           close the server, and end
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator
from enum import IntEnum
from typing import Any

import rdmanet
from tests.streams.pattern import PERIOD, Pattern
from tests.support.lines import lines, tell

HOST = os.environ.get("RDMANET_TEST_HOST", "127.0.0.1")
HEADER = struct.Struct(
    "!IIIBBH"
)  # seed, bytes of the caller, bytes of the server, ending, caller's index, its life
LONGEST = 1 << 20
LENT_ONCE_IN = 20  # lengths
HANG_S = 60.0
STOOD_STILL_S = 0.5


class Ending(IntEnum):
    """What the caller and the server do in the end."""

    WHOLE = 0  # both send all, then end of file, and read to the other's end of file
    CALLER_ABORTS = 1
    SERVER_ABORTS = 2
    CALLER_CLOSES = 3  # after half of what it sends, with whatever is unread
    SERVER_CLOSES = 4
    CALLER_CLOSES_PAUSED = 5
    SERVER_CLOSES_PAUSED = 6


class Failure(Exception):
    """What must not be."""


class Side(asyncio.Protocol):
    """One end of a connection, whose callbacks are awaited."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.chunks: list[bytes] = []
        self.ended = False
        self.lost = asyncio.get_running_loop().create_future()
        self.writable = asyncio.Event()
        self.writable.set()
        self._news = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.chunks.append(data)
        self._news.set()

    def eof_received(self) -> bool:
        self.ended = True
        self._news.set()
        return True

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost.set_result(exc)
        self.writable.set()
        self._news.set()

    async def received(self) -> AsyncIterator[bytes]:
        """What comes, until the end of file or of the connection."""
        while True:
            while self.chunks:
                yield self.chunks.pop(0)
            if self.ended or self.lost.done():
                return
            self._news.clear()
            await self._news.wait()


class Worker:
    def __init__(self, index: int, life: int, connections: int, seed: int) -> None:
        self.index = index
        self.life = life
        self.random = random.Random(seed)
        self.peers: dict[int, tuple[int, int]] = {}
        self.mortal: set[tuple[int, int]] = set()
        self.is_quiet = False
        self.beat = self.stood_still = 0.0  # by the loop's clock: when it came round, when it came late
        self.counts: Counter[str] = Counter()
        self.under_way: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(connections)

    # --- one conversation

    async def call(self) -> None:
        """Hold a conversation with a random peer."""
        index = self.random.choice([each for each in self.peers if each != self.index])
        port, life = self.peers[index]
        seed, ending = self.random.getrandbits(32), self.random.choice([Ending.WHOLE] * 6 + list(Ending))
        up, down = self.length(), self.length()
        since = asyncio.get_running_loop().time()
        try:
            _, side = await rdmanet.create_rdma_connection(Side, HOST, port)
        except OSError as exc:
            given_up = isinstance(exc, ConnectionRefusedError) and self.has_stood_still(since)
            if (index, life) not in self.mortal and not given_up:
                raise Failure(f"could not connect to process {index}: {exc!r}") from exc
            self.counts["not let in"] += 1
            return
        side.transport.write(HEADER.pack(seed, up, down, ending, self.index, self.life))
        who = f"{ending.name} {up}/{down} to {index}: {side.transport!r}"
        await self.converse(
            side, Pattern(seed), up, Pattern(~seed), down, ending, True, (index, life), since, who
        )

    def length(self) -> int:
        """How much a side sends. Mostly little, so that there are many conversations."""
        if self.random.randrange(LENT_ONCE_IN) == 0:
            return 2 * LONGEST + self.random.randrange(2 * LONGEST)
        return int(LONGEST ** self.random.random())

    async def answer(self, side: Side) -> None:
        """What the server does: the same, from the other end."""
        began = b""
        received = side.received()
        async for chunk in received:
            began += chunk
            if len(began) >= HEADER.size:
                break
        if len(began) < HEADER.size:
            side.transport.abort()  # who called was killed before it said a word
            await side.lost
            return
        side.chunks.insert(0, began[HEADER.size :])
        seed, up, down, ending, index, life = HEADER.unpack_from(began)
        who = f"{Ending(ending).name} {up}/{down} from {index}: {side.transport!r}"
        await self.converse(
            side, Pattern(~seed), down, Pattern(seed), up, Ending(ending), False, (index, life), 0.0, who
        )

    async def converse(
        self,
        side: Side,
        ours: Pattern,
        to_send: int,
        theirs: Pattern,
        to_come: int,
        ending: Ending,
        is_caller: bool,
        peer: tuple[int, int],
        since: float,
        who: str,
    ) -> None:
        is_short = ending is not Ending.WHOLE and (ending % 2 == 1) == is_caller
        writing = asyncio.ensure_future(self.write(side, ours, to_send // 2 if is_short else to_send))
        try:
            if is_short:
                await writing
                await self.end(side, ending)
            else:
                await self.read(side, theirs, to_come)
                await writing
                if side.ended:
                    side.transport.close()
            error = await side.lost
        except AssertionError as exc:
            raise Failure(f"{who}: {exc}") from exc
        finally:
            writing.cancel()
            if not side.lost.done():
                side.transport.abort()
        self.counts["bytes"] += theirs.position
        is_whole = theirs.position == to_come and side.ended and error is None
        # Who stands still while it connects may hear that it was given up right behind its acceptance.
        given_up = (
            is_caller
            and not theirs.position
            and isinstance(error, ConnectionResetError)
            and self.has_stood_still(since)
        )
        if ending is Ending.WHOLE and not is_whole and not given_up and peer not in self.mortal:
            raise Failure(f"{who}: {theirs.position} of {to_come} came; ended: {side.ended}; {error!r}")
        self.counts["whole" if is_whole else "cut short"] += 1

    async def write(self, side: Side, pattern: Pattern, length: int) -> None:
        if length > LONGEST:
            await self.lend(side, pattern, length - LONGEST)
        while pattern.position < length and not side.lost.done():
            piece = min(int(PERIOD ** self.random.random()), length - pattern.position)
            side.transport.write(pattern.take(piece))
            if side.lost.done() or side.transport.is_closing():
                return
            await side.writable.wait()
            if self.random.random() < 0.05:
                await asyncio.sleep(self.random.random() / 100)
        if pattern.position == length and not side.transport.is_closing():
            side.transport.write_eof()

    async def lend(self, side: Side, pattern: Pattern, length: int) -> None:
        """Write so much in one piece, and change its memory when writing is not paused any more."""
        lent = bytearray()
        while len(lent) < length:
            lent += pattern.take(min(LONGEST, length - len(lent)))
        side.transport.write(memoryview(lent))
        await side.writable.wait()
        lent[:] = bytes(length)
        self.counts["lent"] += 1

    async def read(self, side: Side, pattern: Pattern, length: int) -> None:
        async for chunk in side.received():
            pattern.check(chunk)
            if pattern.position > length:
                raise Failure(f"{pattern.position} bytes came, of {length}")
            if self.random.random() < 0.05 and not side.lost.done():
                side.transport.pause_reading()
                await asyncio.sleep(self.random.random() / 100)
                side.transport.resume_reading()

    async def end(self, side: Side, ending: Ending) -> None:
        if ending in (Ending.CALLER_CLOSES_PAUSED, Ending.SERVER_CLOSES_PAUSED) and not side.lost.done():
            side.transport.pause_reading()
            await asyncio.sleep(self.random.random() / 100)
        if ending in (Ending.CALLER_ABORTS, Ending.SERVER_ABORTS):
            side.transport.abort()
        else:
            side.transport.close()

    # --- all of them

    def begin(self, conversation: Any, name: str) -> None:
        task = asyncio.ensure_future(self.watch(conversation, name))
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)

    async def watch(self, conversation: Any, name: str) -> None:
        try:
            async with asyncio.timeout(HANG_S):
                await conversation
        except TimeoutError:
            self.fail(f"{name}: a hang, it was not over in {HANG_S:.0f} s")
        except Exception as exc:
            self.fail(f"{name}: {exc!r}")

    def fail(self, text: str) -> None:
        self.counts["failed"] += 1
        tell(failure=f"process {self.index}, life {self.life}: {text}")

    def has_stood_still(self, since: float) -> bool:
        """A server gives up on a caller that keeps others waiting for a second, because it was stopped, say."""
        return self.stood_still > since or asyncio.get_running_loop().time() - self.beat > STOOD_STILL_S

    async def notice_stops(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self.beat = loop.time()
            await asyncio.sleep(0.05)
            if loop.time() - self.beat > STOOD_STILL_S:
                self.stood_still = loop.time()

    async def keep_calling(self) -> None:
        while not self.is_quiet:
            await self._places.acquire()
            if self.is_quiet:
                return
            self.begin(self.call_and_leave(), "caller")

    async def call_and_leave(self) -> None:
        try:
            await self.call()
        finally:
            self._places.release()

    def side_of_server(self) -> Side:
        side = Side()
        self.begin(self.answer(side), "server")
        return side

    async def run(self) -> None:
        server = await rdmanet.start_rdma_server(self.side_of_server, HOST, 0, backlog=1024)
        calling: asyncio.Task[None] | None = None
        noticing = asyncio.ensure_future(self.notice_stops())
        tell(port=server.sockets[0].getsockname()[1])
        async for line in lines():
            told = json.loads(line)
            if "peers" in told:
                self.peers = {int(index): (port, life) for index, (port, life) in told["peers"].items()}
                calling = calling or asyncio.ensure_future(self.keep_calling())
            if "mortal" in told:
                self.mortal.add((told["mortal"], self.peers[told["mortal"]][1]))
                tell(known=told["mortal"])
            if "quiet" in told:
                self.is_quiet = True
                while self.under_way:
                    await asyncio.wait(set(self.under_way))
                tell(counts=self.counts)
        noticing.cancel()
        server.close()
        await server.wait_closed()
        if calling is not None:
            calling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await calling


def main() -> None:
    index, life, connections, seed = map(int, sys.argv[1:])
    if index % 2:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    else:
        runner = asyncio.Runner()
    with runner:
        runner.run(Worker(index, life, connections, seed).run())


if __name__ == "__main__":
    main()
