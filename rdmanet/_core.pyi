"""The verbs, from Python: what the compiled core offers.

`rdmanet.verbs` and `rdmanet.cm` re-export it; import from there.

Errors: a call that the library refuses raises OSError with the library's errno. Using a closed object
raises ValueError, using one of a parent process RuntimeError.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import InitVar, dataclass
from enum import IntEnum, IntFlag
from ipaddress import IPv4Address, IPv6Address
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, final, overload

from typing_extensions import Buffer

from rdmanet.credit import Ledger
from rdmanet.qpinfo import QPInfo
from rdmanet.remote import RemoteArray, RemoteMemory, RemoteStruct

EMBEDDED_ENVIRONMENT: str

_R = TypeVar("_R")

_Remote = RemoteMemory | RemoteArray | RemoteStruct

_Address = tuple[str, int] | tuple[str, int, int, int]

# ---- library.pxi ----

def live_objects() -> dict[str, int]:
    """How many C objects this process holds, by kind."""

def process_id() -> int:
    """What os.getpid() says, without a system call: a fork handler keeps it right."""

class Library:
    """A verbs library: the embedded device's, or the system's rdma-core."""

    @property
    def name(self) -> str:
        """`embedded` or `rdma-core`."""
    @property
    def path(self) -> str: ...
    @property
    def embedded_device(self) -> bool: ...
    @staticmethod
    def embedded() -> Library:
        """The embedded device's library, of the package or as RDMANET_SOFT_LIBRARY says.

        :raises DeviceNotFoundError: the file is not there or cannot be loaded
        """
    @staticmethod
    def system() -> Library | None:
        """The system's libibverbs and librdmacm, or None where they are not installed; missing() says why."""
    @staticmethod
    def missing() -> dict[str, str]:
        """The libraries that could not be opened so far: name to reason."""
    def devices(self) -> list[Device]:
        """This library's devices.

        :raises OSError: the library cannot ask, for instance because the kernel lacks RDMA support
        """
    def optional_calls(self) -> dict[str, bool]:
        """Which of the calls that not every version has are there: by name as in the library.

        One that is not there is an OSError with EOPNOTSUPP when it is needed.
        """
    def live(self) -> dict[str, int]:
        """What the embedded device holds in this process, by kind; empty for another library."""
    def set_faults(self, text: str | None) -> None:
        """Make things go wrong in all contexts of this process, those to come included.

        Otherwise as Context.set_faults(); None is what the environment's RDMANET_SOFT_CHAOS says.
        """
    def log_to(self, fd: int) -> bool:
        """Send the embedded device's warnings to a descriptor that does not block, one write a line; -1: to standard
        error. False for another library, which has none.
        """
    def faults_happened(self) -> int:
        """How many faults have come to pass in this process since set_faults() was called last.

        A test that meant to provoke one can see that it did.
        """

class Resource:
    """Owner of one C object: closed by close() or `with`; a forgotten one is a ResourceWarning."""

    @property
    def closed(self) -> bool: ...
    def close(self) -> None:
        """Free the object. Doing it again, or in a forked child, does nothing.

        :raises OSError: EBUSY while other objects need this one; it stays open
        """
    def __enter__(self) -> Self: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None: ...

# ---- device.pxi ----

class NodeType(IntEnum):
    """What kind of thing a device is."""

    UNKNOWN = -1
    CA = 1
    SWITCH = 2
    ROUTER = 3
    RNIC = 4
    USNIC = 5
    USNIC_UDP = 6
    UNSPECIFIED = 7

class TransportType(IntEnum):
    """The protocol family a device speaks; RoCE counts as InfiniBand."""

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
    """A path's largest packet. The value is the ABI's code; bytes is the size."""

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
    """How far a device's atomics reach: within the device, or to all of the machine."""

    NONE = 0
    HCA = 1
    GLOB = 2

class EventType(IntEnum):
    """Asynchronous events of a device."""

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
    """What a device can do; names as in struct ibv_device_attr."""

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
    def implicit_odp(self) -> bool:
        """Whether the whole address space can be registered, and sent from."""

@dataclass(frozen=True)
class PortAttr:
    """A port; names as in struct ibv_port_attr."""

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
    """One address of a port."""

    gid: bytes
    gid_index: int
    port_num: int
    gid_type: GIDType
    ndev_ifindex: int
    @property
    def address(self) -> IPv4Address | IPv6Address:
        """The GID as an IP address; one that stands for an IPv4 address as that."""

def best_gid(table: Iterable[GIDEntry]) -> GIDEntry | None:
    """The address to use when nobody said which: routable before link-local, RoCE v2 before v1, IPv4 before IPv6.

    :param table: entries of a gid_table(); None is the answer where there are none
    """

def gid_advice(table: Iterable[GIDEntry], ip: str) -> str:
    """In words: which entry of a port's table an IP address of ours is, and which one leads further, if one does."""

@dataclass(frozen=True)
class AsyncEvent:
    """An asynchronous event: what happened, and to which of our objects, where it is one of ours."""

    event_type: EventType
    qp: QP | None = None
    cq: CQ | None = None
    srq: SRQ | None = None
    port_num: int | None = None

class Device:
    """A device as a library lists it."""

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
    def open(self) -> Context:
        """Open the device.

        :raises DeviceNotFoundError: it has gone since it was listed
        :raises OSError: it cannot be opened; a note says what to do about permissions and modules
        """

def devices() -> list[Device]:
    """All devices: the system's, where its libraries are installed, and the embedded one."""

class Context(Resource):
    """An open device: the parent of all its objects. Made by Device.open(), or a CMID's."""

    @property
    def library(self) -> Library: ...
    @property
    def name(self) -> str: ...
    @property
    def owned(self) -> bool:
        """False where the connection manager opened it, and closes it."""
    @property
    def async_fd(self) -> int:
        """Readable when there are asynchronous events."""
    @property
    def num_comp_vectors(self) -> int: ...
    def query_device(self) -> DeviceAttr:
        """What the device can do."""
    def query_rt_values(self) -> int:
        """The device's clock now, which completion timestamps are read from, in nanoseconds.

        :raises OSError: EOPNOTSUPP, where it cannot be read
        """
    def query_port(self, port_num: int = 1) -> PortAttr:
        """The state and limits of a port; the first one has number 1."""
    def query_gid(self, port_num: int = 1, index: int = 0) -> bytes:
        """One address of a port, as 16 bytes."""
    def gid_table(self, port_num: int | None = None) -> list[GIDEntry]:
        """The addresses in use, of one port or of all, with index and type."""
    def pkey(self, port_num: int = 1, index: int = 0) -> int:
        """One partition key of a port."""
    def get_async_event(self) -> AsyncEvent | None:
        """The next asynchronous event, acknowledged, or None when there is none.

        Who reads an event takes it from all others who read so; listeners hear of it none the less. The context of a
        CMID is read by the streams on it, so there is less to be found here than in a `DeviceEvents`.
        """

    def add_listener(self, listener: Callable[[AsyncEvent], None]) -> None:
        """Call `listener(event)` for each asynchronous event that anybody reads from now on, in that one's thread.

        It must not raise. It is held weakly.
        """

    def remove_listener(self, listener: Callable[[AsyncEvent], None]) -> None:
        """Call it no more; that it was not added is no error."""

    def counters(self) -> dict[str, int]:
        """What the device has counted, where it is the embedded one; else an empty dict."""
    def set_faults(self, text: str) -> None:
        """Make things go wrong in this context, on the embedded device: see docs/testing.md for the text.

        It replaces what was set before, and counts anew; an empty text ends all faults.

        :raises ValueError: the text makes no sense; the message says what would
        :raises OSError: EOPNOTSUPP, on another device
        """

