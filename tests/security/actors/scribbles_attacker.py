"""The attacker: a client like any other, which writes over the memory that the server has let it map.

usage: scribbles_attacker.py PORT

It finds the server's arena in its own address space, and then does what it is told:

    {"scribble": "ports", "value": n}     the ports of the head
    {"scribble": "channels", "value": n}  the channel of each CQ, when the server has gone to sleep
    {"scribble": "connection", "values"}  each word of another connection: all of its block, its receive ring
    {"scribble": "all", "value": n}       each word of the head, of all that is alive, and some thousand of the heap
    {"watch": true}                       until the server has set a word right that is only its own

It says how many words it has written. rdmanet/soft/shm/arena.h has the layout.
"""

import asyncio
import ctypes
import os
import random
import time

import rdmanet

HEAD_WORDS = 4 + 64
MAGIC = 0x524E4152454E0600 + 384 // 128 * 16 + 640 // 128
QPS, QP_BYTES, QPS_MAX = 4096, 384, 64 * 256
KEYS, KEY_BYTES, KEYS_MAX = QPS + QPS_MAX * QP_BYTES, 64, 1 << 16
CQS, CQ_BYTES, CQS_MAX = KEYS + KEYS_MAX * KEY_BYTES, 640, 1 << 12
POOLS, POOL_BYTES, POOLS_MAX = CQS + CQS_MAX * CQ_BYTES, 256, 1 << 12
HEAP = POOLS + POOLS_MAX * POOL_BYTES
SIZE, HEAP_BYTES = 512 << 20, 8 << 20
# Words within the blocks.
QP_DEST, QP_RING, QP_SLOTS, QP_STRIDE = 3, 8, 10, 11
CQ_ARMED, CQ_CHANNEL, CQ_HOLD = 2, 3, 134
POOL_TAIL = 2
QPS_LOOKED_AT, CQS_LOOKED_AT, POOLS_LOOKED_AT = 256, 64, 64


class Client(asyncio.Protocol):
    def __init__(self):
        self.arrived = asyncio.Event()

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.arrived.set()

    def connection_lost(self, exc):
        self.arrived.set()


class Words:
    """A mapped arena, word by word."""

    def __init__(self, address):
        self.words = (ctypes.c_uint32 * (SIZE // 4)).from_address(address)
        self.written = 0
        magic = self.words[0] | self.words[1] << 32
        assert magic == MAGIC, f"the layout is another: {magic:#x}"

    def block(self, base, index, size):
        """Where its first word is."""
        return (base + index * size) // 4

    def write(self, first, count, value):
        for at in range(first, first + count):
            self.words[at] = value() if callable(value) else value
        self.written += count

    def qps(self):
        """Those that another process than this one may enter, as far as they say."""
        for index in range(QPS_LOOKED_AT):
            at = self.block(QPS, index, QP_BYTES)
            if 2 <= self.words[at] & 0xFF <= 5 and self.words[at + QP_DEST]:
                yield at

    def keys(self):
        for index in range(KEYS_MAX):
            at = self.block(KEYS, index, KEY_BYTES)
            if self.words[at]:
                yield at

    def cqs(self):
        for index in range(CQS_LOOKED_AT):
            at = self.block(CQS, index, CQ_BYTES)
            if self.words[at + CQ_CHANNEL] not in (0, 0xFFFFFFFF):
                yield at

    def pools(self):
        for index in range(POOLS_LOOKED_AT):
            at = self.block(POOLS, index, POOL_BYTES)
            if self.words[at + POOL_TAIL]:
                yield at


def arenas():
    """Our own, and the server's: the addresses by inode."""
    found = {}
    for line in open("/proc/self/maps"):
        if "memfd:rdmanet-arena" in line:
            area, _, _, _, inode, *_ = line.split()
            found[int(inode)] = int(area.split("-")[0], 16)
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.pop(os.stat(f"/proc/self/fd/{fd}").st_ino, None)  # ours: we have its descriptor as well
        except OSError:
            pass
    return found


def scribble(order, words, own_port):
    value, what = order.get("value"), order["scribble"]
    if what == "ports":
        words.write(4, 64, value)
    elif what == "channels":
        cqs = list(words.cqs())
        while not any(words.words[at + CQ_ARMED] & 3 in (1, 2) for at in cqs):
            time.sleep(0)
        for at in cqs:
            words.write(at + CQ_CHANNEL, 1, value)
    elif what == "connection":
        at = next(at for at in words.qps() if words.words[at + QP_DEST] >> 8 != own_port)
        ring = (words.words[at + QP_RING] | words.words[at + QP_RING + 1] << 32) // 4
        slots, stride = words.words[at + QP_SLOTS], words.words[at + QP_STRIDE] // 4
        for value in order["values"]:
            words.write(at, QP_BYTES // 4, value)
            words.write(ring, slots * stride, value)
    else:
        chance = random.Random(value)
        heap = [HEAP // 4 + chance.randrange(HEAP_BYTES // 4) for _ in range(4096)]
        parts = [(0, HEAD_WORDS)]
        parts += [(at, QP_BYTES // 4) for at in words.qps()]
        parts += [(at, KEY_BYTES // 4) for at in words.keys()]
        parts += [(at, CQ_BYTES // 4) for at in words.cqs()]
        parts += [(at, POOL_BYTES // 4) for at in words.pools()]
        parts += [(at, 1) for at in heap]
        marks.extend(at + CQ_HOLD for at in words.cqs())
        for at, count in parts:
            words.write(at, count, value)


def watch(words):
    """A moderation that nobody asked for; only the server's own look can take it away."""
    for at in marks:
        words.words[at] = 77
    while any(words.words[at] == 77 for at in marks):
        time.sleep(0.001)


marks = []


async def main():
    loop = asyncio.get_running_loop()
    transport, client = await rdmanet.create_rdma_connection(Client, "127.0.0.1", int(argv[0]))
    transport.write(b"a" * 64)
    await client.arrived.wait()
    ((_, address),) = arenas().items()
    words = Words(address)
    own = transport.get_extra_info("rdma_qp") >> 8
    say(qps=sum(1 for _ in words.qps()), keys=sum(1 for _ in words.keys()), cqs=sum(1 for _ in words.cqs()))
    while order := await loop.run_in_executor(None, hear):
        if order.get("watch"):
            watch(words)
            say(right_again=True)
        else:
            words.written = 0
            scribble(order, words, own)
            say(written=words.written)
    os._exit(0)  # its connection has no end that anybody would want to see


asyncio.run(main())
