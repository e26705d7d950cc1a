"""What a time-out leaves of a blocking stream's write: every byte is sent once, and in its place."""

import contextlib
import io
import random
import threading

import pytest

from tests.streams.test_blocking import LIMIT_S, MIB, NOT_LONG_S, meanwhile, pair, until_in_a_call

pytestmark = pytest.mark.once

KINDS = {"bytes": bytes, "bytearray": bytearray, "memoryview": memoryview}


def some_bytes(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count)


@pytest.fixture
def ends():
    with pair() as both:
        yield both


def rest_of(near, far, write_rest) -> bytes:
    """All that the far end gets, when the near one writes the rest, and ends."""
    near.settimeout(LIMIT_S)

    def send() -> None:
        write_rest()
        near.shutdown()

    with meanwhile(send):
        return far.readall()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [8 * MIB, 100_000], ids=["large", "small"])
def test_write_returns_how_many_bytes_it_took(ends, kind, size):
    near, far = ends
    near.settimeout(NOT_LONG_S)
    data, sent = some_bytes(24 * MIB), 0
    with pytest.raises(TimeoutError, match="not within 0.05 s"):
        while True:
            taken = near.write(KINDS[kind](data[sent : sent + size]))
            assert 0 < taken <= size
            sent += taken
    with pytest.raises(TimeoutError):
        near.write(b"nothing of it is taken")
    assert 0 < sent < 8 * MIB
    got = rest_of(near, far, lambda: near.write(data[sent:]))
    assert got == data


@pytest.mark.parametrize("call", ["write", "sendall"])
def test_the_time_is_the_calls(ends, call):
    """A peer that reads slowly, but steadily, does not give it more."""
    near, far = ends
    near.settimeout(0.3)
    over = threading.Event()

    def read_slowly() -> bool:
        return any(over.wait(0.01) or not far.recv(65536) for _ in range(1000))

    with meanwhile(read_slowly) as reader:
        data = memoryview(bytearray(256 * MIB))
        try:
            if call == "write":
                assert near.write(data) < len(data)
            else:
                with pytest.raises(TimeoutError, match="not within 0.3 s"):
                    near.sendall(data)
        finally:
            over.set()
    assert reader == [True], "it was still reading"


@pytest.mark.parametrize("buffer_bytes", [8192, 100_000, 8 * MIB])
def test_a_buffered_writer_sends_each_byte_once(ends, buffer_bytes):
    near, far = ends
    near.settimeout(NOT_LONG_S)
    written, writer = bytearray(), io.BufferedWriter(near, buffer_bytes)
    with pytest.raises(TimeoutError):
        while True:
            piece = some_bytes(buffer_bytes - 1, seed=len(written))
            written += piece
            assert writer.write(piece) == len(piece)  # the buffer is empty, and has room for it
            writer.flush()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            writer.flush()
    got = rest_of(near, far, writer.flush)
    assert got == written
    writer.detach()


@pytest.mark.parametrize("buffer_bytes", [8192, 100_000])
def test_what_a_buffered_writer_has_not_taken(ends, buffer_bytes):
    """Of a piece as large as its buffer, it has taken all if its write() returns, and nothing if that raises.

    From Python 3.13 on such a piece goes past an empty buffer, so write() may raise, and flush() has nothing to send.
    """
    near, far = ends
    near.settimeout(NOT_LONG_S)
    written, writer = bytearray(), io.BufferedWriter(near, buffer_bytes)
    with pytest.raises(TimeoutError):
        while True:
            piece = some_bytes(buffer_bytes, seed=len(written))
            assert writer.write(piece) == len(piece)
            written += piece
            writer.flush()
    for _ in range(2):
        with contextlib.suppress(TimeoutError):
            writer.flush()
        with pytest.raises(TimeoutError):  # before it takes it, or past the buffer
            writer.write(piece)
    last = some_bytes(10)

    def write_rest() -> None:
        assert writer.write(last) == len(last)
        writer.flush()

    got = rest_of(near, far, write_rest)
    assert got == written + last
    writer.detach()


def test_what_sendall_could_not_send_in_time_goes_out_later(ends):
    near, far = ends
    near.settimeout(NOT_LONG_S)
    data = some_bytes(8 * MIB + 10)
    for part in (data[: 8 * MIB], data[8 * MIB :]):
        with pytest.raises(TimeoutError):
            near.sendall(memoryview(part))
    with pytest.raises(TimeoutError):
        near.write(b"nothing of it is taken")
    assert rest_of(near, far, lambda: None) == data


def test_a_write_behind_what_sendall_has_left(ends):
    """What the write takes back is its own bytes, not those before them."""
    near, far = ends
    near.settimeout(NOT_LONG_S)
    first, second = some_bytes(4 * MIB), some_bytes(4 * MIB, seed=1)
    with pytest.raises(TimeoutError):
        near.sendall(first)
    with pytest.raises(TimeoutError):
        near.write(second)
    assert rest_of(near, far, lambda: near.write(second)) == first + second


def test_a_writer_beside_a_reader(ends):
    """The reader leads, and the writer only waits for it; the count is as exact."""
    near, far = ends
    near.settimeout(LIMIT_S)
    data, sent = some_bytes(16 * MIB), 0
    with meanwhile(lambda: near.recv(1)):
        until_in_a_call(near)
        near.settimeout(NOT_LONG_S)
        with contextlib.suppress(TimeoutError):
            while True:
                sent += near.write(memoryview(data)[sent : sent + 3 * MIB])
        assert 0 < sent < len(data)
        far.write(b"x")
    assert rest_of(near, far, lambda: near.write(data[sent:])) == data


def test_the_end_of_the_connection_is_no_time_out(ends):
    near, far = ends
    near.settimeout(LIMIT_S)

    def reset() -> None:
        far.recv(1)
        far.abort()

    with meanwhile(reset), pytest.raises(ConnectionResetError):
        near.write(bytes(64 * MIB))