# ---- memory.pxi ----

class AccessFlags(IntFlag):
    """What a memory region, or the peers of a queue pair, may do."""

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
    """What is going to happen to memory registered on demand; see ibv_advise_mr(3)."""

    PREFETCH = 0
    PREFETCH_WRITE = 1
    PREFETCH_NO_FAULT = 2

class AdviseMRFlags(IntFlag):
    """FLUSH: it is done when the call returns."""

    NONE = 0
    FLUSH = 1

class PD(Resource):
    """A protection domain: regions and queue pairs of different domains cannot be used together.

    :raises OSError: ENOMEM, when the device has no more
    """

    def __init__(self, context: Context) -> None: ...
    @property
    def context(self) -> Context: ...
    def reg_mr(self, buffer: Buffer, access: AccessFlags | int | None = None) -> MR:
        """Register memory that somebody else owns; its export is held until the region is closed.

        :param access: by default LOCAL_WRITE where the memory is writable, else none
        :raises BufferError: writing was asked for and the memory is read-only, or it is not contiguous; of a numpy
            array it is a ValueError
        :raises OSError: EINVAL for memory of 0 bytes, or REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE; ENOMEM
        """
    def alloc_mr(
        self, length: int, access: AccessFlags | int = ..., *, huge_pages: bool | Literal["try"] = False
    ) -> MR:
        """Zeroed memory of its own, registered; on the embedded device a peer can map it.

        :param length: in bytes; the memory behind it is whole pages
        :param huge_pages: True for huge pages of the system's default size, whole ones; "try" for such, or else for
            ordinary pages that the kernel may make huge ones of. `MR.page_size` says which they are
        :raises ValueError: length is 0, or cannot be
        :raises OSError: EINVAL for REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE; ENOMEM. Without enough huge pages
            it says how many there are, and what to type; another where the kernel has none at all
        """
    def reg_implicit(self, access: AccessFlags | int = 0) -> MR:
        """Register the whole address space, on demand, for local use.

        :raises OSError: where the device cannot
        """
    def reg_dm_mr(
        self, dm: DM, offset: int = 0, length: int | None = None, access: AccessFlags | int = ...
    ) -> MR:
        """Register device memory, or a part; the region's addresses begin at 0.

        :raises OSError: EINVAL, if the part is not in it
        """
    def reg_dmabuf_mr(
        self, fd: int, length: int, *, offset: int = 0, iova: int = 0, access: AccessFlags | int = ...
    ) -> MR:
        """Register memory of another device by a dma-buf of it; here it has the addresses from iova on.

        :raises OSError: EOPNOTSUPP, where the device or the library cannot
        """
    def alloc_null_mr(self) -> MR:
        """A region without memory: what is written to it is dropped, and zeros are read from it.

        :raises OSError: EOPNOTSUPP, where the device has none
        """
    def advise_mr(
        self,
        advice: AdviseMRAdvice | int,
        sg_list: SGE | MR | Iterable[SGE | MR],
        flags: AdviseMRFlags | int = ...,
    ) -> None:
        """Say what is going to happen to parts of regions that are registered on demand.

        :raises OSError: EOPNOTSUPP, where the device takes no advice; EFAULT, ENOENT or EINVAL for wrong parts
        """

class BufferPool:
    """Registered memory, lent in buffers: `with pool.acquire(100) as buffer:`.

    :param buffer_bytes: the length of each
    :param count: how many; the pool never grows
    :param huge_pages: as of `PD.alloc_mr`
    :raises OSError: as `PD.alloc_mr`
    """

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
    def available(self) -> int:
        """How many buffers acquire() has now."""
    @property
    def closed(self) -> bool: ...
    def acquire(self, nbytes: int | None = None) -> PooledBuffer:
        """A buffer for the time of a `with` block, with what its last user has left in it.

        :param nbytes: its length; by default all of buffer_bytes
        :returns: a PooledBuffer
        :raises ValueError: that is more than a buffer has, or the pool is closed
        :raises OSError: ENOBUFS, all are in use
        """
    def fits(self, nbytes: int | None) -> None:
        """Raise ValueError unless acquire() could ever give that."""
    def _freed(self) -> None: ...
    def close(self) -> None:
        """Give the memory back. Doing it again does nothing.

        :raises OSError: EBUSY while buffers are lent, or in requests under way; it stays open
        """
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

