"""A stranger who makes noise: again and again it comes to a TCP port, says what makes no sense, and is hung up on.

argv: port, at least so many times, and for at least so many seconds. It says how often it came, and was hung up on.
"""

import socket
import time

port, times, seconds = int(argv[0]), int(argv[1]), float(argv[2])
attempts = hung_up = 0
began = time.monotonic()
while attempts < times or time.monotonic() < began + seconds:
    attempts += 1
    with socket.create_connection(("127.0.0.1", port), 30) as stranger:
        stranger.sendall(b"\x1b[2J\nCRITICAL root: hacked\n".ljust(72, b"!"))
        try:
            hung_up += stranger.recv(1) == b""
        except ConnectionResetError:
            hung_up += 1
say(attempts=attempts, hung_up=hung_up)
