"""rdmanet.tensors for programs without an event loop: the calls, waiting, cancelling, threads, and how threads end."""

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy
import pytest
from places import ENVIRONMENT, HOST, script

import rdmanet
from rdmanet import tensors
from rdmanet.tensors import blocking
from tests.support.processes import Process

MIB = 1 << 20
LONG_S = float(os.environ.get("RDMANET_TEST_LIMIT", 30))


@pytest.fixture
def owner() -> Iterator[blocking.Endpoint]:
    with blocking.open(HOST) as endpoint:
        yield endpoint


@pytest.fixture
def user() -> Iterator[blocking.Endpoint]:
    with blocking.open(HOST) as endpoint:
        yield endpoint


@pytest.fixture
def peer(owner: blocking.Endpoint, user: blocking.Endpoint) -> blocking.Peer:
    return user.connect(owner.address())


def test_the_calls(owner: blocking.Endpoint, user: blocking.Endpoint, peer: blocking.Peer):
    theirs = numpy.arange(600, dtype="<f4").reshape(20, 30)
    assert user.connect(owner.address()) is peer and peer.address.endpoint in owner.address()
    with owner.register(theirs) as memory:
        assert (memory.nbytes, memory.dtype, memory.shape) == (2400, "<f4", (20, 30))
        described = memory.describe(mode="rw")
        whole = tensors.Descriptor.from_bytes(described)
        mine = numpy.empty_like(theirs)
        reading = peer.read(described, into=mine)
        assert reading.wait() is None and reading.done and not reading.cancel()
        assert (mine == theirs).all()
        peer.write(mine[:1] * 2, whole[19:], notify=b"word").wait(LONG_S)
        told = owner.notification(LONG_S)
        assert (told.memory, told.payload) == (memory, b"word") and (theirs[19] == mine[0] * 2).all()
        rows = numpy.empty((3, 30), "<f4")
        peer.read_rows(whole, iter([5, 0, 19]), into=rows).wait(LONG_S)
        assert (rows == theirs[[5, 0, 19]]).all()
        peer.read_many((whole[at : at + 1], mine[at : at + 1]) for at in (3, 7)).wait(LONG_S)
        peer.write_many((mine[at : at + 1], whole[at : at + 1]) for at in (8, 9)).wait(LONG_S)
        assert len(memory.held()) == 1
        memory.revoke(described)
        assert not memory.held()
        with pytest.raises(rdmanet.RegionRevokedError):
            peer.read(described, into=mine).wait(LONG_S)
    assert peer.statistics()["failed"] == 1
    peer.close()
    with pytest.raises(ValueError, match="closed"):
        peer.read(described, into=mine).wait(LONG_S)


def test_a_program_s_own_coroutine(owner: blocking.Endpoint, user: blocking.Endpoint):
    async def fetch(endpoint: tensors.Endpoint) -> bytes:
        peer = await endpoint.connect(owner.address())
        mine = bytearray(4)
        await peer.read(described, into=mine)
        return bytes(mine)

    with owner.register(b"text") as memory:
        described = memory.describe()
        assert user.submit(fetch).wait(LONG_S) == b"text"


def test_wrong_arguments_are_the_transfer_s(owner: blocking.Endpoint, peer: blocking.Peer):
    with owner.register(bytearray(4)) as memory:
        described = memory.describe()
        for transfer, error in (
            (peer.read(described, into=bytearray(3)), ValueError),
            (peer.read(described, into=b"text"), TypeError),
            (peer.read(b"rubbish", into=bytearray(3)), tensors.DescriptorError),
            (peer.write(b"text", described), PermissionError),
        ):
            for _ in range(2):
                with pytest.raises(error):
                    transfer.wait(LONG_S)
            assert transfer.done and "failed" in repr(transfer)


# -- waiting and cancelling ------------------------------------------------------------------------------------