@final
class PooledBuffer:
    """A buffer of a pool, for requests (as an element) and for the program (as a buffer: `memoryview(buffer)`)."""

    @property
    def pool(self) -> BufferPool: ...
    def release(self) -> None:
        """Give it back: others get it as soon as no request and no memoryview refers to it. Twice is once."""
    def sge(self, offset: int = 0, length: int | None = None) -> SGE:
        """A part of it for a work request; SGE checks the bounds."""
    def __len__(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

class MR(Resource):
    """A memory region, which is also its memory: memoryview(mr), mr[:], bytes(mr) work."""

    @property
    def page_size(self) -> int:
        """Bytes in each page of its own memory; 0 where the memory is not its own. See PD.alloc_mr()."""
    @property
    def dm(self) -> DM | None:
        """The device memory that it is of."""
    def _leased(self, more: int) -> None: ...
    def rereg(
        self,
        *,
        pd: PD | None = None,
        buffer: Buffer | None = None,
        access: AccessFlags | int | None = None,
    ) -> None:
        """Change the region in place: its domain, its memory, its rights, or several at once. See ibv_rereg_mr(3).

        The keys may change. Nothing that uses the region may be in flight.

        :param buffer: other memory, which it borrows from now on
        :raises OSError: EOPNOTSUPP, where the device cannot. The region is as it was, except that it is closed
            where the device gave it up half-way
        """
    @property
    def pd(self) -> PD: ...
    @property
    def access(self) -> AccessFlags: ...
    @property
    def lkey(self) -> int: ...
    @property
    def rkey(self) -> int: ...
    @property
    def address(self) -> int:
        """Where the memory lies: the remote address for a peer that has the rkey."""
    @property
    def length(self) -> int:
        """Its size in bytes."""
    def sge(self, offset: int = 0, length: int | None = None) -> SGE:
        """A part of the region for a work request; SGE checks the bounds.

        :param offset: in bytes, from 0 on
        :param length: in bytes; None is the rest
        :raises IndexError: it is not inside
        """
    @property
    def at(self) -> _Slices:
        """Parts of the region for work requests, as slices: `mr.at[64:128]` is an SGE.

        :raises IndexError: the slice is not inside; unlike a list's, it is not cut to fit
        """
    def to_remote(self, offset: int = 0, length: int | None = None) -> RemoteMemory:
        """What a peer has to know of it, or of a part.

        :raises IndexError: the part is not inside
        """
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
    """mr.at"""

    def __init__(self, mr: MR) -> None: ...
    def __getitem__(self, key: int | slice, /) -> SGE: ...

# ---- devicememory.pxi ----

class DM(Resource):
    """Memory on the device; see ibv_alloc_dm(3).

    :param length: in bytes
    :param log_align_req: its alignment is at least 2 to this power
    :raises OSError: EOPNOTSUPP where the device has none; ENOMEM, when it has no more
    """

    def __init__(self, context: Context, length: int, log_align_req: int = 0) -> None: ...
    @property
    def context(self) -> Context: ...
    @property
    def length(self) -> int:
        """Its size in bytes."""
    def __len__(self) -> int: ...
    def copy_to_dm(self, offset: int, data: Buffer) -> None:
        """Copy bytes into the device memory; most devices want offset and length to be multiples of 4.

        :raises IndexError: they do not fit there
        """
    def copy_from_dm(self, offset: int, length: int) -> bytes:
        """Bytes of the device memory; most devices want offset and length to be multiples of 4.

        :raises IndexError: they are not in it
        """

# ---- address.pxi ----

@dataclass(frozen=True)
class GlobalRoute:
    """The part of an address that leads beyond the subnet; on Ethernet it is the whole address.

    Names as in struct ibv_global_route; see ibv_create_ah(3).
    """

    dgid: bytes
    flow_label: int = 0
    sgid_index: int = 0
    hop_limit: int = 64
    traffic_class: int = 0

@dataclass
class AHAttr:
    """The way to a peer: its GID, or its LID within an InfiniBand subnet, and how to go.

    The fields of the route may be given as one, too: AHAttr(gr=GlobalRoute(...)).
    """

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
    def is_global(self) -> bool:
        """Whether there is a route: without one the peer is in our subnet, at dlid."""
    @property
    def global_route(self) -> GlobalRoute | None:
        """The fields of the route as one, or None."""

class AH(Resource):
    """An address handle: where a datagram goes.

    :param pd: the domain of the queue pairs that use it
    :param attr: an AHAttr
    :raises OSError: EINVAL, for instance without a GID where the port is an Ethernet one
    """

    def __init__(self, pd: PD, attr: AHAttr) -> None: ...
    @staticmethod
    def from_wc(pd: PD, wc: WC, grh: Buffer, port_num: int = 1) -> AH:
        """The handle that leads back to where a datagram came from.

        :param wc: the completion of its receive
        :param grh: the first 40 bytes of the receive's buffer; they count if wc_flags has GRH
        :raises OSError: EOPNOTSUPP, where the library cannot tell
        """
    @property
    def pd(self) -> PD: ...
    @property
    def attr(self) -> AHAttr: ...

# ---- completion.pxi ----

class WCStatus(IntEnum):
    """How a work request ended."""

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
    """What completed. Only a successful completion says."""

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
    """A work completion: one work request has ended."""

    @property
    def wr_id(self) -> object:
        """What the request had."""
    @property
    def qp(self) -> QP | None:
        """Whose it is; None only where a shared receive was taken by a queue pair that is gone, or not ours."""
    @property
    def srq(self) -> SRQ | None:
        """The shared queue that a receive was taken from."""
    @property
    def is_send(self) -> bool: ...
    @property
    def status(self) -> WCStatus: ...
    @property
    def opcode(self) -> WCOpcode | None:
        """What completed; None when it failed, since the device does not say."""
    @property
    def byte_len(self) -> int: ...
    @property
    def imm_data(self) -> int | None:
        """The 32 bits that came along, or None."""
    @property
    def qp_num(self) -> int: ...
    @property
    def src_qp(self) -> int: ...
    @property
    def invalidated_rkey(self) -> int | None:
        """The key that the peer's SEND_WITH_INV made invalid, or None."""
    @property
    def pkey_index(self) -> int: ...
    @property
    def slid(self) -> int: ...
    @property
    def sl(self) -> int: ...
    @property
    def dlid_path_bits(self) -> int: ...
    @property
    def timestamp(self) -> int | None:
        """When it completed, in ticks of the device's clock; None where its CQEX does not tell."""
    @property
    def wallclock_ns(self) -> int | None:
        """When it completed, in nanoseconds since 1970; None where its CQEX does not tell."""
    @property
    def vendor_err(self) -> int: ...
    @property
    def wc_flags(self) -> WCFlags: ...
    def raise_for_status(self) -> None:
        """Nothing, when the work succeeded.

        :raises CompletionError: it did not; where the peer is gone, it is a ConnectionResetError too
        """

class CompChannel(Resource):
    """A completion channel: a descriptor that is readable when an armed CQ has something.

    :raises OSError: EMFILE or ENFILE, when there are no more descriptors
    """

    def __init__(self, context: Context) -> None: ...
    @property
    def context(self) -> Context: ...
    @property
    def fd(self) -> int:
        """The descriptor; non-blocking."""
    def fileno(self) -> int: ...
    def get_cq_event(self) -> CQ | None:
        """The CQ whose arming has fired, or None when there is no event. CQ.ack_events() is due for it."""

class CQ(Resource):
    """A completion queue.

    :param cqe: how many completions it has to hold, at least
    :param channel: where its events go, when it is armed
    :param comp_vector: which of the device's interrupts tells, below Context.num_comp_vectors
    :raises OSError: EINVAL for numbers that the device does not have; ENOMEM
    """

    def __init__(
        self, context: Context, cqe: int, channel: CompChannel | None = None, comp_vector: int = 0
    ) -> None: ...
    @property
    def context(self) -> Context: ...
    @property
    def channel(self) -> CompChannel | None: ...
    @property
    def cqe(self) -> int:
        """How many completions it holds; at least what was asked for."""
    @property
    def stray(self) -> int:
        """Completions that were dropped, because their queue pair was gone."""
    def resize(self, cqe: int) -> None:
        """Change how many completions it holds; what is in it stays.

        :raises OSError: EINVAL if more are in it, or the device has no such large one; EOPNOTSUPP or ENOSYS
        :raises ValueError: the AsyncQPs that complete here may have more in flight
        """
    def modify(self, cq_count: int, cq_period: int) -> None:
        """Moderate its events: an armed one fires after cq_count completions, or cq_period microseconds after
        the first, from the next arming on; with either of them 0, as ever.

        :raises OSError: EOPNOTSUPP, where the device cannot
        """
    def req_notify(self, solicited_only: bool = False) -> None:
        """Arm: one event on the channel at the next completion. Poll once more before sleeping."""
    def ack_events(self, nevents: int = 1) -> None:
        """Acknowledge events that get_cq_event() returned; close() does what is left.

        :raises ValueError: there are fewer
        """
    def poll(self, num_entries: int = 16) -> list[WC]:
        """Up to num_entries completions, oldest first. Never sleeps.

        :raises OSError: the queue is broken, for instance because it was overrun
        """

# ---- polling.pxi ----

class CreateCQWCFlags(IntFlag):
    """What an extended completion queue's completions tell. Values as IBV_WC_EX_WITH_*."""

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
    """SINGLE_THREADED: its user sees to it that no two threads use the queue at once."""

    NONE = 0
    SINGLE_THREADED = 0x1
    IGNORE_OVERRUN = 0x2

@dataclass(frozen=True)
class CQInitAttrEx:
    """How an extended completion queue is made; see ibv_create_cq_ex(3)."""

    cqe: int
    channel: CompChannel | None = None
    comp_vector: int = 0
    wc_flags: CreateCQWCFlags | int = ...
    flags: CreateCQFlags | int = ...

class CQEX(CQ):
    """An extended completion queue; otherwise it is used as a CQ.

    :raises OSError: EOPNOTSUPP, where the device has none, or cannot tell what wc_flags ask for
    """

    def __init__(self, context: Context, init_attr: CQInitAttrEx) -> None: ...
    @property
    def wc_flags(self) -> CreateCQWCFlags:
        """What its completions tell."""
    def start_poll(self) -> Completions:
        """An iterator over the completions that are there; it ends when there are no more, and may go on
        later. It may be used in a `with` block, as the C calls are, but there is nothing to end."""

@final
class Completions:
    """What is in an extended completion queue, one after the other."""

    def __new__(cls, cq: CQEX) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> WC: ...

# ---- workrequest.pxi ----

class WROpcode(IntEnum):
    """What a send request does."""

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
    """How a send request is done."""

    NONE = 0
    FENCE = 0x1
    SIGNALED = 0x2
    SOLICITED = 0x4
    INLINE = 0x8
    IP_CSUM = 0x10

@final
class SGE:
    """A scatter/gather element: length bytes at offset of a region.

    :param buffer: an MR, or a part of one as `memoryview(mr)[a:b]`; or any buffer, with the lkey of a region
        that covers it, or without one for a request with SendFlags.INLINE, whose bytes are copied while it
        is posted
    :raises IndexError: the part is not within the buffer
    :raises TypeError: it is no buffer
    """

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
    """A receive request: buffers for one message.

    :param sg_list: SGEs, MRs or memoryviews of MRs, or one of them; they fill in order
    :param wr_id: anything; its completion brings it back
    """

    def __init__(self, sg_list: SGE | MR | Iterable[SGE | MR] = (), *, wr_id: object = 0) -> None: ...
    @property
    def wr_id(self) -> object: ...
    @property
    def sg_list(self) -> tuple[SGE, ...]: ...

class SendWR:
    """A send request; see ibv_post_send(3).

    :param opcode: what to do
    :param sg_list: the local side: SGEs, MRs or memoryviews of MRs, or one of them
    :param wr_id: anything; its completion brings it back
    :param flags: signaled by default; a request without SIGNALED gives no completion of its own, and its
        place in the queue comes free when a later one completes
    :param imm_data: 32 bits for SEND_WITH_IMM and RDMA_WRITE_WITH_IMM
    :param remote_addr: where, and
    :param rkey: by which key, for RDMA and atomics; for BIND_MW the key that the window shall have
    :param compare_add: what to compare with, or to add
    :param swap: what to store if it compares equal
    :param ah: of a datagram: where it goes,
    :param remote_qpn: to which queue pair,
    :param remote_qkey: and the key that is expected there
    :param remote_srqn: the number of the shared receive queue, for XRC
    :param invalidate_rkey: the key that LOCAL_INV, or at the peer SEND_WITH_INV, makes invalid
    :param mw: the window that BIND_MW binds, and
    :param bind_info: an MWBindInfo: what to
    :param atomic_data: the 8 bytes of ATOMIC_WRITE
    """

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
    """What a window shows of a region; see ibv_bind_mw(3).

    :param addr: where it begins; None is the region's own beginning
    :param length: in bytes; 0 unbinds (type 1)
    """

    mr: MR
    addr: int | None = None
    length: int = 0
    mw_access_flags: AccessFlags | int = 0

@dataclass(frozen=True)
class MWBind:
    """A request to bind a window of type 1."""

    bind_info: MWBindInfo
    wr_id: object = 0
    send_flags: SendFlags | int = ...

def inc_rkey(rkey: int) -> int:
    """The next key of a window of type 2: the same but for the lowest byte, which is its user's."""

class MW(Resource):
    """A memory window.

    :param pd: the domain of the region, and of the queue pair, that it is bound with
    :raises OSError: EOPNOTSUPP, where the device has none of the type
    """

    def __init__(self, pd: PD, mw_type: MWType | int = ...) -> None: ...
    @property
    def pd(self) -> PD: ...
    @property
    def mw_type(self) -> MWType: ...
    @property
    def mr(self) -> MR | None:
        """What it was bound to last."""
    @property
    def rkey(self) -> int:
        """Its key. One of type 1 has a new one after each binding."""

# ---- srq.pxi ----

class SRQType(IntEnum):
    BASIC = 0
    XRC = 1
    TM = 2

@dataclass
class SRQAttr:
    """The sizes of a shared receive queue, and the limit below which it tells (0: it doesn't)."""

    max_wr: int = 1
    max_sge: int = 1
    srq_limit: int = 0

@dataclass
class SRQInitAttr:
    """How a shared receive queue is made. An XRC one has a CQ and a domain of its own."""

    attr: SRQAttr = ...
    srq_type: SRQType = ...
    xrcd: XRCD | None = None
    cq: CQ | None = None

class SRQ(Resource):
    """A shared receive queue.

    :param pd: its protection domain
    :param init_attr: an SRQInitAttr or an SRQAttr; the sizes are updated to what the device grants
    :raises OSError: EOPNOTSUPP, EINVAL for sizes that the device does not have, ENOMEM
    """

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
    def in_flight(self) -> int:
        """How many receives are posted whose end has not been polled."""
    @property
    def srq_num(self) -> int:
        """The number by which an XRC sender names this queue.

        :raises OSError: EOPNOTSUPP or EINVAL, where it has none
        """
    def query(self) -> SRQAttr:
        """Its sizes and its limit, from the device, as an SRQAttr."""
    def modify(self, *, max_wr: int | None = None, srq_limit: int | None = None) -> None:
        """Change the size, or set the limit.

        :param max_wr: as many receives; what is posted stays
        :param srq_limit: one event SRQ_LIMIT_REACHED when fewer receives than this are left; the limit is
            then 0 again, and no more is told
        :raises OSError: EINVAL for a limit above the size, or for fewer places than receives are posted;
            EOPNOTSUPP where the device cannot
        """
    def post_recv(self, wrs: RecvWR | Iterable[RecvWR]) -> None:
        """Post a RecvWR, or several as one chain. Their buffers are kept until they complete.

        :raises OSError: ENOMEM when the queue is full, EINVAL when a request is wrong. The requests before
            the one that was refused are posted; the message says how many
        """

class XRCD(Resource):
    """An XRC domain: what the shared receive queues of several processes, and the queue pairs that feed
    them, have in common.

    :param fd: a file that stands for the domain, the same for all its processes; -1 for one of our own
    :param oflags: os.O_CREAT to make it, os.O_EXCL to insist on that
    :raises OSError: EOPNOTSUPP, where the device has no XRC
    """

    def __init__(self, context: Context, fd: int = -1, oflags: int = ...) -> None: ...
    @property
    def context(self) -> Context: ...

# ---- qpattr.pxi ----

class SendOpsFlags(IntFlag):
    """What QP.wr() of a queue pair can do; the others it cannot. Values as IBV_QP_EX_WITH_*."""

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
    """Which attributes a modify() gives; it follows from the QPAttr."""

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
    """The sizes of a queue pair. What the device grants is at least what is asked for."""

    max_send_wr: int = 1
    max_recv_wr: int = 1
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0

@dataclass
class QPInitAttr:
    """How a queue pair is made; cap is updated to what the device grants.

    With an srq its receives are posted there. An XRC_SEND queue pair has no recv_cq, an XRC_RECV one no
    queue at all.
    """

    send_cq: CQ | None = None
    recv_cq: CQ | None = None
    cap: QPCap = ...
    qp_type: QPType = ...
    sq_sig_all: bool = False
    srq: SRQ | None = None

@dataclass
class QPInitAttrEx(QPInitAttr):
    """How a queue pair is made, with what came later; see ibv_create_qp_ex(3).

    :param send_ops_flags: what QP.wr() shall be able to do; the device refuses what it does not know
    :param xrcd: for XRC_RECV
    """

    send_ops_flags: SendOpsFlags | int = 0
    create_flags: QPCreateFlags | int = 0
    xrcd: XRCD | None = None

@dataclass
class QPAttr:
    """Attributes of a queue pair; None means not given. Names as in struct ibv_qp_attr."""

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
    def mask(self) -> QPAttrMask:
        """Which are given."""

# ---- queuepair.pxi ----

class QP(Resource):
    """A queue pair, which keeps the buffers of its requests until their completions are polled.

    :raises OSError: EINVAL for sizes or a type that the device does not have; ENOMEM
    """

    def __init__(self, pd: PD, init_attr: QPInitAttr) -> None: ...
    @property
    def pd(self) -> PD: ...
    @staticmethod
    def open(pd: PD, xrcd: XRCD, qp_num: int) -> QP:
        """Share the XRC_RECV queue pair of another process, in the same domain: it stays while one has it.

        :param pd: any of the context's
        :raises OSError: EINVAL if there is none of that number; EOPNOTSUPP
        """
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
    def state(self) -> QPState:
        """The state that the library knows of; query() asks the device."""
    @property
    def in_flight(self) -> tuple[int, int]:
        """(sends, receives) that are posted and whose end has not been polled."""
    @property
    def peer_gone(self) -> bool:
        """Whether the peer's process is known to have ended while it was connected still, as when it is killed.

        The embedded device knows; of another's this is False.
        """
    def modify(self, attr: QPAttr | None = None, **attrs: Any) -> None:
        """Change attributes, or the state: `qp.modify(qp_state=QPState.RTS, sq_psn=0)`.

        :param attr: a QPAttr with what is to change, instead of
        :param attrs: its fields
        :raises TypeError: neither is given, or both, or something else
        :raises ModifyQPError: the device refused (EINVAL); it names what is missing or not allowed
        :raises OSError: it refused for another reason
        """
    def to_init(
        self, port_num: int = 1, *, pkey_index: int = 0, access: AccessFlags | int = 0, qkey: int = 0
    ) -> None:
        """RESET to INIT. The peer gets no access to memory that is not given here.

        :param qkey: of a datagram queue pair: who sends to it has to say the same
        """
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
    ) -> None:
        """INIT to RTR: connect to the peer's queue pair, and receive from it.

        A datagram queue pair has no peer and takes no arguments; an unconnected one's are those up to rq_psn.

        :param dgid: the peer's GID, 16 bytes; without it dlid is its address
        :param min_rnr_timer: how long a peer shall wait that finds no receive, as a code of the InfiniBand
            specification: 1 is 10 us, 12 is 640 us, 31 is 491.52 ms, 0 is 655.36 ms
        """
    def to_rts(
        self,
        *,
        sq_psn: int = 0,
        timeout: int = 14,
        retry_cnt: int = 7,
        rnr_retry: int = 7,
        max_rd_atomic: int = 1,
    ) -> None:
        """RTR to RTS: send, too. What is not connected reliably takes sq_psn only.

        :param timeout: for an answer, 4.096 us * 2 ** timeout; 0 waits for ever
        :param rnr_retry: how often to try again when the peer has posted no receive; 7 is without limit
        """
    def info(
        self,
        *,
        port_num: int = 1,
        sgid_index: int | None = None,
        psn: int | None = None,
        mtu: int | None = None,
    ) -> QPInfo:
        """What the peer has to know for its connect(), as a QPInfo.

        The queue pair remembers what it said last, for its own connect().

        :param sgid_index: of the address to be reached by; by default the index of best_gid()
        :param psn: the number of the first packet; by default at random
        :param mtu: of our side, in bytes; by default the port's
        """
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
    ) -> None:
        """From RESET or INIT to RTS, connected with the peer's queue pair; the peer does the same with our info().

        Nothing waits for the peer here. Let it connect before the first request is posted, and post the receives
        for what it may send at once before this, in INIT.

        :param peer: the peer's QPInfo
        :param access: what the peer may do with our memory; by default nothing, or what to_init() said
        :raises ValueError: this queue pair's info() was never asked for, so the peer cannot know it
        :raises OSError: the device refused; the queue pair is where it came to
        """
    def to_error(self) -> None:
        """To ERR: all that is posted completes as flushed."""
    def to_reset(self) -> None:
        """To RESET: all that is posted is forgotten, without completions."""
    def query(self) -> tuple[QPAttr, QPInitAttr]:
        """All attributes, from the device."""
    def counters(self) -> dict[str, int]:
        """What the embedded device has counted for this queue pair; empty on another."""
    def attach_mcast(self, gid: bytes | IPv4Address | IPv6Address, lid: int = 0) -> None:
        """Receive what is sent to a multicast group, too; of a datagram queue pair.

        :param gid: the group's: 16 bytes, or an IP address
        """
    def detach_mcast(self, gid: bytes | IPv4Address | IPv6Address, lid: int = 0) -> None:
        """Leave a group.

        :raises OSError: EINVAL, if the queue pair is not in it
        """
    def bind_mw(self, mw: MW, bind: MWBind) -> None:
        """Bind a window of type 1, in the order of the send queue; its new key is mw.rkey.

        :param bind: an MWBind
        :raises OSError: EINVAL for a window of type 2, or rights that the region lacks; EPERM or EOPNOTSUPP
        """
    def wr(self) -> WRSession:
        """Post with the extended calls: `with qp.wr() as wr: wr.send(...); wr.rdma_write(...)`.

        What the block has made is posted when it ends, all or nothing; an exception in it posts nothing. The
        queue pair must have been made with QPInitAttrEx.send_ops_flags.

        :raises OSError: EOPNOTSUPP, if it was not
        """
    def post_send(self, wrs: SendWR | Iterable[SendWR]) -> None:
        """Post a request, or several as one chain.

        :raises OSError: ENOMEM when the queue is full, EINVAL when a request or the state is wrong. The
            requests before the one that was refused are posted; the message says how many
        :raises ValueError: what a request names is closed, or another context's; nothing is posted
        """
    def post_recv(self, wrs: RecvWR | Iterable[RecvWR]) -> None:
        """Post a request, or several as one chain.

        :raises OSError: as post_send()
        """

