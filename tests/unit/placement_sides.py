"""A side of a connection that places bytes, as a value: its books, its program, and what comes to it.

The books are the real ones (PeerWants, OurWants, Ledger). Around them `Side` does what the engine does, with lists for
rings and a bytearray for each read's memory. What its program writes and reads is its `Script`. When something happens
is decided elsewhere (placement_world.py); here is what may happen and what it does.

The byte at position p of a stream is p modulo 251, so what is read shows where it came from. A WRITE needs a key that
is good, reads get the right bytes, and in the end all was read and nobody is owed anything. Anything else is a
`Violation`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from rdmanet.credit import FEATURE_PLACEMENT, Hello, Ledger

DATA, CREDIT, PING, PONG, FIN, ABORT, PLACED = range(1, 8)
WRITE = 0  # no frame
FRAME_BYTES = 3  # of a DATA frame, at most
SLOT_BYTES = 512
MEMORY_BYTES = 1 << 12  # addresses between one read's memory and the next
FIXED, LOOSE, SLOTS = "fixed", "loose", "slots"


class Violation(AssertionError):
    """A rule was broken, or something that the rules are to give was not there."""


def pattern(start: int, count: int) -> bytes:
    return bytes(position % 251 for position in range(start, start + count))


class ReadOf(NamedTuple):
    """A read of a script: what it wants, and in which buffers."""

    kind: str
    sizes: tuple[int, ...]


def fixed(*sizes: int) -> ReadOf:
    return ReadOf(FIXED, sizes)


def loose(size: int) -> ReadOf:
    return ReadOf(LOOSE, (size,))


def slots(size: int) -> ReadOf:
    return ReadOf(SLOTS, (size,))


@dataclass(frozen=True)
class Script:
    """What a side's program does."""

    writes: int = 0
    """bytes, which are there to be sent from the beginning"""
    places: bool = True
    ends: str = ""
    """fin: when all is written; abort: at any time"""
    reads: tuple[ReadOf, ...] = ()
    """then it reads what comes, byte by byte"""
    slots: int = 2
    cancels: int = 0
    switches: int = 0
    pauses: int = 0
    closes: bool = False
    news: int = 0
    """Credits that are due because of something else"""


class Read:
    def __init__(self, what: ReadOf, number: int, start: int) -> None:
        self.kind, self.sizes = what
        self.size = sum(what.sizes)
        self.address = (number + 1) * MEMORY_BYTES
        self.memory = bytearray(self.size)
        self.start = start  # the position of its first byte
        self.have = 0
        self.named = 0
        self.wants: list[Any] = []
        self.stopped = False

    def at(self, address: int, length: int) -> slice | None:
        """These bytes of memory, if they are this read's."""
        offset = address - self.address
        return slice(offset, offset + length) if 0 <= offset and offset + length <= self.size else None


