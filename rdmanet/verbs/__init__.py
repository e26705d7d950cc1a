"""The verbs, under their own names. ::

    import rdmanet.verbs as v

    with v.open_device() as context, v.PD(context) as pd, v.CQ(context, 64) as cq:
        mr = pd.alloc_mr(4096)
        qp = v.QP(pd, v.QPInitAttr(cq, cq, v.QPCap(max_send_wr=16, max_recv_wr=16)))
        qp.to_init(access=v.AccessFlags.REMOTE_WRITE)
        ...

Close objects with close() or `with`, children before their parents; an object that is never closed causes a
ResourceWarning. Nothing here blocks: wait for the descriptors CompChannel.fd and Context.async_fd. Names and
meanings are those of rdma-core's manual pages, ibv_post_send(3) and so on.
"""

import importlib

from rdmanet import _core, errors

TYPE_CHECKING = False  # see rdmanet/__init__.py
if TYPE_CHECKING:
    from rdmanet._core import (  # isort: skip
        AH, CQ, CQEX, DM, MR, MTU, MW, PD, QP, SGE, SRQ, WC, XRCD, AccessFlags, AdviseMRAdvice,
        AdviseMRFlags, AHAttr, AsyncEvent, AtomicCap, BufferPool, CompChannel, Completions, Context,
        CQInitAttrEx, CreateCQFlags, CreateCQWCFlags, Device, DeviceAttr, EventType, GIDEntry, GIDType,
        GlobalRoute, Library, LinkLayer, MigState, MWBind, MWBindInfo, MWType, NodeType, PooledBuffer,
        PortAttr, PortState, QPAttr, QPAttrMask, QPCap, QPCreateFlags, QPInitAttr, QPInitAttrEx, QPState,
        QPType, RecvWR, SendFlags, SendOpsFlags, SendWR, SRQAttr, SRQInitAttr, SRQType, TransportType,
        WCFlags, WCOpcode, WCStatus, WROpcode, WRSession, best_gid, devices, inc_rkey, live_objects,
    )  # fmt: skip
    from rdmanet.errors import (
        CompletionError,
        CompletionResetError,
        DeviceNotFoundError,
        ModifyQPError,
        RdmaError,
        RemoteAccessError,
    )
    from rdmanet.verbs.device_lookup import features, find_device, open_device
    from rdmanet.wire.qpinfo import QPInfo
    from rdmanet.wire.remote import RemoteArray, RemoteMemory, RemoteStruct

__all__ = [
    "AH", "CQEX", "DM", "MW", "SRQ", "XRCD", "AdviseMRAdvice", "AdviseMRFlags", "Completions",
    "CQInitAttrEx", "CreateCQFlags", "CreateCQWCFlags", "GlobalRoute", "MWBind", "MWBindInfo", "MWType",
    "QPCreateFlags", "QPInitAttrEx", "SendOpsFlags", "SRQAttr", "SRQInitAttr", "SRQType", "WRSession",
    "inc_rkey", "CQ", "MR", "MTU", "PD", "QP", "SGE", "WC", "AHAttr", "AccessFlags", "AsyncEvent",
    "AtomicCap", "BufferPool", "PooledBuffer", "CompChannel", "CompletionError", "CompletionResetError",
    "Context", "Device", "DeviceAttr", "DeviceNotFoundError", "EventType", "GIDEntry", "GIDType", "Library",
    "LinkLayer", "MigState", "ModifyQPError", "NodeType", "PortAttr", "PortState", "QPAttr", "QPAttrMask",
    "QPCap", "QPInfo", "QPInitAttr", "QPState", "QPType", "RdmaError", "RemoteAccessError", "RemoteArray",
    "RemoteMemory", "RemoteStruct", "RecvWR", "SendFlags", "SendWR", "TransportType", "WCFlags", "WCOpcode",
    "WCStatus", "WROpcode", "best_gid", "devices", "features", "find_device", "live_objects", "open_device",
]  # fmt: skip


_ELSEWHERE = {
    "QPInfo": "wire.qpinfo",
    **dict.fromkeys(("RemoteArray", "RemoteMemory", "RemoteStruct"), "wire.remote"),
    **dict.fromkeys(("features", "find_device", "open_device"), "verbs.device_lookup"),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Each is looked up when it is first used: streams import modules of this package, and need few of its names.

        Some of them import msgspec, which takes longer than a connection of the byte stream: see base/bodies.py.
        """
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in _ELSEWHERE:
            module = importlib.import_module(f"rdmanet.{_ELSEWHERE[name]}")
        else:
            module = errors if name.endswith("Error") else _core
        found = globals()[name] = getattr(module, name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
