"""Many clients of an echo server in one process: argv is its port, how many, and our limit of descriptors, or 0.

Says `ready`. For each line {"connect": "at once"}, or "in turn", it connects them all; {"connect": "at once",
"tell": true}: and says `asking` when each has begun. It says how many are `accepted`,
and the `errors` of those who weren't; and how many seconds it took at most to be accepted (`slowest`), or not
(`seconds`). For {"echo": true} it says how many had their words back.
"""

import asyncio
import collections
import resource
import time

from rdmanet import open_rdma_connection

port, count, limit = map(int, argv)
clients, errors = [], collections.Counter()
seconds, slowest = [0.0], [0.0]  # to be refused, to be accepted


async def connect():
    began = time.monotonic()
    try:
        clients.append(await open_rdma_connection("127.0.0.1", port))
        slowest.append(time.monotonic() - began)
    except OSError as exc:
        errors[f"{type(exc).__name__}: {exc}"] += 1
        seconds.append(time.monotonic() - began)


async def echo(reader, writer, i):
    words = f"client {i}\n".encode()
    try:
        writer.write(words)
        return await reader.readline() == words
    except OSError as exc:
        return f"{type(exc).__name__}: {exc}"


async def main():
    loop = asyncio.get_running_loop()
    if limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    say(ready=True)
    while (order := await loop.run_in_executor(None, hear)) is not None:
        if "connect" in order:
            if order["connect"] == "at once":
                asking = [asyncio.ensure_future(connect()) for _ in range(count)]
                if "tell" in order:
                    await asyncio.wait(asking, timeout=0.1)
                    say(asking=True)
                await asyncio.gather(*asking)
            else:
                for _ in range(count):
                    await connect()
            say(accepted=len(clients), errors=errors, seconds=max(seconds), slowest=max(slowest))
        else:
            answers = await asyncio.gather(*(echo(*client, i) for i, client in enumerate(clients)))
            say(echoes=answers.count(True), others=sorted({str(answer) for answer in answers} - {"True"}))
    for _, writer in clients:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for _, writer in clients), return_exceptions=True)


asyncio.run(main())
