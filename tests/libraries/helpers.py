"""What the libraries' tests have in common."""

import os
from typing import Any

MUCH = os.urandom(300_000)


def port_of(server: Any) -> int:
    return int(server.sockets[0].getsockname()[1])


def is_open(port: int) -> bool:
    from rdmanet.loop import doors

    found = doors.find("127.0.0.1", port)
    if isinstance(found, doors.Found):
        found.socket.close()
    return isinstance(found, doors.Found)


async def pipeline(client: Any) -> None:
    """A hundred values set and read again in one pipeline of a client of redis-py's kind."""
    commands = client.pipeline(transaction=False)
    for n in range(100):
        commands.set(f"key{n}", n)
        commands.get(f"key{n}")
    assert (await commands.execute())[1::2] == [b"%d" % n for n in range(100)]
