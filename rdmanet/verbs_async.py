"""The verbs and the connection manager for programs that `await`, by their own names::

    from rdmanet.verbs_async import AsyncCMID, AsyncCQ

    async with AsyncCMID() as id:
        await id.resolve(("127.0.0.1", 7471))
        with v.PD(id.context) as pd, AsyncCQ(id.context, 64) as cq:
            qp = id.create_qp(pd, cq)
            await id.connect()
            await qp.send(b"hello")

It runs on asyncio's loop and uvloop, on Trio, and on any loop that is given as a `Notifier`; importing it imports
none of them. docs/async-verbs.md says what belongs to which thread, what cancelling does, and who answers for
memory that a peer can reach.
"""

from rdmanet.async_cm import AsyncCMChannel, AsyncCMID, AsyncCMListener
from rdmanet.async_exchange import exchange
from rdmanet.async_queues import AsyncBufferPool, AsyncCQ, AsyncQP, DeviceEvents, shared
from rdmanet.notifier import Future, Notifier, TrioNotifier, current_notifier
from rdmanet.remote import RemoteArray, RemoteMemory, RemoteStruct

__all__ = [
    "AsyncBufferPool",
    "AsyncCMChannel",
    "AsyncCMID",
    "AsyncCMListener",
    "AsyncCQ",
    "AsyncQP",
    "DeviceEvents",
    "Future",
    "Notifier",
    "RemoteArray",
    "RemoteMemory",
    "RemoteStruct",
    "TrioNotifier",
    "current_notifier",
    "exchange",
    "shared",
]
