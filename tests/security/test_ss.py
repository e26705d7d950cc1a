"""What `rdmanet ss` may see, and what it believes: other users see nothing, and no lie is printed as a fact."""

import contextlib
import json
import os
import resource
import socket
import threading
from typing import Any

import pytest

from rdmanet.base import onlookers
from rdmanet.base.call_accounts import CALLS_MOST
from rdmanet.cli import asking, columns, ss
from tests.security.conftest import ATTACKER, VICTIM, unfit

ESCAPE = "\x1b[2J\x1b]0;pwned\x07\u202e"
HEAD = b'{"version":%d,"loop":1,"library":"","engines":[],"servers":[]}\n' % onlookers.VERSION
CONNECTION = (
    b'{"counters":["a"],"count":1,"columns":["tcp","%s","client","127.0.0.1",1,"127.0.0.1",2,"open",true,false,'
    b'"","",7,"","",""],"numbers":[5]}\n'
)

CALLS = (
    b'{"calls":[{"key":1,"side":"server","service":"%b","where":"%b","under_way":1,'
    b'"calls":[{"method":"%b","us":1,"doing":"%b"}],"notes":["%b"]}]}\n'
)

SERVER = (
    b'"servers":[{"places":[["127.0.0.1",1]],"fabric":"tcp","serving":true,"connections":0,"doors":['
    b'{"place":["127.0.0.1",1],"missing":"%b","front":%d,"port":0,"workers":[{"pid":%d,"port":1}]}]}]'
)


def head_with(missing: bytes = b"", front: int = 0, pid: int = 2) -> bytes:
    return HEAD.replace(b'"servers":[]', SERVER % (missing, front, pid))


@pytest.mark.parametrize("way", ["by the command", "by its own program"])
def test_another_user_sees_nothing(stage, guarded, way):
    if os.geteuid() != 0:
        unfit("only root can be two users")
    owner = stage.start("watched", *(() if guarded else ("open",)), user=VICTIM, ACTOR_DUMPABLE="1")
    name = owner.hear()["name"]
    looker = stage.start("looker", name, way, user=ATTACKER, ACTOR_DUMPABLE="1")
    said = looker.hear()
    if guarded:
        assert said["heard"] == 0 and said["tried"] > 0
    else:
        assert said["heard"] > 0


def test_the_same_user_sees_it(stage):
    if os.geteuid() != 0:
        unfit("only root can be two users")
    owner = stage.start("watched", user=VICTIM, ACTOR_DUMPABLE="1")
    name = owner.hear()["name"]
    said = stage.start("looker", name, "by its own program", user=VICTIM, ACTOR_DUMPABLE="1").hear()
    assert said["heard"] > 0


