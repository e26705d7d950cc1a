"""One end of two queue pairs that are connected by hand, with as short a budget for acknowledgements as there is.

usage: pair.py ADDRESS OTHER_ADDRESS; prints its number, reads the other's; then a line for each SEND to make,
whose status it prints.
"""

import sys

from rdmanet import _core
from rdmanet.verbs import CQ, PD, QP, QPCap, QPInitAttr, RecvWR, SendWR, WROpcode

here, there = sys.argv[1:]
with _core.Library.embedded().devices()[0].open() as context:
    gids = {str(entry.address): entry for entry in context.gid_table()}
    with PD(context) as pd, CQ(context, 64) as cq, pd.alloc_mr(4096) as mr:
        with QP(pd, QPInitAttr(cap=QPCap(max_send_wr=16, max_recv_wr=16), send_cq=cq, recv_cq=cq)) as qp:
            qp.to_init()
            print(qp.qp_num, flush=True)
            dgid = bytes(10) + b"\xff\xff" + bytes(map(int, there.split(".")))
            qp.to_rtr(int(sys.stdin.readline()), dgid, sgid_index=gids[here].gid_index)
            qp.to_rts(timeout=8, retry_cnt=1)
            for _ in range(8):
                qp.post_recv(RecvWR(sg_list=[mr.sge(0, 64)]))
            for _ in sys.stdin:
                qp.post_send(SendWR(WROpcode.SEND, mr.sge(64, 64), wr_id="send"))
                found = []
                while not any(wc.wr_id == "send" for wc in found):
                    found = cq.poll(16)
                print(*(wc.status.name for wc in found if wc.wr_id == "send"), flush=True)
