"""Listens at Unix sockets: argv is their paths, or names after `@`. Says `has`; then, for each line, what it
`heard`."""

import select
import socket

listeners, guests, heard = [], [], b""
for path in argv:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + path[1:] if path.startswith("@") else path)
    listener.listen()
    listeners.append(listener)
say(has=len(listeners))
wake = 0  # standard input
while True:
    ready, _, _ = select.select([wake, *listeners, *guests], [], [])
    for one in ready:
        if one in listeners:
            guests.append(one.accept()[0])
        elif one in guests:
            if said := one.recv(4096):
                heard += said
                one.sendall(b"the listener\n")
            else:
                guests.remove(one)
                one.close()
        elif hear() is None:
            raise SystemExit
    if wake in ready:
        say(heard=heard.decode())
