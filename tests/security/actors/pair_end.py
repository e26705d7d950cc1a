"""One end of a pair of queue pairs that are connected by hand: argv is who it is (see link_words.become).

Says its `number`; is told the other's `number` and the `psn` of both (and a `timeout`); says that it is `connected`.
Then it is told

- to `send` a text, and says the `status`; each message that comes is said as `got`, receives that are flushed are not;
- to `offer` so many bytes: says their `address` and `key`;
- to write a text `at` an address, with a `key`, and says the `status`;
- to have `room` for no more than so many bytes in its address space, and says so.
"""

import resource
import select
import sys

from link_words import become_or_end
from rdmanet import _core
from rdmanet.verbs import (
    CQ,
    PD,
    QP,
    AccessFlags,
    CompChannel,
    QPCap,
    QPInitAttr,
    RecvWR,
    SendWR,
    WCStatus,
    WROpcode,
)

become_or_end(argv, say)

ROOM, DEPTH = 64, 8
REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
offered = []


def offer(pd, length):
    mr = pd.alloc_mr(length, REMOTE)
    offered.append(mr)
    say(address=mr.address, key=mr.rkey)


def leave_no_room(more):
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))
    say(room=more)


def send(qp, mr, text, opcode=WROpcode.SEND, **where):
    data = text.encode()
    mr[DEPTH * ROOM : DEPTH * ROOM + len(data)] = data
    qp.post_send(SendWR(opcode, mr.sge(DEPTH * ROOM, len(data)), wr_id="send", **where))


def completed(wc, mr):
    if wc.wr_id == "send":
        say(status=wc.status.name)
    elif wc.status != WCStatus.WR_FLUSH_ERR:
        start = wc.wr_id * ROOM
        say(got=bytes(mr[start : start + wc.byte_len]).decode(), status=wc.status.name)


def obey(told, pd, qp, mr):
    if "send" in told:
        send(qp, mr, told["send"])
    elif "offer" in told:
        offer(pd, told["offer"])
    elif "at" in told:
        send(qp, mr, told["write"], WROpcode.RDMA_WRITE, remote_addr=told["at"], rkey=told["key"])
    else:
        leave_no_room(told["room"])


with (
    _core.Library.embedded().devices()[0].open() as context,
    PD(context) as pd,
    CompChannel(context) as channel,
):
    gid = next(entry for entry in context.gid_table() if str(entry.address) == "127.0.0.1")
    with CQ(context, 4 * DEPTH, channel) as cq, pd.alloc_mr((DEPTH + 1) * ROOM) as mr:
        cap = QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH)
        with QP(pd, QPInitAttr(send_cq=cq, recv_cq=cq, cap=cap)) as qp:
            qp.to_init(access=REMOTE)
            say(number=qp.qp_num)
            for place in range(DEPTH):
                qp.post_recv(RecvWR(mr.sge(place * ROOM, ROOM), wr_id=place))
            told = hear()
            qp.to_rtr(told["number"], gid.gid, sgid_index=gid.gid_index, rq_psn=told["psn"])
            qp.to_rts(sq_psn=told["psn"], timeout=told.get("timeout", 18), retry_cnt=7)
            say(connected=True)
            while True:
                cq.req_notify()
                while found := cq.poll(DEPTH):
                    for wc in found:
                        completed(wc, mr)
                ready, _, _ = select.select([sys.stdin, channel], [], [])
                if channel in ready:
                    channel.get_cq_event().ack_events(1)
                if sys.stdin in ready:
                    if (told := hear()) is None:
                        break
                    obey(told, pd, qp, mr)
        while offered:
            offered.pop().close()
