"""What docs/howto/engines.md shows, as it is there, with a peer.

usage: page.py ENGINE
"""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
from pair import BLOCK, hear, target

PAGE = Path(__file__).parents[3] / "docs/howto/engines.md"
COUNTING, NIXL, MOONCAKE, DLSLIME, DLSLIME_READS, PEERCACHE = re.findall(
    r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
)


def nixl(pipe, names):
    names["metadata_of_the_peer"], names["address_there"] = hear(pipe)
    exec(NIXL, names)
    assert names["state"] == "DONE"


def mooncake(pipe, names):
    peer, names["address_there"] = hear(pipe)
    names["port_of_the_peer"] = int(peer.rpartition(":")[2])
    exec(MOONCAKE, names)


def dlslime(pipe, names):
    names["info_of_the_peer"] = hear(pipe)
    exec(DLSLIME, names)
    pipe.send(names["endpoint"].endpoint_info())
    assert hear(pipe) == "connected"
    exec(DLSLIME_READS, names)


def peercache(pipe, names):
    names["peer"], names["address_there"], names["key_of_the_peer"] = hear(pipe)
    exec(PEERCACHE, names)


CASES = {each.__name__: each for each in (nixl, mooncake, dlslime, peercache)}

if __name__ == "__main__":
    engine = sys.argv[1]
    with target(importlib.import_module(f"{engine}_pair").serve) as (pipe, _):
        memory = np.zeros(BLOCK, np.uint8)
        names = {"address": memory.ctypes.data, "size": BLOCK}
        exec(COUNTING, names)
        CASES[engine](pipe, names)
        assert names["carried"]() >= BLOCK
        pipe.send("bytes")
        assert hear(pipe) == memory.tobytes()
    print("done")
