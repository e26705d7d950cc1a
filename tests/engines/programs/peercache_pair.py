"""PeerCache: two of its transports for RDMA.

usage: peercache_pair.py CASE
"""

import contextlib
import itertools
import random

import numpy as np
import pair
from pair import BLOCK, LARGE, carrying, hear, random_bytes, run
from peercache.config import PeerCacheConfig
from peercache.transport import RdmaTransport

BLOCKS = 256


def started(memory):
    transport = RdmaTransport(
        PeerCacheConfig(
            discovery_addr="127.0.0.1:31998",  # its store would look there
            protocol="rdma",
            device_name="soft0",
            gid_index=0,
            local_hostname=pair.HOST,
        )
    )
    return transport, transport.register_mr(memory.ctypes.data, memory.nbytes)


def serve(pipe, size=BLOCK):
    memory = random_bytes(size)
    transport, region = started(memory)
    pipe.send((transport.local_endpoint(), region.addr, region.rkey))
    while hear(pipe) != "end":
        pipe.send(memory.tobytes())


class Initiator:
    def __init__(self, pipe, size=BLOCK):
        self.pipe = pipe
        self.memory = np.zeros(size, np.uint8)
        self.transport, self.region = started(self.memory)
        self.name, self.there, self.key = hear(pipe)

    def ask(self, word):
        self.pipe.send(word)
        return hear(self.pipe)

    def start(self, reads, here, there, size):
        """Blocks of one size, between offsets here and there: for each, whether it was transferred."""
        operation = self.transport.batch_read_v if reads else self.transport.batch_write_v
        count = len(here)
        ours = [self.region.addr + offset for offset in here]
        theirs = [self.there + offset for offset in there]
        return operation([self.name] * count, ours, theirs, [self.key] * count, [size] * count)

    def transfer(self, reads, here, there, size):
        with carrying(size * len(here)):
            assert all(self.start(reads, here, there, size))


def read_and_write(one):
    one.transfer(True, [0], [0], BLOCK)
    assert one.memory.tobytes() == one.ask("bytes")
    one.memory[:] = random_bytes(BLOCK)
    one.transfer(False, [0], [0], BLOCK)
    assert one.memory.tobytes() == one.ask("bytes")


def batches(one):
    """Blocks from everywhere to everywhere else, in one call: there, and back again."""
    size = BLOCK // BLOCKS
    here = [place * size for place in range(BLOCKS)]
    there = random.sample(here, BLOCKS)
    ours = one.memory[:] = random_bytes(BLOCK)
    ours = ours.copy()
    one.transfer(False, here, there, size)
    theirs = np.frombuffer(one.ask("bytes"), np.uint8)
    for a, b in zip(here, there, strict=True):
        assert theirs[b : b + size].tobytes() == ours[a : a + size].tobytes()
    one.memory[:] = 0
    one.transfer(True, here, there, size)
    assert one.memory.tobytes() == ours.tobytes()


def random_sizes(one):
    def transfer(reads, here, there, size):
        one.transfer(reads, [here], [there], size)

    pair.random_sizes(one, transfer)


@contextlib.contextmanager
def transfers(pipe):
    """Reads and writes by turns, in 1,024 parts: its queue has no room for more."""
    one = Initiator(pipe, LARGE)
    operations = itertools.cycle([True, False])
    part = LARGE // 1024
    parts = range(0, LARGE, part)

    def transfer():
        return None if all(one.start(next(operations), parts, parts, part)) else "False"

    yield transfer


if __name__ == "__main__":
    run((read_and_write, batches, random_sizes), serve, Initiator, transfers)
