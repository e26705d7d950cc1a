"""A queue pair of this host that receives from one number, for actors that wait for their peer by TCP."""

import contextlib

import rdmanet.verbs as v

PEER = 0xABCD01  # no process has that port


@contextlib.contextmanager
def receiver(context, peer=PEER, **attributes):
    """The queue pair, and its address. The context is closed at the end."""
    with context, v.PD(context) as pd, v.CQ(context, 4) as cq, v.QP(pd, v.QPInitAttr(cq, cq)) as qp:
        entry = next(entry for entry in context.gid_table() if str(entry.address) == "127.0.0.1")
        qp.to_init()
        qp.to_rtr(peer, entry.gid, sgid_index=entry.gid_index, **attributes)
        yield qp, entry.gid
