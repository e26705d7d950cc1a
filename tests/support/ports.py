"""Ports that a test binds by number, while other suites run on this machine."""

import errno
import random
import socket
from contextlib import ExitStack
from pathlib import Path


def free_port() -> int:
    """A port that is free on all addresses of both families.

    It's not of the range from which the kernel gives ports to whoever connects, or binds to port 0.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, max(lowest, 20_000))
        try:
            with ExitStack() as held:
                for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
                    held.enter_context(socket.create_server((host, port), family=family))
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
        else:
            return port