# ---- session.pxi ----

_SGList = SGE | Buffer | Iterable[SGE | Buffer]

@final
class WRSession:
    """The requests of one `with qp.wr()` block. Keywords are those of SendWR; flags are SIGNALED by default."""

    def __new__(cls, qp: QP) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...
    def __len__(self) -> int: ...
    def abort(self) -> None:
        """Forget what was collected; the end of the block posts what comes after."""
    def post(self, wr: SendWR) -> None:
        """A request made elsewhere.

        :raises OSError: EOPNOTSUPP, if the queue pair was not made for it
        """
    def send(
        self,
        sg_list: _SGList = (),
        *,
        imm_data: int | None = None,
        invalidate_rkey: int | None = None,
        **options: Any,
    ) -> None:
        """SEND, SEND_WITH_IMM, or SEND_WITH_INV."""
    def rdma_write(
        self,
        sg_list: _SGList = (),
        *,
        remote_addr: int,
        rkey: int,
        imm_data: int | None = None,
        **options: Any,
    ) -> None:
        """RDMA_WRITE, or RDMA_WRITE_WITH_IMM."""
    def rdma_read(self, sg_list: _SGList = (), *, remote_addr: int, rkey: int, **options: Any) -> None: ...
    def atomic_cmp_swp(
        self, sg_list: _SGList, *, remote_addr: int, rkey: int, compare: int, swap: int, **options: Any
    ) -> None:
        """ATOMIC_CMP_AND_SWP: the 8 bytes as they were come to sg_list."""
    def atomic_fetch_add(
        self, sg_list: _SGList, *, remote_addr: int, rkey: int, add: int, **options: Any
    ) -> None:
        """ATOMIC_FETCH_AND_ADD: the 8 bytes as they were come to sg_list."""
    def atomic_write(self, data: Buffer, *, remote_addr: int, rkey: int, **options: Any) -> None:
        """ATOMIC_WRITE: 8 bytes at once, to an address that is a multiple of 8."""
    def flush(
        self,
        *,
        remote_addr: int,
        rkey: int,
        length: int,
        placement: int = ...,
        level: int = ...,
        **options: Any,
    ) -> None:
        """FLUSH: complete when what was written to a range has got as far as placement says."""
    def bind_mw(self, mw: MW, rkey: int, bind_info: MWBindInfo, **options: Any) -> None:
        """BIND_MW: give a window of type 2 this key, and this part of a region."""
    def local_inv(self, rkey: int, **options: Any) -> None:
        """LOCAL_INV: make a key of ours invalid."""

