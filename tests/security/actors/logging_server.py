"""A server by asyncio, with a queue pair that waits for its peer by TCP: what does its logging get of strangers?

It says the TCP port of the queue pair. When it hears that they have gone it logs what is left to log, and says so. When
it hears again it says what was logged in all, and how long that was.
"""

import asyncio
import logging
import re
import time

import rdmanet
from rdmanet import _core
from receiving import receiver

LEFT_OUT = re.compile(r" \(and (\d+) more of this kind\)$")


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.name, record.levelname, record.getMessage()))


async def serve():
    kept = Lines()
    logging.getLogger("rdmanet").addHandler(kept)
    async with await rdmanet.start_rdma_server(asyncio.Protocol, "127.0.0.1", 0):
        with receiver(_core.Library.embedded().devices()[0].open()) as (qp, _):
            began = time.monotonic()
            say(port=qp.qp_num >> 8)
            await asyncio.get_running_loop().run_in_executor(None, hear)
            count = -1
            while count != len(kept.lines):  # each turn of the loop logs some, if there are any
                count = len(kept.lines)
                for _ in range(3):
                    await asyncio.sleep(0)
            say(caught_up=True)
            await asyncio.get_running_loop().run_in_executor(None, hear)
            seconds = time.monotonic() - began
    lines = [text for name, level, text in kept.lines if (name, level) == ("rdmanet.device", "WARNING")]
    left_out = sum(int(found[1]) for text in lines if (found := LEFT_OUT.search(text)))
    kinds = sorted({LEFT_OUT.sub("", text) for text in lines})
    say(lines=len(lines), left_out=left_out, seconds=seconds, kinds=kinds)


asyncio.run(serve())
