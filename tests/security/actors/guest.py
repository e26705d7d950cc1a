"""An honest client.

usage: guest.py ADDRESS PORT

It is told how often to connect, and whether to keep these connections. It says how long each took, in seconds, and
what its server answered: see besieged.py. What takes longer than PATIENCE_S counts as no connection.
"""

import asyncio
import time

import rdmanet

PATIENCE_S = 1
WAYS = ("mapped", "cma", "engine", "stream")  # to other processes
kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
ways: set[str] = set()  # that bytes took, as the device counts them


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, question: bytes) -> str:
    writer.write(question)
    return (await reader.readexactly(6 if question == b"q" else 1)).decode()


async def connect(keep: bool) -> tuple[float, str]:
    began = time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE_S):
            streams = await rdmanet.open_rdma_connection(argv[0], int(argv[1]))
            took = time.monotonic() - began
            answer = await ask(*streams, b"q" if keep else b"?")
    except (OSError, EOFError) as exc:  # a time-out is an OSError, too
        return time.monotonic() - began, f"{type(exc).__name__}: {exc}"
    counted = streams[1].get_extra_info("rdma_pd").context.counters()
    ways.update(way for way in WAYS if counted[f"bytes_{way}"])
    if keep:
        kept.append(streams)
    else:
        streams[1].close()
        await streams[1].wait_closed()
    return took, answer


async def ask_all() -> list[str]:
    answers = []
    for streams in kept:
        try:
            async with asyncio.timeout(PATIENCE_S):
                answers.append(await ask(*streams, b"?"))
        except (OSError, EOFError) as exc:
            answers.append(f"{type(exc).__name__}: {exc}")
    return answers


async def open_device() -> None:
    """A first connection makes and imports what others find ready: that is no server's matter."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(1))
        writer.close()

    async with await rdmanet.start_rdma_stream_server(serve, "127.0.0.1", 0) as server:
        streams = await rdmanet.open_rdma_connection(*server.sockets[0].getsockname()[:2])
        await ask(*streams, b"?")
        streams[1].close()
        await streams[1].wait_closed()


async def main() -> None:
    await open_device()
    loop = asyncio.get_running_loop()
    say(ready=True)
    while order := await loop.run_in_executor(None, hear):
        if "ask" in order:
            say(answers=await ask_all())
            continue
        if "ways" in order:
            say(ways=sorted(ways))
            continue
        done = [await connect(order.get("keep", False)) for _ in range(order["connect"])]
        say(took=[took for took, _ in done], answers=[answer for _, answer in done])


asyncio.run(main())
