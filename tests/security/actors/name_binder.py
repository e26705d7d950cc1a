"""Has names of ports, of `<address>/<port>`, as programs have them that listen by TCP: argv. Says how many it `has`."""

import socket

names = [socket.socket(socket.AF_UNIX) for _ in argv]
for name, text in zip(names, argv, strict=True):
    name.bind(f"\0rdmanet-cm/{text}")
say(has=len(names))
hear()
