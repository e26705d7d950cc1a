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

cdef enum:
    READ_RIGHT = verbs.IBV_ACCESS_REMOTE_READ
    WRITE_RIGHT = verbs.IBV_ACCESS_REMOTE_WRITE
    KNOWN_MOST = 256                # descriptors
    FEW_AT_ONCE = 8                 # so many chains are moved in turns of the loop: to wake another thread takes longer


@cython.final
cdef class FastPath:
    """What a connection reads and writes at once; see the head of _pyx/fastpath.pxi.

    :param connection: it goes by this one
    :param endpoint: whose descriptors it takes
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
    cdef dict known                 # what descriptors say, by their bytes
    cdef bint executes              # the device executes requests while they are posted

    cdef readonly object grant
    cdef object region              # a RemoteRegion
    cdef uint64_t address, length
    cdef uint32_t rkey
    cdef int access

    cdef readonly object memory
    cdef uint64_t start, end
    cdef uint32_t lkey
    cdef bint is_readonly

    def __cinit__(self, Sender connection not None, endpoint, claimed, find, uint64_t at_once, uint64_t piece):
        self.connection = connection
        self.endpoint = endpoint
        self.claimed = claimed
        self.find = find
        self.known = {}
        self.at_once = at_once
        self.piece = piece
        self.executes = connection.engine.pd.context.library.embedded_device

    def move(self, int opcode, descriptor, array):
        """Read or write one block, which has begun when this returns: a Blocks, mostly `done`.

        Returns None if the general way is to be gone.
        """
        cdef Blocks blocks
        if not self.executes or not self.connection.writable:   # it is being closed
            return None
        blocks = Blocks.__new__(Blocks, None, opcode, self.at_once, self.piece)
        if not self.add(blocks, descriptor, array):
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
        for descriptor, array in pairs:
            if not self.add(blocks, descriptor, array):
                return None
            if self.grant is not grant:
                grant = self.grant
                grants[grant] = None
            if self.memory is not memory:
                memory = self.memory
                memories.add(memory)
        return grants, memories

    def learn(self, bytes encoded not None, descriptor):
        """These bytes are that descriptor."""
        if len(self.known) >= KNOWN_MOST:
            self.known.clear()
        self.known[encoded] = descriptor

    def forget(self, grant):
        """The peer's memory of this grant is not to be used any more."""
        if self.grant == grant:
            self.grant = self.region = None

    # -- one block -------------------------------------------------------------------------------------------

    cdef bint add(self, Blocks blocks, descriptor, array) except -1:
        cdef bint reads = blocks.opcode == verbs.IBV_WR_RDMA_READ
        cdef uint64_t offset, nbytes, here
        cdef Py_buffer c
        cdef bint few
        if type(descriptor) is bytes:
            descriptor = self.known.get(descriptor)
            if descriptor is None:
                return False
        try:
            endpoint = descriptor.endpoint
            if endpoint is not self.endpoint and endpoint != self.endpoint:
                return False
            if ("r" if reads else "w") not in descriptor.mode:
                return False
            offset = descriptor.offset
            nbytes = descriptor.nbytes
            grant = descriptor.grant
            PyObject_GetBuffer(array, &c, PyBUF_WRITABLE if reads else PyBUF_SIMPLE)
        except (AttributeError, TypeError, OverflowError, BufferError, ValueError):
            return False
        here = <uint64_t>c.buf
        if nbytes == 0 or <uint64_t>c.len != nbytes:
            PyBuffer_Release(&c)
            return False
        PyBuffer_Release(&c)    # whoever calls has the array, and its registered memory holds an export
        if not self.has_theirs(grant, reads, offset, nbytes) or not self.has_ours(here, nbytes, reads):
            return False
        few = self.executes and blocks.total + nbytes <= FEW_AT_ONCE * self.at_once
        blocks.append_pieces(here, self.address + offset, nbytes, self.lkey, self.rkey,
                             self.at_once if few else self.piece)
        return True

    cdef bint has_theirs(self, grant, bint reads, uint64_t offset, uint64_t nbytes) except -1:
        """The peer's memory of a grant is here, and has these bytes for this."""
        if self.grant is None or (grant is not self.grant and grant != self.grant):
            remote = self.claimed(grant)
            if remote is None:
                return False
            self.grant, self.region = grant, remote._region
            self.address, self.length, self.rkey, self.access = (
                remote.address, remote.length, remote.rkey, remote.access)
        return (
            not self.region.revoked and self.access & (READ_RIGHT if reads else WRITE_RIGHT)
            and offset <= self.length and nbytes <= self.length - offset
        )

    cdef bint has_ours(self, uint64_t address, uint64_t nbytes, bint reads) except -1:
        """These bytes are in memory that is registered here."""
        if self.memory is not None and self.memory.is_closed:
            self.memory = None
        if self.memory is None or address < self.start or address + nbytes > self.end or (reads and self.is_readonly):
            self.memory = self.find(address, nbytes, reads)
            if self.memory is None:
                return False
            self.start = self.memory.address
            self.end = self.start + <uint64_t>self.memory.nbytes
            self.lkey = self.memory.registered.region_in(self.connection.engine.pd).lkey
            self.is_readonly = self.memory.is_readonly
        return True
