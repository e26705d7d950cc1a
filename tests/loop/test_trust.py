"""Who speaks for a TCP listener has it, and is in no container or sandbox.

Attacks by other users and from sandboxes are in tests/security/test_doors.py.
"""

import contextlib
import errno
import os
import posix
import socket
import sys

import pytest

from rdmanet.loop import kernel, trust
from rdmanet.loop.trust import Speaker
from tests.support.descriptors import descriptors_left
from tests.support.processes import Process

STATUS = trust._status(os.getpid())


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def speaker(listener):
    """This process, which has the listener."""
    ours, its = socket.socketpair()
    with ours, its:
        yield Speaker(ours, *listener.getsockname())


def test_who_has_the_listener_is_trusted(listener, speaker):
    assert (speaker.pid, speaker.user) == (os.getpid(), os.geteuid())
    assert speaker.why_not() == ""
    assert speaker.why_not_with(listener.fileno()) == ""


def test_who_has_another_of_its_group_is_trusted():
    """Workers share a port by SO_REUSEPORT: each has a listener of its own."""
    ours, its = socket.socketpair()
    with socket.socket() as first, socket.socket() as second, ours, its:
        for each in (first, second):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind(("127.0.0.1", 0) if each is first else first.getsockname())
            each.listen()
        speaker = Speaker(ours, *first.getsockname())
        assert speaker.why_not() == ""
        assert [speaker.why_not_with(each.fileno()) for each in (first, second)] == ["", ""]


def test_what_else_a_process_has_is_no_listener(listener, speaker):
    read, write = os.pipe()
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(listener.getsockname()) as joined,
    ):
        accepted, _ = listener.accept()
        for number in (0, read, other.fileno(), joined.fileno(), accepted.fileno(), 9999, 1 << 64):
            assert "does not have the TCP listener" in speaker.why_not_with(number)
        accepted.close()
    os.close(read)
    os.close(write)


def test_nobody_speaks_for_nobody():
    ours, its = socket.socketpair()
    with socket.socket() as bound, ours, its:
        bound.bind(("127.0.0.1", 0))
        assert "no TCP listener" in Speaker(ours, *bound.getsockname()).why_not()


SPEAKING = """
import socket, sys
speaking = socket.socket(socket.AF_UNIX)
speaking.bind("")
speaking.listen()
print(speaking.getsockname()[1:].decode(), flush=True)
input()
"""


def speak(other: Process) -> socket.socket:
    to_it = socket.socket(socket.AF_UNIX)
    to_it.connect("\0" + other.line())
    return to_it


def test_of_another_process_it_is_looked_up(listener):
    with Process(sys.executable, "-c", SPEAKING) as other, speak(other) as to_it:
        speaker = Speaker(to_it, *listener.getsockname())
        assert speaker.pid == other.pid and speaker.why_not() == ""
        assert "does not have the TCP listener" in speaker.why_not_with(listener.fileno())
        assert trust.may_map(other.pid)
    assert not trust.may_map(other.pid)


def test_who_has_inherited_it_is_trusted(listener):
    """A server's workers are forked, or started with its socket."""
    with (
        Process(sys.executable, "-c", SPEAKING, pass_fds=[listener.fileno()]) as other,
        speak(other) as to_it,
    ):
        speaker = Speaker(to_it, *listener.getsockname())
        assert speaker.why_not() == "" and speaker.why_not_with(listener.fileno()) == ""


def test_who_has_ended_is_not_trusted(listener):
    """Its number may be another's by now, which has the listener."""
    with Process(sys.executable, "-c", SPEAKING, pass_fds=[listener.fileno()]) as other:
        to_it = speak(other)
    with to_it:
        assert "has ended" in Speaker(to_it, *listener.getsockname()).why_not()
        again = Speaker(to_it, *listener.getsockname())
        again.pid = os.getpid()
        assert "has ended" in again.why_not_with(listener.fileno())


def test_of_another_user_it_must_live_as_well(listener, monkeypatch):
    """What a third user may not read is no reason to ask less: whoever has the pid by now is unconfined."""

    def unreadable(path: str) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with Process(sys.executable, "-c", SPEAKING, pass_fds=[listener.fileno()]) as other:
        to_it = speak(other)
        living = Speaker(to_it, *listener.getsockname())
        monkeypatch.setattr(os, "geteuid", lambda: living.user + 1)
        monkeypatch.setattr(posix, "readlink", unreadable)
        assert living.why_not_with(listener.fileno()) == ""
    with to_it:
        dead = Speaker(to_it, *listener.getsockname())
        dead.pid = os.getpid()
        assert "has ended" in dead.why_not_with(listener.fileno())


