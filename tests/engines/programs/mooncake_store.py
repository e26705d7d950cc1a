"""Mooncake's store: a master, a process that gives memory, and one that puts values there and gets them.

usage: mooncake_store.py
"""

import os

import pair
from mooncake.store import MooncakeDistributedStore
from mooncakes_master import master
from pair import carrying, hear, target

GIVEN = 64 << 20
OWN = 16 << 20  # what a process transfers from and to
SIZES = (1, 100, 4096, 65_537, 1 << 20, (4 << 20) + 1)


def store(address, given):
    made = MooncakeDistributedStore()
    assert made.setup(pair.HOST, "P2PHANDSHAKE", given, OWN, "rdma", "soft0", address) == 0
    return made


def serve(pipe):
    """All values are in this process' memory. It gets them as well."""
    mine = store(hear(pipe), GIVEN)
    pipe.send("ready")
    while (key := hear(pipe)) != "end":
        pipe.send(mine.get(key))
    mine.close()


def put_and_get(mine, pipe):
    values = {f"{size} bytes": os.urandom(size) for size in SIZES}
    for key, value in values.items():
        with carrying(len(value)):
            assert mine.put(key, value) == 0
    for key, value in values.items():
        with carrying(len(value)):
            assert mine.get(key) == value
        pipe.send(key)
        assert hear(pipe) == value


if __name__ == "__main__":
    with master() as (address, _), target(serve) as (pipe, _):
        pipe.send(address)
        assert hear(pipe) == "ready"
        mine = store(address, 0)
        put_and_get(mine, pipe)
        mine.close()
    print("done")
