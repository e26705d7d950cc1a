"""Listens on one port after another: argv is the first, the step, and how many. Says how many it `has`, and errors."""

import socket

from rdmanet.cm import CMEventChannel, Library

channel = CMEventChannel(Library.embedded())
has, errors, passed = [], [], 0
for i in range(int(argv[2])):
    port = int(argv[0]) + i * int(argv[1])
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:  # somebody's TCP port: that isn't what this is about
            passed += 1
            continue
    id = channel.create_id()
    try:
        id.bind_addr(("127.0.0.1", port))
        id.listen(1)
        has.append(id)
    except OSError as exc:
        errors.append(exc.errno)
        id.close()
say(has=len(has), errors=errors, passed=passed)
hear()
