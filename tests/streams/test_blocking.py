"""Streams for programs without an event loop: what sockets and raw files do, these do.

The other end is a thread of this process, or another process. Time-outs end what would wait for ever.
"""

import array
import asyncio
import atexit
import contextlib
import errno
import functools
import gc
import io
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import HOST
from pattern import REPEATED, Pattern

import rdmanet
from rdmanet import RdmaStream, listen_rdma_stream, open_rdma_stream
from rdmanet.streams.private_loop import PrivateLoop
from tests.support.processes import Process

pytestmark = pytest.mark.once

MIB = 1 << 20
LIMIT_S = 60
NOT_LONG_S = 0.05


@contextlib.contextmanager
def meanwhile(*calls: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run calls in threads while the block runs; they end with it, and what they raise is raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        running = [pool.submit(call) for call in calls]
        results: list[Any] = []
        yield results
        results += [one.result(LIMIT_S) for one in running]


@contextlib.contextmanager
def pair(**options: Any) -> Iterator[tuple[RdmaStream, RdmaStream]]:
    """Both ends of a connection: the connecting one, the accepting one."""
    with listen_rdma_stream(HOST, timeout=LIMIT_S, **options) as listener, contextlib.ExitStack() as stack:
        with meanwhile(listener.accept) as accepted:
            near = open_rdma_stream(HOST, listener.getsockname()[1], timeout=LIMIT_S, **options)
            stack.callback(near.abort)
        far = accepted[0]
        stack.callback(far.abort)
        far.settimeout(LIMIT_S)
        # soft-iWARP may have overlooked the first frame, and sees it with the next one (docs/rules.md).
        near.sendall(b"!")
        assert far.recv(1) == b"!"
        yield near, far


@pytest.fixture
def ends() -> Iterator[tuple[RdmaStream, RdmaStream]]:
    with pair() as both:
        yield both


@pytest.mark.parametrize("end", ["close", "abort"])
def test_closing_does_not_wait_for_bytes_that_nobody_reads(ends, end):
    near, far = ends
    far.sendall(bytes(100_000))
    assert near.recv(1)
    with meanwhile(getattr(far, end)):
        pass
    try:
        near.close()
    except ConnectionResetError:
        assert end == "abort"
    assert near.closed


def until_in_a_call(stream: RdmaStream) -> None:
    while not stream._private.calls:
        time.sleep(0.001)


def fill(stream: RdmaStream) -> bytes:
    """Write until the peer would have to read; return what was written."""
    stream.settimeout(NOT_LONG_S)
    sent, pattern = b"", Pattern()
    with contextlib.suppress(TimeoutError):
        while True:
            piece = pattern.take(MIB)
            sent += piece[: stream.write(piece)]
    stream.settimeout(LIMIT_S)
    return sent


# ---- reading and writing


def test_there_and_back(ends):
    near, far = ends
    assert isinstance(near, io.RawIOBase) and near.readable() and near.writable() and not near.seekable()
    assert near.write(b"question") == 8
    assert far.recv(100) == b"question"
    far.sendall(b"answer")
    assert near.recv(3) == b"ans"
    buffer = bytearray(10)
    assert near.readinto(buffer) == 3
    assert buffer == b"wer" + bytes(7)
    assert "RdmaTransport open" in repr(near)


def test_much_both_ways_at_once(ends):
    def send(stream: RdmaStream) -> None:
        pattern = Pattern(seed=1)
        for size in (1, 7, 65536, 100_000, MIB, MIB, MIB):
            assert stream.write(pattern.take(size)) == size
        stream.shutdown()

    def receive(stream: RdmaStream) -> None:
        pattern = Pattern(seed=1)
        while chunk := stream.recv(200_000):
            pattern.check(chunk)
        assert pattern.position == 3 * MIB + 165_544

    near, far = ends
    with meanwhile(lambda: send(near)):
        receive(far)
    with meanwhile(lambda: send(far)):
        receive(near)


def test_buffered_and_text(ends):
    near, far = ends
    writer = io.BufferedWriter(near)
    writer.write(b"a line\nanother\n")
    writer.write(b"x" * 300_000)
    writer.flush()
    near.shutdown()
    reader = io.BufferedReader(far)
    assert reader.readline() == b"a line\n"
    assert reader.peek(1)[:1] == b"a"
    assert next(reader) == b"another\n"
    assert reader.read(10) == b"x" * 10
    assert reader.read() == b"x" * 299_990
    text = io.TextIOWrapper(io.BufferedRWPair(far, far), write_through=True)
    text.write("grün\n")
    text.flush()
    far.shutdown()
    assert near.readall() == "grün\n".encode()
    for wrapper in (writer, reader, text):
        wrapper.detach()


def test_what_can_be_written_and_read_into(ends):
    near, far = ends
    for data in (b"", b"ab", bytearray(b"cd"), memoryview(b"ef"), memoryview(b"1g2h")[1::2].tobytes()):
        near.write(data)
    assert near.write(array.array("H", [1, 2])) == 4
    for wrong in ("text", 7, None):
        with pytest.raises(TypeError):
            near.write(wrong)
    with pytest.raises(BufferError):
        near.write(memoryview(b"1234")[::2])
    near.shutdown()
    numbers = array.array("H", [0])
    assert far.readinto(numbers) == 2 and numbers.tobytes() == b"ab"
    assert far.readinto(bytearray()) == 0 and far.recv(0) == b""
    for call in (lambda: far.readinto(b"read only"), lambda: far.readinto("text"), lambda: far.recv("1")):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(ValueError):
        far.recv(-1)
    assert far.readall() == b"cdefgh" + array.array("H", [1, 2]).tobytes()


def test_a_writer_is_held_up_by_a_peer_that_does_not_read(ends):
    near, far = ends
    sent = fill(near)
    with meanwhile(near.shutdown):
        assert far.readall() == sent, "nothing but what the writes have taken"


def test_nothing_stays_behind_between_calls(ends):
    """write() has handed over all, so the peer gets it though we make no further call."""
    near, far = ends
    for _ in range(10):
        near.write(b"ten bytes!")
    got = b""
    while len(got) < 100:
        got += far.recv(1000)


# ---- time-outs, signals, threads, forks


def test_timeouts(ends):
    near, far = ends
    assert near.gettimeout() == LIMIT_S
    near.settimeout(NOT_LONG_S)
    with pytest.raises(TimeoutError, match="not within 0.05 s"):
        near.recv(1)
    far.write(b"late")
    assert near.recv(4) == b"late", "a time-out loses nothing"
    near.settimeout(None)
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="not positive"):
            near.settimeout(wrong)
    assert near.gettimeout() is None
    with listen_rdma_stream(HOST, timeout=NOT_LONG_S) as listener:
        with pytest.raises(TimeoutError):
            listener.accept()
        with pytest.raises(TimeoutError):  # nobody accepts
            open_rdma_stream(HOST, listener.getsockname()[1], timeout=NOT_LONG_S)
        with pytest.raises(ValueError, match="not positive"):
            open_rdma_stream(HOST, 1, timeout=0)


