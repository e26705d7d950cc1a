"""NIXL: two agents, whose backend UCX finds the embedded device.

usage: nixl_pair.py CASE
"""

import contextlib
import itertools
import random

import numpy as np
import pair
from nixl_cu12._api import nixl_agent, nixl_agent_config
from nixl_cu12._bindings import nixlRemoteDisconnectError
from pair import BLOCK, LARGE, PART, carrying, hear, random_bytes, run, until

BLOCKS = 1000
BLOCK_SIZE = 1024


def agent_with(name, memory):
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, name)], "DRAM")
    return agent


def serve(pipe, size=BLOCK):
    """Answer what the initiator asks: our memory's bytes, other bytes in it, or the next notification."""
    memory = random_bytes(size)
    agent = agent_with("target", memory)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    while (word := hear(pipe)) != "end":
        if word == "notification":
            pipe.send(until(agent.get_new_notifs, "a notification"))
        else:
            if word == "renew":
                memory[:] = random_bytes(BLOCK)
            pipe.send(memory.tobytes())


class Initiator:
    def __init__(self, pipe, size=BLOCK):
        self.pipe = pipe
        self.memory = np.zeros(size, np.uint8)
        self.agent = agent_with("initiator", self.memory)
        metadata, self.address = hear(pipe)
        self.name = self.agent.add_remote_agent(metadata)

    def ask(self, word):
        self.pipe.send(word)
        return hear(self.pipe)

    def start(self, operation, local, remote, notification=b""):
        """Transfer between blocks, each an offset and a size."""
        blocks = (
            self.agent.get_xfer_descs([(base + offset, size, 0) for offset, size in side], "DRAM")
            for base, side in ((self.memory.ctypes.data, local), (self.address, remote))
        )
        handle = self.agent.initialize_xfer(operation, *blocks, self.name, notification)
        return handle, self.agent.transfer(handle)

    def end(self, handle):
        def state():
            found = self.agent.check_xfer_state(handle)
            return found if found != "PROC" else None

        return until(state, "the transfer's end")

    def transfer(self, operation, local, remote, notification=b""):
        with carrying(sum(size for _, size in local)):
            handle, state = self.start(operation, local, remote, notification)
            assert (self.end(handle) if state == "PROC" else state) == "DONE"
        self.agent.release_xfer_handle(handle)


WHOLE = [(0, BLOCK)]


def read_and_write(one):
    there = one.ask("renew")
    one.transfer("READ", WHOLE, WHOLE)
    assert one.memory.tobytes() == there
    one.memory[:] = random_bytes(BLOCK)
    one.transfer("WRITE", WHOLE, WHOLE)
    assert one.ask("bytes") == one.memory.tobytes() != there


def notifications(one):
    for text in (b"first", b"second", bytes(range(256))):
        one.transfer("WRITE", WHOLE, WHOLE, text)
        assert one.ask("notification") == {"initiator": [text]}
    one.agent.send_notif("target", b"without a transfer")
    assert one.ask("notification") == {"initiator": [b"without a transfer"]}


def lists(one):
    """A thousand blocks from everywhere to everywhere else, in one transfer."""
    places = [place * BLOCK_SIZE for place in range(BLOCK // BLOCK_SIZE)]
    for operation in ("READ", "WRITE"):
        here, there = (random.sample(places, BLOCKS) for _ in range(2))
        theirs = np.frombuffer(one.ask("renew"), np.uint8).copy()
        ours = one.memory[:] = random_bytes(BLOCK)
        ours = ours.copy()
        one.transfer(operation, *([(place, BLOCK_SIZE) for place in side] for side in (here, there)))
        for a, b in zip(here, there, strict=True):
            if operation == "READ":
                ours[a : a + BLOCK_SIZE] = theirs[b : b + BLOCK_SIZE]
            else:
                theirs[b : b + BLOCK_SIZE] = ours[a : a + BLOCK_SIZE]
        assert one.memory.tobytes() == ours.tobytes()
        assert one.ask("bytes") == theirs.tobytes()


def random_sizes(one):
    def transfer(reads, here, there, size):
        one.transfer("READ" if reads else "WRITE", [(here, size)], [(there, size)])

    pair.random_sizes(one, transfer)


@contextlib.contextmanager
def transfers(pipe):
    """Reads and writes by turns, of parts that do not adjoin on the other side."""
    one = Initiator(pipe, LARGE)
    operations = itertools.cycle(["READ", "WRITE"])
    parts = [(place, PART) for place in range(0, LARGE, PART)]

    def transfer():
        try:
            one.transfer(next(operations), parts, parts[::-1])
        except nixlRemoteDisconnectError as exc:
            return str(exc)
        return None

    yield transfer


if __name__ == "__main__":
    run((read_and_write, notifications, lists, random_sizes), serve, Initiator, transfers)
