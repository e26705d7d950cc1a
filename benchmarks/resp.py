"""A small server that speaks Redis's protocol, for clients that are to be measured or tried without Redis."""

import asyncio
from collections.abc import Mapping


async def resp(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, first: Mapping[bytes, bytes] = {}
) -> None:
    """Serve one client: PING, SET and GET, and an error for anything else.

    Each connection has values of its own; those of `first` are there from the beginning.
    """
    kept = dict(first)
    while line := await reader.readline():
        words = []
        for _ in range(int(line[1:])):
            size = int((await reader.readline())[1:])
            words.append((await reader.readexactly(size + 2))[:-2])
        match words[0].upper(), *words[1:]:
            case b"GET", key if key in kept:
                writer.writelines([b"$%d\r\n" % len(kept[key]), kept[key], b"\r\n"])
            case b"SET", key, value:
                kept[key] = value
                writer.write(b"+OK\r\n")
            case b"PING", *_:
                writer.write(b"+PONG\r\n")
            case _:
                writer.write(b"-ERR unknown command\r\n")
        await writer.drain()
    writer.close()
