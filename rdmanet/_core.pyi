"""The verbs, from Python: what the compiled core offers.

`rdmanet.verbs` and `rdmanet.cm` re-export it; import from there.

Errors: a call that the library refuses raises OSError with the library's errno. Using a closed object
raises ValueError; using one in a forked child raises RuntimeError.
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

def live_objects() -> dict[str, int]:
    """The number of C objects that this process holds, by kind. A test can compare it before and after."""

def is_in_environment(name: bytes) -> bool:
    """Whether os.environ has this name, asked without a call of Python code."""

def process_id() -> int:
    """os.getpid() without a system call: a fork handler updates the value."""

class Library:
    """A verbs library: the embedded device's, or the system's rdma-core.

    :ivar name: "embedded" or "rdma-core"
    :ivar path: the file of libibverbs, or of the embedded device
    """

    @property
    def name(self) -> str:
        """`embedded` or `rdma-core`."""
    @property
    def path(self) -> str: ...
    @property
    def embedded_device(self) -> bool:
        """Whether this is the embedded device's library."""
    @staticmethod
    def embedded() -> Library:
        """The embedded device's library.

        It is part of the package; RDMANET_SOFT_LIBRARY names another file.

        :raises DeviceNotFoundError: the file is not there or cannot be loaded
        """
    @staticmethod
    def system() -> Library | None:
        """The system's libibverbs and librdmacm, or None if they are not installed; missing() says why."""
    @staticmethod
    def missing() -> dict[str, str]:
        """The libraries that could not be opened so far: name to reason."""
    def devices(self) -> list[Device]:
        """This library's devices.

        :raises OSError: the library cannot list them, for instance because the kernel lacks RDMA support
        """
    def optional_calls(self) -> dict[str, bool]:
        """The calls that only some versions of the library have: name to whether this one has it.

        Whatever needs a missing one raises OSError with EOPNOTSUPP.
        """
    def live(self) -> dict[str, int]:
        """The number of objects of the embedded device in this process, by kind; empty for another library."""
    def set_faults(self, text: str | None) -> None:
        """Inject faults into all contexts of this process, including future ones.

        The text is as for Context.set_faults(); None restores the environment's RDMANET_SOFT_CHAOS.
        """
    def log_to(self, fd: int) -> bool:
        """Write the embedded device's warnings to a non-blocking descriptor, one write per line; -1 is standard error.
        Returns False for another library, which has no such warnings.
        """
    def faults_happened(self) -> int:
        """How many faults have happened in this process since the last call of set_faults().

        A test uses it to check that the fault that it set has happened. faults() has each fault's own number.
        """
    def faults(self) -> dict[str, int]:
        """The faults that are set for all contexts of this process, each with how often it has happened since.

        Contexts that have a text of their own (Context.set_faults()) do not count here. Faults that are written alike
        are one.
        """
    def check_environment(self) -> None:
        """Raise an error if environment variables keep the embedded device from opening. It is not opened here.

        :raises OSError: one of them makes no sense, or is misspelt (EINVAL)
        """

class Resource:
    """The owner of one C object of a verbs library.

    close() or `with` frees the C object. An object that is not closed causes a ResourceWarning. In a forked child every
    use raises RuntimeError, except close(), which does nothing.
    """

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
    def close(self) -> None:
        """Free the object. Closing it again, or in a forked child, does nothing.

        :raises OSError: EBUSY while other objects need this one, which then stays open
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
    """Whether a port can be used: ACTIVE, or not."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5

class LinkLayer(IntEnum):
    """The link layer of a port. On Ethernet, Device.transport_type tells RoCE from iWARP."""

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2

class MTU(IntEnum):
    """The largest packet of a path. The value is the ABI's code; `bytes` is the size."""

    MTU_256 = 1
    MTU_512 = 2
    MTU_1024 = 3
    MTU_2048 = 4
    MTU_4096 = 5
    @property
    def bytes(self) -> int:
        """The size in bytes."""

class GIDType(IntEnum):
    """The kind of packets for a GID: InfiniBand, Ethernet frames (RoCE v1), or UDP (RoCE v2)."""

    IB = 0
    ROCE_V1 = 1
    ROCE_V2 = 2

class AtomicCap(IntEnum):
    """Whether a device's atomics are atomic within the device only, or for the whole machine."""

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
    """The properties of a device; names as in struct ibv_device_attr."""

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
        """Whether the whole address space can be registered and used as the source of sends."""

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
        """The GID as an IP address; an IPv4-mapped one as an IPv4 address."""

def best_gid(table: Iterable[GIDEntry]) -> GIDEntry | None:
    """The address to use by default: routable before link-local, RoCE v2 before v1, IPv4 before IPv6.

    :param table: entries of a gid_table(); the result is None if there are none
    """

def gid_advice(table: Iterable[GIDEntry], ip: str) -> str:
    """A sentence: which entry of a port's GID table a local IP address is, and which entry is better, if any."""

@dataclass(frozen=True)
class AsyncEvent:
    """An asynchronous event: what happened, and to which object; see ibv_get_async_event(3).

    :param event_type: an EventType
    :param qp: the queue pair concerned, if it is one of this program
    :param cq: the completion queue concerned, likewise
    :param srq: the shared receive queue concerned, likewise
    :param port_num: the port concerned
    """

    event_type: EventType
    qp: QP | None = None
    cq: CQ | None = None
    srq: SRQ | None = None
    port_num: int | None = None

class Device:
    """A device as a library lists it; open() returns a Context.

    :ivar name: its name, as in ibv_devices(1)
    :ivar guid: its GUID, an int of 64 bits
    :ivar node_type: a NodeType
    :ivar transport_type: a TransportType
    :ivar library: the library that lists it
    """

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
        :raises OSError: it cannot be opened; a note says what to do about permissions and modules. EINVAL of the
            embedded device means that an environment variable is wrong; the message says which
        """

def devices() -> list[Device]:
    """All devices: the system's, if its libraries are installed, and the embedded one."""

class Context(Resource):
    """An open device: the parent of all its objects.

    Device.open() creates it, or the connection manager does (CMID.context). The connection manager shares one context
    among all its identifiers, and closes it when the last event channel and all objects of the context are closed.

    :ivar name: the name of the device
    :ivar library: the library through which it is used
    :ivar owned: whether close() closes it; otherwise the connection manager does
    """

    @property
    def library(self) -> Library: ...
    @property
    def name(self) -> str: ...
    @property
    def owned(self) -> bool:
        """Whether close() closes it; otherwise the connection manager does."""
    @property
    def async_fd(self) -> int:
        """A descriptor that is readable when there are asynchronous events."""
    @property
    def num_comp_vectors(self) -> int:
        """How many completion vectors (interrupts) it has."""
    @property
    def transport_type(self) -> TransportType:
        """The protocol family that the device speaks, a TransportType."""
    def query_device(self) -> DeviceAttr:
        """The properties of the device."""
    def query_rt_values(self) -> int:
        """The device's clock now, in nanoseconds. Completion timestamps are read from it.

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
        """The next asynchronous event, acknowledged, or None if there is none.

        Only one reader gets an event; every listener gets it too. The streams on a CMID's context read its events, so
        a program that needs all of them uses `DeviceEvents`.
        """

    def add_listener(self, listener: Callable[[AsyncEvent], None]) -> None:
        """From now on, call `listener(event)` for each asynchronous event that anyone reads, in the reader's thread.

        The listener must not raise. The context holds only a weak reference to it.
        """

    def remove_listener(self, listener: Callable[[AsyncEvent], None]) -> None:
        """Stop calling the listener. Removing a listener that was not added does nothing."""

    def counters(self) -> dict[str, int]:
        """The embedded device's counters; an empty dict for other devices."""
    def set_faults(self, text: str) -> None:
        """Inject faults into this context, on the embedded device. docs/testing.md describes the text.

        It replaces the previous text and restarts all counts; an empty text ends all faults.

        :raises ValueError: the text is wrong; the message says what is expected
        :raises OSError: EOPNOTSUPP, on another device
        """
    def faults(self) -> dict[str, int]:
        """The faults that were set for this context, each with how often it has happened in it since."""

# ---- memory.pxi ----

class AccessFlags(IntFlag):
    """The access rights of a memory region, or of the peers of a queue pair."""

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
    """The planned use of memory that is registered on demand; see ibv_advise_mr(3)."""

    PREFETCH = 0
    PREFETCH_WRITE = 1
    PREFETCH_NO_FAULT = 2

