"""A TCP program that notes what comes: argv may have an address, and "full": somebody listens beside it by the port's
name, whose queue is full.

Says its `port`, and for each line how many bytes `came`, by how many `connections`: as soon as there are as many bytes
as the line has in `came`.
"""

import select
import socket


def fill(name):
    """A listener of this name, and as many connections as may wait."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(0)
    kept = [listener]
    while True:
        kept.append(socket.socket(socket.AF_UNIX))
        kept[-1].setblocking(False)
        try:
            kept[-1].connect(name)
        except BlockingIOError:
            return kept


address = next((word for word in argv if word != "full"), "127.0.0.1")
program = socket.create_server((address, 0))
port = program.getsockname()[1]
kept = fill(f"\0rdmanet-cm/::ffff:127.0.0.1/{port}") if "full" in argv else []
say(port=port)
guests = set()
came = connections = 0
asked = []
wake = 0  # standard input
while True:
    ready, _, _ = select.select([wake, program, *guests], [], [])
    for one in ready:
        if one is program:
            guests.add(one.accept()[0])
            connections += 1
        elif one in guests:
            said = one.recv(4096)
            came += len(said)
            if not said:
                guests.remove(one)
    if wake in ready:
        order = hear()
        if order is None:
            break
        asked.append(order.get("came", 0))
    while asked and came >= asked[0]:
        del asked[0]
        say(came=came, connections=connections)
