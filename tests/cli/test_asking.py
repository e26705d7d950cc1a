"""How `rdmanet ss` asks: one process at a time, a line after another, and nobody waits for one who does not speak."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from msgspec import json

from rdmanet.base import onlookers
from rdmanet.base.accounts import ConnectionInfo, columns_of, row_of
from rdmanet.cli import asking
from tests.cli.test_ss import ENVIRONMENT

LINES = 5


class Floor:
    """Who has been asked and has not answered yet, of all speakers."""

    def __init__(self) -> None:
        self.holders = 0
        self.are_two = threading.Event()

    @contextmanager
    def held(self) -> Iterator[None]:
        """For long enough that another one would be asked, too, if two were asked at a time."""
        self.holders += 1
        if self.holders > 1:
            self.are_two.set()
        self.are_two.wait(0.05)
        yield
        self.holders -= 1


class Speaker:
    """Speaks as a loop does: it says a head, and then a line with one connection each time that it is asked."""

    def __init__(self, name: str, floor: Floor, lines: int) -> None:
        self.name, self.floor, self.lines = name, floor, lines
        self.is_asked = threading.Event()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"\0{onlookers.NAME}{os.getpid()}/{os.urandom(8).hex()}")
        self.listener.listen()
        self.thread = threading.Thread(target=self.speak)
        self.thread.start()

    def speak(self) -> None:
        with suppress(OSError):
            caller, _ = self.listener.accept()
            with caller:
                caller.sendall(json.encode({"version": onlookers.VERSION, "loop": 1}) + b"\n")
                row = row_of(ConnectionInfo("rdma", self.name, "", None, None, "open", stats={"a": 7}))
                columns, numbers = columns_of([row])
                for number in range(self.lines + 1):
                    if not caller.recv(1):
                        return
                    self.is_asked.set()
                    line: Any = {"counters": ["a"], "count": 1, "columns": columns, "numbers": numbers}
                    with self.floor.held():
                        if number == LINES:
                            line = {"connections": number}
                    self.is_asked.clear()
                    caller.sendall(json.encode(line) + b"\n")
                while caller.recv(1):  # it is asked, and says nothing
                    self.is_asked.set()

    def close(self) -> None:
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


class Mumbler(Speaker):
    """When it is asked, it says bytes again and again, but no line, until another one is asked."""

    def __init__(self, begins: threading.Event, other: Speaker) -> None:
        self.begins, self.other = begins, other
        super().__init__("mumbler", Floor(), 0)

    def speak(self) -> None:
        with suppress(OSError):
            caller, _ = self.listener.accept()
            with caller:
                caller.sendall(json.encode({"version": onlookers.VERSION, "loop": 1}) + b"\n")
                caller.recv(1)
                self.begins.set()
                while not self.other.is_asked.wait(0.001):
                    caller.sendall(b" ")


class Follower(Speaker):
    """Says its head when that one has begun."""

    def __init__(self, may_begin: threading.Event) -> None:
        self.may_begin = may_begin
        super().__init__("follower", Floor(), LINES)

    def speak(self) -> None:
        self.may_begin.wait(10)
        super().speak()


@contextmanager
def speakers(floor: Floor, **lines: int) -> Iterator[None]:
    with ExitStack() as stack:
        for name, count in lines.items():
            stack.callback(Speaker(name, floor, count).close)
        yield


def heard() -> dict[str, list[asking.Answer]]:
    """By the text that each says; those who are late say none."""
    found: dict[str, list[asking.Answer]] = {}
    for answer in asking.ask_all(os.getpid()):
        name = next(iter(answer.connections)).reason if len(answer.connections) else answer.failed
        found.setdefault(name, []).append(answer)
    return found


def test_one_is_asked_at_a_time(monkeypatch):
    monkeypatch.setattr(asking, "GRACE_S", 100.0)
    monkeypatch.setattr(asking, "ANSWER_S", 100.0)
    floor = Floor()
    with speakers(floor, one=LINES, two=LINES, three=LINES):
        found = heard()
    assert {name: len(found[name][0].connections) for name in found} == dict.fromkeys(
        ("one", "two", "three"), LINES
    )
    assert next(iter(found["one"][0].connections)).stats == {"a": 7}
    assert not floor.are_two.is_set()


def test_a_line_is_made_while_the_one_before_is_understood(monkeypatch):
    understand = asking._Asked.understand
    speaker = Speaker("one", Floor(), LINES)

    def after_the_next_was_asked_for(asked: asking._Asked) -> bool:
        assert speaker.is_asked.wait(10)
        return understand(asked)

    monkeypatch.setattr(asking._Asked, "understand", after_the_next_was_asked_for)
    try:
        found = heard()
    finally:
        speaker.close()
    assert len(found["one"][0].connections) == LINES


def test_who_falls_silent_holds_nobody_up(monkeypatch):
    """It is late, whenever that is; the others are not."""
    monkeypatch.setattr(asking, "ANSWER_S", 1.0)
    with speakers(Floor(), one=0, two=LINES, three=2, four=LINES):
        found = heard()
    assert len(found.pop("late")) == 2
    assert {name: len(found[name][0].connections) for name in found} == {"two": LINES, "four": LINES}


def test_who_says_no_line_holds_nobody_up(monkeypatch):
    """However much it says."""
    monkeypatch.setattr(asking, "GRACE_S", 0.1)
    monkeypatch.setattr(asking, "ANSWER_S", 2.0)
    begins = threading.Event()
    follower = Follower(begins)
    mumbler = Mumbler(begins, follower)
    try:
        found = heard()
    finally:
        follower.close()
        mumbler.close()
    assert len(found["follower"][0].connections) == LINES


def test_a_list_does_not_wait_for_asyncio():
    """To import it takes as long as all the rest, and each list is a process of its own."""
    program = (
        "import sys, rdmanet.cli.command_line as it; it.main(['ss', '--json']);"
        " sys.exit('asyncio' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_many_silent_ones_hold_nobody_up_for_long(monkeypatch):
    """Anybody may have such sockets. Together they get no more time than one who begins to speak late."""
    monkeypatch.setattr(asking, "GRACE_S", 1000.0)
    with ExitStack() as stack:
        for _ in range(3):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.bind(f"\0{onlookers.NAME}{os.getpid()}/{os.urandom(8).hex()}")
            silent.listen()
        assert [answer.failed for answer in asking.ask_all(os.getpid())] == ["late"] * 3