class AdviseMRFlags(IntFlag):
    """FLUSH: the advice has been carried out when the call returns."""

    NONE = 0
    FLUSH = 1

class PD(Resource):
    """A protection domain: regions and queue pairs of different domains cannot be used together.

    :param context: the device
    :raises OSError: ENOMEM if the device has no more
    """

    def __init__(self, context: Context) -> None: ...
    @property
    def context(self) -> Context: ...
    def reg_mr(self, buffer: Buffer, access: AccessFlags | int | None = None) -> MR:
        """Register the memory of another object. Its export is held until the region is closed.

        :param buffer: contiguous memory; writable if access includes writing
        :param access: AccessFlags; by default LOCAL_WRITE if the memory is writable, else none
        :raises BufferError: access includes writing and the memory is read-only, or it is not contiguous; numpy raises
            ValueError instead
        :raises OSError: EINVAL for memory of 0 bytes, or REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE; ENOMEM
        """
    def alloc_mr(
        self, length: int, access: AccessFlags | int = ..., *, huge_pages: bool | Literal["try"] = False
    ) -> MR:
        """Allocate zeroed memory and register it. On the embedded device a peer can map it.

        :param length: in bytes; whole pages are allocated
        :param huge_pages: True for huge pages of the system's default size; "try" for huge pages if there are enough,
            else for ordinary pages that the kernel may turn into huge ones. `MR.page_size` says which they are
        :raises ValueError: length is 0 or out of range
        :raises OSError: EINVAL for REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE; ENOMEM. If there are not enough
            huge pages, it says how many there are and which command reserves more
        """
    def reg_implicit(self, access: AccessFlags | int = 0) -> MR:
        """Register the whole address space, on demand, for local use.

        :raises OSError: EOPNOTSUPP or EINVAL if the device does not support it
        """
    def reg_dm_mr(
        self, dm: DM, offset: int = 0, length: int | None = None, access: AccessFlags | int = ...
    ) -> MR:
        """Register device memory, or a part of it. The addresses of the region begin at 0.

        :raises OSError: EINVAL if the part is not within the memory
        """
    def reg_dmabuf_mr(
        self, fd: int, length: int, *, offset: int = 0, iova: int = 0, access: AccessFlags | int = ...
    ) -> MR:
        """Register memory of another device by its dma-buf. The addresses of the region begin at iova.

        :raises OSError: EOPNOTSUPP if the device or the library does not support it
        """
    def alloc_null_mr(self) -> MR:
        """Create a region without memory: writes to it are dropped, and reads from it return zeros.

        :raises OSError: EOPNOTSUPP if the device does not support it
        """
    def advise_mr(
        self,
        advice: AdviseMRAdvice | int,
        sg_list: SGE | MR | Iterable[SGE | MR],
        flags: AdviseMRFlags | int = ...,
    ) -> None:
        """Tell the device the planned use of parts of regions that are registered on demand.

        :raises OSError: EOPNOTSUPP if the device takes no advice; EFAULT, ENOENT or EINVAL for wrong parts
        """

class BufferPool:
    """A pool of registered buffers, which it lends: `with pool.acquire(100) as buffer:`.

    :param buffer_bytes: the length of each buffer
    :param count: the number of buffers; the pool never grows
    :param huge_pages: as for `PD.alloc_mr`
    :ivar mr: the region that contains all buffers
    :raises OSError: as from `PD.alloc_mr`
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
        """How many buffers are free."""
    @property
    def closed(self) -> bool:
        """Whether close() was called."""
    def acquire(self, nbytes: int | None = None) -> PooledBuffer:
        """Borrow a buffer for the length of a `with` block. It contains what its last user left in it.

        :param nbytes: its length; by default buffer_bytes
        :returns: a PooledBuffer
        :raises ValueError: nbytes is more than a buffer has, or the pool is closed
        :raises OSError: ENOBUFS if all buffers are in use
        """
    def fits(self, nbytes: int | None) -> None:
        """Raise ValueError if no buffer is that long, or the pool is closed."""
    def _freed(self) -> None: ...
    def close(self) -> None:
        """Free the memory. Closing it again does nothing.

        :raises OSError: EBUSY while buffers are lent or used by pending requests; the pool stays open
        """
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

@final
class PooledBuffer:
    """A buffer of a pool: an element for requests, and memory for the program (`memoryview(buffer)`).

    :ivar pool: the BufferPool that lends it
    """

    @property
    def pool(self) -> BufferPool: ...
    def release(self) -> None:
        """Return it to the pool. It is free as soon as no request and no memoryview refers to it.

        Releasing it again does nothing.
        """
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
    """A memory region, which is also its memory: memoryview(mr), mr[:], bytes(mr) work.

    :ivar pd: its protection domain
    :ivar length: in bytes
    :ivar page_size: the page size of its memory, in bytes; 0 if it does not own memory
    :ivar access: AccessFlags
    :ivar dm: the device memory that it registers, or None
    """

    @property
    def page_size(self) -> int:
        """The page size of its memory, in bytes; 0 if it does not own memory. See PD.alloc_mr()."""
    @property
    def dm(self) -> DM | None:
        """The device memory that it registers, or None."""
    def _offered(self, more: int) -> None: ...
    def rereg(
        self,
        *,
        pd: PD | None = None,
        buffer: Buffer | None = None,
        access: AccessFlags | int | None = None,
    ) -> None:
        """Change the protection domain, the memory or the access rights of the region, or several. See ibv_rereg_mr(3).

        The keys may change. No request that uses the region may be in flight.

        :param buffer: the new memory, which it borrows from now on
        :raises BufferError: access includes writing, and the memory is read-only
        :raises OSError: EOPNOTSUPP if the device does not support it. The region is unchanged, unless the device failed
            half-way: then it is closed
        """
    @property
    def pd(self) -> PD: ...
    @property
    def access(self) -> AccessFlags: ...
    @property
    def lkey(self) -> int:
        """The key for local work requests."""
    @property
    def rkey(self) -> int:
        """The key for peers, as far as `access` permits."""
    @property
    def address(self) -> int:
        """The address of its first byte for requests, and for a peer that has the rkey: where the memory is in this
        process, or 0 with AccessFlags.ZERO_BASED.
        """
    @property
    def length(self) -> int:
        """Its size in bytes."""
    def sge(self, offset: int = 0, length: int | None = None) -> SGE:
        """A part of the region for a work request; SGE checks the bounds.

        :param offset: in bytes, from 0 on
        :param length: in bytes; None is the rest
        :raises IndexError: the part is not within the region
        """
    @property
    def at(self) -> _Slices:
        """Parts of the region for work requests, by slicing: `mr.at[64:128]` is an SGE.

        :raises IndexError: the slice is not within the region; unlike that of a list, it is not truncated
        """
    def to_remote(self, offset: int = 0, length: int | None = None) -> RemoteMemory:
        """What a peer needs to access the region, or a part of it: a RemoteMemory.

        :param offset: in bytes, from 0 on
        :param length: in bytes; None is the rest
        :raises IndexError: the part is not within the region
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

    :param context: the device
    :param length: in bytes, also returned by len()
    :param log_align_req: the minimum alignment, as a power of 2
    :raises OSError: EOPNOTSUPP if the device has none; ENOMEM if it has no more
    """

    def __init__(self, context: Context, length: int, log_align_req: int = 0) -> None: ...
    @property
    def context(self) -> Context: ...
    @property
    def length(self) -> int:
        """Its size in bytes."""
    def __len__(self) -> int: ...
    def copy_to_dm(self, offset: int, data: Buffer) -> None:
        """Copy bytes into the device memory. Most devices require multiples of 4 for offset and length.

        :raises IndexError: the bytes do not fit
        """
    def copy_from_dm(self, offset: int, length: int) -> bytes:
        """Copy bytes out of the device memory. Most devices require multiples of 4 for offset and length.

        :raises IndexError: the range is not within the memory
        """

# ---- address.pxi ----

@dataclass(frozen=True)
class GlobalRoute:
    """The part of an address that routes beyond the subnet; on Ethernet it is the whole address.

    Names as in struct ibv_global_route; see ibv_create_ah(3).
    """

    dgid: bytes
    flow_label: int = 0
    sgid_index: int = 0
    hop_limit: int = 64
    traffic_class: int = 0

@dataclass
class AHAttr:
    """The address of a peer: its GID, or its LID within an InfiniBand subnet, and how packets get there.

    See ibv_create_ah(3).

    :param dgid: the peer's GID, 16 bytes; None if only the LID is used
    :param sgid_index: which GID of the local port packets come from
    :param hop_limit: how many routers packets may pass
    :param traffic_class: how routers treat the packets
    :param flow_label: a label for packets that routers treat alike
    :param dlid: the peer's LID, on InfiniBand
    :param sl: the service level, on InfiniBand; the priority, on Ethernet
    :param src_path_bits: which LID of the local port packets come from
    :param static_rate: a limit of the rate, a value of enum ibv_rate; 0 is none
    :param port_num: the local port
    :param gr: the fields of the route as one: AHAttr(gr=GlobalRoute(...))
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
        """Whether there is a global route; without one the peer is in the local subnet, at dlid."""
    @property
    def global_route(self) -> GlobalRoute | None:
        """The fields of the route as a GlobalRoute, or None."""

