"""The bindings `ibverbs`: two connected queue pairs. They post and poll by the device's table of operations.

usage: ibverbs_pair.py CASE
"""

import ibverbs
import numpy as np
import pair
from ibverbs import AccessFlags, QPInfo, RecvWR, SendFlags, SendWR, WROpcode
from pair import BLOCK, carrying, hear, random_bytes, run, until

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ


class Side:
    def __init__(self, memory):
        self.memory = memory
        [device] = ibverbs.get_device_list()
        context = device.open()
        domain = context.alloc_pd()
        self.queue = context.create_cq(16)
        self.region = domain.reg_mr(memory.ctypes.data, memory.nbytes, ACCESS)
        self.pair = domain.create_qp(ibverbs.QPInitAttr(send_cq=self.queue, recv_cq=self.queue))
        info = ibverbs.local_qp_info(self.pair, context.query_port(1), context.query_gid(1, 0), port=1, psn=0)
        self.info = info.to_bytes()

    def connect(self, info):
        ibverbs.connect_rc(self.pair, QPInfo.from_bytes(info), port=1, sgid_index=0, access=ACCESS)

    def part(self, offset, size):
        return ibverbs.SGE(self.region, size, offset=offset)

    def complete(self):
        for completion in until(lambda: self.queue.poll(16), "a completion"):
            completion.raise_for_status()


def serve(pipe):
    side = Side(random_bytes(BLOCK))
    pipe.send((side.info, side.memory.ctypes.data, side.region.rkey))
    side.connect(hear(pipe))
    pipe.send("connected")
    while (word := hear(pipe)) != "end":
        if word == "recv":
            side.pair.post_recv(RecvWR(wr_id=1, sg_list=[side.part(0, BLOCK)]))
            pipe.send("posted")
            side.complete()
        pipe.send(side.memory.tobytes())


class Initiator(Side):
    def __init__(self, pipe):
        super().__init__(np.zeros(BLOCK, np.uint8))
        self.pipe = pipe
        info, self.there, self.key = hear(pipe)
        self.connect(info)
        assert self.ask(self.info) == "connected"

    def ask(self, word):
        self.pipe.send(word)
        return hear(self.pipe)

    def post(self, opcode, here, size, there=0):
        request = SendWR(
            wr_id=1,
            sg_list=[self.part(here, size)],
            opcode=opcode,
            send_flags=SendFlags.SIGNALED,
            remote_addr=self.there + there,
            rkey=self.key,
        )
        with carrying(size):
            self.pair.post_send(request)
            self.complete()


def read_and_write(one):
    one.post(WROpcode.RDMA_READ, 0, BLOCK)
    assert one.memory.tobytes() == one.ask("bytes")
    one.memory[:] = random_bytes(BLOCK)
    one.post(WROpcode.RDMA_WRITE, 0, BLOCK)
    assert one.memory.tobytes() == one.ask("bytes")


def send_and_recv(one):
    one.memory[:] = random_bytes(BLOCK)
    assert one.ask("recv") == "posted"
    one.post(WROpcode.SEND, 0, BLOCK)
    assert hear(one.pipe) == one.memory.tobytes()


def random_sizes(one):
    def transfer(reads, here, there, size):
        one.post(WROpcode.RDMA_READ if reads else WROpcode.RDMA_WRITE, here, size, there)

    pair.random_sizes(one, transfer)


if __name__ == "__main__":
    run((read_and_write, send_and_recv, random_sizes), serve, Initiator)
