"""Passes on what a client and a server say, and keeps it; then says the client's part again, several times.

argv is the server's port, and how many times. Says its `port`; what the `client` and the `server` said; and what the
server `answers` to the repetitions.
"""

import select
import socket


def receive(connection):
    """What it says; nothing when it has gone, in whichever way."""
    try:
        return connection.recv(4096)
    except ConnectionError:
        return b""


server = ("127.0.0.1", int(argv[0]))
listener = socket.create_server(("127.0.0.1", 0))
name = socket.socket(socket.AF_UNIX)
name.bind(f"\0rdmanet-cm/::ffff:127.0.0.1/{listener.getsockname()[1]}")  # else it is a TCP program's
say(port=listener.getsockname()[1])
client = listener.accept()[0]
ends = {client: socket.create_connection(server)}
ends |= {there: here for here, there in ends.items()}
heard = dict.fromkeys(ends, b"")
while True:
    ready = select.select(list(ends), [], [])[0]
    said = {one: receive(one) for one in ready}
    for one, words in said.items():
        heard[one] += words
        if words:
            ends[one].sendall(words)
    if not all(said.values()):
        break
words = heard.pop(client)
(answer,) = heard.values()
say(client=words.hex(), server=answer.hex())
for one in ends:
    one.close()

answers = []
for _ in range(int(argv[1])):
    with socket.create_connection(server) as again:
        again.sendall(words)
        answer = b""
        while more := receive(again):
            answer += more
        answers.append(answer.hex())
say(answers=answers)
hear()