class AH(Resource):
    """An address handle: the destination of datagrams.

    :param pd: the domain of the queue pairs that use it
    :param attr: an AHAttr, which it keeps as `attr`
    :raises OSError: EINVAL, for instance without a GID where the port is an Ethernet one
    """

    def __init__(self, pd: PD, attr: AHAttr) -> None: ...
    @staticmethod
    def from_wc(pd: PD, wc: WC, grh: Buffer, port_num: int = 1) -> AH:
        """The handle for the sender of a datagram.

        :param wc: the completion of its receive
        :param grh: the first 40 bytes of the receive's buffer; they count if wc_flags has GRH
        :raises OSError: EOPNOTSUPP if the library cannot tell the sender's address
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
    """The operation that completed; only successful completions have it."""

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
    """What else a completion has: a routing header before the data, immediate data, an invalidated key."""

    GRH = 0x1
    WITH_IMM = 0x2
    IP_CSUM_OK = 0x4
    WITH_INV = 0x8

@final
class WC:
    """A work completion: the end of one work request. Fields as in struct ibv_wc; see ibv_poll_cq(3).

    If it failed, only status, vendor_err, wr_id, qp_num, qp and srq are valid.

    :ivar wr_id: the wr_id of its request
    :ivar qp: the queue pair; None if it is gone or belongs to another process
    """

    @property
    def wr_id(self) -> object:
        """The wr_id of its request."""
    @property
    def qp(self) -> QP | None:
        """The queue pair; None if it is gone or belongs to another process."""
    @property
    def srq(self) -> SRQ | None:
        """The shared receive queue that the receive came from, or None."""
    @property
    def is_send(self) -> bool:
        """Whether its request was in the send queue."""
    @property
    def status(self) -> WCStatus:
        """Its status, a WCStatus."""
    @property
    def opcode(self) -> WCOpcode | None:
        """The operation; None if it failed, because then the device does not report it."""
    @property
    def byte_len(self) -> int:
        """How many bytes were received or read; undefined for other sends."""
    @property
    def imm_data(self) -> int | None:
        """The immediate data, 32 bits, or None."""
    @property
    def qp_num(self) -> int:
        """The number of the queue pair."""
    @property
    def src_qp(self) -> int:
        """Of a datagram: the sender's queue pair."""
    @property
    def invalidated_rkey(self) -> int | None:
        """The key that the peer's SEND_WITH_INV made invalid, or None."""
    @property
    def pkey_index(self) -> int:
        """Of a datagram on InfiniBand: the index of its partition key."""
    @property
    def slid(self) -> int:
        """Of a datagram on InfiniBand: the sender's local identifier."""
    @property
    def sl(self) -> int:
        """Of a datagram: its service level."""
    @property
    def dlid_path_bits(self) -> int:
        """Of a datagram on InfiniBand: to which of the port's local identifiers it came."""
    @property
    def timestamp(self) -> int | None:
        """When it completed, in ticks of the device's clock, with WITH_COMPLETION_TIMESTAMP; else None."""
    @property
    def wallclock_ns(self) -> int | None:
        """When it completed, in ns since 1970, with WITH_COMPLETION_TIMESTAMP_WALLCLOCK; else None."""
    @property
    def vendor_err(self) -> int:
        """If it failed: the vendor's error code, for the vendor's support."""
    @property
    def wc_flags(self) -> WCFlags:
        """Its WCFlags."""
    def raise_for_status(self) -> None:
        """Do nothing if the request succeeded.

        :raises CompletionError: it did not; where the peer is gone, it is a ConnectionResetError too
        """

class CompChannel(Resource):
    """A completion channel: its descriptor is readable when an armed CQ has an event.

    :param context: the device
    :raises OSError: EMFILE or ENFILE, when there are no more descriptors
    """

    def __init__(self, context: Context) -> None: ...
    @property
    def context(self) -> Context: ...
    @property
    def fd(self) -> int:
        """The descriptor; non-blocking."""
    def fileno(self) -> int:
        """fd, for `select` and similar functions."""
    def get_cq_event(self) -> CQ | None:
        """The CQ of the next event, or None if there is no event. Acknowledge it with CQ.ack_events()."""

class CQ(Resource):
    """A completion queue.

    :param context: the device
    :param cqe: how many completions it must hold at least
    :param channel: the CompChannel for its events
    :param comp_vector: the completion vector (interrupt) of its events, below Context.num_comp_vectors
    :ivar stray: how many completions were dropped because their queue pair was gone
    :raises OSError: EINVAL for sizes or vectors that the device does not support; ENOMEM
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
        """How many completions it can hold; at least as many as were asked for."""
    @property
    def stray(self) -> int:
        """How many completions were dropped because their queue pair was gone."""
    def resize(self, cqe: int) -> None:
        """Change how many completions it can hold. Completions in it stay.

        :raises OSError: EINVAL if it contains more, or the device cannot make it that large; EOPNOTSUPP or ENOSYS
        :raises ValueError: the AsyncQPs that complete here may have more in flight
        """
    def modify(self, cq_count: int, cq_period: int) -> None:
        """Moderate its events. From the next arming on, an event comes after cq_count completions, or cq_period
        microseconds after the first one; if either is 0, there is no moderation.

        :raises OSError: EOPNOTSUPP if the device does not support it
        """
    def req_notify(self, solicited_only: bool = False) -> None:
        """Arm it: the next completion causes one event on the channel. Poll once more before sleeping."""
    def ack_events(self, nevents: int = 1) -> None:
        """Acknowledge events that get_cq_event() returned; close() acknowledges the rest.

        :raises ValueError: fewer events are unacknowledged
        """
    def poll(self, num_entries: int = 16) -> list[WC]:
        """Return up to num_entries completions, oldest first. It never blocks.

        :raises OSError: the queue is broken, for instance because it was overrun
        """

# ---- extendedcq.pxi ----

class CreateCQWCFlags(IntFlag):
    """The fields of an extended completion queue's completions. Values as IBV_WC_EX_WITH_*."""

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
    """SINGLE_THREADED: the program guarantees that no two threads use the queue at once."""

    NONE = 0
    SINGLE_THREADED = 0x1
    IGNORE_OVERRUN = 0x2

@dataclass(frozen=True)
class CQInitAttrEx:
    """The attributes of a new extended completion queue; see ibv_create_cq_ex(3).

    :param cqe: how many completions it must hold at least
    :param channel: the CompChannel for its events
    :param comp_vector: the completion vector (interrupt) of its events, below Context.num_comp_vectors
    :param wc_flags: CreateCQWCFlags: the fields of its completions
    :param flags: CreateCQFlags
    """

    cqe: int
    channel: CompChannel | None = None
    comp_vector: int = 0
    wc_flags: CreateCQWCFlags | int = ...
    flags: CreateCQFlags | int = ...

class CQEX(CQ):
    """An extended completion queue; it can be used wherever a CQ can.

    :raises OSError: EOPNOTSUPP if the device has none, or does not support all wc_flags
    """

    def __init__(self, context: Context, init_attr: CQInitAttrEx) -> None: ...
    @property
    def wc_flags(self) -> CreateCQWCFlags:
        """The fields of its completions."""
    def poll(self, num_entries: int = 16) -> list[WC]:
        """Return up to num_entries completions, oldest first, with the fields of wc_flags. It never blocks.

        :raises OSError: the queue is broken, for instance because it was overrun
        """
    def start_poll(self) -> Completions:
        """An iterator over the completions in the queue. It ends when there are no more, and can be used again later.
        It works in a `with` block, in analogy to the C calls, but needs none."""

