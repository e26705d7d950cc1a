# ruff: noqa: F821
"""Was offered a region, and does not let go of it: writes when it was taken back, whatever it said before.

usage: offer_holder PORT acknowledges|never|invalidates|starves
"""

from hostile import DATA, SLOTS, Client, frame

from rdmanet._core import WROpcode

port, how = int(argv[0]), argv[1]
client = Client(port, receives=2 if how == "starves" else SLOTS)
say(connected=True)
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