def test_before_linux_6_5_who_has_the_pid_must_be_of_the_user(speaker, monkeypatch):
    monkeypatch.setattr(trust, "_SO_PEERPIDFD", 9999)  # no option
    assert speaker.lives()
    speaker.user += 1
    assert not speaker.lives()


def test_a_foreign_proc_shows_nothing(listener, monkeypatch):
    with Process(sys.executable, "-c", SPEAKING) as other, speak(other) as to_it:
        monkeypatch.setattr(posix, "readlink", lambda path: "1")
        assert "another pid namespace" in Speaker(to_it, *listener.getsockname()).why_not()


def test_this_process_is_not_confined(monkeypatch):
    monkeypatch.setattr(trust, "_status", lambda pid: STATUS | {"NoNewPrivs": "0"})  # as in most places
    assert trust._more_confined(os.getpid()) == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda status: status | {"NSpid": "17 1"},
        lambda status: status | {"NoNewPrivs": "1"},
        lambda status: status | {"Seccomp": "2"},
        lambda status: status | {"Seccomp_filters": "1"},
        lambda status: status | {"CapBnd": "0"},
    ],
    ids=["pid namespace", "no_new_privs", "seccomp", "one more filter", "capabilities"],
)
def test_what_everybody_may_read_shows_a_sandbox(change, monkeypatch):
    ours = STATUS | {"NoNewPrivs": "0", "Seccomp": "0", "Seccomp_filters": "0", "CapBnd": "ff"}
    monkeypatch.setattr(trust, "_status", lambda pid: change(ours) if pid == 1 else ours)
    assert trust._more_confined(1)


def test_no_new_privs_may_hide_a_sandbox_also_from_who_has_it(monkeypatch):
    monkeypatch.setattr(trust, "_status", lambda pid: STATUS | {"NoNewPrivs": "1"})
    assert trust._more_confined(os.getpid())


def test_a_kernel_without_seccomp_and_pid_namespaces_confines_nobody(monkeypatch):
    monkeypatch.setattr(trust, "_status", lambda pid: {"NoNewPrivs": "0", "CapBnd": "ff"})
    assert trust._more_confined(os.getpid()) == ""


IN_GROUPS = """
import os
os.setgroups(range(1_000_000, 1_002_000))
print("ready", flush=True)
input()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be in any group")
def test_a_process_of_many_groups_is_not_confined():
    """The list of its groups comes before what confines it."""
    with Process(sys.executable, "-c", IN_GROUPS) as other:
        assert other.line() == "ready"
        assert trust._more_confined(other.pid) == ""


NAMED = """
import sys
with open("/proc/self/comm", "wb", 0) as name:
    name.write(b"a\\rB:1\\x1cC:2")
print("ready", flush=True)
input()
"""


def test_the_name_of_a_process_is_no_line_of_its_status():
    with Process(sys.executable, "-c", NAMED) as other:
        assert other.line() == "ready"
        its = trust._status(other.pid)
    assert its["Name"] == "a\rB:1\x1cC:2"
    assert its.keys() == trust._status(os.getpid()).keys()


def test_a_status_without_what_we_look_for_proves_nothing(speaker, monkeypatch):
    def not_ours(pid: int, kind: str) -> tuple[int, int]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(trust, "_namespace", not_ours)
    monkeypatch.setattr(trust, "_status", lambda pid: {})
    speaker.user += 1
    assert "does not tell what confines it" in speaker._why_confined()


def test_no_descriptor_to_look_with_is_no_answer(listener, speaker):
    questions = [
        lambda: Speaker(speaker._socket, *listener.getsockname()),
        lambda: trust._more_confined(os.getpid()),
    ]
    with contextlib.suppress(OSError):  # since Linux 6.5
        os.close(speaker._socket.getsockopt(socket.SOL_SOCKET, trust._SO_PEERPIDFD))
        questions.append(speaker.lives)
    for question in questions:
        with descriptors_left(0), pytest.raises(OSError) as failed:
            question()
        assert failed.value.errno == errno.EMFILE
        question()


def test_memory_of_nobody_is_not_mapped():
    assert trust.may_map(os.getpid())
    assert not trust.may_map(0)


def test_the_listener_is_that_of_the_address(listener, speaker):
    assert speaker.listener == kernel.tcp_listener(*listener.getsockname())
