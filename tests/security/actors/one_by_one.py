"""A client of the switched loop that connects again and again: argv is what it is, of `forgetful` (it remembers no
server that has held it up, and gives an attempt up early).

For each line that it hears it connects to that `port` so many `times`, and says, for each connection, who `served`, the
`fabric`, `why`, and to which ports the door has `led` it.
"""

import asyncio
import encodings.idna  # noqa: F401

import rdmanet
import rdmanet.loop.connecting
import rdmanet.transport
from rdmanet.loop import choice, doors

led = []


async def knock(found, loop, knock=doors.knock):
    place = await knock(found, loop)
    led.append(place.port)
    return place


async def connect(port):
    led.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"who is it\n")
    served = int(await reader.readline())
    fabric, why = writer.get_extra_info("fabric"), writer.get_extra_info("fabric_reason")
    writer.close()
    return {"served": served, "fabric": fabric, "why": why, "led": list(led)}


async def main():
    while (order := hear()) is not None:
        say(connections=[await connect(order["port"]) for _ in range(order["times"])])


doors.knock = knock
if "forgetful" in argv:
    choice.Chooser.remember_silent = lambda self, address, port, knock, loop: knock.close()
    choice.Chooser.remember_slow = lambda self, address, port: None
    rdmanet.loop.connecting.PATIENCE_S = 0.5
rdmanet.run(main())
