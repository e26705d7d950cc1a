"""One who wants to reach a queue pair of another process: told `port`, it makes the link to that one's.

argv is who it is (see link_words.become). It says `began` when the link is being made.
"""

from link_words import become_or_end
from rdmanet import _core
from rdmanet.verbs import CQ, PD, QP, QPCap, QPInitAttr

become_or_end(argv, say)

with _core.Library.embedded().devices()[0].open() as context, PD(context) as pd, CQ(context, 8) as cq:
    gid = next(entry for entry in context.gid_table() if entry.address.is_loopback)
    say(ready=True)
    while (told := hear()) is not None:
        with QP(pd, QPInitAttr(send_cq=cq, recv_cq=cq, cap=QPCap(max_send_wr=1, max_recv_wr=1))) as qp:
            qp.to_init()
            qp.to_rtr(told["port"] << 8 | 5, gid.gid, sgid_index=gid.gid_index)
            say(began=True)
            hear()