@contextlib.contextmanager
def unanswered(user: blocking.Endpoint) -> Iterator[blocking.Transfer[None]]:
    """A read that its peer, which is stopped, does not let begin."""
    with Process(*script("keeper.py"), env=ENVIRONMENT) as keeper:
        facts = keeper.hear()
        peer = user.connect(bytes.fromhex(facts["address"]))
        keeper.stop()
        try:
            yield peer.read(bytes.fromhex(facts["descriptor"]), into=bytearray(facts["nbytes"]))
        finally:
            keeper.send_signal(signal.SIGCONT)


def test_a_time_out_ends_only_the_wait(user: blocking.Endpoint):
    with unanswered(user) as reading:
        for timeout in (0, 0.05):
            with pytest.raises(TimeoutError, match="it goes on"):
                reading.wait(timeout)
        assert not reading.done and "under way" in repr(reading)
        assert reading.cancel() and reading.cancel() and reading.done
        with pytest.raises(CancelledError):
            reading.wait()


def test_a_call_s_time_out(owner: blocking.Endpoint):
    for timeout in (0, 0.05):
        with pytest.raises(TimeoutError):
            owner.notification(timeout)
    assert not owner._thread.under_way


@pytest.mark.parametrize("way", ["read", "write"])
def test_when_cancel_returns_the_access_has_ended(owner: blocking.Endpoint, peer: blocking.Peer, way: str):
    theirs = memoryview(rdmanet.alloc(64 * MIB))
    mine = bytearray(64 * MIB)
    with owner.register(theirs) as memory:
        described = memory.describe(mode="rw")
        peer.read(tensors.Descriptor.from_bytes(described)[:1], into=memoryview(mine)[:1]).wait(LONG_S)
        cancelled = 0
        for _ in range(20):
            moving = peer.read(described, into=mine) if way == "read" else peer.write(mine, described)
            cancelled += moving.cancel()
            mine += b"may be resized: nothing has it registered"
            del mine[64 * MIB :]
        del theirs
    assert cancelled and peer.statistics()["connections"] == 1


def test_a_transfer_that_is_dropped_goes_on(owner: blocking.Endpoint, peer: blocking.Peer):
    theirs, mine = bytes(range(256)) * 4096, bytearray(MIB)
    with owner.register(theirs) as memory:
        described = memory.describe()
        peer.read(described, into=memoryview(mine))
        gc.collect()
        peer.read(described, into=bytearray(MIB)).wait(LONG_S)
        deadline = time.monotonic() + LONG_S
        while peer.statistics()["bytes_read"] < 2 * MIB:
            assert time.monotonic() < deadline, peer.statistics()
    assert mine == theirs


def test_a_failed_transfer_leaves_no_cycle(owner: blocking.Endpoint, peer: blocking.Peer):
    """The memory is the program's again when its function returns, and not when the collector comes by."""

    class Watched(bytearray):
        pass

    def fail() -> weakref.ref[Watched]:
        mine = Watched(4)
        reading = peer.read(described, into=mine)
        with contextlib.suppress(rdmanet.RegionRevokedError):
            reading.wait(LONG_S)
        return weakref.ref(mine)

    with owner.register(bytes(4)) as memory:
        described = memory.describe()
    gc.collect()
    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


def test_an_error_is_raised_again_as_it_was(peer: blocking.Peer):
    """Whoever waits again gets the same error, and not the calls of those who waited before."""
    reading = peer.read(b"no descriptor", into=bytearray(4))
    depths = []
    for _ in range(3):
        with pytest.raises(tensors.DescriptorError) as raised:
            reading.wait(LONG_S)
        depths.append(len(raised.traceback))
    assert depths[0] == depths[1] == depths[2]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_descriptor_for_poll(owner: blocking.Endpoint, peer: blocking.Peer, when: str):
    with owner.register(b"text") as memory, peer.read(memory.describe(), into=bytearray(4)) as reading:
        if when == "after":
            reading.wait(LONG_S)
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        assert poll.poll(LONG_S * 1000) == [(reading.fileno(), select.POLLIN)]
        assert reading.done and reading.wait() is None
    with pytest.raises(OSError):
        os.fstat(poll.poll(0)[0][0])


