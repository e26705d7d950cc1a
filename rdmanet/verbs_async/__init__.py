"""Awaitable verbs and connection manager::

    from rdmanet.verbs_async import AsyncCMID, AsyncCQ

    async with AsyncCMID() as id:
        await id.resolve(("127.0.0.1", 7471))
        with v.PD(id.context) as pd, AsyncCQ(id.context, 64) as cq:
            qp = id.create_qp(pd, cq)
            await id.connect()
            await qp.send(b"hello")

They run on asyncio's loop and uvloop, on Trio, and on any other loop that is passed as a `Notifier`; importing this
module imports none of them. docs/async-verbs.md explains which object belongs to which thread, what cancelling does,
and who is responsible for memory that a peer can reach.
"""

from rdmanet.base.notifier import Future, Notifier, TrioNotifier, current_notifier
from rdmanet.verbs_async.buffer_pool import AsyncBufferPool
from rdmanet.verbs_async.cm import AsyncCMID
from rdmanet.verbs_async.cm_channel import AsyncCMChannel
from rdmanet.verbs_async.cm_listener import AsyncCMListener
from rdmanet.verbs_async.connect import exchange
from rdmanet.verbs_async.events import DeviceEvents
from rdmanet.verbs_async.queues import AsyncCQ, AsyncQP, shared
from rdmanet.wire.remote import RemoteArray, RemoteMemory, RemoteStruct

__all__ = [
    "AsyncBufferPool", "AsyncCMChannel", "AsyncCMID", "AsyncCMListener", "AsyncCQ", "AsyncQP",
    "DeviceEvents", "Future", "Notifier", "RemoteArray", "RemoteMemory", "RemoteStruct", "TrioNotifier",
    "current_notifier", "exchange", "shared",
]  # fmt: skip