# ---- operation.pxi: what async_queues.py builds on ----

@final
class Operation(Generic[_R]):
    """One request, or one chain, that is awaited."""

    @property
    def done(self) -> bool: ...
    def wait(self) -> Awaitable[_R]:
        """The loop's future of its end: what result() returns or raises."""
    def close_after(self, resource: Resource) -> None:
        """Close what the device needs until this has ended: then, or now if it has."""
    def result(self) -> _R:
        """The completion, of a chain a list of them, of an atomic operation what was there before.

        :raises CompletionError: it failed, or the first of a chain that did
        """

@final
class OperationQueue:
    """The send queue, or the receive queue, of a queue pair whose requests are awaited.

    :param watcher: of the queue's completion queue
    :raises ValueError: the completion queue is another, or too small for it
    """

    def __new__(cls, qp: QP, watcher: CompletionWatcher, sends: bool) -> Self: ...
    @property
    def qp(self) -> QP: ...
    @property
    def watcher(self) -> CompletionWatcher: ...
    @property
    def waiting(self) -> int:
        """How many operations wait for a place in the queue."""
    @property
    def in_flight(self) -> int:
        """How many requests are on the device."""
    def close(self) -> None:
        """After the queue pair was closed: end what waits for its turn, and give back what was reserved."""
    def receive(self, sg_list: _SGList) -> Operation[WC]:
        """RECV."""
    def send(self, opcode: int, sg_list: _SGList, flags: int, imm_data: int = 0) -> Operation[WC]:
        """SEND or SEND_WITH_IMM."""
    def rdma(
        self, opcode: int, sg_list: _SGList, remote: _Remote, flags: int, imm_data: int = 0
    ) -> Operation[WC]:
        """RDMA_WRITE, RDMA_WRITE_WITH_IMM or RDMA_READ.

        :raises IndexError: the elements are longer than the remote memory
        """
    def atomic(self, opcode: int, remote: _Remote, compare_add: int, swap: int, flags: int) -> Operation[int]:
        """ATOMIC_CMP_AND_SWP or ATOMIC_FETCH_AND_ADD.

        :raises IndexError: the remote memory is shorter than 8 bytes
        :raises ValueError: its address is not a multiple of 8
        """
    def bind(self, mw: MW, bind: MWBind) -> Operation[WC]:
        """A window of type 1.

        :param bind: an MWBind; its wr_id means nothing
        """
    def batch(self, requests: Iterable[SendWR]) -> Operation[list[WC]]:
        """Requests made elsewhere, as one chain.

        :raises ValueError: there are none, or more than fit in the queue
        """

