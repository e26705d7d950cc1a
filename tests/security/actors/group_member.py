"""A queue pair for datagrams that is in a multicast group: argv is the group.

Says that it is `in` the group, or the errno it was `refused` with; then what it `heard`, when something comes.
"""

import ipaddress
import select

from rdmanet.verbs import (
    CQ,
    PD,
    QP,
    CompChannel,
    QPAttr,
    QPCap,
    QPInitAttr,
    QPState,
    QPType,
    RecvWR,
    open_device,
)

context = open_device()
pd, channel = PD(context), CompChannel(context)
cq = CQ(context, 4, channel=channel)
qp = QP(pd, QPInitAttr(cq, cq, QPCap(max_send_wr=1, max_recv_wr=1), QPType.UD))
qp.modify(QPAttr(qp_state=QPState.INIT, pkey_index=0, port_num=1, qkey=0x01234567))
qp.modify(QPAttr(qp_state=QPState.RTR))
mr = pd.alloc_mr(4096)
qp.post_recv(RecvWR(mr.sge(0, 4096)))
cq.req_notify()
try:
    qp.attach_mcast(ipaddress.ip_address(argv[0]))
    say(refused=0)
except OSError as exc:
    say(refused=exc.errno)
    hear()
else:
    select.select([channel.fd], [], [])
    (wc,) = cq.poll(1)
    say(heard=bytes(mr[40 : wc.byte_len]).decode())
