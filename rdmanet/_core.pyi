"""The verbs, from Python: what the compiled core offers.

`rdmanet.verbs` and `rdmanet.cm` re-export it; import from there.

Errors: a call that the library refuses raises OSError with the library's errno. Using a closed object
raises ValueError; using one in a forked child raises RuntimeError.

The docstrings are in `_pyx/`; a wheel's copy of this file has them, too (scripts/document-stub).
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import InitVar, dataclass
from enum import IntEnum, IntFlag
from ipaddress import IPv4Address, IPv6Address
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, final, overload

from typing_extensions import Buffer

from rdmanet.credit import Ledger, Want
from rdmanet.errors import CompletionError
from rdmanet.wire.qpinfo import QPInfo
from rdmanet.wire.remote import RemoteArray, RemoteMemory, RemoteStruct

EMBEDDED_ENVIRONMENT: str

_R = TypeVar("_R")

_Remote = RemoteMemory | RemoteArray | RemoteStruct

_Address = tuple[str, int] | tuple[str, int, int, int]

# ---- library.pxi ----

def live_objects() -> dict[str, int]: ...
def is_in_environment(name: bytes) -> bool: ...
def process_id() -> int: ...

class Library:
    @property
    def name(self) -> str:
        """`embedded` or `rdma-core`."""
    @property
    def path(self) -> str: ...
    @property
    def embedded_device(self) -> bool: ...
    @staticmethod
    def embedded() -> Library: ...
    @staticmethod
    def system() -> Library | None: ...
    @staticmethod
    def missing() -> dict[str, str]: ...
    def devices(self) -> list[Device]: ...
    def optional_calls(self) -> dict[str, bool]: ...
    def live(self) -> dict[str, int]: ...
    def set_faults(self, text: str | None) -> None: ...
    def log_to(self, fd: int) -> bool: ...
    def faults_happened(self) -> int: ...
    def faults(self) -> dict[str, int]: ...
    def check_environment(self) -> None: ...

class Resource:
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None: ...

# ---- device.pxi ----

class NodeType(IntEnum):
    UNKNOWN = -1
    CA = 1
    SWITCH = 2
    ROUTER = 3
    RNIC = 4
    USNIC = 5
    USNIC_UDP = 6
    UNSPECIFIED = 7

class TransportType(IntEnum):
    UNKNOWN = -1
    IB = 0
    IWARP = 1
    USNIC = 2
    USNIC_UDP = 3
    UNSPECIFIED = 4

class PortState(IntEnum):
    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5

class LinkLayer(IntEnum):
    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2

class MTU(IntEnum):
    MTU_256 = 1
    MTU_512 = 2
    MTU_1024 = 3
    MTU_2048 = 4
    MTU_4096 = 5
    @property
    def bytes(self) -> int: ...

class GIDType(IntEnum):
    IB = 0
    ROCE_V1 = 1
    ROCE_V2 = 2

class AtomicCap(IntEnum):
    NONE = 0
    HCA = 1
    GLOB = 2

class EventType(IntEnum):
    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    COMM_EST = 4
    SQ_DRAINED = 5
    PATH_MIG = 6
    PATH_MIG_ERR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    SRQ_ERR = 14
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18
    WQ_FATAL = 19
    DEVICE_SPEED_CHANGE = 20

@dataclass(frozen=True)
class DeviceAttr:
    fw_ver: str
    node_guid: int
    sys_image_guid: int
    max_mr_size: int
    page_size_cap: int
    vendor_id: int
    vendor_part_id: int
    hw_ver: int
    max_qp: int
    max_qp_wr: int
    device_cap_flags: int
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_res_rd_atom: int
    max_qp_init_rd_atom: int
    atomic_cap: AtomicCap
    max_mw: int
    max_ah: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_pkeys: int
    local_ca_ack_delay: int
    phys_port_cnt: int
    odp_general_caps: int
    odp_rc_caps: int
    max_mcast_grp: int = 0
    max_mcast_qp_attach: int = 0
    max_total_mcast_qp_attach: int = 0
    max_dm_size: int = 0
    max_cq_count: int = 0
    max_cq_period: int = 0
    completion_timestamp_mask: int = 0
    hca_core_clock: int = 0
    @property
    def implicit_odp(self) -> bool: ...

@dataclass(frozen=True)
class PortAttr:
    state: PortState
    max_mtu: MTU
    active_mtu: MTU
    gid_tbl_len: int
    port_cap_flags: int
    max_msg_sz: int
    pkey_tbl_len: int
    lid: int
    sm_lid: int
    lmc: int
    active_width: int
    active_speed: int
    phys_state: int
    link_layer: LinkLayer
    flags: int

@dataclass(frozen=True)
class GIDEntry:
    gid: bytes
    gid_index: int
    port_num: int
    gid_type: GIDType
    ndev_ifindex: int
    @property
    def address(self) -> IPv4Address | IPv6Address: ...

def best_gid(table: Iterable[GIDEntry]) -> GIDEntry | None: ...
def gid_advice(table: Iterable[GIDEntry], ip: str) -> str: ...

@dataclass(frozen=True)
class AsyncEvent:
    event_type: EventType
    qp: QP | None = None
    cq: CQ | None = None
    srq: SRQ | None = None
    port_num: int | None = None

class Device:
    @property
    def library(self) -> Library: ...
    @property
    def name(self) -> str: ...
    @property
    def node_type(self) -> NodeType: ...
    @property
    def transport_type(self) -> TransportType: ...
    @property
    def guid(self) -> int: ...
    def open(self) -> Context: ...

def devices() -> list[Device]: ...

class Context(Resource):
    @property
    def library(self) -> Library: ...
    @property
    def name(self) -> str: ...
    @property
    def owned(self) -> bool:
        """Whether close() closes it; otherwise the connection manager does."""
    @property
    def async_fd(self) -> int: ...
    @property
    def num_comp_vectors(self) -> int: ...
    @property
    def transport_type(self) -> TransportType: ...
    def query_device(self) -> DeviceAttr: ...
    def query_rt_values(self) -> int: ...
    def query_port(self, port_num: int = 1) -> PortAttr: ...
    def query_gid(self, port_num: int = 1, index: int = 0) -> bytes: ...
    def gid_table(self, port_num: int | None = None) -> list[GIDEntry]: ...
    def pkey(self, port_num: int = 1, index: int = 0) -> int: ...
    def get_async_event(self) -> AsyncEvent | None: ...
    def add_listener(self, listener: Callable[[AsyncEvent], None]) -> None: ...
    def remove_listener(self, listener: Callable[[AsyncEvent], None]) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def set_faults(self, text: str) -> None: ...
    def faults(self) -> dict[str, int]: ...

# ---- memory.pxi ----

class AccessFlags(IntFlag):
    LOCAL_WRITE = 0x1
    REMOTE_WRITE = 0x2
    REMOTE_READ = 0x4
    REMOTE_ATOMIC = 0x8
    MW_BIND = 0x10
    ZERO_BASED = 0x20
    ON_DEMAND = 0x40
    HUGETLB = 0x80
    FLUSH_GLOBAL = 0x100
    FLUSH_PERSISTENT = 0x200
    RELAXED_ORDERING = 0x100000

class AdviseMRAdvice(IntEnum):
    PREFETCH = 0
    PREFETCH_WRITE = 1
    PREFETCH_NO_FAULT = 2

class AdviseMRFlags(IntFlag):
    NONE = 0
    FLUSH = 1

class PD(Resource):
    def __init__(self, context: Context) -> None: ...
    @property
    def context(self) -> Context: ...
    def reg_mr(self, buffer: Buffer, access: AccessFlags | int | None = None) -> MR: ...
    def alloc_mr(
        self, length: int, access: AccessFlags | int = ..., *, huge_pages: bool | Literal["try"] = False
    ) -> MR: ...
    def reg_implicit(self, access: AccessFlags | int = 0) -> MR: ...
    def reg_dm_mr(
        self, dm: DM, offset: int = 0, length: int | None = None, access: AccessFlags | int = ...
    ) -> MR: ...
    def reg_dmabuf_mr(
        self, fd: int, length: int, *, offset: int = 0, iova: int = 0, access: AccessFlags | int = ...
    ) -> MR: ...
    def alloc_null_mr(self) -> MR: ...
    def advise_mr(
        self,
        advice: AdviseMRAdvice | int,
        sg_list: SGE | MR | Iterable[SGE | MR],
        flags: AdviseMRFlags | int = ...,
    ) -> None: ...

class BufferPool:
    def __init__(
        self, pd: PD, buffer_bytes: int, count: int, *, huge_pages: bool | Literal["try"] = False
    ) -> None: ...
    @property
    def mr(self) -> MR: ...
    @property
    def buffer_bytes(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def available(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def acquire(self, nbytes: int | None = None) -> PooledBuffer: ...
    def fits(self, nbytes: int | None) -> None: ...
    def _freed(self) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

@final
class PooledBuffer:
    @property
    def pool(self) -> BufferPool: ...
    def release(self) -> None: ...
    def sge(self, offset: int = 0, length: int | None = None) -> SGE: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

class MR(Resource):
    @property
    def page_size(self) -> int:
        """The page size of its memory, in bytes; 0 if it does not own memory. See PD.alloc_mr()."""
    @property
    def dm(self) -> DM | None:
        """The device memory that it registers, or None."""
    def _offered(self, more: int) -> None: ...
    def rereg(
        self, *, pd: PD | None = None, buffer: Buffer | None = None, access: AccessFlags | int | None = None
    ) -> None: ...
    @property
    def pd(self) -> PD: ...
    @property
    def access(self) -> AccessFlags: ...
    @property
    def lkey(self) -> int: ...
    @property
    def rkey(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int:
        """Its size in bytes."""
    def sge(self, offset: int = 0, length: int | None = None) -> SGE: ...
    @property
    def at(self) -> _Slices: ...
    def to_remote(self, offset: int = 0, length: int | None = None) -> RemoteMemory: ...
    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...
    @overload
    def __getitem__(self, key: int, /) -> int: ...
    @overload
    def __getitem__(self, key: slice, /) -> bytes: ...
    def __setitem__(self, key: int | slice, value: int | Buffer, /) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class _Slices:
    def __init__(self, mr: MR) -> None: ...
    def __getitem__(self, key: int | slice, /) -> SGE: ...

# ---- devicememory.pxi ----

class DM(Resource):
    def __init__(self, context: Context, length: int, log_align_req: int = 0) -> None: ...
    @property
    def context(self) -> Context: ...
    @property
    def length(self) -> int:
        """Its size in bytes."""
    def __len__(self) -> int: ...
    def copy_to_dm(self, offset: int, data: Buffer) -> None: ...
    def copy_from_dm(self, offset: int, length: int) -> bytes: ...

# ---- address.pxi ----

@dataclass(frozen=True)
class GlobalRoute:
    dgid: bytes
    flow_label: int = 0
    sgid_index: int = 0
    hop_limit: int = 64
    traffic_class: int = 0

@dataclass
class AHAttr:
    dgid: bytes | None = None
    sgid_index: int = 0
    hop_limit: int = 64
    traffic_class: int = 0
    flow_label: int = 0
    dlid: int = 0
    sl: int = 0
    src_path_bits: int = 0
    static_rate: int = 0
    port_num: int = 1
    gr: InitVar[GlobalRoute | None] = None
    @property
    def is_global(self) -> bool: ...
    @property
    def global_route(self) -> GlobalRoute | None: ...

class AH(Resource):
    def __init__(self, pd: PD, attr: AHAttr) -> None: ...
    @staticmethod
    def from_wc(pd: PD, wc: WC, grh: Buffer, port_num: int = 1) -> AH: ...
    @property
    def pd(self) -> PD: ...
    @property
    def attr(self) -> AHAttr: ...

# ---- completion.pxi ----

class WCStatus(IntEnum):
    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    TM_ERR = 22
    TM_RNDV_INCOMPLETE = 23

class WCOpcode(IntEnum):
    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    BIND_MW = 5
    LOCAL_INV = 6
    TSO = 7
    FLUSH = 8
    ATOMIC_WRITE = 9
    RECV = 128
    RECV_RDMA_WITH_IMM = 129

class WCFlags(IntFlag):
    GRH = 0x1
    WITH_IMM = 0x2
    IP_CSUM_OK = 0x4
    WITH_INV = 0x8

@final
class WC:
    @property
    def wr_id(self) -> object:
        """The wr_id of its request."""
    @property
    def qp(self) -> QP | None:
        """The queue pair; None if it is gone or belongs to another process."""
    @property
    def srq(self) -> SRQ | None: ...
    @property
    def is_send(self) -> bool: ...
    @property
    def status(self) -> WCStatus: ...
    @property
    def opcode(self) -> WCOpcode | None: ...
    @property
    def byte_len(self) -> int: ...
    @property
    def imm_data(self) -> int | None: ...
    @property
    def qp_num(self) -> int: ...
    @property
    def src_qp(self) -> int: ...
    @property
    def invalidated_rkey(self) -> int | None: ...
    @property
    def pkey_index(self) -> int: ...
    @property
    def slid(self) -> int: ...
    @property
    def sl(self) -> int: ...
    @property
    def dlid_path_bits(self) -> int: ...
    @property
    def timestamp(self) -> int | None: ...
    @property
    def wallclock_ns(self) -> int | None: ...
    @property
    def vendor_err(self) -> int: ...
    @property
    def wc_flags(self) -> WCFlags: ...
    def raise_for_status(self) -> None: ...

class CompChannel(Resource):
    def __init__(self, context: Context) -> None: ...
    @property
    def context(self) -> Context: ...
    @property
    def fd(self) -> int: ...
    def fileno(self) -> int: ...
    def get_cq_event(self) -> CQ | None: ...

class CQ(Resource):
    def __init__(
        self, context: Context, cqe: int, channel: CompChannel | None = None, comp_vector: int = 0
    ) -> None: ...
    @property
    def context(self) -> Context: ...
    @property
    def channel(self) -> CompChannel | None: ...
    @property
    def cqe(self) -> int: ...
    @property
    def stray(self) -> int:
        """How many completions were dropped because their queue pair was gone."""
    def resize(self, cqe: int) -> None: ...
    def modify(self, cq_count: int, cq_period: int) -> None: ...
    def req_notify(self, solicited_only: bool = False) -> None: ...
    def ack_events(self, nevents: int = 1) -> None: ...
    def poll(self, num_entries: int = 16) -> list[WC]: ...

# ---- extendedcq.pxi ----

class CreateCQWCFlags(IntFlag):
    WITH_BYTE_LEN = 0x1
    WITH_IMM = 0x2
    WITH_QP_NUM = 0x4
    WITH_SRC_QP = 0x8
    WITH_SLID = 0x10
    WITH_SL = 0x20
    WITH_DLID_PATH_BITS = 0x40
    WITH_COMPLETION_TIMESTAMP = 0x80
    WITH_COMPLETION_TIMESTAMP_WALLCLOCK = 0x800
    STANDARD = 0x7F

class CreateCQFlags(IntFlag):
    NONE = 0
    SINGLE_THREADED = 0x1
    IGNORE_OVERRUN = 0x2

@dataclass(frozen=True)
class CQInitAttrEx:
    cqe: int
    channel: CompChannel | None = None
    comp_vector: int = 0
    wc_flags: CreateCQWCFlags | int = ...
    flags: CreateCQFlags | int = ...

class CQEX(CQ):
    def __init__(self, context: Context, init_attr: CQInitAttrEx) -> None: ...
    @property
    def wc_flags(self) -> CreateCQWCFlags: ...
    def poll(self, num_entries: int = 16) -> list[WC]: ...
    def start_poll(self) -> Completions: ...

@final
class Completions:
    def __new__(cls, cq: CQEX) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> WC: ...

# ---- registration.pxi ----

@final
class Registration:
    @property
    def lkey(self) -> int:
        """The key of the memory."""
    def close(self) -> None: ...

def address_of(buffer: Buffer) -> int: ...

class RegistrationCache:
    def __new__(cls, pd: PD, most_entries: int = 128, most_bytes: int | None = None) -> Self: ...
    def take(self, buffer: Buffer, view: memoryview) -> Registration: ...
    @property
    def most_entries(self) -> int: ...
    @property
    def most_bytes(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def evictions(self) -> int: ...
    def forget(self, reference: Any) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> dict[str, int]: ...

# ---- allocation.pxi ----

@final
class AllocatedMemory:
    length: int
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def alloc(nbytes: int, *, huge_pages: bool | Literal["try"] = False) -> AllocatedMemory: ...
def region_for_peers(pd: PD, buffer: Buffer, access: AccessFlags | int) -> MR: ...

# ---- reuse.pxi ----

REUSED_BYTES: int
"""From so many bytes on, memory of `unfilled()` is kept for a later call."""

@final
class ReusableMemory:
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def unfilled(nbytes: int) -> bytearray | ReusableMemory: ...
def bring_in(memory: Any, nbytes: int, offset: int) -> None: ...
def idle_bytes() -> int: ...

# ---- workrequest.pxi ----

class WROpcode(IntEnum):
    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4
    ATOMIC_CMP_AND_SWP = 5
    ATOMIC_FETCH_AND_ADD = 6
    LOCAL_INV = 7
    BIND_MW = 8
    SEND_WITH_INV = 9
    TSO = 10
    FLUSH = 14
    ATOMIC_WRITE = 15

class SendFlags(IntFlag):
    NONE = 0
    FENCE = 0x1
    SIGNALED = 0x2
    SOLICITED = 0x4
    INLINE = 0x8
    IP_CSUM = 0x10

@final
class SGE:
    def __init__(
        self, buffer: MR | Buffer, offset: int = 0, length: int | None = None, *, lkey: int | None = None
    ) -> None: ...
    @property
    def buffer(self) -> MR | memoryview: ...
    @property
    def addr(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def lkey(self) -> int: ...

class RecvWR:
    def __init__(self, sg_list: SGE | MR | Iterable[SGE | MR] = (), *, wr_id: object = 0) -> None: ...
    @property
    def wr_id(self) -> object: ...
    @property
    def sg_list(self) -> tuple[SGE, ...]: ...

class SendWR:
    def __init__(
        self,
        opcode: WROpcode | int,
        sg_list: SGE | MR | Iterable[SGE | MR] = (),
        *,
        wr_id: object = 0,
        flags: SendFlags | int = ...,
        imm_data: int = 0,
        remote_addr: int = 0,
        rkey: int = 0,
        compare_add: int = 0,
        swap: int = 0,
        ah: AH | None = None,
        remote_qpn: int = 0,
        remote_qkey: int = 0,
        remote_srqn: int = 0,
        invalidate_rkey: int = 0,
        mw: MW | None = None,
        bind_info: MWBindInfo | None = None,
        atomic_data: Buffer | None = None,
    ) -> None: ...
    @property
    def wr_id(self) -> object: ...
    @property
    def opcode(self) -> WROpcode: ...
    @property
    def flags(self) -> SendFlags: ...
    @property
    def sg_list(self) -> tuple[SGE, ...]: ...

# ---- window.pxi ----

class MWType(IntEnum):
    TYPE_1 = 1
    TYPE_2 = 2

@dataclass(frozen=True)
class MWBindInfo:
    mr: MR
    addr: int | None = None
    length: int = 0
    mw_access_flags: AccessFlags | int = 0

@dataclass(frozen=True)
class MWBind:
    bind_info: MWBindInfo
    wr_id: object = 0
    send_flags: SendFlags | int = ...

def inc_rkey(rkey: int) -> int: ...

class MW(Resource):
    def __init__(self, pd: PD, mw_type: MWType | int = ...) -> None: ...
    @property
    def pd(self) -> PD: ...
    @property
    def mw_type(self) -> MWType: ...
    @property
    def mr(self) -> MR | None:
        """The region that it was last bound to, or None."""
    @property
    def rkey(self) -> int: ...

# ---- srq.pxi ----

class SRQType(IntEnum):
    BASIC = 0
    XRC = 1
    TM = 2

@dataclass
class SRQAttr:
    max_wr: int = 1
    max_sge: int = 1
    srq_limit: int = 0

@dataclass
class SRQInitAttr:
    attr: SRQAttr = ...
    srq_type: SRQType = ...
    xrcd: XRCD | None = None
    cq: CQ | None = None

class SRQ(Resource):
    def __init__(self, pd: PD, init_attr: SRQInitAttr | SRQAttr | None = None) -> None: ...
    @property
    def pd(self) -> PD: ...
    @property
    def xrcd(self) -> XRCD | None: ...
    @property
    def cq(self) -> CQ | None: ...
    @property
    def srq_type(self) -> SRQType: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def srq_num(self) -> int: ...
    def query(self) -> SRQAttr: ...
    def modify(self, *, max_wr: int | None = None, srq_limit: int | None = None) -> None: ...
    def post_recv(self, wrs: RecvWR | Iterable[RecvWR]) -> None: ...

class XRCD(Resource):
    def __init__(self, context: Context, fd: int = -1, oflags: int = ...) -> None: ...
    @property
    def context(self) -> Context: ...

# ---- qpattr.pxi ----

class SendOpsFlags(IntFlag):
    RDMA_WRITE = 0x1
    RDMA_WRITE_WITH_IMM = 0x2
    SEND = 0x4
    SEND_WITH_IMM = 0x8
    RDMA_READ = 0x10
    ATOMIC_CMP_AND_SWP = 0x20
    ATOMIC_FETCH_AND_ADD = 0x40
    LOCAL_INV = 0x80
    BIND_MW = 0x100
    SEND_WITH_INV = 0x200
    TSO = 0x400
    FLUSH = 0x800
    ATOMIC_WRITE = 0x1000

class QPCreateFlags(IntFlag):
    BLOCK_SELF_MCAST_LB = 0x2

class QPType(IntEnum):
    RC = 2
    UC = 3
    UD = 4
    RAW_PACKET = 8
    XRC_SEND = 9
    XRC_RECV = 10
    DRIVER = 255

class QPState(IntEnum):
    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6
    UNKNOWN = 7

class MigState(IntEnum):
    MIGRATED = 0
    REARM = 1
    ARMED = 2

class QPAttrMask(IntFlag):
    STATE = 0x1
    CUR_STATE = 0x2
    EN_SQD_ASYNC_NOTIFY = 0x4
    ACCESS_FLAGS = 0x8
    PKEY_INDEX = 0x10
    PORT = 0x20
    QKEY = 0x40
    AV = 0x80
    PATH_MTU = 0x100
    TIMEOUT = 0x200
    RETRY_CNT = 0x400
    RNR_RETRY = 0x800
    RQ_PSN = 0x1000
    MAX_QP_RD_ATOMIC = 0x2000
    ALT_PATH = 0x4000
    MIN_RNR_TIMER = 0x8000
    SQ_PSN = 0x10000
    MAX_DEST_RD_ATOMIC = 0x20000
    PATH_MIG_STATE = 0x40000
    CAP = 0x80000
    DEST_QPN = 0x100000
    RATE_LIMIT = 0x2000000

@dataclass
class QPCap:
    max_send_wr: int = 1
    max_recv_wr: int = 1
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0

@dataclass
class QPInitAttr:
    send_cq: CQ | None = None
    recv_cq: CQ | None = None
    cap: QPCap = ...
    qp_type: QPType = ...
    sq_sig_all: bool = False
    srq: SRQ | None = None

@dataclass
class QPInitAttrEx(QPInitAttr):
    send_ops_flags: SendOpsFlags | int = 0
    create_flags: QPCreateFlags | int = 0
    xrcd: XRCD | None = None

@dataclass
class QPAttr:
    qp_state: QPState | None = None
    cur_qp_state: QPState | None = None
    path_mtu: MTU | None = None
    path_mig_state: MigState | None = None
    qkey: int | None = None
    rq_psn: int | None = None
    sq_psn: int | None = None
    dest_qp_num: int | None = None
    qp_access_flags: AccessFlags | None = None
    cap: QPCap | None = None
    ah_attr: AHAttr | None = None
    alt_ah_attr: AHAttr | None = None
    pkey_index: int | None = None
    alt_pkey_index: int | None = None
    en_sqd_async_notify: bool | None = None
    max_rd_atomic: int | None = None
    max_dest_rd_atomic: int | None = None
    min_rnr_timer: int | None = None
    port_num: int | None = None
    timeout: int | None = None
    retry_cnt: int | None = None
    rnr_retry: int | None = None
    alt_port_num: int | None = None
    alt_timeout: int | None = None
    rate_limit: int | None = None
    @property
    def mask(self) -> QPAttrMask: ...

# ---- queuepair.pxi ----

class QP(Resource):
    def __init__(self, pd: PD, init_attr: QPInitAttr) -> None: ...
    @property
    def pd(self) -> PD: ...
    @staticmethod
    def open(pd: PD, xrcd: XRCD, qp_num: int) -> QP: ...
    @property
    def send_cq(self) -> CQ | None: ...
    @property
    def recv_cq(self) -> CQ | None: ...
    @property
    def srq(self) -> SRQ | None: ...
    @property
    def xrcd(self) -> XRCD | None: ...
    @property
    def cap(self) -> QPCap: ...
    @property
    def qp_num(self) -> int: ...
    @property
    def qp_type(self) -> QPType: ...
    @property
    def state(self) -> QPState: ...
    @property
    def in_flight(self) -> tuple[int, int]: ...
    @property
    def peer_gone(self) -> bool: ...
    def modify(self, attr: QPAttr | None = None, **attrs: Any) -> None: ...
    def to_init(
        self, port_num: int = 1, *, pkey_index: int = 0, access: AccessFlags | int = 0, qkey: int = 0
    ) -> None: ...
    def to_rtr(
        self,
        dest_qp_num: int = 0,
        dgid: bytes | None = None,
        *,
        sgid_index: int = 0,
        dlid: int = 0,
        port_num: int = 1,
        path_mtu: MTU | int = ...,
        rq_psn: int = 0,
        max_dest_rd_atomic: int = 1,
        min_rnr_timer: int = 12,
        hop_limit: int = 64,
        sl: int = 0,
    ) -> None: ...
    def to_rts(
        self,
        *,
        sq_psn: int = 0,
        timeout: int = 14,
        retry_cnt: int = 7,
        rnr_retry: int = 7,
        max_rd_atomic: int = 1,
    ) -> None: ...
    def info(
        self,
        *,
        port_num: int = 1,
        sgid_index: int | None = None,
        psn: int | None = None,
        mtu: int | None = None,
    ) -> QPInfo: ...
    def connect(
        self,
        peer: QPInfo,
        *,
        access: AccessFlags | int | None = None,
        pkey_index: int = 0,
        max_dest_rd_atomic: int = 1,
        min_rnr_timer: int = 12,
        hop_limit: int = 64,
        sl: int = 0,
        timeout: int = 14,
        retry_cnt: int = 7,
        rnr_retry: int = 7,
        max_rd_atomic: int = 1,
    ) -> None: ...
    def to_error(self) -> None: ...
    def to_reset(self) -> None: ...
    def query(self) -> tuple[QPAttr, QPInitAttr]: ...
    def counters(self) -> dict[str, int]: ...
    def attach_mcast(self, gid: bytes | IPv4Address | IPv6Address, lid: int = 0) -> None: ...
    def detach_mcast(self, gid: bytes | IPv4Address | IPv6Address, lid: int = 0) -> None: ...
    def bind_mw(self, mw: MW, bind: MWBind) -> None: ...
    def wr(self) -> WRSession: ...
    def post_send(self, wrs: SendWR | Iterable[SendWR]) -> None: ...
    def post_recv(self, wrs: RecvWR | Iterable[RecvWR]) -> None: ...

# ---- wrsession.pxi ----

_SGList = SGE | Buffer | Iterable[SGE | Buffer]

@final
class WRSession:
    def __new__(cls, qp: QP) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...
    def __len__(self) -> int: ...
    def abort(self) -> None: ...
    def post(self, wr: SendWR) -> None: ...
    def send(
        self,
        sg_list: _SGList = (),
        *,
        imm_data: int | None = None,
        invalidate_rkey: int | None = None,
        **options: Any,
    ) -> None: ...
    def rdma_write(
        self,
        sg_list: _SGList = (),
        *,
        remote_addr: int,
        rkey: int,
        imm_data: int | None = None,
        **options: Any,
    ) -> None: ...
    def rdma_read(self, sg_list: _SGList = (), *, remote_addr: int, rkey: int, **options: Any) -> None: ...
    def atomic_cmp_swp(
        self, sg_list: _SGList, *, remote_addr: int, rkey: int, compare: int, swap: int, **options: Any
    ) -> None: ...
    def atomic_fetch_add(
        self, sg_list: _SGList, *, remote_addr: int, rkey: int, add: int, **options: Any
    ) -> None: ...
    def atomic_write(self, data: Buffer, *, remote_addr: int, rkey: int, **options: Any) -> None: ...
    def flush(
        self,
        *,
        remote_addr: int,
        rkey: int,
        length: int,
        placement: int = ...,
        level: int = ...,
        **options: Any,
    ) -> None: ...
    def bind_mw(self, mw: MW, rkey: int, bind_info: MWBindInfo, **options: Any) -> None: ...
    def local_inv(self, rkey: int, **options: Any) -> None: ...

# ---- watcher.pxi ----

class Watcher:
    @property
    def notifier(self) -> Any: ...
    @property
    def channel(self) -> CompChannel: ...
    @property
    def cqs(self) -> list[CQ]: ...
    @property
    def passes(self) -> int: ...
    @property
    def sleeps(self) -> int: ...
    @property
    def wakeups(self) -> int: ...
    @property
    def events(self) -> int: ...
    @property
    def polls(self) -> int: ...
    @property
    def messages(self) -> int: ...
    def pass_(self) -> None: ...

# ---- operation.pxi, awaited.pxi: what verbs_async/queues.py and regions.py build on ----

@final
class Operation(Generic[_R]):
    @staticmethod
    def beside(
        future: Any,
        opcode: int,
        sg_list: _SGList,
        remote_addr: int,
        rkey: int,
        compare_add: int = 0,
        swap: int = 0,
    ) -> Operation[None]: ...
    def post(self, connection: Connection, total: int = 0) -> bool: ...
    def end(self, error: BaseException | None = None) -> None: ...
    def failure(self, status: int, vendor_err: int, qp_num: int) -> CompletionError: ...
    @property
    def done(self) -> bool: ...
    def wait(self) -> Awaitable[_R]: ...
    def close_after(self, resource: Any) -> None: ...
    def result(self) -> _R: ...

@final
class Blocks:
    future: Any
    error: BaseException | None
    """Why it ended too early, if there was no future to be told; to be taken out."""
    def __new__(cls, future: Any, opcode: int, at_once: int, piece: int) -> Self: ...
    def __len__(self) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def moved(self) -> int: ...
    @property
    def is_to_await(self) -> bool:
        """Of what a FastPath has begun: it is not done, or the loop is due to turn."""
    def add(self, view: Buffer, lkey: int, address: int, rkey: int) -> None: ...
    def add_rows(
        self, view: Buffer, lkey: int, address: int, rkey: int, row_bytes: int, rows: int, indices: Buffer
    ) -> None: ...
    def begin(self, connection: Connection) -> bool: ...
    def post(self, connection: Connection) -> bool: ...
    def close_after(self, resource: Any) -> None: ...
    def stop(self, error: BaseException | None = None) -> None: ...
    def end(self, error: BaseException | None = None) -> None: ...
    def failure(self, status: int, vendor_err: int, qp_num: int) -> CompletionError: ...

@final
class FastPath:
    def __new__(
        cls,
        connection: Connection,
        endpoint: bytes,
        claimed: Callable[[bytes], Any],
        find: Callable[[int, int, bool], Any],
        at_once: int,
        piece: int,
    ) -> Self: ...
    @property
    def grant(self) -> bytes | None:
        """Of the peer's memory that was used last."""
    @property
    def memory(self) -> Any:
        """Of ours that was used last."""
    def move(self, opcode: int, descriptor: Any, array: Any) -> Blocks | None: ...
    def fill(self, blocks: Blocks, pairs: list[Any]) -> tuple[Collection[bytes], Collection[Any]] | None: ...
    def learn(self, encoded: bytes, descriptor: Any) -> None: ...
    def forget(self, grant: bytes) -> None: ...