@final
class Completions:
    """An iterator over the completions of an extended completion queue."""

    def __new__(cls, cq: CQEX) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> WC: ...

# ---- registration.pxi ----

@final
class Registration:
    """Registered memory, for its users: each calls close() once."""

    @property
    def lkey(self) -> int:
        """The key of the memory."""
    def close(self) -> None: ...

def address_of(buffer: Buffer) -> int:
    """The address of the first byte of a contiguous buffer, which its owner may move when nobody holds its export."""

class RegistrationCache:
    """What is registered in a protection domain for one-sided operations.

    :param most_entries: how many registrations are kept,
    :param most_bytes: and of how many bytes together; by default 64 MiB, or a quarter of what may be locked
    """

    def __new__(cls, pd: PD, most_entries: int = 128, most_bytes: int | None = None) -> Self: ...
    def take(self, buffer: Buffer, view: memoryview) -> Registration:
        """The registration of a buffer, to be closed after its use.

        :param view: a memoryview of its bytes, which the caller keeps until then; it is registered for writing, unless
            it is read-only
        :raises OSError: the memory cannot be registered
        :raises ValueError: the cache, or its protection domain, is closed
        """
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
    """Memory that streams can send from and receive into without copies; see `alloc()`.

    It has the buffer protocol: ``memoryview(memory)`` and ``numpy.frombuffer(memory, dtype)`` are views of it. It is
    freed when nothing refers to it or to a view of it any more.

    :ivar length: in bytes
    """

    length: int
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def alloc(nbytes: int, *, huge_pages: bool | Literal["try"] = False) -> AllocatedMemory:
    """Allocate zeroed memory that streams can send from and receive into without copies.

    `reader.readinto()` and `readinto_exactly()` let the peer's device write large messages directly to where they are
    wanted, if the memory is of this kind. Any view of it will do: ``memoryview(memory)[a:b]``, or a NumPy array made
    by ``numpy.frombuffer(memory, dtype)``. The memory is registered when it is first used on a connection, and freed
    when nothing refers to it or to a view of it any more.

    :param nbytes: its length in bytes, at least 1
    :param huge_pages: as for `PD.alloc_mr`
    :returns: an AllocatedMemory
    :raises ValueError: nbytes is 0 or out of range
    :raises OSError: ENOMEM; EMFILE, because each needs a descriptor
    """

def region_for_peers(pd: PD, buffer: Buffer, access: AccessFlags | int) -> MR:
    """`pd.reg_mr(buffer, access)`, but peers of the embedded device can map what lies in memory of `alloc()`."""

# ---- reuse.pxi ----

REUSED_BYTES: int
"""From so many bytes on, memory of `unfilled()` is kept for a later call."""

@final
class ReusableMemory:
    """Large memory of `unfilled()`. It has the buffer protocol."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def unfilled(nbytes: int) -> bytearray | ReusableMemory:
    """Writable memory of undefined content, for who fills it: a bytearray, or large memory that may have been in use
    before.

    :raises ValueError: nbytes is out of range
    :raises MemoryError: there is none
    """

def bring_in(memory: Any, nbytes: int, offset: int) -> None:
    """Have the kernel provide so many bytes of writable memory, from this offset, before they are used.

    Their content stays as it is. Nothing happens where the kernel cannot do that, and to what is beyond the end.
    """

def idle_bytes() -> int:
    """How much memory of `unfilled()` is idle."""

# ---- workrequest.pxi ----

class WROpcode(IntEnum):
    """The operation of a send request."""

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
    """Options of a send request."""

    NONE = 0
    FENCE = 0x1
    SIGNALED = 0x2
    SOLICITED = 0x4
    INLINE = 0x8
    IP_CSUM = 0x10

@final
class SGE:
    """A scatter/gather element: length bytes at offset of a region.

    :param buffer: an MR, a PooledBuffer, or a part of one as `memoryview(mr)[a:b]`; or any buffer, with the lkey of a
        region that covers it, or without an lkey for a request with SendFlags.INLINE, which copies the bytes when it is
        posted
    :param offset: in bytes, from the buffer's beginning
    :param length: in bytes; None is the rest
    :raises IndexError: the part is not within the buffer
    :raises TypeError: it is not a buffer
    """

    def __init__(
        self, buffer: MR | Buffer, offset: int = 0, length: int | None = None, *, lkey: int | None = None
    ) -> None: ...
    @property
    def buffer(self) -> MR | memoryview: ...
    @property
    def addr(self) -> int:
        """The address of its first byte: in the process, or from 0 on in a region with AccessFlags.ZERO_BASED."""
    @property
    def length(self) -> int:
        """Its length in bytes."""
    @property
    def lkey(self) -> int:
        """The lkey of the region; 0 if there is none."""

class RecvWR:
    """A receive request: buffers for one message.

    :param sg_list: SGEs, MRs or memoryviews of MRs, or one of them; they are filled in order
    :param wr_id: any object; the completion has the same
    """

    def __init__(self, sg_list: SGE | MR | Iterable[SGE | MR] = (), *, wr_id: object = 0) -> None: ...
    @property
    def wr_id(self) -> object: ...
    @property
    def sg_list(self) -> tuple[SGE, ...]:
        """Its elements."""

class SendWR:
    """A send request; see ibv_post_send(3).

    :param opcode: a WROpcode
    :param sg_list: the local side: SGEs, MRs or memoryviews of MRs, or one of them
    :param wr_id: any object; the completion has the same
    :param flags: signaled by default; a request without SIGNALED gives no completion of its own, and its
        place in the queue comes free when a later one completes
    :param imm_data: 32 bits for SEND_WITH_IMM and RDMA_WRITE_WITH_IMM
    :param remote_addr: the address in the peer's memory, for RDMA and atomics
    :param rkey: its key, for RDMA and atomics; for BIND_MW the new key of the window
    :param compare_add: the value to compare with, or to add
    :param swap: the value to store if the comparison is equal
    :param ah: for a datagram: the AH of its destination
    :param remote_qpn: for a datagram: the number of the destination's queue pair
    :param remote_qkey: for a datagram: the key that the destination expects
    :param remote_srqn: the number of the shared receive queue, for XRC
    :param invalidate_rkey: the key that LOCAL_INV invalidates here, or SEND_WITH_INV at the peer
    :param mw: the window that BIND_MW binds
    :param bind_info: an MWBindInfo: what BIND_MW binds the window to
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
    def opcode(self) -> WROpcode:
        """Its operation, a WROpcode."""
    @property
    def flags(self) -> SendFlags:
        """Its SendFlags."""
    @property
    def sg_list(self) -> tuple[SGE, ...]:
        """Its elements."""

# ---- window.pxi ----

class MWType(IntEnum):
    """Who chooses the keys of a window: the device (1) or the program (2)."""

    TYPE_1 = 1
    TYPE_2 = 2

@dataclass(frozen=True)
class MWBindInfo:
    """The part of a region that a window exposes; see ibv_bind_mw(3).

    :param mr: the region, which must have AccessFlags.MW_BIND
    :param addr: the address of the first byte, as requests have it (MR.address); None is the beginning of the region
    :param length: in bytes; 0 unbinds (type 1)
    :param mw_access_flags: AccessFlags: the rights of the peer
    """

    mr: MR
    addr: int | None = None
    length: int = 0
    mw_access_flags: AccessFlags | int = 0

@dataclass(frozen=True)
class MWBind:
    """A request to bind a window of type 1; see ibv_bind_mw(3).

    :param bind_info: an MWBindInfo: what to bind it to
    :param wr_id: any object; the completion has the same
    :param send_flags: SendFlags
    """

    bind_info: MWBindInfo
    wr_id: object = 0
    send_flags: SendFlags | int = ...

def inc_rkey(rkey: int) -> int:
    """The next key of a window of type 2. Only its lowest byte differs, which the program may choose."""

