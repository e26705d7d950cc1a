"""At each moment of the victim's (moments.c) it tries to have the port that he deals with: with every set of options,
at every address, to listen and to keep it. argv is the name that the victim connects to; `first` if it is to keep to
the port that it hears of first; `late` if it is to let the moments after a `bind` go by; `quiet` if it is to keep the
port without listening.

Says `ready`, and when it is asked what it `tried` and `got`.
"""

import select
import socket

ADDRESSES = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"))
SETS = ((), ("SO_REUSEADDR",), ("SO_REUSEPORT",), ("SO_REUSEADDR", "SO_REUSEPORT"))

tried, got, calls, ports, kept = 0, [], set(), set(), []


def listens(thief):
    if "quiet" in argv:
        return False
    try:
        thief.listen()
    except OSError:
        return False
    return True


def attack(port, call):
    global tried
    calls.add(call)
    ports.add(port)
    for family, address in ADDRESSES:
        for options in SETS:
            try:
                thief = socket.socket(family)
            except OSError:  # a host without IPv6
                continue
            for option in options:
                thief.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
            tried += 1
            try:
                thief.bind((address, port))
            except OSError:
                thief.close()
            else:
                kept.append(thief)
                got.append([call, address, *options, listens(thief)])


listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(f"\0{argv[0]}")
listener.listen()
say(ready=True)
victim = listener.accept()[0]
while True:
    ready, _, _ = select.select([0, victim], [], [])
    if victim in ready and (said := victim.recv(64).decode()):
        port, call = said.split()
        if not ("first" in argv and ports - {int(port)}) and not ("late" in argv and call == "bind"):
            attack(int(port), call)
        victim.send(b".")
    elif hear() is None:
        break
    else:
        say(tried=tried, got=got, calls=sorted(calls), ports=len(ports))
