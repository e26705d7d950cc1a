"""Ping-pong over a reliable connection, like ibv_rc_pingpong; either side may be that C program.

usage: python examples/rc_pingpong.py [OPTION...]         the server
       python examples/rc_pingpong.py [OPTION...] HOST    the client

There is no connection manager: the two programs send each other the addresses of their queue pairs over TCP, as a
line of text, and connect them by hand. Then the TCP connection is no longer needed.

A reliable connection delivers a message only into a posted receive. So receives are posted before the peer can send,
and each completed receive is replaced before the answer is sent.

The program polls for completions. With -e it sleeps until there is one: a completion of an armed completion queue makes
its channel readable, once. Completions from before the arming do not, so poll once more before sleeping.
"""

import argparse
import select
import socket
import sys
import time
from collections.abc import Iterator

import rdmanet.verbs as v

MTU = 1024  # the text has no word for it; this is ibv_rc_pingpong's
TEXT, DONE = 52, b"done\0"
RECEIVES = 8  # posted ahead; no more than one message is on its way


def completions(cq: v.CQ, channel: v.CompChannel, sleep: bool) -> Iterator[v.WC]:
    """Every completion of a queue, as it comes."""
    while True:
        found = cq.poll()
        if not found and sleep:
            cq.req_notify()
            found = cq.poll()
            if not found:
                select.select([channel], [], [])
                while ready := channel.get_cq_event():
                    ready.ack_events()
        for wc in found:
            wc.raise_for_status()
            yield wc


def introduce(qp: v.QP, mine: v.QPInfo, host: str | None, port: int) -> v.QPInfo:
    """Connect with the peer's queue pair; when it returns, the client may send."""
    if host is None:
        with socket.create_server(("", port)) as listener:
            print("listening on port", listener.getsockname()[1], flush=True)
            wire, _ = listener.accept()
    else:
        wire = socket.create_connection((host, port))
    with wire, wire.makefile("rb") as lines:
        if host is not None:
            wire.sendall(f"{mine}\0".encode())
        peer = v.QPInfo.from_text(lines.read(TEXT))
        qp.connect(peer)
        wire.sendall(DONE if host is not None else f"{mine}\0".encode())
        if host is None and lines.read(len(DONE)) != DONE:
            raise ConnectionResetError("the client left before it was connected")
    return peer


def described(info: v.QPInfo) -> str:
    gid = socket.inet_ntop(socket.AF_INET6, info.gid)
    return f"LID {info.lid:#06x}, QPN {info.qp_num:#08x}, PSN {info.psn:#08x}, GID {gid}"


def main() -> None:
    parser = argparse.ArgumentParser(description="ibv_rc_pingpong, with its options")
    parser.add_argument("-d", "--ib-dev", metavar="DEVICE", help="by default the first")
    parser.add_argument("-g", "--gid-idx", type=int, metavar="INDEX", help="by default the best address")
    parser.add_argument("-p", "--port", type=int, default=18515, help="for the introduction, by TCP")
    parser.add_argument("-s", "--size", type=int, default=4096, help="of a message")
    parser.add_argument("-n", "--iters", type=int, default=1000, metavar="COUNT", help="of messages each way")
    parser.add_argument("-e", "--events", action="store_true", help="sleep on events")
    parser.add_argument("host", nargs="?")
    args = parser.parse_args()
    with (
        v.open_device(args.ib_dev) as context,
        v.PD(context) as pd,
        pd.alloc_mr(2 * args.size) as mr,
        v.CompChannel(context) as send_channel,
        v.CompChannel(context) as recv_channel,
        v.CQ(context, 1, send_channel) as send_cq,
        v.CQ(context, RECEIVES, recv_channel) as recv_cq,
        v.QP(pd, v.QPInitAttr(send_cq, recv_cq, v.QPCap(max_send_wr=1, max_recv_wr=RECEIVES))) as qp,
    ):
        ping = v.SendWR(v.WROpcode.SEND, mr.sge(0, args.size))
        pong = v.RecvWR(mr.sge(args.size, args.size))
        sent = completions(send_cq, send_channel, args.events)
        received = completions(recv_cq, recv_channel, args.events)

        qp.to_init()
        qp.post_recv([pong] * RECEIVES)
        mine = qp.info(sgid_index=args.gid_idx, mtu=MTU)
        print("  local address: ", described(mine))
        peer = introduce(qp, mine, args.host, args.port)
        print("  remote address:", described(peer))

        started = time.perf_counter()
        for turn in range(2 * args.iters):
            if (turn % 2 == 0) == (args.host is not None):  # the client begins
                qp.post_send(ping)
                next(sent)
            else:
                next(received)
                qp.post_recv(pong)
        seconds = time.perf_counter() - started

    volume = 2 * args.iters * args.size
    print(f"{volume} bytes in {seconds:.2f} seconds = {volume * 8e-6 / seconds:.2f} Mbit/sec")
    print(f"{args.iters} iters in {seconds:.2f} seconds = {seconds * 1e6 / args.iters:.2f} usec/iter")


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, OSError) as exc:
        sys.exit(str(exc) or 130)
