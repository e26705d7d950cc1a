"""A client with a secret, which connects a queue pair by TCP to whoever listens at the given port of this host.

argv: the port. It says whether it could open the device, and then waits to be told to end.
"""

from rdmanet import _core
from receiving import receiver

device = _core.Library.embedded().devices()[0]
try:
    context = device.open()
except OSError as exc:
    say(refused=str(exc))
else:
    with receiver(context, int(argv[0]) << 8) as (qp, _):
        qp.to_rts()
        say(connecting=True)
        hear()
