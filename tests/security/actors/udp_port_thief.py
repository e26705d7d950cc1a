"""Tries to have UDP ports: with every set of options, at every address, of no host's, too. argv are the addresses.

It is told the `port`; it says what it `tried` and `got`, and then, asked once more, what it has `read`.
"""

import select
import socket

SETS = ((), ("SO_REUSEADDR",), ("SO_REUSEPORT",), ("SO_REUSEADDR", "SO_REUSEPORT"))
FREEBIND = 15  # IP_FREEBIND, which the module doesn't name

say(ready=True)
port = hear()["port"]
tried, got, kept = 0, [], []
for address in argv:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for options in SETS:
        for only in (False, True) if family == socket.AF_INET6 else (False,):
            try:
                thief = socket.socket(family, socket.SOCK_DGRAM)
                if only:
                    thief.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            except OSError:  # a host without IPv6
                continue
            thief.setsockopt(socket.IPPROTO_IP, FREEBIND, 1)
            for option in options:
                thief.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
            tried += 1
            try:
                thief.bind((address, port))
            except OSError:
                thief.close()
            else:
                kept.append(thief)
                got.append([address, *options])
say(tried=tried, got=got)
hear()
say(read=[thief.recv(9000)[24:].decode() for thief in select.select(kept, [], [], 0)[0]])
hear()