class MW(Resource):
    """A memory window.

    :param pd: the protection domain, which must be that of the region and of the queue pair that bind it
    :param mw_type: an MWType
    :ivar mr: the region that it was last bound to, or None
    :raises OSError: EOPNOTSUPP if the device has no windows of this type
    """

    def __init__(self, pd: PD, mw_type: MWType | int = ...) -> None: ...
    @property
    def pd(self) -> PD: ...
    @property
    def mw_type(self) -> MWType: ...
    @property
    def mr(self) -> MR | None:
        """The region that it was last bound to, or None."""
    @property
    def rkey(self) -> int:
        """Its key, for the peer. A window of type 1 has a new key after each binding."""

# ---- srq.pxi ----

class SRQType(IntEnum):
    """BASIC; XRC, for senders that name the queue; TM, with tag matching, which no device here supports."""

    BASIC = 0
    XRC = 1
    TM = 2

@dataclass
class SRQAttr:
    """The sizes of a shared receive queue.

    :param max_wr: how many receives it must hold at least
    :param max_sge: how many elements each receive may have at least
    :param srq_limit: one event SRQ_LIMIT_REACHED comes when fewer receives are left; 0: none
    """

    max_wr: int = 1
    max_sge: int = 1
    srq_limit: int = 0

@dataclass
class SRQInitAttr:
    """The attributes of a new shared receive queue; see ibv_create_srq_ex(3). An XRC queue has its own CQ and domain.

    :param attr: an SRQAttr: its sizes
    :param srq_type: an SRQType
    :param xrcd: the domain of an XRC queue
    :param cq: the CQ of the receives of an XRC queue
    """

    attr: SRQAttr = ...
    srq_type: SRQType = ...
    xrcd: XRCD | None = None
    cq: CQ | None = None

class SRQ(Resource):
    """A shared receive queue.

    :param pd: its protection domain
    :param init_attr: an SRQInitAttr or an SRQAttr; the sizes are updated to what the device grants
    :ivar srq_type: its SRQType
    :ivar xrcd: the domain of an XRC queue; else None
    :ivar cq: the CQ of the receives of an XRC queue; else None
    :raises OSError: EOPNOTSUPP; EINVAL for sizes that the device does not support; ENOMEM
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
        """How many receives are posted whose completions have not been polled."""
    @property
    def srq_num(self) -> int:
        """The number by which an XRC sender names this queue.

        :raises OSError: EOPNOTSUPP or EINVAL if it has none
        """
    def query(self) -> SRQAttr:
        """Query its sizes and its limit from the device, as an SRQAttr."""
    def modify(self, *, max_wr: int | None = None, srq_limit: int | None = None) -> None:
        """Change the size, or set the limit.

        :param max_wr: the new number of receives; posted ones stay
        :param srq_limit: one event SRQ_LIMIT_REACHED comes when fewer receives than this are left; the limit is then 0
            again, so that no further event comes
        :raises OSError: EINVAL for a limit above the size, or a size below the number of posted receives; EOPNOTSUPP if
            the device does not support it
        """
    def post_recv(self, wrs: RecvWR | Iterable[RecvWR]) -> None:
        """Post a RecvWR, or several as one chain. Their buffers are kept until they complete.

        :raises OSError: ENOMEM if the queue is full, EINVAL if a request is wrong. The requests before the refused one
            are posted; the message says how many
        """

class XRCD(Resource):
    """An XRC domain, which joins the shared receive queues of several processes with the queue pairs that feed them.

    :param context: the device
    :param fd: a file that identifies the domain to all its processes; -1 for a private domain
    :param oflags: os.O_CREAT to create it, with os.O_EXCL to fail if it exists
    :raises OSError: EOPNOTSUPP if the device has no XRC
    """

    def __init__(self, context: Context, fd: int = -1, oflags: int = ...) -> None: ...
    @property
    def context(self) -> Context: ...

# ---- qpattr.pxi ----

class SendOpsFlags(IntFlag):
    """The operations that QP.wr() of a queue pair supports. Values as IBV_QP_EX_WITH_*."""

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
    """BLOCK_SELF_MCAST_LB: the queue pair does not receive what it sends to its own groups."""

    BLOCK_SELF_MCAST_LB = 0x2

class QPType(IntEnum):
    """The transport service: reliable or unreliable connections, datagrams, Ethernet frames, XRC."""

    RC = 2
    UC = 3
    UD = 4
    RAW_PACKET = 8
    XRC_SEND = 9
    XRC_RECV = 10
    DRIVER = 255

class QPState(IntEnum):
    """The state of a queue pair: it receives from RTR on, and sends in RTS; see ibv_modify_qp(3)."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6
    UNKNOWN = 7

class MigState(IntEnum):
    """The state of path migration: whether an alternate path is ready."""

    MIGRATED = 0
    REARM = 1
    ARMED = 2

class QPAttrMask(IntFlag):
    """The mask of ibv_modify_qp(3); it follows from the QPAttr."""

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
    """The sizes of a queue pair. What the device grants is at least what is asked for.

    :param max_send_wr: how many requests the send queue holds
    :param max_recv_wr: how many requests the receive queue holds
    :param max_send_sge: how many elements a send may have
    :param max_recv_sge: how many elements a receive may have
    :param max_inline_data: how many bytes a request with SendFlags.INLINE may have
    """

    max_send_wr: int = 1
    max_recv_wr: int = 1
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0

@dataclass
class QPInitAttr:
    """The attributes of a new queue pair; see ibv_create_qp(3).

    :param send_cq: the CQ of its sends; None for XRC_RECV
    :param recv_cq: the CQ of its receives; None for XRC_SEND and XRC_RECV
    :param cap: a QPCap: its sizes, which are updated to what the device grants
    :param qp_type: a QPType
    :param sq_sig_all: whether every send gives a completion, not only those with SendFlags.SIGNALED
    :param srq: the SRQ that its receives come from; None for a receive queue of its own
    """

    send_cq: CQ | None = None
    recv_cq: CQ | None = None
    cap: QPCap = ...
    qp_type: QPType = ...
    sq_sig_all: bool = False
    srq: SRQ | None = None

