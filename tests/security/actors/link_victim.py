"""A process with a queue pair; argv is who it is (see link_words.become). Says the `port`, until it is to end."""

from link_words import become_or_end
from rdmanet import _core
from rdmanet.verbs import CQ, PD, QP, QPCap, QPInitAttr

become_or_end(argv, say)

with _core.Library.embedded().devices()[0].open() as context, PD(context) as pd, CQ(context, 8) as cq:
    with QP(pd, QPInitAttr(send_cq=cq, recv_cq=cq, cap=QPCap(max_send_wr=1, max_recv_wr=1))) as qp:
        qp.to_init()
        say(port=qp.qp_num >> 8)
        hear()
