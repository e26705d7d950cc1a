"""Takes the abstract names of ports that queue pairs may have, and listens there: argv is the first, and how many."""

import socket

first, count = map(int, argv)
held = []
for port in range(first, first + count):
    taker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        taker.bind(f"\0rdmanet-soft/{port}")
    except OSError:  # somebody was there before
        taker.close()
        continue
    taker.listen()
    held.append(taker)
say(has=len(held))
hear()
