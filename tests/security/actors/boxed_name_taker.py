"""name_taker.py, locked up by its user: argv is in what, with commas between, and the names.

The roles are link_words.become's, and `pids`: a pid namespace. Or it says why it is `unfit`.
"""

import ctypes
import os
import signal

from link_words import become, libc
from taking import take

CLONE_NEWPID, PR_SET_PDEATHSIG = 0x20000000, 1

roles, argv = argv[0].split(","), argv[1:]
for role in roles:
    try:
        if role != "pids":
            become(role)
            continue
        if libc.unshare(CLONE_NEWPID):
            raise OSError(ctypes.get_errno(), "unshare")
    except OSError as exc:
        say(unfit=f"{role}: {exc}")
        raise SystemExit from exc
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

take(argv, say, hear)
