"""Send a file over RDMA.

usage: python examples/file_transfer.py receive DIRECTORY [HOST] [PORT]
       python examples/file_transfer.py send HOST PORT FILE

The end of the stream is the end of the file: the sender closes its half with write_eof() and goes on reading. Over TCP
that is unsafe, because a sender that is killed ends the stream in the same way. Over RDMA it is safe: if a connection
ends without write_eof() or close(), the reader raises.

Anyone who can connect can send. So the receiver accepts plain names only, replaces no file, keeps no incomplete file,
and limits a file to SIZE bytes, TIME seconds, and pauses of SILENCE seconds. SENDERS may send at a time; another one is
refused with the reason. Text from the peer is escaped before it is printed.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import sys
from functools import partial
from pathlib import Path

import rdmanet

CHUNK, LINE = 1 << 20, 200
SIZE, SENDERS, SILENCE, TIME = 1 << 36, 16, 60, 3600
# No separator, no leading dot or dash, no control character: a file in this directory, for any program.
NAME = re.compile(r"\w[\w .+-]{0,99}")
OK, ROOM = b"ok\n", asyncio.Semaphore(SENDERS)


class Refused(Exception):
    """The sender may know why."""


def checked(line: bytes) -> str:
    name = line[:-1].decode(errors="replace")
    if line[-1:] != b"\n" or len(line) > LINE or not NAME.fullmatch(name):
        raise Refused("the name is too long, or has more than letters, digits, spaces and _.+-")
    return name


async def receive_content(path: Path, reader: asyncio.StreamReader) -> str:
    """Into a new file, up to the end of the stream; its SHA-256."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        while True:
            chunk = await asyncio.wait_for(reader.read(CHUNK), SILENCE)
            if not chunk:
                return digest.hexdigest()
            if (size := size + len(chunk)) > SIZE:
                raise Refused(f"it has more than {SIZE} bytes")
            digest.update(chunk)
            file.write(chunk)


async def receive_one(directory: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    unfinished = directory / f".{secrets.token_hex(8)}.part"  # two clients may send the same file at once
    try:
        name = checked(await asyncio.wait_for(reader.readline(), SILENCE))
        if ROOM.locked():
            raise Refused("too many are sending; try again later")
        async with ROOM, asyncio.timeout(TIME):
            writer.write(OK)
            digest = await receive_content(unfinished, reader)
            os.link(unfinished, directory / name)  # unlike a renaming it replaces nothing
        print(f"{name}: {unfinished.stat().st_size} bytes, SHA-256 {digest}")
        writer.write(digest.encode() + b"\n")
    except FileExistsError:
        writer.write(b"there is a file of this name\n")
    except Refused as exc:
        writer.write(f"{exc}\n".encode())
    except (OSError, ValueError) as exc:  # it has gone, or is silent; the disk is full; a line without an end
        print(f"nothing kept of {writer.get_extra_info('peername')}: {exc!r}")
        writer.transport.abort()
    finally:
        unfinished.unlink(missing_ok=True)
        writer.close()


async def receive(directory: str, host: str = "127.0.0.1", port: str = "7472") -> None:
    serve = partial(receive_one, Path(directory))
    async with await rdmanet.start_rdma_stream_server(serve, host, int(port)) as server:
        print("receiving on", *(socket.getsockname() for socket in server.sockets))
        await server.serve_forever()


async def send(host: str, port: str, path: str) -> None:
    digest = hashlib.sha256()
    reader, writer = await rdmanet.open_rdma_connection(host, int(port))
    writer.write(os.fsencode(Path(path).name) + b"\n")
    answer = await reader.readline()
    if answer == OK:
        # A refusal comes before the end of the file, and ends the connection.
        reading = asyncio.ensure_future(reader.readline())
        with open(path, "rb") as file, contextlib.suppress(ConnectionResetError):
            while not reading.done() and (chunk := file.read(CHUNK)):
                digest.update(chunk)
                writer.write(chunk)
                await writer.drain()
            if not reading.done():
                writer.write_eof()
        answer = await reading
    writer.close()
    if answer != digest.hexdigest().encode() + b"\n":
        sys.exit(f"{path}: not received; the receiver says {answer[:LINE]!r}")
    await writer.wait_closed()
    print(f"{path}: verified, SHA-256 {digest.hexdigest()}")


if __name__ == "__main__":
    try:
        match sys.argv[1:]:
            case ["receive", directory, *where]:
                asyncio.run(receive(directory, *where))
            case ["send", host, port, path]:
                asyncio.run(send(host, port, path))
            case _:
                sys.exit(__doc__)
    except (KeyboardInterrupt, OSError) as exc:
        sys.exit(str(exc) or 130)