INTERRUPTED = """
import os, signal, sys, threading, warnings
from rdmanet import open_rdma_stream

warnings.simplefilter("error")
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell runs in the background
given = os.environ["BUSY_POLL"]
busy_poll = None if given == "None" else float(given)
stream = open_rdma_stream(sys.argv[1], int(sys.argv[2]), timeout=60, busy_poll=busy_poll)
for _ in range(3):
    try:
        print("waiting", flush=True)
        stream.recv(1)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
stream.write(b"it still works")
assert stream.recv(100) == b"so it seems"
assert threading.active_count() == 1
stream.close()
"""


def program(listener, text: str, fresh: bool = False, **environment: str) -> Process:
    """A program of its own, which knows where we listen. A fresh one starts Python, which sees its environment."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    where = (HOST, listener.getsockname()[1])
    if fresh:
        return Process(sys.executable, "-c", text, *where, env=env)
    return Process(script(text), *where, forked=True, env=env)


@functools.cache
def script(text: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix="rdmanet-test-")) / "program.py"
    path.write_text(text)
    atexit.register(shutil.rmtree, path.parent)
    return path


@pytest.mark.parametrize("busy_poll", [0, None, float("inf")], ids=["asleep", "by default", "watching"])
def test_keyboard_interrupt(busy_poll):
    with listen_rdma_stream(HOST, timeout=LIMIT_S) as listener:
        with program(listener, INTERRUPTED, BUSY_POLL=str(busy_poll)) as child:
            with listener.accept() as stream:
                stream.settimeout(LIMIT_S)
                for _ in range(3):
                    assert child.line() == "waiting"
                    child.send_signal(signal.SIGINT)
                    assert child.line() == "interrupted"
                assert stream.recv(100) == b"it still works"
                stream.write(b"so it seems")
                assert stream.recv(1) == b""
            child.finish()


SLEEPY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { QUIET_MS = 300 };

/* Set by the program: when its main thread has had nothing to do for a while, a signal comes just before it sleeps. */
int signal_before_sleep;

static bool is_about_to_sleep(void)
{
    return signal_before_sleep && gettid() == getpid();
}

static void interrupt(void)
{
    signal_before_sleep = 0;
    raise(SIGINT);
}

int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask)
{
    static int (*real)(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *);
    static const struct timespec quiet = {.tv_nsec = QUIET_MS * 1000 * 1000};

    if (!real)
        real = (int (*)(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *))dlsym(RTLD_NEXT, "ppoll");
    if (is_about_to_sleep()) {
        int ready = real(fds, count, &quiet, NULL);
        if (ready != 0)
            return ready;
        interrupt();
    }
    return real(fds, count, timeout, mask);
}

/* It sleeps in its loop instead while this has a timer, or something to run. */
int epoll_wait(int fd, struct epoll_event *events, int most, int timeout_ms)
{
    static int (*real)(int, struct epoll_event *, int, int);

    if (!real)
        real = (int (*)(int, struct epoll_event *, int, int))dlsym(RTLD_NEXT, "epoll_wait");
    if (is_about_to_sleep() && (timeout_ms < 0 || timeout_ms > QUIET_MS)) {
        int ready = real(fd, events, most, QUIET_MS);
        if (ready != 0)
            return ready;
        interrupt();
    }
    return real(fd, events, most, timeout_ms);
}
"""

