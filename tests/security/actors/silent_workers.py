"""Calls at the register of a server's workers, and says nothing: argv is the server's address, its port, and how many.

Says how many of them it has `there`. For each line that it hears, it waits until so many have been greeted and so many
have been sent away.
"""

import select
import socket

address, port, count = argv
poll, crowd = select.poll(), {}
for _ in range(int(count)):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.connect(b"\0rdmanet-stream/%s/%d/workers" % (address.encode(), int(port)))
    crowd[one.fileno()] = one
    poll.register(one, select.POLLIN)
say(there=len(crowd))
greeted, sent_away = 0, 0
while (wanted := hear()) is not None:
    while greeted < wanted["greeted"] or sent_away < wanted["sent_away"]:
        for fd, _ in poll.poll():
            if crowd[fd].recv(4096):
                greeted += 1
            else:
                sent_away += 1
                poll.unregister(fd)
    say(greeted=greeted, sent_away=sent_away)
