# ruff: noqa: F821
"""Completes receives of the server's without sending what it says: hopes for what lies in them.

usage: offer_liar PORT ATTACK...; each attack has a connection of its own, on which 24 messages went before, so that all
slots have held one. Tells what came back of it, and the server's last words.
"""

from hostile import ABORT, DATA, Client, frame
from rdmanet import credit
from rdmanet._core import WROpcode

for attack in argv[1:]:
    client = Client(int(argv[0]))
    region = client.news().regions[0]
    there = {"remote_addr": region.address, "rkey": region.rkey}
    for n in range(24):  # each is echoed, and its slot posted again
        client.post(WROpcode.SEND, frame(DATA, b"mine %02d" % n, granted=16 + n, reaped=client.reaped))
        kind, body = client.next_frame()
        while kind not in (0, DATA):
            kind, body = client.next_frame()
        assert (kind, body) == (DATA, b"mine %02d" % n), (kind, body)
    what, _, size = attack.partition(":")
    data = (frame(DATA, b"frame", granted=40, reaped=client.reaped) + bytes(200))[: int(size)]
    if what == "write":
        sent = client.post(WROpcode.RDMA_WRITE_WITH_IMM, data, **there)
    elif what == "imm":
        sent = client.post(WROpcode.SEND_WITH_IMM, data)
    else:
        sent = client.post(WROpcode.SEND, data)
    back, words = b"", None
    while True:
        kind, body = client.next_frame()
        if kind == DATA:
            back += body
            break
        if kind == ABORT:
            words = credit.unpack_abort(body).reason
        if kind in (0, ABORT):
            break
    say(attack=attack, sent=sent, echoed=back.decode(errors="replace"), words=words)
    client.close()
