# READs and WRITEs that have nothing to wait for, and lists of them, of memory that is known at both ends.
#
# A READ of 64 B takes the embedded device less than a microsecond, and took a program 13: for a look at a descriptor,
# an array's bytes, a list, a future, a pass, a turn of the loop. So this is one call for what is nearly always so: the
# descriptor's grant is the one that was used last, and is not revoked; the array lies in memory that this endpoint has
# registered, also that which was used last. Each is compared, and nothing is assumed.
#
# It knows no errors. Where anything is otherwise it says so, and has done nothing; then the general way
# (tensors/peer.py) is gone, which looks at everything again and says what is wrong.
#
# A few MiB are moved in several turns of the loop, as lists are, and what is longer by the device's thread.
#
# Only the embedded device has it for single requests. An adapter completes nothing while it is posted.
#
# In a list of short blocks, to look at each descriptor would take as long as its block. So what is said by one that is
# bytes is kept. And one that is an object is asked by the getters of its class, of which `Descriptor.offset` is one:
# Python would look it up again at each access.

cdef enum:
    READ_RIGHT = verbs.IBV_ACCESS_REMOTE_READ
    WRITE_RIGHT = verbs.IBV_ACCESS_REMOTE_WRITE
    KNOWN_MOST = 1 << 14            # descriptors that are bytes: a list has 10,000
    FEW_AT_ONCE = 8                 # so many chains are moved in turns of the loop: to wake another thread takes longer


@cython.final
cdef class _Said:
    """What a descriptor says, of the peer's memory."""

    cdef object grant, mode
    cdef uint64_t offset, nbytes
    cdef bint reads, writes


