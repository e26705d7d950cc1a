# ruff: noqa: F821
"""Was offered a region, and does not let go of it: writes when it was taken back, whatever it said before.

usage: offer_holder PORT acknowledges|never|invalidates|starves|is_deaf|hoards|rambles
"""

from hostile import ABORT, CREDIT, DATA, PING, PONG, SLOTS, Client, frame
from rdmanet import credit
from rdmanet._core import WROpcode

port, how = int(argv[0]), argv[1]
client = Client(port, receives={"starves": 2, "is_deaf": 0}.get(how, SLOTS))
say(connected=True)
if how == "is_deaf":
    # What the server sends, and what it posts behind that, is held up by its device.
    say(sent=client.post(WROpcode.SEND, frame(DATA, b"x")))
    hear()
    raise SystemExit
if how in ("hoards", "rambles"):
    # As many regions as it can make the server remember, a few at a time; or all in one long frame.
    each = 8 if how == "hoards" else 100
    told, kind = 0, PONG
    while kind == PONG and told < 1000:
        news = [credit.Region(told + i, 0x1000, 1, 1, 4, "n" * 255) for i in range(each)]
        body = credit.pack_credit(credit.Credit(16, tuple(news)))
        client.post(WROpcode.SEND, frame(CREDIT, body, reaped=client.reaped))
        told += each
        client.post(WROpcode.SEND, frame(PING, bytes(8), reaped=client.reaped))
        while (kind := client.next_frame()[0]) not in (PONG, ABORT, 0):
            pass
    say(told=told)
    raise SystemExit
region = client.news().regions[0]
there = {"remote_addr": region.address, "rkey": region.rkey}
say(first=client.post(WROpcode.RDMA_WRITE, b"granted ", **there))
if how == "invalidates":
    say(
        sent=client.post(
            WROpcode.SEND_WITH_INV, frame(DATA, b"x", reaped=client.reaped), invalidate_rkey=region.rkey
        )
    )
    say(last=client.next_frame()[0])
    raise SystemExit
if how == "starves":
    # Its credits promise receives that are not there: what the server sends now is held up, by its device.
    for _ in range(2):
        client.post(WROpcode.SEND, frame(DATA, bytes(100), reaped=client.reaped))
if how == "acknowledges":
    assert client.news().revoked == (region.id,)
    client.acknowledge(region.id)
hear()  # the owner's block has ended
say(second=client.post(WROpcode.RDMA_WRITE, b"REVOKED!", **there))
