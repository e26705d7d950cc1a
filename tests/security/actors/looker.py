# ruff: noqa: F821
"""Looks at another process by its socket: by `rdmanet ss`, told to listen to all users, or by itself."""

import contextlib
import os
import socket

import rdmanet.cli.asking as asking

name, way = argv
tried = heard = 0
for _ in range(20):
    tried += 1
    if way == "by the command":
        os.geteuid = lambda: 0
        heard += sum(not answer.failed for answer in asking.ask_all())
    else:
        with socket.socket(socket.AF_UNIX) as asking_it, contextlib.suppress(OSError):
            asking_it.settimeout(5)
            asking_it.connect("\0" + name)
            heard += len(asking_it.recv(1 << 16))
say(tried=tried, heard=heard)
