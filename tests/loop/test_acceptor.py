"""Accepting rests when it fails, and goes on later."""

import asyncio
import errno
import os
import socket

import pytest

from rdmanet.loop import acceptor
from rdmanet.loop.acceptor import Acceptor
from tests.support.waiting import loop_turns, until_seen


class Failing:
    """A listener whose accept() fails as often as it is told to."""

    def __init__(self, real: socket.socket, code: int) -> None:
        self.real, self.code, self.calls, self.is_over = real, code, 0, False

    def accept(self):
        self.calls += 1
        if self.is_over:
            return self.real.accept()
        raise OSError(self.code, os.strerror(self.code))

    def fileno(self) -> int:
        return self.real.fileno()


@pytest.fixture
def listener():
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("")  # a name that the kernel chooses
        made.listen()
        made.setblocking(False)
        yield made


def caller(listener: socket.socket) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.connect(listener.getsockname())
    return made


CODES = [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPERM]


@pytest.mark.parametrize("code", CODES, ids=map(errno.errorcode.get, CODES))
async def test_it_rests_when_it_fails(listener, monkeypatch, code):
    """Else the loop would call it in every turn."""
    monkeypatch.setattr(acceptor, "REST_S", 0.05)
    failing, came = Failing(listener, code), []
    accepting = Acceptor(asyncio.get_running_loop(), failing, came.append)
    with caller(listener):
        await until_seen(lambda: failing.calls)
        await loop_turns(20)
        assert failing.calls < 5
        failing.is_over = True
        await until_seen(lambda: came)
        came.pop().close()
    failing.is_over = False
    monkeypatch.setattr(acceptor, "REST_S", 1000)
    before = failing.calls
    with caller(listener):
        await until_seen(lambda: failing.calls != before)
    accepting.close()
    assert accepting._resting.cancelled()


async def test_who_has_gone_is_no_failure(listener):
    failing, came = Failing(listener, errno.ECONNABORTED), []
    accepting = Acceptor(asyncio.get_running_loop(), failing, came.append)
    with caller(listener):
        await until_seen(lambda: failing.calls)
        failing.is_over = True
        await until_seen(lambda: came)
        came.pop().close()
    accepting.close()


async def test_it_may_be_closed_by_who_was_accepted(listener):
    accepting = None

    def accepted(connection: socket.socket) -> None:
        connection.close()
        accepting.close()
        listener.close()

    with caller(listener), caller(listener) as second:
        accepting = Acceptor(asyncio.get_running_loop(), listener, accepted)
        await until_seen(lambda: listener.fileno() < 0)
        with pytest.raises(ConnectionResetError):
            second.recv(1)