class CompletionWatcher:
    """Watches a completion queue for those who await its completions.

    :param notifier: the event loop
    :param busy_poll: seconds to watch after a completion before sleeping; None: adaptive, 0: none
    """

    def __init__(self, cq: CQ, notifier: Any, busy_poll: float | None = None) -> None: ...
    def mine(self) -> None:
        """Raise in any other thread but the loop's, for as long as that one lives."""
    @property
    def cq(self) -> CQ: ...
    @property
    def channel(self) -> CompChannel: ...
    @property
    def notifier(self) -> Any: ...
    @property
    def pending(self) -> int: ...
    @property
    def found(self) -> deque[WC]: ...
    @property
    def passes(self) -> int: ...
    @property
    def sleeps(self) -> int: ...
    @property
    def wakeups(self) -> int: ...
    @property
    def events(self) -> int: ...
    @property
    def completions(self) -> int: ...
    def close(self) -> None:
        """Stop watching; those who wait are told. The completion queue is its owner's to close."""
    def wait(self) -> Awaitable[None]:
        """A future that has a result when there may be something in found, or an end to it."""
    def look(self) -> None:
        """Take what is there now."""
    def pass_(self) -> None:
        """One look, as call_soon runs it."""
    def readable(self) -> None:
        """The channel is: take all its events, or none if it was a false alarm, then look."""
    def stats(self) -> dict[str, int]:
        """Counters since it began: how often it looked, slept, was woken, and for how much."""

