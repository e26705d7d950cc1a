"""Taking names that listeners have, of `<address>/<port>`, and keeping whatever is said to them."""

import select
import socket


def take(names, say, hear):
    """It says how many it `has`; then, for each line it hears, who came and what they said since."""
    listeners = []
    for name in names:
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(f"\0rdmanet-cm/{name}")
        except OSError:
            listener.close()
            continue
        listener.listen(64)
        listeners.append(listener)
    say(has=len(listeners))

    guests: list[socket.socket] = []
    visits, heard = 0, b""
    wake = 0  # standard input
    while True:
        ready, _, _ = select.select([wake, *listeners, *guests], [], [])
        for one in ready:
            if one in listeners:
                guests.append(one.accept()[0])
                visits += 1
            elif one in guests:
                said = one.recv(4096)
                heard += said
                if not said:
                    guests.remove(one)
                    one.close()
            elif hear() is None:
                raise SystemExit
        if wake in ready:
            say(visits=visits, heard=heard.decode("latin-1"))
