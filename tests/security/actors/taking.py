"""Taking names that listeners have, of `<address>/<port>`, and keeping whatever is said to them."""

import select
import socket


def take(names, say, hear):
    """It says how many it `has`; then, for each line it hears, how many `visits` there were, and what was `heard`: as
    soon as there are that many, and that text, if the line has them."""
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
    visits, heard = 0, ""
    asked: list[dict] = []
    wake = 0  # standard input
    while True:
        ready, _, _ = select.select([wake, *listeners, *guests], [], [])
        for one in ready:
            if one in listeners:
                guests.append(one.accept()[0])
                visits += 1
            elif one in guests:
                said = one.recv(4096).decode("latin-1")
                heard += said
                if not said:
                    guests.remove(one)
                    one.close()
        if wake in ready:
            order = hear()
            if order is None:
                raise SystemExit
            asked.append(order)
        while asked and visits >= asked[0].get("visits", 0) and asked[0].get("heard", "") in heard:
            del asked[0]
            say(visits=visits, heard=heard)