@dataclass
class QPInitAttrEx(QPInitAttr):
    """The extended attributes of a new queue pair; see ibv_create_qp_ex(3).

    :param send_ops_flags: the operations of QP.wr(); creation fails if the device does not support one of them
    :param create_flags: QPCreateFlags
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
        """The mask of the attributes that are given."""

# ---- queuepair.pxi ----

class QP(Resource):
    """A queue pair.

    :param pd: its protection domain, which must be that of the regions of its requests
    :param init_attr: a QPInitAttr: its queues and sizes; cap is updated to what the device grants
    :ivar send_cq: the CQ of its sends; None for XRC_RECV
    :ivar recv_cq: the CQ of its receives; None for XRC
    :ivar srq: the SRQ that its receives come from, or None
    :ivar xrcd: the XRC domain of an XRC_RECV queue pair
    :raises OSError: EINVAL for sizes or a type that the device does not support; ENOMEM
    """

    def __init__(self, pd: PD, init_attr: QPInitAttr) -> None: ...
    @property
    def pd(self) -> PD: ...
    @staticmethod
    def open(pd: PD, xrcd: XRCD, qp_num: int) -> QP:
        """Share an XRC_RECV queue pair of another process in the same XRC domain. It exists while any process has it.

        :param pd: any protection domain of the context
        :raises OSError: EINVAL if there is no such queue pair; EOPNOTSUPP
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
    def cap(self) -> QPCap:
        """What the device has granted, a QPCap."""
    @property
    def qp_num(self) -> int:
        """Its number, 24 bits, by which the peer addresses it."""
    @property
    def qp_type(self) -> QPType:
        """Its transport service, a QPType."""
    @property
    def state(self) -> QPState:
        """The state known to the library; query() asks the device."""
    @property
    def in_flight(self) -> tuple[int, int]:
        """(sends, receives) that are posted and whose completions have not been polled."""
    @property
    def peer_gone(self) -> bool:
        """Whether it is known that the peer's process ended while it was connected, for example because it was killed.

        Only the embedded device knows. It is False on other devices, for a peer that disconnected, and for a peer that
        cannot be reached.
        """
    def modify(self, attr: QPAttr | None = None, **attrs: Any) -> None:
        """Change attributes, or the state: `qp.modify(qp_state=QPState.RTS, sq_psn=0)`.

        The mask of ibv_modify_qp(3) follows from what is given.

        :param attr: a QPAttr with the changes
        :param attrs: the fields of a QPAttr, instead of attr
        :raises TypeError: neither or both are given, or attr is not a QPAttr
        :raises ModifyQPError: the device refused (EINVAL); the exception names what is missing or not allowed
        :raises OSError: the device refused for another reason
        """
    def to_init(
        self, port_num: int = 1, *, pkey_index: int = 0, access: AccessFlags | int = 0, qkey: int = 0
    ) -> None:
        """RESET to INIT. The peer gets only the access to memory that is given here.

        :param qkey: for a datagram queue pair: the key that senders must use
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

        A datagram queue pair has no peer and takes no arguments; one of an unreliable connection takes those up to
        rq_psn.

        :param dgid: the peer's GID, 16 bytes; without it dlid is the address
        :param min_rnr_timer: how long a peer waits that has found no receive, as a code of the InfiniBand
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
        """RTR to RTS: send as well. Only reliable connections take other arguments than sq_psn.

        :param timeout: how long to wait for an ACK, 4.096 us * 2 ** timeout; 0 is without limit
        :param rnr_retry: how often to retry when the peer has posted no receive; 7 is without limit
        """
    def info(
        self,
        *,
        port_num: int = 1,
        sgid_index: int | None = None,
        psn: int | None = None,
        mtu: int | None = None,
    ) -> QPInfo:
        """The QPInfo that the peer needs for its connect().

        The queue pair remembers the last one, for its own connect().

        :param sgid_index: the index of the local address for the peer; by default that of best_gid()
        :param psn: the sequence number of the first packet; by default random
        :param mtu: the MTU of this side, in bytes; by default the port's
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
        """RESET or INIT to RTS: connect to the peer's queue pair. The peer does the same with this side's info().

        This does not wait for the peer. Do not post a request before the peer has connected, and post the receives for
        what the peer may send at once before this call, in INIT.

        :param peer: the peer's QPInfo
        :param access: the peer's access rights to local memory; by default none, or those given to to_init()
        :raises ValueError: info() was never called, so the peer cannot have it
        :raises OSError: the device refused a transition; the queue pair stays in the last state that it reached
        """
    def to_error(self) -> None:
        """To ERR: all posted requests complete as flushed."""
    def to_reset(self) -> None:
        """To RESET: all posted requests are dropped, without completions."""
    def query(self) -> tuple[QPAttr, QPInitAttr]:
        """All attributes, from the device, as (QPAttr, QPInitAttr)."""
    def counters(self) -> dict[str, int]:
        """The embedded device's counters for this queue pair; empty on other devices."""
    def attach_mcast(self, gid: bytes | IPv4Address | IPv6Address, lid: int = 0) -> None:
        """Join a multicast group with a datagram queue pair: it also receives what is sent to the group.

        :param gid: the GID of the group: 16 bytes, or an IP address
        """
    def detach_mcast(self, gid: bytes | IPv4Address | IPv6Address, lid: int = 0) -> None:
        """Leave a group.

        :raises OSError: EINVAL if the queue pair is not a member
        """
    def bind_mw(self, mw: MW, bind: MWBind) -> None:
        """Bind a window of type 1, in the order of the send queue; its new key is mw.rkey.

        :param bind: an MWBind
        :raises OSError: EINVAL for a window of type 2, or rights that the region lacks; EPERM or EOPNOTSUPP
        """
    def wr(self) -> WRSession:
        """Post with the extended calls: `with qp.wr() as wr: wr.send(...); wr.rdma_write(...)`.

        The end of the block posts its requests, all or none; an exception in the block posts none. The queue pair must
        have been created with QPInitAttrEx.send_ops_flags.

        :raises OSError: EOPNOTSUPP if it was not
        """
    def post_send(self, wrs: SendWR | Iterable[SendWR]) -> None:
        """Post a SendWR, or several as one chain. Their buffers are kept until they complete.

        :raises OSError: ENOMEM if the queue is full, EINVAL if a request or the state is wrong. The requests before the
            refused one are posted; the message says how many
        :raises ValueError: an object of a request is closed, or belongs to another context; nothing is posted
        """
    def post_recv(self, wrs: RecvWR | Iterable[RecvWR]) -> None:
        """Post a RecvWR, or several as one chain. Their buffers are kept until they complete.

        :raises OSError: as for post_send()
        """