INTERRUPTED_BEFORE_SLEEP = """
import ctypes, signal, sys
from rdmanet import open_rdma_stream

signal.signal(signal.SIGINT, signal.default_int_handler)
armed = ctypes.c_int.in_dll(ctypes.CDLL(None), "signal_before_sleep")
with open_rdma_stream(sys.argv[1], int(sys.argv[2]), timeout=60) as stream:
    armed.value = 1
    try:
        stream.recv(1)
    except KeyboardInterrupt:
        stream.write(b"interrupted")
"""


def test_keyboard_interrupt_just_before_it_sleeps(tmp_path):
    """Python has looked for signals, and ppoll() or epoll_wait() does not run yet."""
    source, library = tmp_path / "sleepy.c", tmp_path / "sleepy.so"
    source.write_text(SLEEPY)
    compile = ["cc", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(compile, env=os.environ | {"LD_PRELOAD": ""}, check=True)
    # A sanitizer stays the first.
    preload = " ".join(filter(None, (os.environ.get("LD_PRELOAD"), str(library))))
    with listen_rdma_stream(HOST, timeout=LIMIT_S) as listener:
        with program(listener, INTERRUPTED_BEFORE_SLEEP, fresh=True, LD_PRELOAD=preload) as child:
            with listener.accept() as stream:
                stream.settimeout(LIMIT_S)
                assert stream.recv(100) == b"interrupted"
            child.finish()


def test_keyboard_interrupt_while_a_call_begins_or_ends(ends):
    """Python looks for signals after each call of a function in C, among others."""
    near, far = ends
    entering = PrivateLoop.entered.__wrapped__.__code__
    for at in itertools.count():
        returns = itertools.count()

        def interrupt(frame, event, _, at=at, returns=returns):
            if event == "c_return" and frame.f_code is entering and next(returns) == at:
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            near.shutdown()
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.setprofile(None)
        far.write(b"x")
        assert near.recv(1) == b"x"  # nobody is in a call
    assert at >= 3


@pytest.mark.parametrize("by_loop", [False, True], ids=["", "by-loop"])
def test_a_signal_whose_handler_calls_the_stream(ends, by_loop):
    """It is refused, before it has written anything; the call that it interrupted goes on."""
    near, far = ends
    if by_loop:  # where a timer waits, the loop runs during the call
        near._private.loop.call_later(3600.0, int)
    refused, handled = [], threading.Event()

    def handler(*_: object) -> None:
        try:
            for call in (lambda: near.recv(1), lambda: near.write(b"x"), near.close):
                with pytest.raises(RuntimeError, match="what a signal interrupted") as caught:
                    call()
                refused.append(caught)
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "a handler runs as it would elsewhere"
        finally:
            handled.set()

    before = signal.signal(signal.SIGUSR1, handler)
    try:

        def send() -> None:
            until_in_a_call(near)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            handled.wait()
            far.write(b"x")

        with meanwhile(send):
            assert near.recv(1) == b"x"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(refused) == 3


def test_two_threads_in_calls_of_one_kind_are_refused(ends):
    near, far = ends
    with meanwhile(lambda: near.recv(1)) as received:
        until_in_a_call(near)
        for call in (
            lambda: near.recv(1),
            lambda: near.readinto(bytearray(1)),
            near.shutdown,
            near.close,
            near.abort,
        ):
            with pytest.raises(RuntimeError, match="another thread"):
                call()
        far.write(b"x")
    assert received == [b"x"]
    assert not near.closed


def test_one_thread_reads_while_another_writes(ends):
    """Much, both ways at once, with all four ends waiting for each other; then the one that did not lead leads."""
    sizes = (1, 7, 65536, 100_000, *[MIB] * 12)

    def send(stream: RdmaStream) -> None:
        pattern = Pattern(seed=2)
        for size in sizes:
            stream.write(memoryview(pattern.take(size)) if size % 2 else pattern.take(size))

    def receive(stream: RdmaStream) -> None:
        pattern = Pattern(seed=2)
        while pattern.position < sum(sizes):
            pattern.check(stream.recv(200_000))

    with meanwhile(*(lambda s=s, call=call: call(s) for s in ends for call in (send, receive))):
        pass


def test_a_writer_goes_on_while_another_thread_waits_for_bytes(ends):
    """Who waits for bytes leads; its passes, or the loop's, are the writer's too."""
    near, far = ends
    with meanwhile(lambda: near.recv(1)) as received:
        until_in_a_call(near)
        with meanwhile(lambda: near.write(bytes(5 * MIB))):
            left = 5 * MIB
            while left:
                left -= len(far.recv(MIB))
        far.write(b"x")
    assert received == [b"x"]


def test_a_writer_has_a_time_limit_while_another_thread_waits_for_bytes(ends):
    near, far = ends
    with meanwhile(lambda: near.recv(1)) as received:
        until_in_a_call(near)
        left = len(fill(near))
        while left:
            left -= len(far.recv(MIB))
        far.write(b"x")
    assert received == [b"x"]


@pytest.mark.parametrize("busy_poll", [0, 0.5, float("inf")])
@pytest.mark.parametrize("slots", [1, 2, 16])
def test_a_writer_that_watches_learns_of_credits(busy_poll, slots):
    """Its queue may be asleep when it begins to watch."""
    with pair(slot_bytes=4096, data_slots=slots, busy_poll=busy_poll) as (near, far):
        pattern, size = Pattern(seed=3), 200 * 4096

        def send() -> None:
            pattern = Pattern(seed=3)
            for _ in range(4):
                assert near.write(memoryview(pattern.take(size // 4))) == size // 4

        with meanwhile(send):
            while pattern.position < size:
                pattern.check(far.recv(10_000))


KILLED = """
import signal, sys
from rdmanet import open_rdma_stream

stream = open_rdma_stream(sys.argv[1], int(sys.argv[2]), timeout=60)
print("connected", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("call", ["recv", "write"])
@pytest.mark.parametrize("busy_poll", [0, float("inf")])
def test_a_peer_that_is_killed_while_we_wait(call, busy_poll):
    """Also if we watch: that its process has gone is no completion."""
    with listen_rdma_stream(HOST, timeout=LIMIT_S, busy_poll=busy_poll) as listener:
        with program(listener, KILLED) as child:
            stream = listener.accept()
            assert child.line() == "connected"
            stream.settimeout(LIMIT_S)
            with (
                pytest.raises(ConnectionError),
                meanwhile(lambda: (until_in_a_call(stream), child.send_signal(9))),
            ):
                if call == "recv":
                    stream.recv(1)
                else:
                    stream.write(bytes(8 * MIB))
            stream.abort()


@pytest.mark.parametrize("slots", [1, 16])
def test_a_writer_goes_on_although_the_loop_is_needed(slots):
    """A timer on its loop: so the whole call is the loop's. Frames come free, and no byte has waited for one.

    With one slot, all that was written is posted before a frame is free for the rest.
    """
    with pair(slot_bytes=4096, data_slots=slots) as (near, far):
        near._private.loop.call_later(LIMIT_S, print)
        with meanwhile(lambda: near.write(memoryview(bytes(MIB)))) as results:
            left = MIB
            while left:
                left -= len(far.recv(MIB))
        assert results == [MIB]


def test_one_thread_leads_and_another_follows(ends):
    """They change places at any moment."""
    near, far = ends
    rounds, size = 400, 300_000
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:

        def read() -> None:
            for _ in range(rounds):
                assert near.recv(1) == b"x"

        def write() -> None:
            for _ in range(rounds // 20):
                near.write(memoryview(bytes(size)))

        def answer() -> None:
            for n in range(rounds):
                far.write(b"x")
                if n % 20 == 0:
                    left = size
                    while left:
                        left -= len(far.recv(left))

        near.settimeout(LIMIT_S / 2)
        with meanwhile(read, write, answer):
            pass
    finally:
        sys.setswitchinterval(before)


def test_signals_while_another_thread_lives():
    """The kernel gives a signal to a thread that does not block it: that must wake the one that sleeps."""
    with listen_rdma_stream(HOST, timeout=LIMIT_S) as listener:
        with program(listener, SIGNALLED) as child:
            with listener.accept() as stream:
                stream.settimeout(LIMIT_S)
                for n in range(300):
                    stream.write(b"x")
                    child.send_signal(signal.SIGUSR1)
                    assert int(child.line()) == n + 1
            child.finish()


SIGNALLED = """
import os, signal, sys, threading
from rdmanet import open_rdma_stream

handled = 0

def handle(*_):
    global handled
    handled += 1
    os.write(1, b"%d\\n" % handled)  # print() can't be entered again, and the next signal may come before it returns

signal.signal(signal.SIGUSR1, handle)
threading.Thread(target=threading.Event().wait, daemon=True).start()
with open_rdma_stream(sys.argv[1], int(sys.argv[2]), timeout=60) as stream:
    while stream.recv(100):
        pass
"""


def test_what_a_handler_raises_loses_no_byte(ends):
    """Unless it comes in the few instructions in which Python takes over the result: there every function loses it."""
    near, far = ends
    size = 16 * MIB

    class Alarm(Exception):
        pass

    def handler(*_: object) -> None:
        if near._private.calls:  # a call has begun and has not ended
            raise Alarm

    def send() -> None:
        pattern = Pattern(seed=4)
        while pattern.position < size:
            far.write(pattern.take(min(50_000, size - pattern.position)))

    pattern, alarms, delays = Pattern(seed=4), 0, random.Random(4)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with meanwhile(send):
            while pattern.position < size:
                # Once in a read that succeeds, so some do on the slowest of machines.
                signal.setitimer(signal.ITIMER_REAL, delays.uniform(1e-5, 3e-4))
                chunk = b""
                while not chunk:
                    try:
                        chunk = near.recv(256 * 1024)
                    except Alarm:
                        alarms += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                pattern.check(chunk)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert alarms


def test_a_thread_for_each_connection():
    """Accepted streams are independent of each other and of the listener."""

    def serve(stream: RdmaStream) -> None:
        with stream:
            while chunk := stream.recv(1000):
                stream.write(chunk.upper())

    def ask(n: int) -> None:
        with open_rdma_stream(HOST, port, timeout=LIMIT_S) as stream:
            for k in range(10):
                text = b"line %d of %d" % (k, n)
                stream.write(text)
                assert io.BufferedReader(Kept(stream)).read(len(text)) == text.upper()

    class Kept(io.RawIOBase):
        """A raw file that is not closed with what reads from it."""

        def __init__(self, stream: RdmaStream) -> None:
            self.readinto = stream.readinto

        def readable(self) -> bool:
            return True

    with listen_rdma_stream(HOST, timeout=LIMIT_S) as listener:
        port = listener.getsockname()[1]
        with meanwhile(*(lambda n=n: ask(n) for n in range(2))):
            with ThreadPoolExecutor(2) as pool:
                served = [pool.submit(serve, listener.accept()) for _ in range(2)]
            for one in served:
                one.result()


def test_where_an_event_loop_runs_it_is_refused(ends):
    near, far = ends

    async def main() -> None:
        for call in (
            lambda: near.recv(1),
            lambda: near.write(b"x"),
            near.close,
            lambda: open_rdma_stream(HOST, 1),
            lambda: listen_rdma_stream(HOST),
        ):
            with pytest.raises(RuntimeError, match="open_rdma_connection"):
                call()

    asyncio.run(main())
    near.write(b"and works again")
    assert far.recv(100) == b"and works again"


FORKED = """
import os, sys, warnings
from rdmanet import open_rdma_stream

stream = open_rdma_stream(sys.argv[1], int(sys.argv[2]), timeout=60)
warnings.simplefilter("ignore", DeprecationWarning)  # that threads and forks go together badly; the device has one
child = os.fork()
if child == 0:
    status = 1
    try:
        stream.write(b"of the child")
    except RuntimeError as exc:
        status = 0 if "after fork" in str(exc) else 2
    stream.close()
    os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stream.write(b"of the parent")
assert stream.recv(1) == b""
stream.close()
"""


@pytest.mark.embedded_only("librdmacm does not survive a fork")
def test_a_forked_child_has_a_dead_copy():
    with listen_rdma_stream(HOST, timeout=LIMIT_S) as listener:
        with program(listener, FORKED) as process:
            with listener.accept() as stream:
                stream.settimeout(LIMIT_S)
                assert stream.recv(100) == b"of the parent"
                stream.shutdown()
                assert stream.recv(1) == b""
            process.finish()


def test_no_thread_is_started(ends):
    before = threading.active_count()
    with listen_rdma_stream("localhost" if HOST == "127.0.0.1" else HOST) as listener:
        assert listener.getsockname()[1]
    assert threading.active_count() == before


# ---- the ends of it


def test_an_abort_while_we_write_is_told_as_later(ends):
    near, far = ends
    with (
        pytest.raises(ConnectionResetError) as caught,
        meanwhile(lambda: (until_in_a_call(near), far.abort())),
    ):
        near.write(bytes(8 * MIB))
    with pytest.raises(ConnectionResetError) as again:
        near.write(b"x")
    assert str(again.value) == str(caught.value)


def test_shutdown_leaves_the_other_half(ends):
    near, far = ends
    near.write(b"question")
    near.shutdown()
    near.shutdown(socket.SHUT_WR)
    with pytest.raises(BrokenPipeError):
        near.write(b"more")
    with pytest.raises(OSError, match="SHUT_WR") as caught:
        near.shutdown(7)
    assert caught.value.errno == errno.EINVAL
    assert far.readall() == b"question"
    assert far.recv(1) == b""
    far.write(b"answer")
    far.close()
    assert near.readall() == b"answer"


def leave_unsent(stream: RdmaStream, data: bytes) -> None:
    """Have it write more than the peer has room for; the rest is for later calls to send."""
    stream.settimeout(NOT_LONG_S)
    with pytest.raises(TimeoutError):
        stream.sendall(data)


def test_shutdown_says_that_bytes_are_lost(ends):
    near, far = ends
    leave_unsent(near, bytes(8 * MIB))
    near.settimeout(LIMIT_S)
    with meanwhile(far.abort), pytest.raises(ConnectionResetError):
        near.shutdown()
    near.close()


def test_close_delivers(ends):
    near, far = ends
    much = (REPEATED * 4)[: 8 * MIB]
    leave_unsent(near, much)
    with meanwhile(near.close):
        assert far.readall() == much
    near.close()
    assert near.closed
    for call in (
        lambda: near.recv(1),
        lambda: near.readinto(bytearray(1)),
        lambda: near.write(b"x"),
        near.shutdown,
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert near.getpeername() == far.getsockname()
    with pytest.raises(ConnectionResetError):
        while True:  # as by TCP, the first may not know yet
            far.write(b"x")
    with contextlib.suppress(ConnectionResetError):  # it says so if one of these was posted, and is lost
        far.close()


def test_a_close_that_loses_bytes_says_so():
    with pair(close_timeout=0.2) as (near, far):
        leave_unsent(near, bytes(8 * MIB))
        with pytest.raises(TimeoutError, match="no progress"):
            near.close()
        assert near.closed
        with pytest.raises(ConnectionResetError):
            far.readall()


def test_writes_that_never_wait_learn_that_the_peer_has_closed(ends):
    near, far = ends
    far.close()
    end = time.monotonic() + LIMIT_S
    with pytest.raises(ConnectionResetError):
        while time.monotonic() < end:
            near.write(b"")  # takes no place in the peer's ring, so none of these has to wait


def test_a_peer_that_aborts(ends):
    near, far = ends
    near.write(b"partly")
    assert far.recv(4) == b"part"
    near.abort()
    near.abort()
    assert far.recv(10) == b"ly", "what had come is not lost"
    for call in (lambda: far.recv(1), lambda: far.recv(1), lambda: far.write(b"x")):
        with pytest.raises(ConnectionResetError):
            call()
    far.close()  # what is known is not said again


def test_a_peer_that_aborts_while_we_wait(ends):
    near, far = ends
    with meanwhile(near.abort), pytest.raises(ConnectionResetError):
        far.recv(1)


def test_a_stream_that_nobody_keeps():
    with listen_rdma_stream(HOST, timeout=LIMIT_S) as listener:
        with meanwhile(listener.accept) as accepted:
            near = open_rdma_stream(HOST, listener.getsockname()[1], timeout=LIMIT_S)
        with pytest.warns(ResourceWarning, match="unclosed <RdmaStream"):
            del near
            gc.collect()
        with accepted[0] as far, pytest.raises(ConnectionResetError):
            far.recv(1)
        with pytest.warns(ResourceWarning, match="unclosed <RdmaStreamListener"):
            listen_rdma_stream(HOST)
            gc.collect()


# ---- connecting and listening


def test_names_of_both_ends(ends):
    near, far = ends
    assert near.getsockname() == far.getpeername()
    assert near.getpeername() == far.getsockname()
    assert near.get_extra_info("rdma_device") == far.get_extra_info("rdma_device")
    with pytest.raises(OSError):
        near.fileno()


def test_nobody_listens():
    with listen_rdma_stream(HOST) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError):
            listen_rdma_stream(HOST, port)
    with pytest.raises(ConnectionRefusedError):
        open_rdma_stream(HOST, port)
    for call in (listener.accept, listener.getsockname):
        with pytest.raises(ValueError, match="closed"):
            call()
    listener.close()


def test_wrong_arguments():
    for wrong, error in (({"colour": "red"}, TypeError), ({"data_slots": 0}, ValueError)):
        with pytest.raises(error):
            open_rdma_stream(HOST, 1, **wrong)
        with pytest.raises(error):
            listen_rdma_stream(HOST, **wrong)
    with pytest.raises(TypeError):
        RdmaStream()
    gc.collect()


def test_who_waits_is_refused_when_the_listener_is_closed():
    listener = listen_rdma_stream(HOST, timeout=LIMIT_S)

    def connect() -> None:
        with pytest.raises(ConnectionRefusedError):
            open_rdma_stream(HOST, port, timeout=LIMIT_S)

    port = listener.getsockname()[1]
    with meanwhile(connect):
        listener._private.run(listener._wait, LIMIT_S)
        listener.close()


def test_a_device_that_is_removed_ends_the_waiting():
    """The test does what the server would do then."""
    with listen_rdma_stream(HOST, timeout=LIMIT_S) as listener:

        def accept() -> None:
            with pytest.raises(OSError, match="is gone"):
                listener.accept()

        with meanwhile(accept):
            while listener._arrived is None:
                time.sleep(0.001)
            listener._private.loop.call_soon_threadsafe(listener._server.close)
        accept()


def test_who_gave_up_is_passed_over():
    """Its request is there, but its client has gone; the next one is taken."""
    with listen_rdma_stream(HOST, timeout=LIMIT_S) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(TimeoutError):
            open_rdma_stream(HOST, port, timeout=NOT_LONG_S)
        with meanwhile(lambda: open_rdma_stream(HOST, port, timeout=LIMIT_S)) as opened:
            accepted = listener.accept()
        with opened[0] as near, accepted as far:
            far.write(b"you, then")
            near.settimeout(LIMIT_S)
            assert near.recv(100) == b"you, then"


def test_asyncios_streams_are_its_peers():
    """It is the same protocol on the wire."""

    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.close()
        await writer.wait_closed()

    async def main() -> None:
        async with await rdmanet.start_rdma_stream_server(shout, HOST, 0) as server:
            port = server.sockets[0].getsockname()[1]
            assert await asyncio.to_thread(ask, port) == b"HELLO"
            server.close()
            await server.wait_closed()

    def ask(port: int) -> bytes:
        with open_rdma_stream(HOST, port, timeout=LIMIT_S) as stream:
            stream.write(b"hello")
            stream.shutdown()
            return stream.readall()

    asyncio.run(main())
