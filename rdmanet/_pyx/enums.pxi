# The enumerations: numbers of abi/verbs.h and abi/rdma_cma.h, under the names that these have, without IBV_ and so on.
#
# A name without a number has the next one, or in an IntFlag the next bit, beginning with 0 or bit 0.
# tests/unit/test_enumerations.py compares all with the headers.

cdef object _Enum = enum.IntEnum, _Flag = enum.IntFlag

cdef tuple enumerations = (
    # name, kind, docstring, members
    ("NodeType", _Enum, "What kind of thing a device is.",
     "UNKNOWN=-1 CA=1 SWITCH ROUTER RNIC USNIC USNIC_UDP UNSPECIFIED"),
    ("TransportType", _Enum, "The protocol family a device speaks; RoCE counts as InfiniBand.",
     "UNKNOWN=-1 IB IWARP USNIC USNIC_UDP UNSPECIFIED"),
    ("PortState", _Enum, "Whether a port can be used: ACTIVE, or not.",
     "NOP DOWN INIT ARMED ACTIVE ACTIVE_DEFER"),
    ("LinkLayer", _Enum, "The link layer of a port. On Ethernet, Device.transport_type tells RoCE from iWARP.",
     "UNSPECIFIED INFINIBAND ETHERNET"),
    ("AtomicCap", _Enum, "Whether a device's atomics are atomic within the device only, or for the whole machine.",
     "NONE HCA GLOB"),
    ("GIDType", _Enum, "The kind of packets for a GID: InfiniBand, Ethernet frames (RoCE v1), or UDP (RoCE v2).",
     "IB ROCE_V1 ROCE_V2"),
    ("EventType", _Enum, "Asynchronous events of a device.",
     "CQ_ERR QP_FATAL QP_REQ_ERR QP_ACCESS_ERR COMM_EST SQ_DRAINED PATH_MIG PATH_MIG_ERR DEVICE_FATAL PORT_ACTIVE "
     "PORT_ERR LID_CHANGE PKEY_CHANGE SM_CHANGE SRQ_ERR SRQ_LIMIT_REACHED QP_LAST_WQE_REACHED CLIENT_REREGISTER "
     "GID_CHANGE WQ_FATAL DEVICE_SPEED_CHANGE"),
    ("AccessFlags", _Flag, "The access rights of a memory region, or of the peers of a queue pair.",
     "LOCAL_WRITE REMOTE_WRITE REMOTE_READ REMOTE_ATOMIC MW_BIND ZERO_BASED ON_DEMAND HUGETLB FLUSH_GLOBAL "
     "FLUSH_PERSISTENT RELAXED_ORDERING=0x100000"),
    ("AdviseMRAdvice", _Enum, "The planned use of memory that is registered on demand; see ibv_advise_mr(3).",
     "PREFETCH PREFETCH_WRITE PREFETCH_NO_FAULT"),
    ("AdviseMRFlags", _Flag, "FLUSH: the advice has been carried out when the call returns.",
     "NONE=0 FLUSH"),
    ("WCStatus", _Enum, "How a work request ended.",
     "SUCCESS LOC_LEN_ERR LOC_QP_OP_ERR LOC_EEC_OP_ERR LOC_PROT_ERR WR_FLUSH_ERR MW_BIND_ERR BAD_RESP_ERR "
     "LOC_ACCESS_ERR REM_INV_REQ_ERR REM_ACCESS_ERR REM_OP_ERR RETRY_EXC_ERR RNR_RETRY_EXC_ERR LOC_RDD_VIOL_ERR "
     "REM_INV_RD_REQ_ERR REM_ABORT_ERR INV_EECN_ERR INV_EEC_STATE_ERR FATAL_ERR RESP_TIMEOUT_ERR GENERAL_ERR TM_ERR "
     "TM_RNDV_INCOMPLETE"),
    ("WCOpcode", _Enum, "The operation that completed; only successful completions have it.",
     "SEND RDMA_WRITE RDMA_READ COMP_SWAP FETCH_ADD BIND_MW LOCAL_INV TSO FLUSH ATOMIC_WRITE RECV=128 "
     "RECV_RDMA_WITH_IMM"),
    ("WCFlags", _Flag, "More of a completion: a routing header before the data, immediate data, an invalidated key.",
     "GRH WITH_IMM IP_CSUM_OK WITH_INV"),
    ("CreateCQWCFlags", _Flag, "The fields of an extended completion queue's completions. Values as IBV_WC_EX_WITH_*.",
     "WITH_BYTE_LEN WITH_IMM WITH_QP_NUM WITH_SRC_QP WITH_SLID WITH_SL WITH_DLID_PATH_BITS WITH_COMPLETION_TIMESTAMP "
     "WITH_COMPLETION_TIMESTAMP_WALLCLOCK=0x800 STANDARD=0x7f"),
    ("CreateCQFlags", _Flag, "SINGLE_THREADED: the program guarantees that no two threads use the queue at once.",
     "NONE=0 SINGLE_THREADED IGNORE_OVERRUN"),
    ("WROpcode", _Enum, "The operation of a send request.",
     "RDMA_WRITE RDMA_WRITE_WITH_IMM SEND SEND_WITH_IMM RDMA_READ ATOMIC_CMP_AND_SWP ATOMIC_FETCH_AND_ADD LOCAL_INV "
     "BIND_MW SEND_WITH_INV TSO FLUSH=14 ATOMIC_WRITE"),
    ("SendFlags", _Flag, "Options of a send request.",
     "NONE=0 FENCE SIGNALED SOLICITED INLINE IP_CSUM"),
    ("MWType", _Enum, "Who chooses the keys of a window: the device (1) or the program (2).",
     "TYPE_1=1 TYPE_2"),
    ("SRQType", _Enum, "BASIC; XRC, for senders that name the queue; TM, with tag matching, which no device here has.",
     "BASIC XRC TM"),
    ("QPType", _Enum, "The transport service: reliable or unreliable connections, datagrams, Ethernet frames, XRC.",
     "RC=2 UC UD RAW_PACKET=8 XRC_SEND XRC_RECV DRIVER=255"),
    ("QPState", _Enum, "The state of a queue pair: it receives from RTR on, and sends in RTS; see ibv_modify_qp(3).",
     "RESET INIT RTR RTS SQD SQE ERR UNKNOWN"),
    ("MigState", _Enum, "The state of path migration: whether an alternate path is ready.",
     "MIGRATED REARM ARMED"),
    ("QPAttrMask", _Flag, "The mask of ibv_modify_qp(3); it follows from the QPAttr.",
     "STATE CUR_STATE EN_SQD_ASYNC_NOTIFY ACCESS_FLAGS PKEY_INDEX PORT QKEY AV PATH_MTU TIMEOUT RETRY_CNT RNR_RETRY "
     "RQ_PSN MAX_QP_RD_ATOMIC ALT_PATH MIN_RNR_TIMER SQ_PSN MAX_DEST_RD_ATOMIC PATH_MIG_STATE CAP DEST_QPN "
     "RATE_LIMIT=0x2000000"),
    ("SendOpsFlags", _Flag, "The operations that QP.wr() of a queue pair supports. Values as IBV_QP_EX_WITH_*.",
     "RDMA_WRITE RDMA_WRITE_WITH_IMM SEND SEND_WITH_IMM RDMA_READ ATOMIC_CMP_AND_SWP ATOMIC_FETCH_AND_ADD LOCAL_INV "
     "BIND_MW SEND_WITH_INV TSO FLUSH ATOMIC_WRITE"),
    ("QPCreateFlags", _Flag, "BLOCK_SELF_MCAST_LB: the queue pair does not receive what it sends to its own groups.",
     "BLOCK_SELF_MCAST_LB=0x2"),
    ("PortSpace", _Enum, "TCP: reliable connections; UDP: datagrams.",
     "IPOIB=2 TCP=262 UDP=273 IB=319"),
    ("CMEventType", _Enum, "What happened to an identifier.",
     "ADDR_RESOLVED ADDR_ERROR ROUTE_RESOLVED ROUTE_ERROR CONNECT_REQUEST CONNECT_RESPONSE CONNECT_ERROR UNREACHABLE "
     "REJECTED ESTABLISHED DISCONNECTED DEVICE_REMOVAL MULTICAST_JOIN MULTICAST_ERROR ADDR_CHANGE TIMEWAIT_EXIT "
     "ADDRINFO_RESOLVED ADDRINFO_ERROR USER INTERNAL"),
)


def _enumeration(str name, kind, str doc, str members):
    """The maker of an enumeration, for late.pxi."""
    def make():
        flags = kind is _Flag
        cdef list pairs = []
        cdef int number = flags
        for word in members.split():
            word, _, given = word.partition("=")
            if given:
                number = int(given, 0)
            pairs.append((word, number))
            number = (2 * number or 1) if flags else number + 1
        made = kind(name, pairs, module=__name__)
        made.__doc__ = doc
        return made
    return make


for about in enumerations:
    makers[about[0]] = _enumeration(*about)
del about
