"""A TCP program that does not understand its first client, and hangs up, resets the connection, or answers.

usage: tcp_program.py ADDRESS MANNER
"""

import socket
import struct
import sys

address, manner = sys.argv[1:]
family = socket.AF_INET6 if ":" in address else socket.AF_INET
with socket.create_server((address, 0), family=family) as server:
    print(server.getsockname()[1], flush=True)
    client, _ = server.accept()
    with client:
        client.recv(1000)
        if manner == "resets":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif manner == "answers":
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
