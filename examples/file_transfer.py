"""Send a file over RDMA.

usage: python examples/file_transfer.py receive DIRECTORY [HOST] [PORT]
       python examples/file_transfer.py send HOST PORT FILE

The end of the file is the end of the stream: the sender closes its half with write_eof() and keeps reading.
On TCP that is unsafe, because a sender that was killed ends the stream in the same way. Here it is not: a
connection that ends without write_eof() or close() raises at the reader.
"""

import asyncio
import contextlib
import hashlib
import secrets
import sys
from functools import partial
from pathlib import Path

import rdmanet

CHUNK_BYTES = 1 << 20


async def receive_one(directory: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # Only the last part of the name is used: a peer does not choose where we write.
    name = Path((await reader.readline()).decode(errors="replace").rstrip("\n")).name
    if name in ("", "..") or "\0" in name:
        writer.transport.abort()
        return
    # Until it is whole it has a name of its own: two may send the same file at once.
    partial_path, digest = directory / f"{name}.{secrets.token_hex(4)}.part", hashlib.sha256()
    try:
        with partial_path.open("wb") as file:
            while chunk := await reader.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
    except ConnectionError as exc:
        partial_path.unlink()
        print(f"{name}: the sender is gone, nothing kept: {exc}")
        return
    partial_path.rename(directory / name)
    writer.write(digest.hexdigest().encode() + b"\n")
    writer.close()
    await writer.wait_closed()
    print(f"{name}: {(directory / name).stat().st_size} bytes, SHA-256 {digest.hexdigest()}")


async def receive(directory: str, host: str = "127.0.0.1", port: str = "7472") -> None:
    serve = partial(receive_one, Path(directory))
    async with await rdmanet.start_rdma_stream_server(serve, host, int(port), limit=CHUNK_BYTES) as server:
        print("receiving on", *(socket.getsockname() for socket in server.sockets))
        await server.serve_forever()


async def send(host: str, port: str, path: str) -> None:
    digest = hashlib.sha256()
    reader, writer = await rdmanet.open_rdma_connection(host, int(port))
    writer.write(Path(path).name.encode() + b"\n")
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            writer.write(chunk)
            await writer.drain()
    writer.write_eof()
    received = (await reader.readline()).decode().rstrip()
    writer.close()
    await writer.wait_closed()
    if received != digest.hexdigest():
        sys.exit(f"{path}: the receiver has SHA-256 {received}, this is {digest.hexdigest()}")
    print(f"{path}: verified, SHA-256 {received}")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        match sys.argv[1:]:
            case ["receive", directory, *where]:
                asyncio.run(receive(directory, *where))
            case ["send", host, port, path]:
                asyncio.run(send(host, port, path))
            case _:
                sys.exit(__doc__)