@cython.final
cdef class FastPath:
    """What a connection reads and writes at once; see the head of _pyx/fastpath.pxi.

    :param connection: it goes by this one
    :param endpoint: whose descriptors it takes
    :param descriptors: their class, whose `from_bytes` decodes them
    :param claimed: gives the peer's memory of a grant (an OfferedMemory), or None
    :param find: gives memory that is registered here (a Memory) by an address, a length, and whether it is written to;
        or None
    :param at_once: see Blocks, as for `piece`

    :ivar grant: of the peer's memory that was used last,
    :ivar memory: and ours
    """

    cdef Sender connection
    cdef object endpoint, claimed, find
    cdef uint64_t at_once, piece
    cdef bint executes              # the device executes requests while they are posted

    cdef object descriptors
    cdef dict known                 # what they say, by their bytes
    cdef _Said last                 # what the last one said that was no bytes
    cdef descrgetfunc get           # how their attributes are got, by these
    cdef object endpoint_of, grant_of, mode_of, offset_of, nbytes_of

    cdef readonly object grant
    cdef object region              # a RemoteRegion
    cdef uint64_t address, length
    cdef uint32_t rkey
    cdef int access

    cdef readonly object memory
    cdef uint64_t start, end
    cdef uint32_t lkey
    cdef bint is_readonly

    def __cinit__(self, Sender connection not None, endpoint, descriptors, claimed, find,
                  uint64_t at_once, uint64_t piece):
        self.connection = connection
        self.endpoint = endpoint
        self.descriptors = descriptors
        self.claimed = claimed
        self.find = find
        self.known = {}
        self.last = _Said.__new__(_Said)
        self.at_once = at_once
        self.piece = piece
        self.executes = connection.engine.pd.context.library.embedded_device
        self.endpoint_of, self.grant_of = descriptors.endpoint, descriptors.grant
        self.mode_of, self.offset_of, self.nbytes_of = descriptors.mode, descriptors.offset, descriptors.nbytes
        self.get = Py_TYPE(self.endpoint_of).tp_descr_get
        for each in (self.grant_of, self.mode_of, self.offset_of, self.nbytes_of):
            if self.get == NULL or Py_TYPE(each).tp_descr_get != self.get:
                raise TypeError(f"{descriptors!r} has no getters")

    def move(self, int opcode, descriptor, array):
        """Read or write one block, which has begun when this returns: a Blocks, mostly `done`.

        Returns None if the general way is to be gone.
        """
        cdef Blocks blocks
        if not self.executes or not self.connection.writable:   # it is being closed
            return None
        blocks = Blocks.__new__(Blocks, None, opcode, self.at_once, self.piece)
        try:
            if not self.add(blocks, descriptor, array) or not self.is_there():
                return None
        except (TypeError, OverflowError, BufferError, ValueError, OSError):
            return None
        blocks.go_on_at_once(self.connection)
        blocks.is_to_await = not blocks.done or self.connection.engine.turn_is_over()
        return blocks if blocks.done or blocks.posted else None

    def fill(self, Blocks blocks not None, list pairs not None):
        """Add pairs of a descriptor and an array to a list; returns which grants, and which memory of ours, it uses.

        Returns None if the general way is to be gone, with another list.
        """
        cdef dict grants = {}
        cdef set memories = set()
        grant = memory = None
        blocks.reserve(len(pairs))
        try:
            for descriptor, array in pairs:
                if not self.add(blocks, descriptor, array):
                    return None
                if self.grant is not grant or self.memory is not memory:
                    if not self.is_there():
                        return None
                    grant, memory = self.grant, self.memory
                    grants[grant] = None
                    memories.add(memory)
        except (TypeError, OverflowError, BufferError, ValueError, OSError):
            return None
        for memory in memories:     # an array may run a program's code when it is looked at
            if memory.is_closed:
                return None
        return grants, memories

    def forget(self, grant):
        """The peer's memory of this grant is not to be used any more."""
        if self.grant == grant:
            self.grant = self.region = None

    # -- one block -------------------------------------------------------------------------------------------

    cdef bint add(self, Blocks blocks, descriptor, array) except -1:
        """Add a block of what is known, whose end is to be looked at by `is_there`.

        Returns False, or raises what its callers catch, if a descriptor or an array is none, or not as it must be.
        """
        cdef bint reads = blocks.opcode == verbs.IBV_WR_RDMA_READ
        cdef _Said said
        cdef uint64_t here, length
        cdef Py_buffer c
        cdef bint few
        said = self.look(descriptor)
        if said is None or not (said.reads if reads else said.writes):
            return False
        PyObject_GetBuffer(array, &c, PyBUF_WRITABLE if reads else PyBUF_SIMPLE)
        here, length = <uint64_t>c.buf, <uint64_t>c.len
        PyBuffer_Release(&c)    # whoever calls has the array, and its registered memory holds an export
        if length == 0 or length != said.nbytes:
            return False
        if not self.has_theirs(said, reads) or not self.has_ours(here, said.nbytes, reads):
            return False
        few = self.executes and blocks.total + said.nbytes <= FEW_AT_ONCE * self.at_once
        blocks.append(here, self.address + said.offset, said.nbytes, self.lkey, self.rkey,
                      self.at_once if few else self.piece)
        return True

    cdef _Said look(self, descriptor):
        """What a descriptor says; None: it is of another endpoint's memory."""
        cdef _Said said
        if type(descriptor) is bytes:
            said = <_Said>self.known.get(descriptor)
            if said is None:
                said = self.read(self.descriptors.from_bytes(descriptor), _Said.__new__(_Said))
                if len(self.known) >= KNOWN_MOST:
                    self.known.clear()
                if said is not None:
                    if said.grant == self.grant:
                        said.grant = self.grant     # which the next one then has, too
                    self.known[descriptor] = said
            return said
        return self.read(descriptor, self.last) if type(descriptor) is self.descriptors else None

    cdef _Said read(self, descriptor, _Said said):
        endpoint = self.get(self.endpoint_of, descriptor, self.descriptors)
        if endpoint is not self.endpoint:
            if endpoint != self.endpoint:
                return None
            self.endpoint = endpoint    # the next one mostly has this object, too
        mode = self.get(self.mode_of, descriptor, self.descriptors)
        if mode is not said.mode:
            said.reads, said.writes = "r" in mode, "w" in mode
            said.mode = mode
        said.grant = self.get(self.grant_of, descriptor, self.descriptors)
        said.offset = self.get(self.offset_of, descriptor, self.descriptors)
        said.nbytes = self.get(self.nbytes_of, descriptor, self.descriptors)
        return said

    cdef bint has_theirs(self, _Said said, bint reads) except -1:
        """The peer's memory of a grant is here, and has these bytes for this."""
        if said.grant is not self.grant:
            if self.grant is None or said.grant != self.grant:
                remote = self.claimed(said.grant)
                if remote is None:
                    return False
                self.region = remote._region
                self.address, self.length, self.rkey, self.access = (
                    remote.address, remote.length, remote.rkey, remote.access)
            self.grant = said.grant
        return (
            self.access & (READ_RIGHT if reads else WRITE_RIGHT)
            and said.offset <= self.length and said.nbytes <= self.length - said.offset
        )

    cdef bint has_ours(self, uint64_t address, uint64_t nbytes, bint reads) except -1:
        """These bytes are in memory that is registered here."""
        if self.memory is None or address < self.start or address + nbytes > self.end or (reads and self.is_readonly):
            self.memory = None      # until its key is known, which may have to be made, and cannot be
            memory = self.find(address, nbytes, reads)
            if memory is None:
                return False
            self.start = memory.address
            self.end = self.start + <uint64_t>memory.nbytes
            self.lkey = memory.registered.region_in(self.connection.engine.pd).lkey
            self.is_readonly = memory.is_readonly
            self.memory = memory
        return True

    cdef bint is_there(self) except -1:
        """What was used last has not ended, at either end."""
        if self.memory.is_closed:
            self.memory = None
        return self.memory is not None and not self.region.revoked
