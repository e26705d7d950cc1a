"""A plugin of pytest for suites of others: every loop is switched, and the end says what the connections were made by.

It counts what create_connection() has made. RDMANET_TEST_PLAIN=1 leaves the loops as they are, to compare.
"""

import functools
import os
from collections import Counter

from rdmanet.cli.everywhere import switch_every_loop
from rdmanet.loop.mixin import RdmaLoop

made: Counter[object] = Counter()


def pytest_configure():
    if os.environ.get("RDMANET_TEST_PLAIN"):
        return
    connect = RdmaLoop.create_connection

    @functools.wraps(connect)
    async def create_connection(self, *args, **kwds):
        transport, protocol = await connect(self, *args, **kwds)
        made[transport.get_extra_info("fabric")] += 1
        return transport, protocol

    RdmaLoop.create_connection = create_connection  # type: ignore[method-assign]
    switch_every_loop()


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"connections by RDMA: {made['rdma']}, by TCP: {made['tcp']}")