def test_a_descriptor_for_poll_of_what_is_cancelled(user: blocking.Endpoint):
    with unanswered(user) as reading, reading:
        fd = reading.fileno()
        assert select.select([fd], [], [], 0)[0] == []
        reading.cancel(wait=False)  # whether it says so or not, the endpoint's thread may be quicker
        assert select.select([fd], [], [], LONG_S)[0] == [fd]
        assert reading.cancel()


def test_an_owner_that_computes_answers(owner: blocking.Endpoint):
    """Here nothing of its own runs but this test."""
    with owner.register(bytearray(b"text")) as memory:
        facts = {"address": owner.address().hex(), "descriptor": memory.describe().hex()}
        with Process(*script("reader.py"), env=ENVIRONMENT) as reader:
            reader.tell(**facts)
            deadline = time.monotonic() + LONG_S
            while not memory._memory.held():  # in this thread, without a call
                assert time.monotonic() < deadline, "the endpoint's thread has not answered"


def test_many_threads(owner: blocking.Endpoint, user: blocking.Endpoint):
    table = numpy.random.default_rng(7).integers(0, 1 << 60, (1000, 8))
    with owner.register(table) as memory:
        whole = tensors.Descriptor.from_bytes(memory.describe())

        def work(seed: int) -> int:
            numbers = numpy.random.default_rng(seed)
            for turn in range(25):
                wanted = numbers.integers(0, 1000, 5)
                rows = numpy.empty((5, 8), table.dtype)
                reading = user.connect(owner.address()).read_rows(whole, wanted, into=rows)
                if turn % 5 == 0:
                    reading.cancel()
                else:
                    reading.wait(LONG_S)
                    assert (rows == table[wanted]).all()
            return seed

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == list(range(4))
    assert user.connect(owner.address()).statistics()["connections"] == 1


# -- ends ------------------------------------------------------------------------------------------------------


def named() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == blocking.THREAD_NAME]


def test_the_thread_ends_with_the_endpoint():
    with blocking.open(HOST) as endpoint:
        (thread,) = [each for each in threading.enumerate() if each.name == blocking.THREAD_NAME]
        assert thread.daemon
    assert not named()
    endpoint.close()
    with pytest.raises(ValueError, match="this endpoint is closed"):
        endpoint.register(b"text")
    with pytest.raises(ValueError, match="this endpoint is closed"):
        endpoint.notification()
    with pytest.raises(OSError), blocking.open("192.0.2.1"):
        pass
    assert not named()


def test_closing_ends_what_is_under_way(user: blocking.Endpoint):
    with blocking.open(HOST) as endpoint:
        with unanswered(endpoint) as reading:
            waiting = endpoint.submit(lambda each: anext(each.notifications()))
            endpoint.close()
            assert reading.done and waiting.done
            for each in (reading, waiting):
                with pytest.raises(CancelledError):
                    each.wait()
                assert each.cancel()


def test_closing_a_memory_after_its_endpoint():
    with blocking.open(HOST) as endpoint:
        kept = bytearray(b"text")
        memory = endpoint.register(kept)
        peer = endpoint.connect(endpoint.address())
    memory.close()
    peer.close()
    kept.clear()


def test_an_endpoint_that_is_forgotten():
    endpoint = blocking.open(HOST)
    thread = endpoint._thread._thread
    with pytest.warns(ResourceWarning, match="unclosed <blocking Endpoint"):
        del endpoint
    thread.join()
    assert not named()


def test_it_sleeps_when_idle(owner: blocking.Endpoint, peer: blocking.Peer):
    with owner.register(b"text") as memory:
        peer.read(memory.describe(), into=bytearray(4)).wait(LONG_S)
        clocks = [
            time.pthread_getcpuclockid(each.ident)
            for each in threading.enumerate()
            if each.name == blocking.THREAD_NAME and each.ident is not None
        ]
        assert len(clocks) == 2
        before = sum(map(time.clock_gettime, clocks))
        assert peer.read(memory.describe(), into=bytearray(4)).wait(LONG_S) is None
        threading.Event().wait(0.5)
        assert sum(map(time.clock_gettime, clocks)) - before < 0.25


