"""`rdmanet doctor HOST:PORT`: argv is the host, the port, and what it is, of `careless` (it does not ask by TCP who has
the port). Says what it has found of the `fabric`, for which it connects as programs do, and of the `ping`.
"""

import asyncio

from rdmanet.cli import doctor, interrupts
from rdmanet.cli.running import reach
from rdmanet.loop import loop_factory

host, port, *kinds = argv


async def port_by_tcp(address, port):
    return port


if "careless" in kinds:
    doctor._port_by_tcp = port_by_tcp
fabric = interrupts.run(reach(host, int(port)), loop_factory)
finding, _ = asyncio.run(doctor._ping(host, int(port)))
say(fabric=fabric.found, ping=finding.found)
