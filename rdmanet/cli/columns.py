"""Connections as `rdmanet ss` hears of them: by columns, most of which have one value for all. They are checked here.

A line of an answer tells of some hundred connections (base/onlookers.py). Columns take a small part of the memory that
rows and objects do, and so of the time: those are made when they are asked for.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import repeat
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, json

from rdmanet.base.accounts import ConnectionInfo, columns_of, rows_of
from rdmanet.base.onlookers import ROWS_MOST
from rdmanet.protocol import State

TEXT_MOST = 300
NUMBERS_MOST = 1 << 16
"""Of counters that a line says, of all its connections: one that is said once is that of each of them."""
_HOST_MOST = 64
_DEVICE_MOST = 64
_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Numbers: TypeAlias = _Number | list[_Number]
_Texts: TypeAlias = str | list[str]
_Hosts: TypeAlias = str | None | list[str | None]
_Bools: TypeAlias = bool | list[bool]
Columns = tuple[
    _Texts, _Texts, _Texts, _Hosts, Numbers, _Hosts, Numbers, _Texts, _Bools, _Bools, _Texts, _Texts, Numbers, _Texts,
    _Texts, _Texts,
]  # fmt: skip
"""What columns_of() returns first (base/accounts.py)."""
_HOSTS_AT, _STATES_AT = (3, 5), (7, 8, 9, 15)
_WORDS_AT = {
    0: {"rdma", "tcp"},
    2: {"client", "server", ""},
    7: {state.name.lower() for state in State},
}
_TEXTS_AT = dict.fromkeys((1, 13, 14, 15), TEXT_MOST) | dict.fromkeys((10, 11), _DEVICE_MOST)
"""Which columns are what: addresses; what says more than numbers do; words, and which; texts, and how long."""


class Block:
    """What one line says of connections. Each has the counters of these names; or has none, and `counters` is empty.

    :ivar columns: those of `columns_of` (base/accounts.py)
    :ivar numbers: those of the counters
    """

    def __init__(self, counters: Sequence[str], count: int, columns: list[Any], numbers: list[Any]) -> None:
        self.counters, self.count = tuple(counters), count
        self.columns, self.numbers = columns, numbers

    def attributes(self) -> list[Any]:
        """The columns of what a ConnectionInfo has before its counters, in its order: an address is one value."""
        columns = [*self.columns]
        for at in (5, 3):
            host, port = columns[at : at + 2]
            places: Any = None if host is None else (host, port)
            if isinstance(host, list) or isinstance(port, list):
                pairs = zip(self._values(host), self._values(port), strict=False)
                places = [None if host is None else (host, port) for host, port in pairs]
            columns[at : at + 2] = [places]
        return columns

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """What `row_of` says of each (base/accounts.py)."""
        numbers: Iterable[Any] = repeat((), self.count)
        if self.numbers:
            numbers = zip(*map(self._values, self.numbers), strict=False)
        return zip(*map(self._values, self.attributes()), numbers, strict=False)

    def greatest(self) -> tuple[Any, ...] | None:
        """A row with the greatest numbers of all rows, of which nothing is to be said if there is nothing of any.

        None if they are in several states, or may be.
        """
        if any(isinstance(self.columns[at], list) for at in _STATES_AT):
            return None
        columns = [column[0] if isinstance(column, list) else column for column in self.columns]
        numbers = [max(column) if isinstance(column, list) else column for column in self.numbers]
        return next(Block(self.counters, 1, columns, numbers).rows())

    def places(self, at: int) -> set[tuple[Any, Any]]:
        """The different ones of the addresses whose hosts are column `at`."""
        return set(zip(*map(self._values, self.columns[at : at + 2]), strict=False))

    def _values(self, column: Any) -> Iterable[Any]:
        return column if isinstance(column, list) else repeat(column, self.count)


class Connections:
    """What was said of connections, in the order in which it came."""

    def __init__(self, infos: Iterable[ConnectionInfo] = ()) -> None:
        self.blocks = [Block(names, 1, *columns_of([row])) for names, row in rows_of(infos)]

    def __len__(self) -> int:
        return sum(block.count for block in self.blocks)

    def __iter__(self) -> Iterator[ConnectionInfo]:
        return (info_of(row, block.counters) for block in self.blocks for row in block.rows())

    def by_tcp(self) -> Iterator[ConnectionInfo]:
        """Those that are by TCP."""
        return (
            info_of(row, block.counters)
            for block in self.blocks
            if block.columns[0] != "rdma"
            for row in block.rows()
            if row[0] == "tcp"
        )


def possible_peers(by_pid: Mapping[int, Iterable[Connections]]) -> Iterator[tuple[int, int]]:
    """Pairs of processes that may be each other's peers: the second has called where the first has connections.

    That is found by the places of servers, which are few; peers are found by connections.
    """
    here, there = defaultdict[Any, set[int]](set), defaultdict[Any, set[int]](set)
    for pid, connections in by_pid.items():
        for block in (block for each in connections for block in each.blocks):
            role, (local_at, peer_at) = block.columns[2], _HOSTS_AT
            for place in () if role == "client" else block.places(local_at):
                here[place].add(pid)
            for place in () if role == "server" else block.places(peer_at):
                there[place].add(pid)
    for place, pids in here.items():
        yield from ((pid, peer) for pid in pids for peer in there.get(place, ()) if peer != pid)


def info_of(row: Any, names: Sequence[str]) -> ConnectionInfo:
    """The connection that a row is of."""
    numbers = row[-1]
    return ConnectionInfo(*(*row[:-1], defaultdict(int, zip(names, numbers, strict=bool(numbers)))))


def as_json(block: Block, names: Iterable[str]) -> bytes:
    """Connections of which nothing is to be said but their columns, as objects, separated by commas.

    What these have in common is encoded once: that takes a part of the time that objects take.

    :param names: of the attributes
    """
    attributes = [*zip(names, block.attributes(), strict=False)]
    pieces, text = list[list[bytes]](), b"{"
    for at, (name, column) in enumerate((*attributes, *zip(block.counters, block.numbers, strict=True))):
        text += b',"stats":{' if at == len(attributes) else b"," if at else b""
        text += json.encode(name) + b":"
        if not isinstance(column, list):
            text += json.encode(column)
            continue
        is_number = isinstance(column[0], int)
        of_each = json.encode(column)[1:-1].split(b",") if is_number else [*map(json.encode, column)]
        pieces += [text] * block.count, of_each
        text = b""
    pieces.append([text + b'},"waits":[],"notes":[]},'] * block.count)
    in_order = [b""] * (len(pieces) * block.count)
    for at, piece in enumerate(pieces):
        in_order[at :: len(pieces)] = piece
    return b"".join(in_order)[:-1]


# -- what is believed ------------------------------------------------------------------------------------


def checked_block(block: Block) -> Block:
    """:raises ValueError: it makes no sense"""
    if not 0 < block.count <= ROWS_MOST or any(
        isinstance(column, list) and len(column) != block.count for column in (*block.columns, *block.numbers)
    ):
        raise ValueError("it says more of some connections than of others, or of too many in a line")
    if len(block.numbers) not in (0, len(block.counters)):
        raise ValueError("it says more numbers than names for them, or fewer")
    if block.count * len(block.numbers) > NUMBERS_MOST:
        raise ValueError(f"it says more than {NUMBERS_MOST} numbers in a line")
    for at, words in _WORDS_AT.items():
        if not words.issuperset(_values(block.columns[at])):
            raise ValueError("it says of a connection what makes no sense")
    for at in _HOSTS_AT:
        block.columns[at] = _each(block.columns[at], checked_host)
    for at, most in _TEXTS_AT.items():
        block.columns[at] = _each(block.columns[at], partial(printable, most=most))
    return block


def _values(column: Any) -> Iterable[Any]:
    """The different ones of a column: mostly there are few."""
    return set(column) if isinstance(column, list) else (column,)


def _each(column: Any, checked: Callable[[Any], Any]) -> Any:
    """The column with what is to be believed of each value."""
    good = {value: checked(value) for value in _values(column)}
    return [good[value] for value in column] if isinstance(column, list) else good[column]


def checked_host(host: Any) -> Any:
    """:raises ValueError: it is no address"""
    if host is None:
        return None
    if len(host) > _HOST_MOST:
        raise ValueError("it says an address that is too long")
    return _host(host)


# Thousands of connections have the same few. What strangers say is neither kept without end, nor long.
@lru_cache(maxsize=4096)
def _host(host: str) -> str:
    """:raises ValueError: it is no address"""
    address, _, zone = host.partition("%")
    ipaddress.ip_address(address)
    return printable(f"{address}%{zone}" if zone else address, _HOST_MOST)


def printable(text: str, most: int) -> str:
    """A text of a stranger's, on one line, without anything that a terminal would act on."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    if cut.isprintable():
        return cut
    return "".join(character if character.isprintable() else "\ufffd" for character in cut)
