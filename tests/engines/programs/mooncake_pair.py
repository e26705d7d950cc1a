"""Mooncake: two transfer engines, which find each other by themselves (P2PHANDSHAKE).

usage: mooncake_pair.py CASE
"""

import contextlib
import itertools

import numpy as np
import pair
from mooncake.engine import TransferEngine
from pair import BLOCK, LARGE, carrying, hear, random_bytes, run

BLOCKS = 256
SEGMENTS = 32


def started(metadata="P2PHANDSHAKE", name=None):
    engine = TransferEngine()
    assert engine.initialize(name or pair.HOST, metadata, "rdma", "soft0") == 0
    return engine


def registered(engine, memory):
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    return memory


def serve(pipe, size=BLOCK):
    engine = started()
    memories = [registered(engine, random_bytes(size))]
    pipe.send((f"{pair.HOST}:{engine.get_rpc_port()}", memories[0].ctypes.data))
    while (word := hear(pipe)) != "end":
        if word == "segments":
            memories += [registered(engine, random_bytes(BLOCK)) for _ in range(SEGMENTS)]
            pipe.send([(each.ctypes.data, each.tobytes()) for each in memories[1:]])
        else:
            pipe.send(memories[0].tobytes())


class Initiator:
    def __init__(self, pipe, size=BLOCK, engine=None):
        self.pipe = pipe
        self.engine = engine or started()
        self.memory = registered(self.engine, np.zeros(size, np.uint8))
        self.here = self.memory.ctypes.data
        self.name, self.there = hear(pipe)

    def ask(self, word):
        self.pipe.send(word)
        return hear(self.pipe)


def read(one):
    with carrying(BLOCK):
        assert one.engine.transfer_sync_read(one.name, one.here, one.there, BLOCK) == 0
    assert one.memory.tobytes() == one.ask("bytes")


def write(one):
    one.memory[:] = random_bytes(BLOCK)
    with carrying(BLOCK):
        assert one.engine.transfer_sync_write(one.name, one.here, one.there, BLOCK) == 0
    assert one.memory.tobytes() == one.ask("bytes")


def read_and_write(one):
    read(one)
    write(one)


def batches(one):
    """Blocks in the reverse order, in one call: there, and back again."""
    size = BLOCK // BLOCKS
    places = [place * size for place in range(BLOCKS)]
    here = [one.here + place for place in places]
    there = [one.there + place for place in reversed(places)]
    ours = one.memory[:] = random_bytes(BLOCK)
    ours = ours.copy()
    with carrying(BLOCK):
        assert one.engine.batch_transfer_sync_write(one.name, here, there, [size] * BLOCKS) == 0
    assert one.ask("bytes") == ours.reshape(BLOCKS, size)[::-1].tobytes()
    one.memory[:] = 0
    with carrying(BLOCK):
        assert one.engine.batch_transfer_sync_read(one.name, here, there, [size] * BLOCKS) == 0
    assert one.memory.tobytes() == ours.tobytes()


def segments(one):
    """Many registered memories, read in one batch into as many of our own."""
    theirs = one.ask("segments")
    ours = [registered(one.engine, np.zeros(BLOCK, np.uint8)) for _ in range(SEGMENTS)]
    with carrying(BLOCK * SEGMENTS):
        status = one.engine.batch_transfer_sync_read(
            one.name,
            [each.ctypes.data for each in ours],
            [address for address, _ in theirs],
            [BLOCK] * SEGMENTS,
        )
        assert status == 0
    assert [each.tobytes() for each in ours] == [data for _, data in theirs]
    for each in ours:
        assert one.engine.unregister_memory(each.ctypes.data) == 0


def random_sizes(one):
    def transfer(reads, here, there, size):
        transfer = one.engine.transfer_sync_read if reads else one.engine.transfer_sync_write
        with carrying(size):
            assert transfer(one.name, one.here + here, one.there + there, size) == 0

    pair.random_sizes(one, transfer)


@contextlib.contextmanager
def transfers(pipe):
    """Reads and writes by turns. The engine itself cuts them into parts of 64 KiB."""
    one = Initiator(pipe, LARGE)
    operations = itertools.cycle([one.engine.transfer_sync_read, one.engine.transfer_sync_write])

    def transfer():
        status = next(operations)(one.name, one.here, one.there, LARGE)
        return f"status {status}" if status else None

    yield transfer


if __name__ == "__main__":
    run((read_and_write, batches, segments, random_sizes), serve, Initiator, transfers)
