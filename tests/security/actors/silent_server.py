"""A program without a loop, with a queue pair that waits for its peer by TCP. It says the port, until told to end."""

from rdmanet import _core
from receiving import receiver

with receiver(_core.Library.embedded().devices()[0].open()) as (qp, _):
    say(port=qp.qp_num >> 8)
    hear()
