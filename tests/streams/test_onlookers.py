"""What a loop answers to who looks at its process: in slices, to a few at a time, and not for ever."""

import asyncio
import contextlib
import errno
import itertools
import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness import Net

from rdmanet.base import onlookers, watching
from rdmanet.base.accounts import ConnectionInfo, ServerInfo, row_of, rows_of
from rdmanet.base.call_accounts import CallsInfo
from rdmanet.cli.columns import Block
from tests.support.descriptors import descriptors_left
from tests.support.waiting import begin, loop_turns, readable, until_seen


class Many:
    """A source with so many connections that its answer fills any socket."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked = 0

    modules: tuple[str, ...] = ()

    def headline(self) -> dict[str, Any]:
        return {"loop": 1, "library": "", "engines": []}

    def connection_rows(self) -> Iterator[tuple[list[str], tuple[Any, ...]]]:
        return rows_of(self.connection_infos())

    def calls_infos(self) -> Iterator[CallsInfo]:
        return iter(())

    def server_infos(self) -> Iterator[ServerInfo]:
        return iter(())

    def connection_infos(self) -> Iterator[ConnectionInfo]:
        for port in range(self.count):
            self.asked += 1
            yield ConnectionInfo("tcp", "why " * 50, "client", ("127.0.0.1", port), ("127.0.0.1", 1), "open")


class Mixed(Many):
    """Connections with other counters, and without."""

    def connection_infos(self) -> Iterator[ConnectionInfo]:
        for stats in ({"a": 1, "b": 2}, {}, {"a": 3, "b": 4}, {"c": 5}):
            yield ConnectionInfo("tcp", "", "client", ("127.0.0.1", 1), None, "open", stats=stats)


def watched(source: Many) -> onlookers.Onlookers:
    loop = asyncio.get_running_loop()
    return onlookers.Onlookers(source, onlookers.Readers(loop, loop.add_reader, loop.remove_reader))


def look(at: onlookers.Onlookers) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(at._socket.getsockname())
    sock.setblocking(False)
    return sock


async def read_all(sock: socket.socket) -> list[bytes]:
    """All lines: each but the first is asked for."""
    heard = bytearray()
    while True:
        await readable(sock.fileno())
        some = sock.recv(1 << 20)
        if not some:
            return bytes(heard).splitlines()
        heard += some
        if heard.endswith(b"\n"):
            with contextlib.suppress(BrokenPipeError):  # it was the last one
                sock.send(b"\n")


def rows_said(lines: list[bytes]) -> list[list[Any]]:
    return [row for line in lines[1:-1] for row in rows_in(json.loads(line))]


def rows_in(line: dict[str, Any]) -> list[Any]:
    """As JSON has them."""
    block = Block(line["counters"], line["count"], line["columns"], line["numbers"])
    rows: list[Any] = json.loads(json.dumps([*block.rows()]))
    return rows


async def test_the_loop_does_its_other_work_meanwhile(monkeypatch):
    monkeypatch.setattr(onlookers, "SLICE_S", 0)
    source = Many(2000)
    at, turns = watched(source), 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await loop_turns()

    (other,) = await begin(other_work())
    with look(at) as sock:
        lines = await read_all(sock)
    other.cancel()
    at.close()
    assert json.loads(lines[0])["version"] == onlookers.VERSION
    rows = rows_said(lines)
    assert len(rows) == 2000 and json.loads(lines[-1]) == {"connections": 2000}
    assert rows[0] == json.loads(json.dumps(row_of(next(source.connection_infos()))))
    assert turns >= 200


async def test_a_line_is_no_shorter_because_others_had_the_cpu(monkeypatch):
    """Shorter lines are more lines, just where there is no time for them. At each look two slices have passed."""
    monkeypatch.setattr(onlookers, "SLICE_S", 0.05)
    clock = itertools.count(time.monotonic(), 0.1)
    times = SimpleNamespace(monotonic=lambda: next(clock), thread_time=time.thread_time)
    monkeypatch.setattr(onlookers, "time", times)
    at = watched(Many(onlookers.ROWS_MOST))
    with look(at) as sock:
        lines = await read_all(sock)
    at.close()
    assert [json.loads(line)["count"] for line in lines[1:-1]] == [onlookers.ROWS_MOST]


async def test_lines_that_are_asked_for_at_once_take_a_turn_each(monkeypatch):
    monkeypatch.setattr(onlookers, "SLICE_S", 100.0)
    source = Many((onlookers.LINES_AHEAD + 2) * onlookers.ROWS_MOST)
    at, made = watched(source), list[int]()
    with look(at) as sock:
        await readable(sock.fileno())
        sock.recv(1 << 20)
        sock.send(b"\n" * onlookers.LINES_AHEAD)
        while len(made) < 100 and source.asked <= (onlookers.LINES_AHEAD - 1) * onlookers.ROWS_MOST:
            await loop_turns()
            made.append(source.asked // onlookers.ROWS_MOST)
        assert set(range(1, onlookers.LINES_AHEAD)) <= set(made)
        await loop_turns(10)
        assert source.asked <= onlookers.LINES_AHEAD * onlookers.ROWS_MOST + 1
    await until_seen(lambda: not at.answers)
    at.close()


async def test_who_asks_for_too_much_at_once_is_given_up():
    at = watched(Many(10 * onlookers.ROWS_MOST))
    with look(at) as sock:
        await readable(sock.fileno())
        sock.recv(1 << 20)
        sock.send(b"\n" * (onlookers.LINES_AHEAD + 1))
        await until_seen(lambda: not at.answers)
    at.close()


async def test_no_more_is_made_than_is_asked_for():
    source = Many(10 * onlookers.ROWS_MOST)
    at = watched(source)
    with look(at) as sock:
        await readable(sock.fileno())
        assert json.loads(sock.recv(1 << 20))["version"] == onlookers.VERSION
        await loop_turns(10)
        assert source.asked == 0
        sock.send(b"\n")
        await until_seen(lambda: source.asked)
        await loop_turns(10)
        assert source.asked <= onlookers.ROWS_MOST + 1
        assert len(await read_all(sock)) > 3
    await until_seen(lambda: not at.answers)
    at.close()


def importing(monkeypatch: pytest.MonkeyPatch) -> Many:
    """A source that takes modules which nobody has imported."""
    source = Many(1)
    source.modules = ("colorsys", "sched", "symtable")
    for name in source.modules:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return source


async def test_modules_are_imported_one_in_a_turn(monkeypatch):
    source = importing(monkeypatch)
    lines = onlookers._lines_of(source)
    for number, _ in enumerate(source.modules, 1):
        assert next(lines) == b""
        assert [name in sys.modules for name in source.modules] == [at < number for at in range(3)]
    assert json.loads(next(lines))["version"] == onlookers.VERSION
    source = importing(monkeypatch)
    at = watched(source)
    with look(at) as sock:
        assert len(rows_said(await read_all(sock))) == 1
    at.close()


async def test_modules_are_imported_when_who_looks_has_the_last_descriptor(monkeypatch):
    source = importing(monkeypatch)
    at = watched(source)
    with look(at) as sock:
        await until_seen(lambda: at.answers)
        with descriptors_left(0):
            await until_seen(lambda: all(name in sys.modules for name in source.modules) or not at.answers)
        assert len(rows_said(await read_all(sock))) == 1
    at.close()


async def test_who_asks_before_it_was_told_is_given_up(monkeypatch):
    at = watched(importing(monkeypatch))
    with look(at) as sock:
        sock.send(b"\n")
        assert await read_all(sock) == [] and not at.answers
    at.close()


async def test_names_of_counters_stand_once_in_a_line():
    """Connections that have none yet have no names, either, and a line of their own."""
    at = watched(Mixed(1))
    with look(at) as sock:
        lines = [json.loads(line) for line in await read_all(sock)]
    assert [(line["counters"], [row[-1] for row in rows_in(line)]) for line in lines[1:-1]] == [
        (["a", "b"], [[1, 2], [3, 4]]),
        (["c"], [[5]]),
        ([], [[]]),
    ]
    at.close()


async def test_who_asks_for_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(onlookers, "PATIENCE_S", 0.05)
    source = Many(1)
    at = watched(source)
    with look(at):
        await until_seen(lambda: at.answers)
        await until_seen(lambda: not at.answers)
    assert not source.asked
    at.close()


async def test_who_asks_but_does_not_read_is_given_up():
    source = Many(1_000_000)
    at = watched(source)
    with look(at) as sock:
        await until_seen(lambda: at.answers)

        def has_ended() -> bool:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                sock.send(b"\n")
            return not at.answers

        await until_seen(has_ended)
    assert source.asked < source.count  # no more was made than could be sent
    at.close()


async def test_who_asks_too_slowly_is_given_up(monkeypatch):
    monkeypatch.setattr(onlookers, "PATIENCE_S", 0.05)
    monkeypatch.setattr(onlookers, "PATIENCE_IN_ALL_S", 0.2)
    source = Many(1_000_000)
    at = watched(source)
    with look(at) as sock:
        await until_seen(lambda: at.answers)

        def has_ended() -> bool:
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                sock.recv(1 << 20)
                sock.send(b"\n")
            return not at.answers

        await until_seen(has_ended)
    assert source.asked < source.count
    at.close()


async def test_few_are_answered_at_a_time():
    source = Many(20_000)
    at = watched(source)
    looking = [look(at) for _ in range(onlookers.ONLOOKERS_MOST)]
    await until_seen(lambda: len(at.answers) == onlookers.ONLOOKERS_MOST)
    with look(at) as late:
        assert await read_all(late) == []
    for sock in looking:
        sock.close()
    await until_seen(lambda: not at.answers)
    at.close()


class Full:
    """A listener of a process that has no descriptors left."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.tried = 0

    def fileno(self) -> int:
        return self.listener.fileno()

    def accept(self) -> None:
        self.tried += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_the_loop_rests_where_nobody_can_be_accepted():
    source = Many(1)
    at = watched(source)
    real = at._socket
    with look(at) as sock:
        at._socket = full = Full(real)  # type: ignore[assignment]
        await until_seen(lambda: at._resting)
        await loop_turns(10)
        assert full.tried == 1
        at._socket = real
        at._resting.cancel()
        at._begin()  # a second later
        assert len(await read_all(sock)) == 3
    at.close()


