"""Datagrams: answer them, or ask for answers.

usage: datagrams.py answer ADDRESS [GROUP]; prints its queue pair's number, then answers whatever comes, also to the
       group, until its standard input ends
   or: datagrams.py ask ADDRESS TO NUMBER SIZE ANSWERS; sends so many bytes to a queue pair, or to all of a group
       as number 0xffffff, and prints address and number of who answers
"""

import contextlib
import ipaddress
import select
import sys

from rdmanet import _core
from rdmanet.verbs import (
    AH,
    CQ,
    PD,
    QP,
    AHAttr,
    CompChannel,
    QPCap,
    QPInitAttr,
    QPType,
    RecvWR,
    SendWR,
    WROpcode,
)

GRH, LARGEST, QKEY, DEPTH = 40, 4096, 0x1234, 8


class End:
    """A queue pair for datagrams with receives posted, and memory for each and for one to send."""

    def __init__(self, keep, pd, address):
        self.keep, self.pd = keep, pd
        self.gid = next(entry for entry in pd.context.gid_table() if str(entry.address) == address)
        self.channel = keep(CompChannel(pd.context))
        self.cq = keep(CQ(pd.context, 2 * DEPTH, self.channel))
        self.mr = keep(pd.alloc_mr((DEPTH + 1) * (GRH + LARGEST)))
        cap = QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH)
        self.qp = keep(QP(pd, QPInitAttr(self.cq, self.cq, cap, QPType.UD)))
        self.qp.to_init(qkey=QKEY)
        self.qp.to_rtr()
        self.qp.to_rts()
        for place in range(DEPTH):
            self.receive(place)

    def receive(self, place):
        self.qp.post_recv(RecvWR(self.mr.sge(place * (GRH + LARGEST), GRH + LARGEST), wr_id=place))

    def send(self, data, ah, number):
        at = DEPTH * (GRH + LARGEST)
        self.mr[at : at + len(data)] = data
        sge = self.mr.sge(at, len(data))
        self.qp.post_send(
            SendWR(WROpcode.SEND, sge, wr_id="send", ah=ah, remote_qpn=number, remote_qkey=QKEY)
        )

    def messages(self, *others):
        """Of each that comes its bytes, the way back, and who sent it; until one of the others is readable."""
        while True:
            self.cq.req_notify()
            for wc in self.cq.poll(DEPTH):
                wc.raise_for_status()
                if wc.wr_id != "send":
                    at = wc.wr_id * (GRH + LARGEST)
                    back = self.keep(AH.from_wc(self.pd, wc, self.mr[at : at + GRH]))
                    yield self.mr[at + GRH : at + wc.byte_len], back, wc.src_qp
                    self.receive(wc.wr_id)
            ready = select.select([self.channel, *others], [], [])[0]
            if set(ready) & set(others):
                return
            self.channel.get_cq_event().ack_events(1)


def answer(end, group=None):
    if group:
        end.qp.attach_mcast(ipaddress.ip_address(group))
    print(end.qp.qp_num, flush=True)
    for data, back, number in end.messages(sys.stdin):
        end.send(data, back, number)
    if group:
        end.qp.detach_mcast(ipaddress.ip_address(group))


def ask(end, to, number, size, answers):
    ah = end.keep(AH(end.pd, AHAttr(ipaddress.ip_address(to), end.gid.gid_index)))
    sent = bytes(range(251)) * 17
    sent = sent[: int(size)]
    end.send(sent, ah, int(number, 0))
    messages = end.messages()
    for _ in range(int(answers)):
        data, back, number = next(messages)
        assert bytes(data) == sent
        address = ipaddress.IPv6Address(back.attr.dgid)
        print(address.ipv4_mapped or address, number)


def main(way, address, *arguments):
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        pd = keep(PD(keep(_core.Library.embedded().devices()[0].open())))
        {"answer": answer, "ask": ask}[way](End(keep, pd, address), *arguments)


main(*sys.argv[1:])
