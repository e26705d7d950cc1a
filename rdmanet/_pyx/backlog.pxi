# What was written and found no room in a frame, in order. The first chunk is perhaps taken in part.
#
# A chunk is a `bytes` object, or a Loan: memory of the program whose bytes are sent from where they lie. A program that
# lends memory that can change is told when it may change it again. So a Loan has an end: all of it is in frames (copied
# there, or read by the device from where it lies), and all frames that the device reads from it have completed.


@cython.final
cdef class Loan:
    cdef Py_buffer view         # the export that keeps the memory in its place
    cdef const char *data
    cdef size_t size
    cdef bint mutable           # the program waits for its end
    cdef bint taken             # all of it is in frames
    cdef uint32_t frames        # those that the device reads from here
    cdef AllocatedMemory memory     # that it is of, or None

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


cdef Loan loan_of(view):
    """All of a memoryview. Only an exact `bytes` object below it is memory that cannot change."""
    cdef Loan loan = Loan.__new__(Loan)
    cdef exported memory
    # A view of our own: the program may release its, and this one keeps the object from being resized.
    hold_export(PyMemoryView_FromObject(view), PyBUF_SIMPLE, &loan.view, &memory)
    loan.data, loan.size = memory.first, memory.length
    loan.mutable = not PyBytes_CheckExact(view.obj)
    loan.memory = memory_at(memory.first, memory.length)
    return loan


@cython.final
cdef class Backlog:
    cdef object chunks          # deque of bytes and Loans; None until there is one
    cdef size_t offset          # how much of the first is taken already
    cdef size_t size            # bytes in all that are left
    cdef uint32_t loans         # mutable ones, here or in flight, that have not ended
    cdef size_t lent            # bytes of these that the device reads, or may read
    cdef list spent             # Loans that are taken: their memory's finalizers may write, so not while we pump

    cdef inline object queue(self):
        if self.chunks is None:
            self.chunks = collections.deque()
        return self.chunks

    cdef inline int append(self, bytes chunk) except -1:
        self.queue().append(chunk)
        self.size += <size_t>PyBytes_GET_SIZE(chunk)
        return 0

    cdef int put_first(self, bytes chunk) except -1:
        """Bytes that come before all others."""
        if self.offset:
            self.split_first()
        self.queue().appendleft(chunk)
        self.size += <size_t>PyBytes_GET_SIZE(chunk)
        return 0

    cdef int split_first(self) except -1:
        """Make what is left of the first chunk a chunk of its own."""
        cdef const char *data
        cdef size_t left
        first = self.first(&data, &left)
        rest = PyBytes_FromStringAndSize(data, left)
        self.taken(first, left, left)
        self.chunks.appendleft(rest)
        self.size += left
        return 0

    cdef int append_loan(self, Loan loan) except -1:
        self.queue().append(loan)
        self.size += loan.size
        self.loans += loan.mutable
        return 0

    cdef inline object first(self, const char **data, size_t *left):
        """The first chunk, and what of it is left. There is one."""
        first = self.chunks[0]
        if type(first) is Loan:
            data[0] = (<Loan>first).data + self.offset
            left[0] = (<Loan>first).size - self.offset
        else:
            data[0] = PyBytes_AS_STRING(first) + self.offset
            left[0] = <size_t>PyBytes_GET_SIZE(first) - self.offset
        return first

    cdef inline int taken(self, object first, size_t n, size_t left) except -1:
        """`n` of the `left` bytes of the first chunk are in a frame."""
        self.size -= n
        if n == left:
            self.chunks.popleft()
            self.offset = 0
            if type(first) is Loan:
                if self.spent is None:
                    self.spent = []
                self.spent.append(first)
                (<Loan>first).taken = True
                self.look_for_end(first)
        else:
            self.offset += n
        return 0

    cdef int drop_last(self, size_t n) except -1:
        """Forget the last `n` bytes, of which none is of a Loan."""
        cdef size_t left
        self.size -= n
        while n:
            last = self.chunks.pop()
            left = <size_t>PyBytes_GET_SIZE(last) - (0 if self.chunks else self.offset)
            if left > n:
                self.chunks.append(PyBytes_FromStringAndSize(PyBytes_AS_STRING(last), PyBytes_GET_SIZE(last) - n))
                break
            n -= left
            if not self.chunks:
                self.offset = 0
        return 0

    # -- loans ------------------------------------------------------------------------------------------

    cdef inline void lend(self, Loan loan, size_t n) noexcept:
        """The device reads `n` bytes of it, which it is given in a frame."""
        loan.frames += 1
        if loan.mutable:
            self.lent += n

    cdef inline void give_back(self, Loan loan, size_t n) noexcept:
        """That frame has completed."""
        loan.frames -= 1
        if loan.mutable:
            self.lent -= n
        self.look_for_end(loan)

    cdef inline void look_for_end(self, Loan loan) noexcept:
        if loan.mutable and loan.taken and loan.frames == 0:
            self.loans -= 1

    cdef int let_go(self) except -1:
        """Drop the spent Loans; the send log keeps those that the device reads. Their memory's finalizers may write."""
        spent, self.spent = self.spent, None
        return 0

    cdef void forget_loans(self) noexcept:
        """The queue pair is gone: the device reads nothing."""
        self.loans = 0
        self.lent = 0

    cdef int clear(self) except -1:
        """Drop what is left. What the device reads goes on until it completes."""
        chunks, self.chunks = self.chunks, None
        self.size = self.offset = 0
        for chunk in chunks or ():
            if type(chunk) is Loan:
                (<Loan>chunk).taken = True
                self.look_for_end(chunk)
        return 0
