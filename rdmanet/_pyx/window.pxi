# Memory windows: keys for parts of a region, which can be created and revoked without a registration.
#
#     type 1   QP.bind_mw(mw, MWBind(...)): the device chooses the key; binding zero bytes unbinds it
#     type 2   a SendWR with BIND_MW: the program chooses the key (inc_rkey() of the previous one); LOCAL_INV, or the
#              peer's SEND_WITH_INV, revokes it
#
# The region must have AccessFlags.MW_BIND. A window may grant only rights that the region has, except that remote
# writing requires only LOCAL_WRITE of the region. A region cannot be closed while a window is bound to it. A window
# holds the region that it was last bound to.


@_late
def MWBindInfo():
    @_record
    class MWBindInfo(_FrozenRecord):
        """The part of a region that a window exposes; see ibv_bind_mw(3).

        :param mr: the region, which must have AccessFlags.MW_BIND
        :param addr: the address of the first byte, as requests have it (MR.address); None is the beginning of the
            region
        :param length: in bytes; 0 unbinds (type 1)
        :param mw_access_flags: AccessFlags: the rights of the peer
        """
        mr: "MR"
        addr: int | None = None
        length: int = 0
        mw_access_flags: AccessFlags | int = 0
    return MWBindInfo


@_late
def MWBind():
    @_record
    class MWBind(_FrozenRecord):
        """A request to bind a window of type 1; see ibv_bind_mw(3).

        :param bind_info: an MWBindInfo: what to bind it to
        :param wr_id: any object; the completion has the same
        :param send_flags: SendFlags
        """
        bind_info: MWBindInfo
        wr_id: object = 0
        send_flags: SendFlags | int = core.SendFlags.SIGNALED
    return MWBind


def inc_rkey(uint32_t rkey):
    """The next key of a window of type 2. Only its lowest byte differs, which the program may choose."""
    return (rkey & 0xffffff00) | ((rkey + 1) & 0xff)


cdef MR bind_region(info):
    """The region of a binding; raise if it is closed."""
    cdef MR mr = info.mr
    if mr is None:
        raise TypeError(f"{shown(info)} names no memory region (mr)")
    mr.usable()
    return mr


cdef int check_binding(Context context, MW mw, info) except -1:
    """Raise if a window, or the region to bind it to, is closed or belongs to another context."""
    mw.usable()
    same_library(context, mw.pd.context)
    same_library(context, bind_region(info).pd.context)
    return 0


cdef int fill_bind_info(verbs.ibv_mw_bind_info *c, info) except -1:
    cdef MR mr = bind_region(info)
    c.mr = mr.ptr
    c.addr = mr.iova if info.addr is None else field(info, "addr", <uint64_t>-1)
    c.length = field(info, "length", <uint64_t>-1)
    c.mw_access_flags = field(info, "mw_access_flags", 0x7fffffff)
    return 0


@cython.no_gc_clear
cdef class MW(Resource):
    """A memory window.

    :param pd: the protection domain, which must be that of the region and of the queue pair that bind it
    :param mw_type: an MWType
    :ivar mr: the region that it was last bound to, or None
    :raises OSError: EOPNOTSUPP if the device has no windows of this type
    """

    cdef verbs.ibv_mw *ptr
    cdef readonly PD pd
    cdef readonly object mw_type
    cdef readonly MR mr          # the region that it was last bound to

    def __init__(self, PD pd not None, mw_type=verbs.IBV_MW_TYPE_1):
        cdef int rc, kind = mw_type
        self.unmade()
        pd.usable()
        with nogil:
            rc = verbs.rn_alloc_mw(pd.ptr, <verbs.ibv_mw_type>kind, &self.ptr)
        check(rc, f"ibv_alloc_mw({mw_type!r})")
        self.pd = pd
        self.mw_type = core.MWType(mw_type)
        pd.context.add_child()
        self.opened(MWS)

    def __dealloc__(self):
        self.drop()

    def __repr__(self):
        return f"<MW {self.mw_type.name}, rkey {self.ptr.rkey:#x}>" if self.is_here() else f"<MW{state_of(self)}>"

    cdef bint is_open(self) noexcept:
        return self.ptr is not NULL

    cdef int destroy(self) except -1:
        cdef verbs.ibv_mw *ptr = self.ptr
        cdef int rc
        self.ptr = NULL
        with nogil:
            rc = verbs.rn_dealloc_mw(ptr)
        if rc < 0:
            self.ptr = ptr
            check(rc, "ibv_dealloc_mw")
        self.mr = None
        self.pd.context.remove_child()
        self.destroyed()
        return 0

    @property
    def rkey(self):
        """Its key, for the peer. A window of type 1 has a new key after each binding."""
        self.usable()
        return self.ptr.rkey