# ---- wrsession.pxi ----

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
        """Discard the requests collected so far; the end of the block posts only later ones."""
    def post(self, wr: SendWR) -> None:
        """Add a request that was created elsewhere.

        :raises OSError: EOPNOTSUPP if its opcode is not in the queue pair's send_ops_flags
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
    def rdma_read(self, sg_list: _SGList = (), *, remote_addr: int, rkey: int, **options: Any) -> None:
        """RDMA_READ into sg_list."""
    def atomic_cmp_swp(
        self, sg_list: _SGList, *, remote_addr: int, rkey: int, compare: int, swap: int, **options: Any
    ) -> None:
        """ATOMIC_CMP_AND_SWP; sg_list receives the old 8 bytes."""
    def atomic_fetch_add(
        self, sg_list: _SGList, *, remote_addr: int, rkey: int, add: int, **options: Any
    ) -> None:
        """ATOMIC_FETCH_AND_ADD; sg_list receives the old 8 bytes."""
    def atomic_write(self, data: Buffer, *, remote_addr: int, rkey: int, **options: Any) -> None:
        """ATOMIC_WRITE of 8 bytes, to an address that is a multiple of 8."""
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
        """FLUSH: completes when earlier writes to the range have reached the level of `placement`."""
    def bind_mw(self, mw: MW, rkey: int, bind_info: MWBindInfo, **options: Any) -> None:
        """BIND_MW: bind a window of type 2 to a part of a region, with this key."""
    def local_inv(self, rkey: int, **options: Any) -> None:
        """LOCAL_INV: invalidate a local key."""

# ---- watcher.pxi ----

class Watcher:
    """Watches completion queues, for its user: a subclass, which gets what is found; see _pyx/watcher.pxi."""

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
    """One request, or one chain, that is awaited."""

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
    def result(self) -> _R:
        """The completion, of a chain a list of them, of an atomic operation what was there before.

        :raises CompletionError: it failed, or the first of a chain that did
        """

@final
class Blocks:
    """Many one-sided requests of one kind, awaited as one; see _pyx/blocks.pxi.

    :param future: which is told of the end; may be replaced. None: whoever has begun this looks whether it is `done`
    :param opcode: RDMA_READ or RDMA_WRITE
    :param at_once: the most bytes of one chain, which the device may execute while it is posted
    :param piece: the most bytes of one request, where a block is longer than that
    """

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
    ) -> None:
        """The rows of this memory, one after the other, and those of the peer's array that `indices` name.

        :param rows: the peer's array has so many
        :param indices: numbers of 64 bits with a sign, contiguous; as many as this memory has rows
        :raises IndexError: one of them is negative, or no row of the peer's; nothing is added then
        """
    def begin(self, connection: Connection) -> bool:
        """Post what the device executes at once, for as long as the loop need not turn.

        Returns whether that was all, or may go on like this in the loop's next turn. If not, `post` goes on.
        """
    def post(self, connection: Connection) -> bool:
        """Post what may be in flight now. Returns whether nothing is left to be posted.

        :raises OSError: the connection is lost
        """
    def close_after(self, resource: Any) -> None: ...
    def stop(self, error: BaseException | None = None) -> None: ...
    def end(self, error: BaseException | None = None) -> None: ...
    def failure(self, status: int, vendor_err: int, qp_num: int) -> CompletionError: ...

@final
class FastPath:
    """READs and WRITEs that have nothing to wait for; see _pyx/fastpath.pxi.

    :param connection: it goes by this one
    :param endpoint: whose descriptors it takes
    :param claimed: gives the peer's memory of a grant (an OfferedMemory), or None
    :param find: gives memory that is registered here (a Memory) by an address, a length, and whether it is written to;
        or None
    :param at_once: see Blocks, as for `piece`
    """

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
    def move(self, opcode: int, descriptor: Any, array: Any) -> Blocks | None:
        """Read or write one block, which has begun when this returns: mostly it is `done`.

        Returns None if the general way is to be gone.
        """
    def fill(self, blocks: Blocks, pairs: list[Any]) -> tuple[Collection[bytes], Collection[Any]] | None:
        """Add pairs of a descriptor and an array to a list; returns which grants, and which memory of ours, it uses.

        Returns None if the general way is to be gone, with another list.
        """
    def learn(self, encoded: bytes, descriptor: Any) -> None:
        """These bytes are that descriptor."""
    def forget(self, grant: bytes) -> None:
        """The peer's memory of this grant is not to be used any more."""

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
    def waiting(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    def close(self) -> None: ...
    def receive(self, sg_list: _SGList) -> Operation[WC]: ...
    def send(self, opcode: int, sg_list: _SGList, flags: int, imm_data: int = 0) -> Operation[WC]: ...
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
    def bind(self, mw: MW, bind: MWBind) -> Operation[WC]: ...
    def batch(self, requests: Iterable[SendWR]) -> Operation[list[WC]]:
        """Requests made elsewhere, as one chain.

        :raises ValueError: there are none, or more than fit in the queue
        """

class CompletionWatcher(Watcher):
    """Watches a completion queue for those who await its completions.

    :param notifier: the event loop
    :param busy_poll: seconds to watch after each completion before sleeping; None: adaptive, 0: none
    """

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
    """A copy of an event, already acknowledged. Names as in struct rdma_cm_event; see rdma_get_cm_event(3).

    :ivar type: a CMEventType
    :ivar status: 0 or -errno; for REJECTED the reason of the rejection
    :ivar id: the identifier concerned; for CONNECT_REQUEST a new one
    :ivar listen_id: for CONNECT_REQUEST: the listener
    :ivar private_data: the peer's private data, on InfiniBand and RoCE padded with zeros
    :ivar responder_resources: how many READs and atomics the peer asks to have in flight to this side
    :ivar initiator_depth: how many READs and atomics this side may have in flight to the peer
    :ivar retry_count: how often the peer retries
    :ivar rnr_retry_count: how often the peer retries when it finds no receive; 7 is without limit
    :ivar qp_num: the peer's queue pair
    :ivar ah_attr: for datagrams: the address of the peer
    :ivar qkey: for datagrams: the key that the peer expects
    """

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
    def error(self) -> OSError | None:
        """The exception for this event, or None if it is not a failure."""
    def raise_for_status(self) -> None:
        """Raise the exception of error(), if there is one."""

class CMEventChannel(Resource):
    """A channel for connection events; its fd is readable when there are events.

    :param library: the library of the devices
    :raises OSError: the connection manager cannot be used; a note says what to do about permissions and modules
    """

    def __init__(self, library: Library) -> None: ...
    @property
    def library(self) -> Library: ...
    @property
    def fd(self) -> int:
        """The descriptor; non-blocking."""
    def fileno(self) -> int:
        """fd, for `select` and similar functions."""
    def create_id(self, ps: PortSpace = ...) -> CMID:
        """Create an identifier, for one connection or for listening."""
    def get_event(self) -> CMEvent | None:
        """The next event, or None if there is none.

        If the program drops a CONNECT_REQUEST, the request is refused when its identifier is garbage-collected.
        """

class CMID(Resource):
    """An identifier of the connection manager: one connection, or one listener.

    :ivar channel: the channel of its events
    :ivar library: the library of its devices
    """

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
        """The queue pair created by create_qp(), while it is open."""
    @property
    def local_addr(self) -> _Address | None:
        """(ip, port), or (ip, port, flowinfo, scope_id), or None."""
    @property
    def peer_addr(self) -> _Address | None:
        """The address of the peer in the same form, once it is known."""
    @property
    def peer_gone(self) -> bool:
        """Whether it is known that the peer's process ended while it was connected, for example because it was killed.

        Only the embedded device knows. It is False on other devices, for a peer that disconnected, and for a peer that
        cannot be reached.
        """
    @property
    def peer_user(self) -> int | None:
        """The number of the user whose process asked for this connection, if it is on this host and the kernel says so.

        None on other devices, for peers on other hosts, on the side that asked, and once the connection is over.
        """

    @property
    def peer_by_name(self) -> bool:
        """Whether the connection was asked for by the listener's name on this host, not by TCP."""

    def set_reuse_addr(self, reuse: bool = True) -> None:
        """Let a listener use a port that old connections still occupy."""
    def set_af_only(self, only: bool = True) -> None:
        """Restrict a listener on :: to IPv6."""
    def set_ack_timeout(self, timeout: int) -> None:
        """Set how long the queue pair waits for an ACK: 4.096 us * 2 ** timeout. Call it before connecting."""
    def set_tos(self, tos: int) -> None:
        """Set the type of service of the connection's packets. Call it before the route is resolved."""
    def set_by_name_alone(self) -> None:
        """Have connect() ask by the listener's name on this host, never by TCP: a TCP program has the port."""
    def bind_addr(self, address: _Address) -> None:
        """Bind to (ip, port) or (ip, port, flowinfo, scope_id); port 0 takes a free one."""
    def resolve_addr(self, src_addr: _Address | None, dst_addr: _Address, timeout_ms: int = 2000) -> None:
        """Find the device that reaches dst_addr: ADDR_RESOLVED or ADDR_ERROR. src_addr may be None."""
    def resolve_route(self, timeout_ms: int = 2000) -> None:
        """Find the route to the address: ROUTE_RESOLVED or ROUTE_ERROR."""
    def resolve_at_once(self, src_addr: _Address | None, dst_addr: _Address) -> bool | None:
        """Find the device and the route to dst_addr without waiting, if the library can: the embedded device's.

        Returns None if it cannot; True if both are found, of which no event tells; False if an event says why not.
        """
    def listen(self, backlog: int = 128) -> None:
        """Listen: each request is a CONNECT_REQUEST with a new CMID."""
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
        """Request a connection: ESTABLISHED, REJECTED, UNREACHABLE or CONNECT_ERROR.

        :param private_data: for the server's CONNECT_REQUEST; at most 56 bytes
        :param responder_resources: how many READs and atomics the peer may have in flight to this side
        :param initiator_depth: how many READs and atomics this side may have in flight to the peer
        :param qp_num: the queue pair, if create_qp() did not create it
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
        """Accept a CONNECT_REQUEST: ESTABLISHED. The client's event gets the private data, at most 196 bytes."""
    def reject(self, private_data: Buffer = b"") -> None:
        """Reject a CONNECT_REQUEST: REJECTED at the client, with the private data, at most 148 bytes."""
    def disconnect(self, *, told: bool = True) -> None:
        """End the connection: the queue pair goes to ERR, and both sides get DISCONNECTED. Not `told`: this side needs
        none, so the embedded device waits for no answer."""
    def establish(self) -> None:
        """Report that the connection is ready, after CONNECT_RESPONSE: for an active side that moves its queue pair
        through the states itself. See rdma_establish(3).

        :raises OSError: EOPNOTSUPP if the library is too old
        """
    def init_qp_attr(self, qp_state: QPState) -> QPAttr:
        """The QP.modify() attributes that move a program's own queue pair to a state; see rdma_init_qp_attr(3)."""
    def join_multicast(self, address: _Address, flags: int = ...) -> None:
        """Join a group, and attach the queue pair: MULTICAST_JOIN, with the address of the group, or MULTICAST_ERROR.

        :param address: (ip, port) of the group; the port is ignored
        """
    def leave_multicast(self, address: _Address) -> None:
        """Leave a group, and detach the queue pair."""
    def create_qp(self, pd: PD, init_attr: QPInitAttr) -> QP:
        """Create this connection's queue pair, in INIT. The connection manager changes its states.

        The identifier keeps it, and closes it before itself.

        :param pd: a protection domain of this identifier's context
        :param init_attr: a QPInitAttr; cap is updated to what the device grants
        :raises ValueError: it already has one, or the domain belongs to another context
        :raises OSError: EINVAL for sizes or a type that the device does not support; ENOMEM
        """
    def destroy_qp(self) -> None:
        """Destroy the queue pair; the same as closing it."""
    def migrate(self, channel: CMEventChannel) -> None:
        """Move to another channel. Events that were not read yet move along.

        :raises ValueError: the channel belongs to another library
        """

# ---- The data engine: what loop_context.py and lifecycle.py build on ----

EMBEDDED_ARENA_BYTES: int
EMBEDDED_MAX_INLINE: int
STREAM_CONTROL_BODY_BYTES: int
STREAM_DATA_SLOTS_MAX: int
STREAM_FIRST_SLOT_BYTES: int
STREAM_SHARED_OWN: int
STREAM_SHARED_SLOTS_MAX: int

def stream_half_open_bytes(slot_bytes: int, data_slots: int, shared: bool) -> int: ...
def stream_queue_depths(data_slots: int) -> tuple[int, int]:
    """(send, receive) queue depths of a connection with a ring of so many slots."""

def decrypted(sslobj: Any, incoming: Any, again: Any) -> tuple[bytes, bool]:
    """All that can be decrypted now, and whether the peer has sent close_notify: (bytes, bool).

    SSLObject.read() has one record at a time. They are read one behind the other into one object.

    :param sslobj: an ssl.SSLObject
    :param incoming: the ssl.MemoryBIO with its encrypted bytes
    :param again: the exceptions that say that no whole record is there
    :raises ssl.SSLError: the bytes are no good
    """

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

@final
class GrownRings:
    """Connections of an engine whose rings have grown.

    :ivar idle_s: after so many seconds without a frame, and at most twice as many, a ring is small again
    """

    idle_s: float
    def __new__(cls, engine: StreamEngine) -> Self: ...
    def look(self) -> None: ...

@final
class KeepAlive:
    """When an engine looks for idle connections, and what it does about them.

    :ivar probes: how many it has sent
    """

    probes: int
    def __new__(cls, engine: StreamEngine, library: Library) -> Self: ...
    def look(self) -> None: ...

class StreamEngine(Watcher):
    """All connections of one event loop on one device; see _pyx/engine.pxi."""

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

class Totals:
    """What the connections and engines of one device have counted that have ended."""

def trace_begin(room: int) -> None:
    """Trace from now on, the last `room` events, a power of two. What was traced before is forgotten."""

def trace_end() -> None:
    """Trace no more, and give the memory back."""

def trace_taken() -> tuple[bytes, int]:
    """The events that are in the ring, as they lie there, the eldest first; and how many there were in all."""

def stream_totals() -> dict[str, dict[str, dict[str, int]]]:
    """For each device that was used: what its connections have counted, by side, and its engines."""

@final
class IntoReader:
    """Where an RdmaStreamReader's bytes go, and what is unread; see _pyx/unread.pxi."""

    def __new__(cls, loop: asyncio.AbstractEventLoop, limit: int) -> Self: ...
    def take_unread(self) -> bytes: ...
    def loses(self, exc: BaseException) -> None: ...

class CompiledReader:
    """What asyncio.StreamReader does, and its attributes, by an IntoReader: the first base of RdmaStreamReader."""

    _into: IntoReader
    def __init__(self, limit: int, loop: asyncio.AbstractEventLoop) -> None: ...

    # asyncio.StreamReader declares the rest. These are ours:

    def lease(self, at_least: int = 1) -> AbstractAsyncContextManager[memoryview]:
        """Look at received bytes where they are: ``async with reader.lease() as view:``.

        ``view`` is a read-only memoryview of the next bytes of the stream, which have been read then, also if the block
        does not use them. It shows one frame of the peer's, without a copy, if that has ``at_least`` bytes, else more,
        in one copy. It is empty at the end of the stream. Where receives are shared, bytes are always copied.

        The view ends with the block. As long as something made of it lives on, an array say, the bytes stay as they
        are, and the peer can send one frame less. It can send nothing more when all are held.

        Waiting can be cancelled; then nothing has been read.

        :raises ValueError: at_least is not positive
        :raises asyncio.IncompleteReadError: the stream ended after fewer bytes; its ``partial`` has them
        """

    def readinto(self, buffer: Buffer) -> Awaitable[int]:
        """Read up to as many bytes as ``buffer`` has, as soon as there is one, into it; returns how many.

        0 at the end of the stream. The buffer must not be resized before that.
        """

    def readinto_exactly(self, buffer: Buffer) -> Awaitable[int]:
        """Fill ``buffer``; returns its size in bytes.

        :raises asyncio.IncompleteReadError: the stream ended before; its ``partial`` has what came
        """

class CompiledWriter:
    """What asyncio.StreamWriter does that costs most: the first base of RdmaStreamWriter."""

class BlockingEnd:
    """The compiled base of a blocking stream's protocol: unread bytes, the connection's end, and calls that move bytes.

    `private` is the stream's own loop, a PrivateLoop (streams/private_loop.py).

    :ivar eof: the peer has ended its half; bytes from before that may be unread
    :ivar lost: the connection is over: `error` says why, or is None
    """

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
    """One connection of the byte stream; see _pyx/connection.pxi and, for its owner, connection.py."""

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
    """How often which time was measured, in nanoseconds. A time of 2**40 ns (18 minutes) or more counts as that.

    :ivar count: how many there are
    :ivar min_ns: the least; 0 if there is none
    :ivar max_ns: the greatest
    """

    @property
    def count(self) -> int: ...
    @property
    def min_ns(self) -> int: ...
    @property
    def max_ns(self) -> int: ...
    @property
    def mean_ns(self) -> float:
        """The mean; 0.0 without any."""
    @property
    def deviation_ns(self) -> float:
        """The standard deviation."""
    def add(self, ns: int) -> None:
        """Count one time."""
    def lap(self, now_s: float) -> None:
        """Count the time since the last call, in seconds of any clock; the first one, and a 0, only begin."""
    def merge(self, other: Histogram) -> None:
        """Count all that the other one has."""
    def clear(self) -> None:
        """Forget all times; a lap goes on."""
    def percentile(self, percent: float) -> float:
        """The time in nanoseconds that so many percent do not exceed, by nearest rank; 0.0 without any.

        :raises ValueError: percent is not in 0..100
        """
    def filled(self) -> list[tuple[float, int]]:
        """[(nanoseconds, how many)] of the cells that are not empty, in order: the times are their middles."""

# ---- traffic.pxi ----

@final
class Traffic:
    """The same requests again and again, on queue pairs that share their completion queues.

    :param qps: the queue pairs, connected, all with the same send_cq and recv_cq
    :param sends: a SendWR for each, or none; its flags say whether it is INLINE
    :param receives: a RecvWR for each, or none
    :param depth: how many requests may be in flight on each
    :param list_size: how many are posted as one chain
    :param every: which one is signaled: 1 is each
    :param receive_depth: how many receives are kept posted on each; they are posted here
    :param sleeps: it waits for events of the queues' channel, and does not poll
    :param memory: BY_MEMORY: the region that is written from, and by the peer into
    :param outgoing: the offset there of the last byte that is written to the peer
    :param incoming: the offset there of the last byte that the peer writes
    :ivar sent: completed requests
    :ivar received: completed receives
    """

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
    def in_flight(self) -> int:
        """How many requests were posted and have not completed."""
    def flow(self, seconds: float, limit: int = 0, *, posting: bool = True, rate: float = 0.0) -> bool:
        """Keep the queues full for a slice of time. True if `limit` was reached on all queue pairs, or, with posting
        off, if everything has completed.

        :param limit: how many requests are to be posted on each; 0 is any number
        :param rate: how many a second, on all together; 0.0 is no limit
        :raises CompletionError: a request failed
        """
    def exchange(
        self,
        seconds: float,
        found: Histogram,
        limit: int = 0,
        *,
        by: int,
        answers: bool,
        rate: float = 0.0,
    ) -> bool:
        """Post one request at a time, and wait, for a slice of time. True if `limit` was reached.

        :param limit: how many times `found` is to have; 0 is any number
        :param found: gets the times: of BY_COMPLETION the whole time, else half a round trip
        :param by: BY_MEMORY (0), BY_RECEIVE (1) or BY_COMPLETION (2): what is waited for
        :param answers: it waits first
        :raises CompletionError: a request failed
        """
    def restart(self) -> None:
        """flow() counts from 0 again. Everything has completed.

        :raises RuntimeError: something is in flight
        """

# ---- cacheline.pxi ----

def cache_line_ns(buffer: Buffer, rounds: int, answers: bool, seconds: float = 0.1) -> float:
    """How long a cache line takes to another CPU and back, in nanoseconds: two processes call this on the same memory.

    :param buffer: shared memory of at least 128 bytes, which are zero when the first of them begins
    :param answers: this is the second process
    :param seconds: how long to wait for the other one: then it returns 0.0
    """
