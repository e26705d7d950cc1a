"""Run one of these scripts as another user, who may not read where our code lies: loaded first, then left.

usage: as_user.py UID SCRIPT [ARGUMENT ...]
"""

import asyncio  # noqa: F401
import concurrent.futures.thread  # noqa: F401
import os
import sys
from pathlib import Path

import rdmanet.streams  # noqa: F401  with all below it
from rdmanet import _core
from rdmanet.stream import listening, peer_memory  # noqa: F401  a server's, later

_core.Library.embedded()
uid = int(sys.argv[1])
script = Path(__file__).parent / sys.argv[2]
code = compile(script.read_text(), script, "exec")
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
sys.argv[:] = sys.argv[2:]
exec(code, {"__name__": "__main__"})