# ---- cm.pxi ----

class CMEventType(IntEnum):
    """What happened to an identifier."""

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
    """TCP: reliable connections; UDP: datagrams."""

    IPOIB = 2
    TCP = 262
    UDP = 273
    IB = 319

@final
class CMEvent:
    """An event, copied; nothing of it has to be given back."""

    @property
    def type(self) -> CMEventType: ...
    @property
    def status(self) -> int: ...
    @property
    def id(self) -> CMID:
        """Whose event it is; of a connection request the new identifier."""
    @property
    def listen_id(self) -> CMID | None:
        """Of a connection request: who listened."""
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
        """Of datagrams, with ESTABLISHED and MULTICAST_JOIN: the way there."""
    @property
    def qkey(self) -> int | None:
        """Of datagrams, with ESTABLISHED and MULTICAST_JOIN: what the other side expects."""
    def error(self) -> OSError | None:
        """The exception that this event means, or None when it is no failure."""
    def raise_for_status(self) -> None:
        """Raise error(), if there is one."""

class CMEventChannel(Resource):
    """A channel of connection events; its fd is readable when there are some.

    :raises OSError: the connection manager cannot be used; a note says what to do about permissions and modules
    """

    def __init__(self, library: Library) -> None: ...
    @property
    def library(self) -> Library: ...
    @property
    def fd(self) -> int:
        """The descriptor; non-blocking."""
    def fileno(self) -> int: ...
    def create_id(self, ps: PortSpace = ...) -> CMID:
        """A new identifier: for one connection, or to listen with."""
    def get_event(self) -> CMEvent | None:
        """The next event, or None when there is none.

        A CONNECT_REQUEST that nobody keeps is refused, when its identifier is collected.
        """

class CMID(Resource):
    """An identifier of the connection manager: one connection, or one listener."""

    @property
    def channel(self) -> CMEventChannel: ...
    @property
    def library(self) -> Library: ...
    @property
    def context(self) -> Context | None:
        """The device's context, shared by its identifiers; None until an address is bound or resolved."""
    @property
    def port_num(self) -> int:
        """The device's port; 0 until an address is bound or resolved."""
    @property
    def qp(self) -> QP | None:
        """The queue pair made by create_qp(), while it is open."""
    @property
    def local_addr(self) -> _Address | None: ...
    @property
    def peer_addr(self) -> _Address | None: ...
    @property
    def peer_gone(self) -> bool:
        """Whether the peer's process is known to have ended while it was connected still, as when it is killed.

        The embedded device knows; of another's this is False.
        """
    def set_reuse_addr(self, reuse: bool = True) -> None:
        """Let a listener have a port that old connections still occupy."""
    def set_af_only(self, only: bool = True) -> None:
        """Let a listener on :: have IPv6 only."""
    def set_ack_timeout(self, timeout: int) -> None:
        """How long the queue pair waits for an answer: 4.096 us * 2 ** timeout; before connecting."""
    def set_tos(self, tos: int) -> None:
        """The type of service of the connection's packets; before the route is resolved."""
    def bind_addr(self, address: _Address) -> None:
        """Bind to an IP address; port 0 takes a free one."""
    def resolve_addr(self, src_addr: _Address | None, dst_addr: _Address, timeout_ms: int = 2000) -> None:
        """Find the device that leads to dst_addr: ADDR_RESOLVED or ADDR_ERROR."""
    def resolve_route(self, timeout_ms: int = 2000) -> None:
        """Find the way there: ROUTE_RESOLVED or ROUTE_ERROR."""
    def listen(self, backlog: int = 128) -> None:
        """Listen: each client is a CONNECT_REQUEST with its own CMID."""
    def connect(
        self,
        private_data: Buffer = b"",
        *,
        responder_resources: int = 1,
        initiator_depth: int = 1,
        retry_count: int = 7,
        rnr_retry_count: int = 0,
        qp_num: int = 0,
    ) -> None:
        """Ask for a connection: ESTABLISHED, REJECTED, UNREACHABLE or CONNECT_ERROR.

        :param private_data: for the server's CONNECT_REQUEST; 56 bytes at most
        :param responder_resources: READs and atomics that the peer may have in flight to us
        :param initiator_depth: READs and atomics that we may have in flight to the peer
        :param qp_num: the queue pair, if it was not made by create_qp()
        """
    def accept(
        self,
        private_data: Buffer = b"",
        *,
        responder_resources: int = 1,
        initiator_depth: int = 1,
        retry_count: int = 7,
        rnr_retry_count: int = 0,
        qp_num: int = 0,
    ) -> None:
        """Accept a CONNECT_REQUEST: ESTABLISHED. The private data, 196 bytes at most, is for the client's."""
    def reject(self, private_data: Buffer = b"") -> None:
        """Refuse a CONNECT_REQUEST: REJECTED at the client, with the private data, 148 bytes at most."""
    def disconnect(self) -> None:
        """End the connection: the queue pair goes to ERR, and DISCONNECTED to both sides."""
    def establish(self) -> None:
        """Say that the connection is ready: of an active side that moves its queue pair on by itself, after
        CONNECT_RESPONSE. See rdma_establish(3).

        :raises OSError: EOPNOTSUPP, where the library is older than that
        """
    def init_qp_attr(self, qp_state: QPState) -> QPAttr:
        """What a queue pair of one's own needs to get to a state, for QP.modify(); see rdma_init_qp_attr(3)."""
    def join_multicast(self, address: _Address, flags: int = ...) -> None:
        """Join a group: MULTICAST_JOIN, with what to send to it, or MULTICAST_ERROR. The queue pair is attached.

        :param address: (ip, port) of the group; the port means nothing
        """
    def leave_multicast(self, address: _Address) -> None:
        """Leave a group; the queue pair is detached."""
    def create_qp(self, pd: PD, init_attr: QPInitAttr) -> QP:
        """Make this connection's queue pair, in INIT; it is the connection manager's to move on.

        The identifier keeps it, and closes it before itself.

        :raises ValueError: it has one already, or the domain is another context's
        :raises OSError: EINVAL for sizes or a type that the device does not have; ENOMEM
        """
    def destroy_qp(self) -> None:
        """Destroy the queue pair; the same as closing it."""
    def migrate(self, channel: CMEventChannel) -> None:
        """Move to another channel; events not read yet come along.

        :raises ValueError: the channel is of another library
        """

