"""DLSlime: two endpoints.

usage: dlslime_pair.py CASE
"""

import contextlib
import itertools

import numpy as np
import pair
from dlslime import RDMAEndpoint
from pair import BLOCK, LARGE, PART, carrying, hear, random_bytes, run

BLOCKS = 64


class Side:
    def __init__(self, memory):
        self.memory = memory
        self.endpoint = RDMAEndpoint("soft0", 1, "auto", 1)
        self.local = self.endpoint.register_memory_region("memory", memory.ctypes.data, 0, memory.nbytes)
        self.remote = None

    def connect(self, info):
        self.endpoint.connect(info)
        self.remote = self.endpoint.register_remote_memory_region("memory", info["mr_info"]["memory"])


def serve(pipe, size=BLOCK):
    side = Side(random_bytes(size))
    endpoint, memory = side.endpoint, side.memory
    pipe.send(endpoint.endpoint_info())
    side.connect(hear(pipe))
    pipe.send("connected")
    while (word := hear(pipe)) != "end":
        if word == "imm":
            future = endpoint.imm_recv()
            pipe.send("posted")
            assert future.wait() == 0
            pipe.send(future.imm_data())
        elif word == "recv":
            future = endpoint.recv((memory.ctypes.data, 0, BLOCK))
            pipe.send("posted")
            assert future.wait() == 0
            pipe.send("received")
        elif word == "send":
            pipe.send("sending")
            with carrying(BLOCK):
                assert endpoint.send((memory.ctypes.data, 0, BLOCK)).wait() == 0
            pipe.send("sent")
        else:
            pipe.send(memory.tobytes())


class Initiator(Side):
    def __init__(self, pipe, size=BLOCK):
        super().__init__(np.zeros(size, np.uint8))
        self.pipe = pipe
        info = hear(pipe)
        self.connect(info)
        assert self.ask(self.endpoint.endpoint_info()) == "connected"

    def ask(self, word):
        self.pipe.send(word)
        return hear(self.pipe)

    def whole(self):
        return [(self.local, self.remote, 0, 0, BLOCK)]


def read(one):
    with carrying(BLOCK):
        assert one.endpoint.read(one.whole()).wait() == 0
    assert one.memory.tobytes() == one.ask("bytes")


def write(one):
    one.memory[:] = random_bytes(BLOCK)
    with carrying(BLOCK):
        assert one.endpoint.write(one.whole()).wait() == 0
    assert one.memory.tobytes() == one.ask("bytes")


def read_and_write(one):
    read(one)
    write(one)


def batches(one):
    """Blocks in the reverse order, in one call."""
    size = BLOCK // BLOCKS
    places = [place * size for place in range(BLOCKS)]
    with carrying(BLOCK):
        crossed = [
            (one.local, one.remote, there, here, size)
            for here, there in zip(places, reversed(places), strict=True)
        ]
        assert one.endpoint.read(crossed).wait() == 0
    theirs = np.frombuffer(one.ask("bytes"), np.uint8).reshape(BLOCKS, size)
    assert one.memory.tobytes() == theirs[::-1].tobytes()


def write_with_imm(one):
    one.memory[:] = random_bytes(BLOCK)
    assert one.ask("imm") == "posted"
    with carrying(BLOCK):
        assert one.endpoint.write_with_imm(one.whole(), 0x1234).wait() == 0
    assert hear(one.pipe) == 0x1234
    assert one.memory.tobytes() == one.ask("bytes")


def send_and_recv(one):
    one.memory[:] = random_bytes(BLOCK)
    assert one.ask("recv") == "posted"
    with carrying(BLOCK):
        assert one.endpoint.send((one.memory.ctypes.data, 0, BLOCK)).wait() == 0
    assert hear(one.pipe) == "received"
    theirs = one.ask("bytes")
    assert one.memory.tobytes() == theirs
    one.memory[:] = 0
    future = one.endpoint.recv((one.memory.ctypes.data, 0, BLOCK))
    assert one.ask("send") == "sending"
    assert future.wait() == 0
    assert hear(one.pipe) == "sent"
    assert one.memory.tobytes() == theirs


def random_sizes(one):
    def transfer(reads, here, there, size):
        transfer = one.endpoint.read if reads else one.endpoint.write
        with carrying(size):
            assert transfer([(one.local, one.remote, there, here, size)]).wait() == 0

    pair.random_sizes(one, transfer)


@contextlib.contextmanager
def transfers(pipe):
    """Reads and writes by turns, in parts, all of them under way.

    DLSlime's thread polls each endpoint until that is shut down, failed ones, too, and is slow with fifty of them.
    """
    one = Initiator(pipe, LARGE)
    operations = itertools.cycle(["read", "write"])

    parts = [(one.local, one.remote, place, place, PART) for place in range(0, LARGE, PART)]

    def transfer():
        operation = getattr(one.endpoint, next(operations))
        errors = [error for future in [operation([part]) for part in parts] if (error := outcome(future))]
        return errors[0] if errors else None

    try:
        yield transfer
    finally:
        one.endpoint.shutdown()


def outcome(future):
    try:
        status = future.wait()
    except RuntimeError as exc:
        return str(exc)
    return f"status {status}" if status else None


if __name__ == "__main__":
    run((read_and_write, batches, write_with_imm, send_and_recv, random_sizes), serve, Initiator, transfers)
