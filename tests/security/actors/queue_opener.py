"""Opens the device and has a queue pair listen, again and again: argv is how often. Says the `errno` of each."""

from rdmanet import _core
from rdmanet.verbs import CQ, PD, QP, QPCap, QPInitAttr


def opening():
    with _core.Library.embedded().devices()[0].open() as context, PD(context) as pd, CQ(context, 8) as cq:
        gid = next(entry for entry in context.gid_table() if str(entry.address) == "127.0.0.1")
        with QP(pd, QPInitAttr(send_cq=cq, recv_cq=cq, cap=QPCap(max_send_wr=1, max_recv_wr=1))) as qp:
            qp.to_init()
            qp.to_rtr(1024 << 8, gid.gid, sgid_index=gid.gid_index)


errors = []
for _ in range(int(argv[0])):
    try:
        opening()
        errors.append(0)
    except OSError as exc:
        errors.append(exc.errno)
say(errors=errors)
hear()
