"""Has names of ports, of `<address>/<port>`, as programs have them that listen by TCP: argv. Says how many it `has`.

With "landlock" among them it is in that sandbox first.
"""

import socket

from link_words import become_or_end

if "landlock" in argv:
    argv.remove("landlock")
    become_or_end(["landlock"], say)
names = [socket.socket(socket.AF_UNIX) for _ in argv]
for name, text in zip(names, argv, strict=True):
    name.bind(f"\0rdmanet-cm/{text}")
say(has=len(names))
hear()