def test_a_call_in_the_endpoint_s_own_thread_is_refused(owner: blocking.Endpoint, peer: blocking.Peer):
    async def wrong(call: Any) -> None:
        with pytest.raises(RuntimeError, match="in the endpoint's own thread"):
            call()

    with owner.register(b"text") as memory:
        described = memory.describe()
        waiting = owner.submit(lambda endpoint: anext(endpoint.notifications()))
        for call in (
            lambda: owner.connect(owner.address()),
            lambda: owner.register(b"text"),
            owner.close,
            memory.close,
            waiting.wait,
            waiting.cancel,
        ):
            owner.submit(lambda _, call=call: wrong(call)).wait(LONG_S)

        async def right(_: object) -> None:
            waiting.cancel(wait=False)

        owner.submit(right).wait(LONG_S)
        with pytest.raises(CancelledError):
            waiting.wait(LONG_S)
        peer.read(described, into=bytearray(4)).wait(LONG_S)


def test_a_forked_child_is_refused_and_harms_nothing(owner: blocking.Endpoint, peer: blocking.Peer):
    with owner.register(b"text") as memory:
        described = memory.describe()
        done = peer.read(described, into=bytearray(4))
        done.wait(LONG_S)
        waiting = owner.submit(lambda endpoint: anext(endpoint.notifications()))
        if not (child := os.fork()):
            try:
                refused = 0
                for call in (
                    lambda: peer.read(described, into=bytearray(4)),
                    lambda: owner.notification(0),
                    memory.describe,
                    waiting.wait,
                    waiting.cancel,
                ):
                    with pytest.raises(RuntimeError, match="open another after fork"):
                        call()
                    refused += 1
                assert done.wait() is None
                memory.close()
                owner.close()
                with blocking.open(HOST) as another:
                    another.register(b"text").close()
                os._exit(refused)
            finally:
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        mine = bytearray(4)
        peer.read(described, into=mine).wait(LONG_S)
        assert mine == b"text" and not waiting.done
        waiting.cancel()


def test_a_forked_child_closes_a_transfer_whose_lock_was_held(owner: blocking.Endpoint):
    with owner.submit(lambda endpoint: anext(endpoint.notifications())) as waiting:
        waiting.fileno()
        with waiting._changed:  # as the endpoint's thread may, at any time
            child = os.fork()
            if not child:
                try:
                    signal.setitimer(signal.ITIMER_REAL, LONG_S)  # no thread of the child's would release it
                    waiting.close()
                    os._exit(0 if waiting._fd < 0 else 99)
                finally:
                    os._exit(98)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not waiting.done


@pytest.mark.parametrize("ending", ["", "sys.exit()", "raise KeyboardInterrupt"])
def test_the_interpreter_s_exit(ending: str):
    """Also with a transfer under way and an endpoint that nobody has closed."""
    code = f"""
import atexit, sys, threading
atexit.register(lambda: print(len(threading.enumerate()), "thread", flush=True))
from rdmanet.tensors import blocking  # whose end comes first
endpoint = blocking.open({HOST!r})
memory = endpoint.register(bytearray(4))
mine = bytearray(4)
endpoint.connect(endpoint.address()).read(memory.describe(), into=mine).wait()
waiting = endpoint.submit(lambda each: anext(each.notifications()))
print("so far", flush=True)
{ending}
"""
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "so far\n1 thread\n", ran.stderr
    said = [line for line in ran.stderr.splitlines() if "KeyboardInterrupt" not in line]
    if ending != "raise KeyboardInterrupt":
        # A busy machine makes steps long, which a debug loop reports.
        said = [line for line in said if not line.startswith("Executing <")]
        assert not [line for line in said if "ResourceWarning" not in line], ran.stderr
        assert ran.returncode == 0
    assert "Exception" not in ran.stderr and "Fatal" not in ran.stderr