async def test_the_end_ends_answers():
    source = Many(20_000)
    at = watched(source)
    with look(at):
        await until_seen(lambda: at.answers)
        at.close()
        at.close()
    assert not at.answers


async def test_a_forked_child_answers_nobody(net: Net):
    await net.serve()
    ours = [each for each in onlookers._all if each._socket.fileno() >= 0]
    assert ours
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # the device has a thread, which the child does not need
        child = os.fork()
    if child == 0:
        os._exit(any(each._socket.fileno() >= 0 for each in ours) or bool(watching.connections()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(each._socket.fileno() >= 0 for each in ours)


async def test_without_descriptors_it_is_not_watched_from_outside(monkeypatch, net: Net):
    """The program's own needs come first."""

    def none_left(fd: int) -> None:
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr(onlookers, "_leave_some", none_left)
    before = {*onlookers._all}
    client, server = await net.pair()
    client.transport.write(b"one")
    await server.until_received(3)
    assert {*onlookers._all} <= before and len(watching.connections()) == 2


async def test_a_list_leaves_nothing_behind(net: Net):
    """Objects of thousands of connections that stay have the collector run in the middle of a slice."""
    client, server = await net.pair()
    lives = [client.transport._life, server.transport._life]
    for life in lives:
        life.facts._known = None  # as if nobody had asked
        list(life.loop_context.connection_rows())
    assert [life.facts._known for life in lives] == [None, None]
    assert client.transport.get_extra_info("sockname") == lives[0].facts.known()["sockname"]
    assert lives[0].facts.known() is lives[0].facts.kept()