class Side:
    """The engine of one side, and its program."""

    def __init__(self, placement: Any, letter: str, script: Script, peers: Script) -> None:
        ours, theirs = (Hello(SLOT_BYTES, s.slots, 8, s.slots, FEATURE_PLACEMENT) for s in (script, peers))
        self.letter = letter
        self.ledger = Ledger(ours, theirs)
        self.peer_wants = placement.PeerWants(0)
        self.wants = placement.OurWants(0)
        self.over = placement.OVER
        self.script = script
        self.peer: Side
        self.channel: list[tuple[Any, ...]] = []  # what comes: WRITEs and frames
        self.written = 0
        self.consumed = 0  # bytes that reads have returned
        self.number = 0  # of the next read
        self.reading: Read | None = None
        self.leaving: list[Read] = []  # given up, and their memory may still be written to
        self.inbox: list[tuple[int, int, bytes | None, bool]] = []  # address, length, bytes, has a slot
        self.keys: dict[int, Any] = {}
        self.cancels, self.switches, self.pauses = script.cancels, script.switches, script.pauses
        self.news = script.news
        self.may_speak = letter == "a"
        self.paused = self.ended = self.closed = self.dead = False

    # -- sending

    def sizes(self, most: int) -> list[int]:
        return sorted({1, most} if most > 0 else set())

    def posts(self) -> list[tuple[str, int]]:
        left = self.script.writes - self.written
        if not left or not self.may_speak or not self.ledger.may_send(DATA):
            return []
        found = [("data", n) for n in self.sizes(min(left, FRAME_BYTES))]
        want = self.peer_wants.current() if self.script.places else None
        if want is not None:
            found += [("place", n) for n in self.sizes(min(left, self.peer_wants.room(want)))]
        return found

    def post(self, how: str, count: int) -> None:
        data = pattern(self.written, count)
        self.written += count
        if how == "data":
            self.peer_wants.sent(count)
            self.transmit(DATA, count, data)
        else:
            self.place(data)

    def place(self, data: bytes) -> None:
        want = self.peer_wants.current()
        self.write(want, data)
        self.peer_wants.sent(len(data))
        self.transmit(PLACED, 16, (want.serial, self.peer_wants.position))

    def write(self, want: Any, data: bytes) -> None:
        self.peer.channel.append((WRITE, self.peer_wants.target(want), want.rkey, data))

    def transmit(self, kind: int, length: int, body: Any = None) -> None:
        if kind in (DATA, PLACED):
            self.ledger.data_sent()
        else:
            self.ledger.control_sent(kind)
        self.peer.channel.append((kind, length, self.ledger.granted, self.ledger.reaped, body))

    def has_news(self) -> bool:
        wants = self.wants
        return bool(
            self.news or wants.unwant_due or wants.next_to_say() is not None or self.peer_wants.answer_due
        )

    def due(self) -> int:
        return self.ledger.control_due(self.has_news()) if self.may_speak else 0

    def speak(self) -> None:
        kind = self.due()
        if kind != CREDIT:
            self.transmit(kind, 8)
            return
        said = []
        while (want := self.wants.next_to_say()) is not None:
            rkey = (self.number << 8) + len(self.keys) + 1000 * len(said)
            while rkey in self.keys:
                rkey += 1
            said.append(self.wants.say(want, rkey))
            self.keys[rkey] = want
        body = tuple(said), self.wants.unwanted(), self.peer_wants.answered()
        self.news -= bool(self.news)
        self.transmit(CREDIT, 1 if any(body) else 0, body)

    def finish(self) -> None:
        if self.script.ends == "abort":
            self.transmit(ABORT, 0)
            self.die()
        else:
            self.transmit(FIN, 0)
            self.peer_wants.finish()

    def finishes(self) -> bool:
        if not self.may_speak or self.ledger.fin_sent:
            return False
        return self.script.ends == "abort" or (
            self.written == self.script.writes and (self.script.ends == "fin" or self.closed)
        )

    # -- what comes

    def lands(self) -> bool:
        return any(item[0] == WRITE for item in self.channel)

    def land(self) -> None:
        index = next(i for i, item in enumerate(self.channel) if item[0] == WRITE)
        _, address, rkey, data = self.channel.pop(index)
        want = self.keys.get(rkey)
        if want is None:
            raise Violation("a WRITE by a key that is good no more")
        if not (want.address <= address and address + len(data) <= want.address + want.length):
            raise Violation("a WRITE to bytes that were not named")
        for read in self.reads():
            if (where := read.at(address, len(data))) is not None:
                read.memory[where] = data
                return
        raise Violation("a WRITE to memory that was let go")

    def reads(self) -> list[Read]:
        return [*self.leaving, *([] if self.reading is None else [self.reading])]

    def hear(self) -> None:
        while self.channel[0][0] == WRITE:
            self.land()
        kind, length, granted, reaped, body = self.channel.pop(0)
        self.ledger.frame_received(16 + length, kind, length, granted, reaped)
        self.may_speak = True
        if kind == DATA:
            self.wants.received(length)
            self.came(0, length, body, True)
        elif kind == PLACED:
            self.hear_placed(*body)
        elif kind == CREDIT and length:
            said, unwanted, answered = body
            self.wants.hear(answered)
            self.peer_wants.hear(said, unwanted)
        elif kind in (FIN, ABORT):
            self.wants.end()
            self.ended = True
            if kind == ABORT:
                self.die()
        self.go_on()

    def hear_placed(self, serial: int, upto: int) -> None:
        want = self.wants.place(serial, upto)
        target, length = self.wants.target, self.wants.placed
        self.ledger.slots_freed(1)
        for read in self.reads():
            if want in read.wants:
                self.came(
                    target, length, bytes(read.memory[read.at(target, length)]) if read.stopped else None
                )
                return
        raise Violation("bytes were placed for no read")

    def came(self, address: int, length: int, data: bytes | None, has_slot: bool = False) -> None:
        self.inbox.append((address, length, data, has_slot))

    # -- reading

    def begins(self) -> bool:
        if self.reading is not None or self.closed:
            return False
        if self.number < len(self.script.reads):
            return True
        return bool(self.inbox)

    def begin(self) -> None:
        reads = self.script.reads
        what = reads[self.number] if self.number < len(reads) else slots(1)
        self.reading = Read(what, self.number, self.consumed)
        self.number += 1
        self.go_on()

    def go_on(self) -> None:
        """Give what has come to whom it is for, let go of memory, and name some."""
        self.let_go()
        if self.closed:
            self.take(None, self.inbox_length())
        read = self.reading
        if read is None or read.stopped or self.paused:
            return
        self.take(read, min(self.inbox_length(), read.size - read.have))
        if self.is_done(read):
            self.returns(read)
        elif not self.inbox and not self.ended:
            self.name(read)

    def is_done(self, read: Read) -> bool:
        if self.is_held(read):
            return False
        return read.have == read.size or self.ended or (read.kind == LOOSE and read.have > 0)

    def is_held(self, read: Read) -> bool:
        """Whether the peer may still write to its memory."""
        return any(want.state != self.over for want in read.wants)

    def returns(self, read: Read) -> None:
        if bytes(read.memory[: read.have]) != pattern(self.consumed, read.have):
            raise Violation(f"a read at {self.consumed} got {bytes(read.memory[: read.have])!r}")
        self.consumed += read.have
        self.reading = None

    def name(self, read: Read) -> None:
        kind, ends = read.kind == FIXED, 0
        if read.kind == SLOTS or (read.kind == LOOSE and read.have):
            return
        if not any(want.state != self.over for want in read.wants):
            read.named = read.have
        for size in read.sizes:
            ends += size
            if read.named < ends and self.wants.may_name(kind):
                read.wants.append(self.wants.name(read.address + read.named, ends - read.named, kind))
                read.named = ends

    def inbox_length(self) -> int:
        return sum(entry[1] for entry in self.inbox)

    def take(self, read: Read | None, count: int) -> None:
        """Out of the inbox, into the read's memory, or to nobody."""
        while count:
            address, length, data, has_slot = self.inbox[0]
            part = min(count, length)
            if read is not None:
                where = slice(read.have, read.have + part)
                if data is not None:
                    read.memory[where] = data[:part]
                elif read.at(address, part) != where:
                    raise Violation("placed bytes are not where they are read")
                read.have += part
            count -= part
            if part == length:
                del self.inbox[0]
                if has_slot:
                    self.ledger.slots_freed(1)
            else:
                self.inbox[0] = (
                    address + part,
                    length - part,
                    None if data is None else data[part:],
                    has_slot,
                )

    def let_go(self) -> None:
        """Keys end when their Wants are over. Reads that were given up end when all theirs are."""
        for rkey in [rkey for rkey, want in self.keys.items() if want.state == self.over]:
            del self.keys[rkey]
        self.leaving = [read for read in self.leaving if self.is_held(read)]
        if self.reading is not None and self.reading.stopped and not self.is_held(self.reading):
            self.reading = None

    def pause(self) -> None:
        self.pauses -= 1
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.go_on()

    # -- giving up

    def stop(self, read: Read) -> None:
        """Its bytes are the stream's next, and its memory is to be its program's again."""
        for i, (address, length, data, has_slot) in enumerate(self.inbox):
            if data is None and (where := read.at(address, length)) is not None:
                self.inbox[i] = address, length, bytes(read.memory[where]), has_slot
        if read.have:
            self.inbox.insert(0, (0, read.have, bytes(read.memory[: read.have]), False))
            read.have = 0
        read.stopped = True
        self.wants.unwant()

    def cancel(self) -> None:
        self.cancels -= 1
        self.stop(self.reading)
        self.go_on()

    def switch(self) -> None:
        self.switches -= 1
        self.stop(self.reading)
        self.leaving.append(self.reading)
        self.reading = None
        self.go_on()

    def may_stop(self) -> bool:
        return self.reading is not None and not self.reading.stopped

    def close(self) -> None:
        self.closed = True
        if self.may_stop():
            self.stop(self.reading)
        self.go_on()

    def die(self) -> None:
        """The queue pair is gone: nothing lands or comes any more."""
        self.dead = self.ended = True
        self.paused = False
        self.wants.end()
        self.peer_wants.finish()
        self.channel.clear()
        self.go_on()

    # -- in the end

    def check_over(self) -> None:
        read, has_read = self.reading, self.consumed
        if read is not None:  # it may wait for what is never sent
            asked = read.start + (1 if read.kind == LOOSE else read.size)
            if self.ended or read.stopped or asked <= self.peer.written:
                raise Violation(f"a read of {self.letter} does not end")
            has_read += read.have
        elif self.keys or self.wants.count or self.leaving:
            raise Violation(f"{self.letter} has not got its memory back")
        if self.dead:
            return
        if self.wants.unanswered or self.peer_wants.answer_due or self.news:
            raise Violation(f"{self.letter} has more to say")
        if self.written != self.script.writes and not self.peer.dead:
            raise Violation(f"{self.letter} has sent {self.written} bytes of {self.script.writes}")
        if not self.closed and not self.peer.dead and has_read != self.peer.written:
            raise Violation(f"{self.letter} has read {has_read} bytes of {self.peer.written}")
