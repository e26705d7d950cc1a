"""NIXL: two agents, whose backend UCX finds the embedded device.

usage: nixl_pair.py CASE
"""

import os
import random
import sys
import time

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config
from nixl_cu12._bindings import nixlRemoteDisconnectError
from pair import BLOCK, carrying, hear, random_bytes, target, until

BLOCKS = 1000
BLOCK_SIZE = 1024
TRANSFERS = int(os.environ.get("RDMANET_TEST_TRANSFERS", "500"))


def agent_with(name, memory):
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, name)], "DRAM")
    return agent


def serve(pipe):
    """Answer what the initiator asks: our memory's bytes, other bytes in it, or the next notification."""
    memory = random_bytes(BLOCK)
    agent = agent_with("target", memory)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data, os.getpid()))
    while (word := hear(pipe)) != "end":
        if word == "notification":
            pipe.send(until(agent.get_new_notifs, "a notification"))
        else:
            if word == "renew":
                memory[:] = random_bytes(BLOCK)
            pipe.send(memory.tobytes())


class Initiator:
    def __init__(self, pipe):
        self.pipe = pipe
        self.memory = np.zeros(BLOCK, np.uint8)
        self.agent = agent_with("initiator", self.memory)
        metadata, self.address, self.target_pid = hear(pipe)
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
    """Small and large ones, at any address; both memories are compared after each hundred."""
    seed = int(os.environ.get("SEED", time.time_ns()))
    print(f"SEED={seed}")
    chance = random.Random(seed)
    theirs = np.frombuffer(one.ask("renew"), np.uint8).copy()
    ours = random_bytes(BLOCK)
    one.memory[:] = ours
    for number in range(TRANSFERS):
        size = min(BLOCK, int(2 ** chance.uniform(0, 20.5)))
        a, b = (chance.randint(0, BLOCK - size) for _ in range(2))
        if chance.random() < 0.5:
            ours[a : a + size] = theirs[b : b + size]
            one.transfer("READ", [(a, size)], [(b, size)])
        else:
            theirs[b : b + size] = ours[a : a + size]
            one.transfer("WRITE", [(a, size)], [(b, size)])
        assert one.memory[a : a + size].tobytes() == ours[a : a + size].tobytes()
        if number % 100 == 99 or number == TRANSFERS - 1:
            assert one.memory.tobytes() == ours.tobytes()
            assert one.ask("bytes") == theirs.tobytes()


def killed(one, process):
    """Its memory is gone: the engine says so, and says it of the next transfer, too."""
    one.transfer("READ", WHOLE, WHOLE)
    process.kill()
    process.join()
    for _ in range(2):
        try:
            handle, state = one.start("READ", WHOLE, WHOLE)
            if state == "PROC":
                state = one.end(handle)
            raise AssertionError(f"a transfer from a process that is gone ended in {state}")
        except nixlRemoteDisconnectError as exc:
            print(f"error: {exc}")


CASES = {each.__name__: each for each in (read_and_write, notifications, lists, random_sizes, killed)}

if __name__ == "__main__":
    with target(serve) as (pipe, process):
        case = CASES[sys.argv[1]]
        case(Initiator(pipe), *([process] if case is killed else []))
    print("done")
