"""A program without a loop, with a queue pair that waits for its peer by TCP. It says the port, until told to end."""

import rdmanet.verbs as v
from rdmanet import _core

device = _core.Library.embedded().devices()[0]
with (
    device.open() as context,
    v.PD(context) as pd,
    v.CQ(context, 4) as cq,
    v.QP(pd, v.QPInitAttr(cq, cq)) as qp,
):
    entry = next(entry for entry in context.gid_table() if str(entry.address) == "127.0.0.1")
    qp.to_init()
    qp.to_rtr(0xABCD01, entry.gid, sgid_index=entry.gid_index)
    say(port=qp.qp_num >> 8)
    hear()
