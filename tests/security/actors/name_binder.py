"""Has names of ports, of `<address>/<port>`, as programs have them that listen by TCP: argv. Says how many it `has`.

With "landlock" among them it is in that sandbox first; or it says why it is `unfit`.
"""

import socket

from link_words import become

if "landlock" in argv:
    argv.remove("landlock")
    try:
        become("landlock")
    except OSError as exc:
        say(unfit=f"landlock: {exc}")
        raise SystemExit from exc
names = [socket.socket(socket.AF_UNIX) for _ in argv]
for name, text in zip(names, argv, strict=True):
    name.bind(f"\0rdmanet-cm/{text}")
say(has=len(names))
hear()
