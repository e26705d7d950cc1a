"""Takes names by the thousand: argv is the first port, and how many; all that a bound port may have. Says how many."""

import socket

names = []
for port in range(int(argv[0]), int(argv[0]) + int(argv[1])):
    for address in ("::ffff:127.0.0.1", "::ffff:0.0.0.0", "::"):
        name = socket.socket(socket.AF_UNIX)
        name.bind(f"\0rdmanet-cm/{address}/{port}")
        names.append(name)
say(has=len(names))
hear()