class Liar:
    """A process of this user behind such a name, which says whatever it likes: a thread of this one."""

    def __init__(self, says: bytes, claims: int, again: bool = False) -> None:
        self._says, self._again = says, again
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{onlookers.NAME}{claims}/{os.urandom(8).hex()}")
        self._listener.listen()
        self._thread = threading.Thread(target=self._speak)
        self._thread.start()

    def _speak(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                with caller, contextlib.suppress(OSError):
                    caller.sendall(self._says)
                    while self._again:
                        caller.sendall(self._says)

    def __enter__(self) -> "Liar":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def text_of_all() -> str:
    picture = ss.Picture()
    return ss._as_text(picture, [process for process in picture.take(None) if process.pid == os.getpid()])


def test_no_escape_is_printed(guarded, monkeypatch):
    if not guarded:
        for module in (asking, columns):
            monkeypatch.setattr(module, "printable", lambda text, most: text)
    escape = ESCAPE.encode().replace(b"\x1b", b"\\u001b").replace(b"\x07", b"\\u0007")
    lies = CONNECTION % escape + CALLS % ((escape,) * 5)
    with Liar(head_with(escape) + lies + b'{"connections":1}\n', os.getpid()):
        said = text_of_all()
    assert "no door at 127.0.0.1:1: " in said
    assert "why TCP: " in said and "1 calls under way" in said
    assert (ESCAPE in said) is not guarded
    assert any(not character.isprintable() and character != "\n" for character in said) is not guarded


def test_no_escape_is_printed_of_several_either():
    escape = ESCAPE.encode().replace(b"\x1b", b"\\u001b").replace(b"\x07", b"\\u0007")
    two = (
        (CONNECTION % b"")
        .replace(b'"count":1', b'"count":2')
        .replace(b'"tcp",""', b'"tcp",["fair","%b"]' % escape)
    )
    with Liar(HEAD + two + b'{"connections":2}\n', os.getpid()):
        said = text_of_all()
    assert "why TCP: fair" in said and "why TCP: \ufffd[2J" in said
    assert all(character.isprintable() or character == "\n" for character in said)


def test_a_line_of_few_bytes_counts_for_its_connections(monkeypatch):
    monkeypatch.setattr(asking, "ANSWER_BYTES_MOST", 200 * asking.ROW_BYTES)
    many = (CONNECTION % b"").replace(b'"count":1', b'"count":%d' % onlookers.ROWS_MOST)
    with Liar(HEAD + many + many, os.getpid()):
        [answer] = [answer for answer in asking.ask_all() if answer.pid == os.getpid()]
    assert "its answer has more than" in answer.failed and not len(answer.connections)


def numbers_of_all(counters: int) -> bytes:
    """A line of a few bytes for each counter, which says its number of as many connections as a line may tell of."""
    names = b",".join(b'"%x"' % number for number in range(counters))
    many = (CONNECTION % b"").replace(b'"count":1', b'"count":%d' % onlookers.ROWS_MOST)
    return many.replace(b'"a"', names).replace(b"[5]", b"[%b]" % b",".join([b"5"] * counters))


def test_a_number_of_all_connections_counts_for_each(monkeypatch):
    monkeypatch.setattr(asking, "ANSWER_BYTES_MOST", 200 * asking.ROW_BYTES)
    with Liar(HEAD + numbers_of_all(100), os.getpid()):
        [answer] = [answer for answer in asking.ask_all() if answer.pid == os.getpid()]
    assert "its answer has more than" in answer.failed and not len(answer.connections)


@pytest.mark.parametrize(
    "name", ["__init__", "__slots__", "__class__", "__del__", "__annotations__", "mro", "self"]
)
def test_names_of_counters_are_only_names(name):
    lie = (CONNECTION % b"").replace(b'"a"', b'"%b"' % name.encode())
    with Liar(HEAD + lie + b'{"connections":1}\n', os.getpid()):
        picture = ss.Picture()
        found = [process for process in picture.take(None) if process.pid == os.getpid()]
    [process] = json.loads(b"".join(ss._as_json(picture, found)))["processes"]
    [connection] = process["loops"][0]["connections"]
    assert connection["stats"] == {name: 5}


def test_no_class_is_made_for_thousands_of_names():
    """That would take a time that grows with the square of their number."""
    names = tuple(f"a{number}" for number in range(10_000))
    assert ss._stats_class(names)(*range(10_000)) == dict(zip(names, range(10_000), strict=True))


def test_a_process_cannot_speak_for_another(guarded, monkeypatch):
    """The name says that it is of process 1; the kernel says whose it is."""
    if not guarded:

        def believed(asked: Any) -> tuple[int, int]:
            return 1, 0

        monkeypatch.setattr(asking._Asked, "_credentials", believed)
    mine = f"of {os.getpid()}"  # another run of the tests may be on this machine
    with Liar(HEAD + CONNECTION % mine.encode() + b'{"connections":1}\n', 1):
        said = [
            answer.pid for answer in asking.ask_all() for each in answer.connections if each.reason == mine
        ]
    assert said == [os.getpid() if guarded else 1]


@contextlib.contextmanager
def full_queue(pid):
    """A name with a process's number, by which nobody can be asked: the kernel takes in no more callers."""
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        name = f"\0{onlookers.NAME}{pid}/{os.urandom(8).hex()}"
        listener.bind(name)
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(8):
                caller = stack.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect(name)
        yield


def test_a_full_queue_speaks_for_nobody_else():
    """The kernel names no process there, and the number in the name is believed of no other."""
    with full_queue(1):
        assert not [answer for answer in asking.ask_all() if answer.pid == 1]


def test_a_full_queue_takes_no_descriptor_of_who_asks():
    """Who has few left still hears the others. To look for a queue's owner takes one."""
    with full_queue(os.getpid()), open("/proc/self/fd/0") as last:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = [
            int(name) for name in os.listdir("/proc/self/fd")
        ]  # also the listing's own, which is to be left
        few = max(used) + 1
        held = [os.dup(last.fileno()) for _ in range(few - len(used))]
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
        try:
            asked = [answer.failed for answer in asking.ask_all(os.getpid())]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for descriptor in held:
                os.close(descriptor)
    assert asked == ["late"]


LIES = {
    "no JSON": (b"hello\n", "malformed"),
    "another version": (b'{"version":77}\n', "version 77"),
    "a wrong type": (HEAD + (CONNECTION % b"").replace(b"7,", b'"x",'), "Expected `int | array`"),
    "a negative number": (HEAD + (CONNECTION % b"").replace(b"7,", b"-1,"), "Expected `int` >= 0"),
    "a negative counter": (HEAD + (CONNECTION % b"").replace(b"[5]", b"[-5]"), "Expected `int` >= 0"),
    "a great counter": (HEAD + (CONNECTION % b"").replace(b"[5]", b"[%d]" % 2**64), "Expected `int` <= "),
    "a column of two for one": (
        HEAD + (CONNECTION % b"").replace(b"[5]", b"[[5,6]]"),
        "more of some connections than of others",
    ),
    "a column of none": (
        HEAD + (CONNECTION % b"").replace(b'"tcp"', b"[]"),
        "more of some connections than of others",
    ),
    "no connection": (HEAD + (CONNECTION % b"").replace(b'"count":1', b'"count":0'), "too many in a line"),
    "connections without end": (
        HEAD + (CONNECTION % b"").replace(b'"count":1', b'"count":%d' % 10**9),
        "too many in a line",
    ),
    "a word of several that is none": (
        HEAD + (CONNECTION % b"").replace(b'"count":1', b'"count":2').replace(b'"open"', b'["open","pwnd"]'),
        "makes no sense",
    ),
    "an address of several that is none": (
        HEAD
        + (CONNECTION % b"")
        .replace(b'"count":1', b'"count":2')
        .replace(b'"127.0.0.1",1', b'[null,"evil"],1'),
        "does not appear to be an IPv4",
    ),
    "no name for a counter": (HEAD + (CONNECTION % b"").replace(b"[5]", b"[5,6]"), "more numbers than names"),
    "no address": (
        HEAD + (CONNECTION % b"").replace(b"127.0.0.1", b"evil", 1),
        "does not appear to be an IPv4",
    ),
    "a long address": (
        HEAD + (CONNECTION % b"").replace(b"127.0.0.1", b"fe80::1%" + b"x" * 60, 1),
        "an address that is too long",
    ),
    "more numbers than anybody has": (HEAD + numbers_of_all(513), "more than 65536 numbers in a line"),
    "a long name": (
        HEAD + (CONNECTION % b"").replace(b'"a"', b'"' + b"x" * 41 + b'"'),
        "a name for a number that is too long",
    ),
    "a state that is none": (HEAD + (CONNECTION % b"").replace(b"open", b"pwnd"), "makes no sense"),
    "calls of nobody": (HEAD + (CALLS % ((b"",) * 5)).replace(b"server", b"nobody"), "makes no sense"),
    "more calls than are named": (
        HEAD + (CALLS % ((b"",) * 5)).replace(b"}],", b"}" + b',{"method":"","us":1}' * CALLS_MOST + b"],"),
        "makes no sense",
    ),
    "a negative time": (HEAD + (CALLS % ((b"",) * 5)).replace(b'us":1', b'us":-1'), "no counter can have"),
    "a worker that is none": (head_with(pid=-1), "no counter can have"),
    "a front that is none": (head_with(front=-1), "no counter can have"),
    "a door nowhere": (
        head_with().replace(b'"place":["127.0.0.1"', b'"place":["evil"'),
        "does not appear to be",
    ),
    "deep nesting": (b"[" * 50000 + b"\n", ""),
    "a line without end": (b"x" * (asking.LINE_BYTES_MOST + 1), "a line of its answer has more"),
    "it breaks off": (HEAD, "it broke off"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_no_answer(lie):
    says, why = LIES[lie]
    with Liar(says, os.getpid()):
        [answer] = [answer for answer in asking.ask_all() if answer.pid == os.getpid()]
    assert why in answer.failed and answer.failed and not len(answer.connections)


def test_an_answer_without_end_is_bounded(monkeypatch):
    monkeypatch.setattr(asking, "ANSWER_BYTES_MOST", 1 << 20)
    with Liar(HEAD + CONNECTION % b"", os.getpid(), again=True):
        [answer] = [answer for answer in asking.ask_all() if answer.pid == os.getpid()]
    assert answer.failed and not len(answer.connections)


def test_who_says_nothing_is_late(monkeypatch):
    monkeypatch.setattr(asking, "ANSWER_S", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{onlookers.NAME}{os.getpid()}/{os.urandom(8).hex()}")
        listener.listen()
        [answer] = [answer for answer in asking.ask_all() if answer.pid == os.getpid()]
    assert answer.failed == "late"
