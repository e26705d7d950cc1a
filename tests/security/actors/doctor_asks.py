"""`rdmanet doctor HOST:PORT`: argv is the host, the port, and what it is, of `careless` (it does not ask by TCP who has
the port). Says what it has found of the `ping`.
"""

import asyncio

from rdmanet.cli import doctor

host, port, *kinds = argv


async def port_by_tcp(address, port):
    return port


if "careless" in kinds:
    doctor._port_by_tcp = port_by_tcp
finding, _ = asyncio.run(doctor._ping(host, int(port)))
say(ping=finding.found)
