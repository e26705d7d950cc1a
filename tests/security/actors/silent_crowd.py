"""Connects by TCP and says nothing: argv is the port, how many, and the address that it comes from, or a network's.

Says `there` when all have connected; for each line it hears, how many were `shown_out` since, and what they were told.
"""

import collections
import socket

crowd = []
for i in range(int(argv[1])):
    one = socket.socket()
    one.bind((f"127.77.{i >> 8}.{i & 255}" if argv[2] == "127.0.0.0" else argv[2], 0))
    one.connect(("127.0.0.1", int(argv[0])))
    one.setblocking(False)
    crowd.append(one)
say(there=len(crowd))
while hear() is not None:
    told: collections.Counter[str] = collections.Counter()
    for one in crowd.copy():
        try:
            words = one.recv(4096)
        except BlockingIOError:
            continue
        except ConnectionError:
            words = b""
        told[words[:10].hex()] += 1
        crowd.remove(one)
    say(shown_out=told.total(), told=told)
