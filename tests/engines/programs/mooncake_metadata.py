"""Mooncake: two transfer engines, which find each other by a metadata server.

usage: mooncake_metadata.py
"""

import pair
from mooncake_pair import Initiator, read_and_write, registered, started
from mooncakes_master import free_port, master
from pair import BLOCK, hear, random_bytes, target


def own_name():
    """Here an engine is called as it likes; it listens on this port."""
    return f"{pair.HOST}:{free_port()}"


def serve(pipe):
    name = own_name()
    engine = started(hear(pipe), name)
    memory = registered(engine, random_bytes(BLOCK))
    pipe.send((name, memory.ctypes.data))
    while hear(pipe) != "end":
        pipe.send(memory.tobytes())


if __name__ == "__main__":
    with master() as (_, url), target(serve) as (pipe, _):
        pipe.send(url)
        read_and_write(Initiator(pipe, engine=started(url, own_name())))
    print("done")