@final
class OperationQueue:
    def __new__(cls, qp: QP, watcher: CompletionWatcher, sends: bool) -> Self: ...
    @property
    def qp(self) -> QP: ...
    @property
    def watcher(self) -> CompletionWatcher: ...
    @property
    def waiting(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    def close(self) -> None: ...
    def receive(self, sg_list: _SGList) -> Operation[WC]: ...
    def send(self, opcode: int, sg_list: _SGList, flags: int, imm_data: int = 0) -> Operation[WC]: ...
    def rdma(
        self, opcode: int, sg_list: _SGList, remote: _Remote, flags: int, imm_data: int = 0
    ) -> Operation[WC]: ...
    def atomic(
        self, opcode: int, remote: _Remote, compare_add: int, swap: int, flags: int
    ) -> Operation[int]: ...
    def bind(self, mw: MW, bind: MWBind) -> Operation[WC]: ...
    def batch(self, requests: Iterable[SendWR]) -> Operation[list[WC]]: ...

class CompletionWatcher(Watcher):
    def __init__(self, cq: CQ, notifier: Any, busy_poll: float | None = None) -> None: ...
    def mine(self) -> None: ...
    @property
    def cq(self) -> CQ: ...
    @property
    def pending(self) -> int: ...
    @property
    def found(self) -> deque[WC]: ...
    @property
    def completions(self) -> int: ...
    def close(self) -> None: ...
    def wait(self) -> Awaitable[None]: ...
    def look(self) -> None: ...
    def readable(self) -> None: ...
    def stats(self) -> dict[str, int]: ...

# ---- cm.pxi ----

class CMEventType(IntEnum):
    ADDR_RESOLVED = 0
    ADDR_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_REQUEST = 4
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVAL = 11
    MULTICAST_JOIN = 12
    MULTICAST_ERROR = 13
    ADDR_CHANGE = 14
    TIMEWAIT_EXIT = 15
    ADDRINFO_RESOLVED = 16
    ADDRINFO_ERROR = 17
    USER = 18
    INTERNAL = 19

class PortSpace(IntEnum):
    IPOIB = 2
    TCP = 262
    UDP = 273
    IB = 319

@final
class CMEvent:
    @property
    def type(self) -> CMEventType: ...
    @property
    def status(self) -> int: ...
    @property
    def id(self) -> CMID:
        """The identifier concerned; for CONNECT_REQUEST a new one."""
    @property
    def listen_id(self) -> CMID | None:
        """For CONNECT_REQUEST: the listener."""
    @property
    def private_data(self) -> bytes: ...
    @property
    def responder_resources(self) -> int: ...
    @property
    def initiator_depth(self) -> int: ...
    @property
    def retry_count(self) -> int: ...
    @property
    def rnr_retry_count(self) -> int: ...
    @property
    def qp_num(self) -> int: ...
    @property
    def ah_attr(self) -> AHAttr | None:
        """For datagrams, with ESTABLISHED and MULTICAST_JOIN: the address of the peer or the group."""
    @property
    def qkey(self) -> int | None:
        """For datagrams, with ESTABLISHED and MULTICAST_JOIN: the key that the other side expects."""
    def error(self) -> OSError | None: ...
    def raise_for_status(self) -> None: ...

class CMEventChannel(Resource):
    def __init__(self, library: Library) -> None: ...
    @property
    def library(self) -> Library: ...
    @property
    def fd(self) -> int: ...
    def fileno(self) -> int: ...
    def create_id(self, ps: PortSpace | int = ...) -> CMID: ...
    def get_event(self) -> CMEvent | None: ...

class CMID(Resource):
    @property
    def channel(self) -> CMEventChannel: ...
    @property
    def library(self) -> Library: ...
    @property
    def context(self) -> Context | None: ...
    @property
    def port_num(self) -> int: ...
    @property
    def qp(self) -> QP | None: ...
    @property
    def local_addr(self) -> _Address | None: ...
    @property
    def peer_addr(self) -> _Address | None: ...
    @property
    def peer_gone(self) -> bool: ...
    @property
    def peer_user(self) -> int | None: ...
    @property
    def peer_by_name(self) -> bool: ...
    def set_reuse_addr(self, reuse: bool = True) -> None: ...
    def set_af_only(self, only: bool = True) -> None: ...
    def set_ack_timeout(self, timeout: int) -> None: ...
    def set_tos(self, tos: int) -> None: ...
    def set_by_name_alone(self) -> None: ...
    def bind_addr(self, address: _Address) -> None: ...
    def resolve_addr(self, src_addr: _Address | None, dst_addr: _Address, timeout_ms: int = 2000) -> None: ...
    def resolve_route(self, timeout_ms: int = 2000) -> None: ...
    def resolve_at_once(self, src_addr: _Address | None, dst_addr: _Address) -> bool | None: ...
    def listen(self, backlog: int = 128) -> None: ...
    def connect(
        self,
        private_data: Buffer = b"",
        *,
        responder_resources: int = 1,
        initiator_depth: int = 1,
        retry_count: int = 7,
        rnr_retry_count: int = 0,
        qp_num: int = 0,
    ) -> None: ...
    def accept(
        self,
        private_data: Buffer = b"",
        *,
        responder_resources: int = 1,
        initiator_depth: int = 1,
        retry_count: int = 7,
        rnr_retry_count: int = 0,
        qp_num: int = 0,
    ) -> None: ...
    def reject(self, private_data: Buffer = b"") -> None: ...
    def disconnect(self, *, told: bool = True) -> None: ...
    def establish(self) -> None: ...
    def notify(self, event_type: int = ...) -> None: ...
    def init_qp_attr(self, qp_state: QPState) -> QPAttr: ...
    def join_multicast(self, address: _Address, flags: int = ...) -> None: ...
    def leave_multicast(self, address: _Address) -> None: ...
    def create_qp(self, pd: PD, init_attr: QPInitAttr) -> QP: ...
    def destroy_qp(self) -> None: ...
    def migrate(self, channel: CMEventChannel) -> None: ...

# ---- The data engine: what loop_context.py and lifecycle.py build on ----

EMBEDDED_ARENA_BYTES: int
EMBEDDED_MAX_INLINE: int
STREAM_CONTROL_BODY_BYTES: int
STREAM_DATA_SLOTS_MAX: int
STREAM_FIRST_SLOT_BYTES: int
STREAM_SHARED_OWN: int
STREAM_SHARED_SLOTS_MAX: int

def stream_half_open_bytes(slot_bytes: int, data_slots: int, shared: bool) -> int: ...
def stream_queue_depths(data_slots: int) -> tuple[int, int]: ...
def decrypted(sslobj: Any, incoming: Any, again: Any) -> tuple[bytes, bool]: ...

class SharedRing:
    engine: StreamEngine
    cq: CQ
    srq: SRQ | None
    slot_bytes: int
    data_slots: int
    members: int
    room: int
    def __new__(
        cls, engine: StreamEngine, slot_bytes: int, data_slots: int, common: int, number: int
    ) -> Self: ...
    def stats(self) -> dict[str, int]: ...

@final
class GrownRings:
    idle_s: float
    def __new__(cls, engine: StreamEngine) -> Self: ...
    def look(self) -> None: ...

@final
class KeepAlive:
    probes: int
    def __new__(cls, engine: StreamEngine, library: Library) -> Self: ...
    def look(self) -> None: ...

class StreamEngine(Watcher):
    pd: PD
    registrations: RegistrationCache
    max_inline: int
    place_bytes: int
    stale: int
    shared_rings: list[SharedRing | None]
    grown: GrownRings
    alive: KeepAlive
    @property
    def can_share(self) -> bool: ...
    @property
    def reads_in_place(self) -> bool: ...
    def has_windows(self) -> bool: ...
    def confines_peers(self) -> bool: ...
    def __new__(
        cls, loop: asyncio.AbstractEventLoop, notifier: Any, context: Context, busy_poll: float | None = None
    ) -> Self: ...
    def set_busy_poll(self, busy_poll: float | None) -> None: ...
    def set_place_bytes(self, least: int) -> None: ...
    def reserve(self, entries: int) -> CQ: ...
    def unreserve(self, cq: CQ, entries: int) -> None: ...
    @property
    def connections(self) -> list[Connection]: ...
    def channel_ready(self) -> bool: ...
    def drain(self) -> None: ...
    def lose_queue(self, cq: CQ, error: OSError) -> None: ...
    def lose_device(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> dict[str, int]: ...

class Totals: ...

def trace_begin(room: int) -> None: ...
def trace_end() -> None: ...
def trace_taken() -> tuple[bytes, int]: ...
def stream_totals() -> dict[str, dict[str, dict[str, Any]]]: ...

@final
class IntoReader:
    def __new__(cls, loop: asyncio.AbstractEventLoop, limit: int) -> Self: ...
    def take_unread(self) -> bytes: ...
    def loses(self, exc: BaseException) -> None: ...

class CompiledReader:
    _into: IntoReader
    def __init__(self, limit: int, loop: asyncio.AbstractEventLoop) -> None: ...

    # asyncio.StreamReader declares the rest. These are ours:

    def lease(self, at_least: int = 1) -> AbstractAsyncContextManager[memoryview]: ...
    def readinto(self, buffer: Buffer) -> Awaitable[int]: ...
    def readinto_exactly(self, buffer: Buffer) -> Awaitable[int]: ...

class CompiledWriter: ...

class BlockingEnd:
    eof: bool
    lost: bool
    error: Exception | None
    def __new__(cls, private: Any, *args: Any) -> Self: ...
    def connected(self, connection: Connection, fd: int) -> None: ...
    def changed(self) -> None: ...
    def notify(self, waiter: asyncio.Future[None]) -> None: ...
    def may_go_on(self, what: int) -> bool: ...
    def run_by_loop(self) -> None: ...
    def recv(self, size: int, timeout: float | None) -> bytes: ...
    def readinto(self, buffer: Buffer, timeout: float | None) -> int: ...
    def write(self, data: Buffer, timeout: float | None, whole: bool) -> int: ...

class Connection:
    owner: object
    engine: StreamEngine
    qp: QP | None
    shared: SharedRing | None
    protocol_paused: bool
    reading: bool
    def __init__(self, owner: object, reference_writes: bool = True, spill_bytes: int = 0) -> None: ...
    def write(self, data: bytes | bytearray | memoryview) -> None: ...
    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None: ...
    def get_write_buffer_size(self) -> int: ...
    @property
    def borrows_memory(self) -> bool: ...
    def get_write_buffer_limits(self) -> tuple[int, int]: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def attach(
        self,
        engine: StreamEngine,
        context: contextvars.Context,
        slot_bytes: int,
        data_slots: int,
        shared_slots: int | None = None,
        first_bytes: int | None = None,
    ) -> None: ...
    @property
    def first_slot_bytes(self) -> int: ...
    @property
    def promised(self) -> int: ...
    def create_qp(self, id: CMID, cq: CQ) -> QP: ...
    def start(self, qp: QP) -> None: ...
    def agree(self, ledger: Ledger, frame_bytes: int, depth: int, solicits: bool = False) -> None: ...
    def hear_slots(self, number: int, slot_bytes: int) -> None: ...
    def keep_alive(self, on: bool, idle: float, interval: float, count: int) -> None: ...
    @property
    def kept_alive(self) -> tuple[bool, float, float, int]: ...
    @property
    def probed(self) -> bool: ...
    @property
    def grows(self) -> bool: ...
    @property
    def has_heard(self) -> bool: ...
    @property
    def has_said(self) -> bool: ...
    def open(self, protocol: asyncio.BaseProtocol, buffered: bool, may_send: bool) -> None: ...
    def hear_early(self) -> None: ...
    def greet(self) -> None: ...
    def lose_operations(self) -> None: ...
    def lose_loans(self) -> None: ...
    @property
    def places(self) -> bool: ...
    def placement_news(self) -> tuple[tuple[tuple[Want, ...], int, int] | None, bool]: ...
    def hear_placement(self, wants: tuple[Want, ...], unwanted: int, answered: int) -> None: ...
    @property
    def placing_unanswered(self) -> int: ...
    def end_keys(self) -> None: ...
    @property
    def lands(self) -> bool: ...
    def lose_landings(self) -> None: ...
    def bind(self, protocol: asyncio.BaseProtocol, buffered: bool) -> None: ...
    def send_control(self, kind: int, body: bytes = b"") -> bool: ...
    def say_abort(self, body: bytes) -> bool: ...
    def post_operation(self, operation: Operation[Any], total: int = 0) -> bool: ...
    def post_bind(
        self, operation: Any, mw: MW, mr: MR, rkey: int, access: int, address: int, length: int
    ) -> bool: ...
    def post_invalidate(self, operation: Any, rkey: int) -> bool: ...
    def stop_writing(self) -> None: ...
    def allow_writing(self) -> None: ...
    def discard_writes(self) -> None: ...
    def stop_posting(self) -> None: ...
    def stop_reading(self) -> None: ...
    def when_flushed(self) -> None: ...
    def when_delivered(self) -> None: ...
    def when_drained(self) -> None: ...
    def credit_body_due(self) -> None: ...
    @property
    def unread(self) -> bool: ...
    def watch_unread(self) -> None: ...
    @property
    def undelivered(self) -> bool: ...
    @property
    def progress(self) -> int: ...
    def part_from_shared(self) -> None: ...
    def release(self) -> None: ...
    def stats(self) -> dict[str, int]: ...

# ---- histogram.pxi ----

@final
class Histogram:
    @property
    def count(self) -> int: ...
    @property
    def min_ns(self) -> int: ...
    @property
    def max_ns(self) -> int: ...
    @property
    def mean_ns(self) -> float: ...
    @property
    def deviation_ns(self) -> float: ...
    def add(self, ns: int) -> None: ...
    def lap(self, now_s: float) -> None: ...
    def merge(self, other: Histogram) -> None: ...
    def clear(self) -> None: ...
    def percentile(self, percent: float) -> float: ...
    def filled(self) -> list[tuple[float, int]]: ...

# ---- traffic.pxi ----

@final
class Traffic:
    def __init__(
        self,
        qps: list[QP],
        sends: list[SendWR],
        receives: list[RecvWR],
        *,
        depth: int,
        list_size: int = 1,
        every: int = 1,
        receive_depth: int = 0,
        sleeps: bool = False,
        memory: MR | None = None,
        outgoing: int = 0,
        incoming: int = 0,
    ) -> None: ...
    @property
    def sent(self) -> int: ...
    @property
    def received(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    def flow(self, seconds: float, limit: int = 0, *, posting: bool = True, rate: float = 0.0) -> bool: ...
    def exchange(
        self, seconds: float, found: Histogram, limit: int = 0, *, by: int, answers: bool, rate: float = 0.0
    ) -> bool: ...
    def restart(self) -> None: ...

# ---- cacheline.pxi ----

def cache_line_ns(buffer: Buffer, rounds: int, answers: bool, seconds: float = 0.1) -> float: ...
