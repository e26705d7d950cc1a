# ruff: noqa: F821
"""Wants the region that was offered to another client: guesses its key from those of its own, or has been told it."""

from hostile import Client
from rdmanet._core import WROpcode

port = int(argv[0])
order = hear()
assert order is not None
address = order["address"]

# The right key, as if it had been found: is it good on this connection?
client = Client(port)
own = client.news().regions[0].rkey if order["search"] else 0
status = client.post(WROpcode.RDMA_READ, length=16, remote_addr=address, rkey=order["rkey"])
say(status=status, data=client.data_read.decode(errors="replace"))
client.close()
if not order["search"]:
    raise SystemExit

# A key of its own tells where others' are, if keys are predictable: those of who came before are that far ahead.
tried, found = 0, ""
for variant in range(256):
    client = Client(port)
    tried += 1
    guess = (own >> 16) + order["ahead"] << 16 & 0xFFFFFFFF | own & 0xFF00 | variant
    if client.post(WROpcode.RDMA_READ, length=16, remote_addr=address, rkey=guess) == "SUCCESS":
        found = client.data_read.decode(errors="replace")
        break
    client.close()
say(tried=tried, found=found)
