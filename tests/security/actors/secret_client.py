"""A client with a secret, which connects a queue pair by TCP to whoever listens at the given port of this host.

argv: the port. It says whether it could open the device, and then waits to be told to end.
"""

import rdmanet.verbs as v
from rdmanet import _core

device = _core.Library.embedded().devices()[0]
try:
    context = device.open()
except OSError as exc:
    say(refused=str(exc))
else:
    with context, v.PD(context) as pd, v.CQ(context, 4) as cq, v.QP(pd, v.QPInitAttr(cq, cq)) as qp:
        entry = next(entry for entry in context.gid_table() if str(entry.address) == "127.0.0.1")
        qp.to_init()
        qp.to_rtr(int(argv[0]) << 8, entry.gid, sgid_index=entry.gid_index)
        qp.to_rts()
        say(connecting=True)
        hear()
