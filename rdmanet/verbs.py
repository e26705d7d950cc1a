"""The verbs, by their own names.

    import rdmanet.verbs as v

    device = v.devices()[0]
    with device.open() as context, v.PD(context) as pd, v.CQ(context, 64) as cq:
        mr = pd.alloc_mr(4096)
        qp = v.QP(pd, v.QPInitAttr(cq, cq, v.QPCap(max_send_wr=16, max_recv_wr=16)))
        qp.to_init(access=v.AccessFlags.REMOTE_WRITE)
        ...

Objects are closed by close() or `with`, children before their parents; a forgotten one is a
ResourceWarning. Nothing here sleeps: descriptors (CompChannel.fd, Context.async_fd) are there to be
waited for. Names and meanings are those of rdma-core's manual pages, ibv_post_send(3) and so on.
"""

from rdmanet._core import (
    CQ,
    MR,
    MTU,
    PD,
    QP,
    SGE,
    WC,
    AccessFlags,
    AHAttr,
    AsyncEvent,
    AtomicCap,
    CompChannel,
    Context,
    Device,
    DeviceAttr,
    EventType,
    GIDEntry,
    GIDType,
    Library,
    LinkLayer,
    MigState,
    NodeType,
    PortAttr,
    PortState,
    QPAttr,
    QPAttrMask,
    QPCap,
    QPInitAttr,
    QPState,
    QPType,
    RecvWR,
    SendFlags,
    SendWR,
    TransportType,
    WCFlags,
    WCOpcode,
    WCStatus,
    WROpcode,
    devices,
    live_objects,
)
from rdmanet.errors import CompletionError, CompletionResetError, DeviceNotFoundError, RdmaError

__all__ = [
    "CQ",
    "MR",
    "MTU",
    "PD",
    "QP",
    "SGE",
    "WC",
    "AHAttr",
    "AccessFlags",
    "AsyncEvent",
    "AtomicCap",
    "CompChannel",
    "CompletionError",
    "CompletionResetError",
    "Context",
    "Device",
    "DeviceAttr",
    "DeviceNotFoundError",
    "EventType",
    "GIDEntry",
    "GIDType",
    "Library",
    "LinkLayer",
    "MigState",
    "NodeType",
    "PortAttr",
    "PortState",
    "QPAttr",
    "QPAttrMask",
    "QPCap",
    "QPInitAttr",
    "QPState",
    "QPType",
    "RdmaError",
    "RecvWR",
    "SendFlags",
    "SendWR",
    "TransportType",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
    "WROpcode",
    "devices",
    "live_objects",
]