# ---- The data engine: what driver.py and transport.py build on ----

STREAM_CONTROL_BODY_BYTES: int
STREAM_DATA_SLOTS_MAX: int
STREAM_SHARED_OWN: int
STREAM_SHARED_SLOTS_MAX: int

def stream_half_open_bytes(slot_bytes: int, data_slots: int, shared: bool) -> int: ...
def stream_queue_depths(data_slots: int) -> tuple[int, int]:
    """(send, receive) queue depths of a connection with a ring of so many slots."""

class SharedRing:
    """The slots of one shared receive queue, and who may have how many; see _pyx/sharedring.pxi."""

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

class StreamEngine:
    """All connections of one event loop on one device; see _pyx/engine.pxi."""

    pd: PD
    channel: CompChannel
    cqs: list[CQ]
    max_inline: int
    passes: int
    sleeps: int
    wakeups: int
    messages: int
    stale: int
    polls: int
    shared_rings: list[SharedRing | None]
    @property
    def can_share(self) -> bool:
        """Whether the device has shared receive queues."""

    def __new__(
        cls, loop: asyncio.AbstractEventLoop, context: Context, busy_poll: float | None = None
    ) -> Self: ...
    def set_busy_poll(self, busy_poll: float | None) -> None: ...
    def reserve(self, entries: int) -> CQ: ...
    def unreserve(self, cq: CQ, entries: int) -> None: ...
    @property
    def connections(self) -> list[StreamConnection]: ...
    def pass_(self) -> None: ...
    def channel_ready(self) -> bool: ...
    def drain(self) -> None: ...
    def lose_queue(self, cq: CQ, error: OSError) -> None: ...
    def lose_device(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> dict[str, int]: ...

# A transport by what it can do; asyncio's classes have slots, which a compiled class cannot inherit.
class StreamConnection(asyncio.Transport):
    """The engine's half of a transport; see _pyx/stream.pxi. Not for use but by subclasses."""

    engine: StreamEngine
    qp: QP | None
    shared: SharedRing | None
    _reading: bool
    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data`, a bytes-like object; never blocks (asyncio.WriteTransport.write).

        Exact `bytes` of 16 KiB and more may be read by the device where they lie, after this returns;
        everything else is consumed or copied before it returns.
        """

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send all of an iterable's buffers; they coalesce as successive writes do."""

    def get_write_buffer_size(self) -> int:
        """Bytes accepted by write() and not yet handed to the device."""

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """(low, high), in bytes."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """When pause_writing and resume_writing are called, in bytes of get_write_buffer_size().

        As asyncio.WriteTransport.set_write_buffer_limits: high defaults to 64 KiB (or four times low),
        low to a quarter of high. Raises ValueError unless high >= low >= 0.
        """

    def _attach(
        self,
        engine: StreamEngine,
        context: contextvars.Context,
        slot_bytes: int,
        data_slots: int,
        shared_slots: int | None = None,
    ) -> None: ...
    def _start(self, qp: QP) -> None: ...
    def _agree(self, ledger: Ledger, frame_bytes: int) -> None: ...
    def _open(self, protocol: asyncio.BaseProtocol, buffered: bool, may_send: bool) -> None: ...
    def _hear_early(self) -> None: ...
    def _lose_operations(self) -> None: ...
    def _bind(self, protocol: asyncio.BaseProtocol, buffered: bool) -> None: ...
    def _send_control(self, kind: int, body: bytes = b"") -> bool: ...
    def _post_operation(
        self,
        operation: Any,
        opcode: int,
        local_address: int,
        length: int,
        lkey: int,
        remote_address: int,
        rkey: int,
    ) -> bool: ...
    def _post_bind(self, operation: Any, mw: MW, mr: MR, rkey: int, access: int) -> bool: ...
    def _post_invalidate(self, operation: Any, rkey: int) -> bool: ...
    def _stop_writing(self) -> None: ...
    def _allow_writing(self) -> None: ...
    def _discard_writes(self) -> None: ...
    def _stop_posting(self) -> None: ...
    def _stop_reading(self) -> None: ...
    def _when_flushed(self) -> None: ...
    def _when_drained(self) -> None: ...
    def _have_news(self) -> None: ...
    @property
    def _discarding(self) -> bool: ...
    @property
    def _unread(self) -> bool: ...
    def _tell_unread(self) -> None: ...
    @property
    def _undelivered(self) -> bool: ...
    @property
    def _progress(self) -> int: ...
    def _part_from_shared(self) -> None: ...
    def _release(self) -> None: ...
    def _stats(self) -> dict[str, int]: ...
    def _control_received(self, kind: int, body: bytes, granted: int) -> None: ...
    def _control_sent(self, kind: int) -> None: ...
    def _flushed(self) -> None: ...
    def _drained(self) -> None: ...
    def _unread_changed(self) -> None: ...
    def _credit_body(self, granted: int, room: int) -> tuple[bool, bytes]: ...
    def _write_refused(self) -> None: ...
    def _pause_writing(self) -> None: ...
    def _resume_writing(self) -> None: ...
    def _callback_raised(self, exc: BaseException, name: str) -> None: ...
    def _fabric_failed(self, failure: tuple[int, bool, int, Any] | OSError) -> None: ...
    def _protocol_broken(self, exc: BaseException) -> None: ...
    def _operation_done(self, operation: Any) -> None: ...
    def _operation_lost(self, operation: Any) -> None: ...
