"""Hands others a descriptor whose last close() waits: a TCP socket with unsent data that nobody reads, and SO_LINGER.

usage: lingerer.py to SECONDS TYPE NAME
       lingerer.py as SECONDS TYPE NAME...

    to   whoever has this abstract name
    as   the first who comes to one of these names and says something

TYPE is `stream` or `seqpacket`. It says how it went: `passed`, and when it is asked for that that it was `taken`; or
`refused`, with the errno.
"""

import array
import select
import socket
import struct

# A message so large that its sender is not writable before it is read, and read at once.
MESSAGE = {"stream": 400, "seqpacket": 1 << 17}


def lingering(seconds):
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    out = socket.socket()
    out.connect(listener.getsockname())
    far, _ = listener.accept()
    out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, seconds))
    out.setblocking(False)
    try:
        while True:
            out.send(bytes(1 << 16))
    except BlockingIOError:
        return out, far


def hand_over(link, seconds):
    out, far = lingering(seconds)
    link.setblocking(False)
    try:
        link.sendmsg(
            [bytes(MESSAGE[kind])], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [out.fileno()]))]
        )
    except PermissionError as exc:
        far.close()  # before ours, which would wait for it
        return {"refused": exc.errno}, out
    out.close()  # the message has the last reference
    return {"passed": True}, link, far


def taken(link):
    """The first of what was sent has been read, or the link is closed with it."""
    poll = select.poll()
    poll.register(link, select.POLLOUT)
    poll.poll()


def come_to(type, name):
    link = socket.socket(socket.AF_UNIX, type)
    if type == socket.SOCK_STREAM:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least there is: 4608
    link.connect("\0" + name)
    return link


def wait_for_one(type, names):
    listeners = []
    for name in names:
        listener = socket.socket(socket.AF_UNIX, type)
        listener.bind("\0" + name)
        listener.listen()
        listeners.append(listener)
    say(has=len(listeners))
    ready, _, _ = select.select(listeners, [], [])
    link, _ = ready[0].accept()
    link.recv(4096)
    return link


KINDS = {"stream": socket.SOCK_STREAM, "seqpacket": socket.SOCK_SEQPACKET}
way, seconds, kind, *names = argv
link = come_to(KINDS[kind], names[0]) if way == "to" else wait_for_one(KINDS[kind], names)
result, *kept = hand_over(link, int(seconds))
say(**result)
if "passed" in result:
    hear()
    taken(link)
    say(taken=True)
hear()
