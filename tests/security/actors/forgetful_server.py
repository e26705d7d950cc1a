"""A server that opens the device twice: with a secret in its environment, and when it is there no more.

It says the number of a queue pair that waits for its peer by TCP, and all that the peer has to know of it.
"""

import os

import rdmanet.verbs as v
from rdmanet import _core

PEER, PSN = 0xABCD01, 17
device = _core.Library.embedded().devices()[0]
device.open().close()
del os.environ["RDMANET_SOFT_SECRET"]
with (
    device.open() as context,
    v.PD(context) as pd,
    v.CQ(context, 4) as cq,
    v.QP(pd, v.QPInitAttr(cq, cq)) as qp,
):
    entry = next(entry for entry in context.gid_table() if str(entry.address) == "127.0.0.1")
    qp.to_init()
    qp.to_rtr(PEER, entry.gid, sgid_index=entry.gid_index, rq_psn=PSN)
    say(number=qp.qp_num, peer=PEER, psn=PSN, gid=entry.gid.hex())
    hear()
