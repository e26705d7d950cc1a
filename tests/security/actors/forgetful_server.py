"""A server that opens the device twice: with a secret in its environment, and when it is there no more.

It says the number of a queue pair that waits for its peer by TCP, and all that the peer has to know of it.
"""

import os

from rdmanet import _core
from receiving import PEER, receiver

PSN = 17
device = _core.Library.embedded().devices()[0]
device.open().close()
del os.environ["RDMANET_SOFT_SECRET"]
with receiver(device.open(), rq_psn=PSN) as (qp, gid):
    say(number=qp.qp_num, peer=PEER, psn=PSN, gid=gid.hex())
    hear()
