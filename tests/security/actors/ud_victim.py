"""Has a queue pair for datagrams: argv is the address. Says the `port` of its number, and the `number`; when it is told
it makes it ready, says the `errno` of that, and then each text that it has `heard`."""

import errno
import select

from rdmanet import _core
from rdmanet.verbs import CQ, PD, QP, CompChannel, QPCap, QPInitAttr, QPType, RecvWR

context = _core.Library.embedded().devices()[0].open()
pd = PD(context)
channel = CompChannel(context)
cq = CQ(context, 8, channel)
memory = pd.alloc_mr(4096)
qp = QP(pd, QPInitAttr(cq, cq, QPCap(max_send_wr=1, max_recv_wr=8), QPType.UD))
say(port=qp.qp_num >> 8, number=qp.qp_num)
hear()
qp.to_init(qkey=0x1234)
try:
    qp.to_rtr()
except OSError as exc:
    say(errno=exc.errno, name=errno.errorcode[exc.errno])
else:
    say(errno=0)
    qp.post_recv(RecvWR(memory.sge(0, 4096), wr_id=1))
    cq.req_notify()
    say(waits=True)
    while 0 not in select.select([0, channel], [], [])[0]:
        channel.get_cq_event()
        cq.ack_events(1)
        cq.req_notify()
        for done in cq.poll(8):
            say(heard=memory[40 : done.byte_len].decode())
