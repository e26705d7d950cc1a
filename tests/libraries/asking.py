"""Ask a server for its page again and again, each time on a connection of its own, and count what is dropped.

It imports nothing of rdmanet or of these tests. So as a program, which is told words on its standard input, it asks by
the kernel's TCP.

usage: asking.py PORT AT_ONCE
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import NamedTuple

Accepts = Callable[[asyncio.StreamWriter], bool]


class Counts(NamedTuple):
    """How many requests one asker has made, and how many of them got no answer."""

    made: int
    dropped: int


async def ask_at_once(port: int, word: str, least: int, at_once: int, accepts: Accepts) -> list[Counts]:
    """What so many askers count: each until it has the page with this word, and has made `least` requests.

    :param accepts: whether a connection is of the kind by which that page has to come
    """
    return await asyncio.gather(*(_ask(port, word.encode(), least, accepts) for _ in range(at_once)))


async def _ask(port: int, word: bytes, least: int, accepts: Accepts) -> Counts:
    made = dropped = 0
    has_come = False
    while made < least or not has_come:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        is_accepted = accepts(writer)
        answer = await _page(reader, writer)
        made += 1
        dropped += not answer
        has_come = has_come or (word in answer and is_accepted)
    return Counts(made, dropped)


async def _page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The page; nothing if the request was dropped."""
    answer = b""
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        while not answer.endswith(b"\r\n0\r\n\r\n"):  # its body comes in chunks
            if not (more := await reader.read(1 << 16)):
                assert not answer
                break
            answer += more
    except ConnectionError:
        assert not answer
    finally:
        writer.close()
    assert not answer or answer.startswith(b"HTTP/1.1 200"), answer
    return answer


def main(port: int, at_once: int) -> None:
    for line in sys.stdin:
        told = json.loads(line)
        counts = asyncio.run(ask_at_once(port, told["word"], told["least"], at_once, lambda _: True))
        assert "rdmanet" not in sys.modules
        print(json.dumps({"counts": counts}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
