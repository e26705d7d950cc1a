"""A client of the switched loop: argv is what it is, of `trusting` (it believes every door), `careless` (it does not
look who is where it is led), `pausing` (when a door has said where to go, it says so, and goes on at the next line),
`keeping` (it keeps what doors have said, and goes by names alone, as every loop does).

For each line that it hears it connects to that `port`, and says the `reply`, the `fabric`, and `why`. Others ask for
RDMA by TCP as well: by a name alone they would not reach the attackers in any case.
"""

import asyncio
import encodings.idna  # noqa: F401

import rdmanet
import rdmanet.loop.connecting
import rdmanet.stream.tls
import rdmanet.transport
from rdmanet.loop import choice, doors
from rdmanet.loop.settings import Settings
from rdmanet.loop.trust import Speaker


async def main():
    while (order := hear()) is not None:
        reader, writer = await asyncio.open_connection("127.0.0.1", order["port"])
        writer.write(b"for the server only\n")
        reply = (await reader.readline()).decode().strip()
        why = writer.get_extra_info("fabric_reason")
        writer.close()
        say(reply=reply, fabric=writer.get_extra_info("fabric"), why=why)


async def pause(found, receive, knock=doors.knock):
    place = await knock(found, receive)
    say(led=place.port)
    hear()
    return place


def by_tcp_too(self, reason, config=Settings.config):
    return config(self, reason).replaced(by_name_alone=False)


if "keeping" in argv:
    choice.KEPT_S = 1000.0
else:
    Settings.config = by_tcp_too
if "trusting" in argv:
    Speaker.why_not = Speaker.why_not_with = lambda *_: ""
if "careless" in argv:
    doors.Place.why_left = lambda _: ""
if "pausing" in argv:
    doors.knock = pause
rdmanet.run(main(), peers="*")
