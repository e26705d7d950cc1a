# The log of a connection's sends: what each completion gives back.
#
# Each posted work request has an entry, by its sequence number: its kind, and the object, if there is one, that must
# live until the device is done with it (the caller's bytes, a one-sided operation). RC completes in order (where a
# device does not, it is told to: `behind_operations`), so a signaled completion retires all entries up to its own.
# References live until then, or until the queue pair is destroyed: never shorter.

cdef enum:
    OPERATION = 15              # in the log only: a work request that is no frame: one-sided, or about a key
    PLACING = 14                # the same: the WRITE ahead of a Placed frame
    LOG = 128                   # entries; more than the send queue is deep

cdef struct log_entry:
    uint32_t kind
    uint32_t length             # of what it carries
    PyObject *reference


@cython.final
@cython.no_gc_clear
cdef class SendLog:
    cdef log_entry entries[LOG]
    cdef uint32_t sequence      # of the next work request
    cdef uint32_t retired       # all before this one have completed

    def __dealloc__(self):
        # Only reached with references in it where nobody dropped them: the queue pair died with its connection.
        self.drop_references()

    cdef inline uint32_t next_low(self) noexcept:
        """The next work request's sequence number, for its wr_id."""
        return self.sequence & LOW_MASK

    cdef inline void posted(self, uint32_t kind, uint32_t length, object reference) noexcept:
        """The next work request is posted, or about to be."""
        cdef log_entry *entry = &self.entries[self.sequence % LOG]
        entry.kind = kind
        entry.length = length
        entry.reference = NULL
        if reference is not None:
            Py_INCREF(reference)
            entry.reference = <PyObject *>reference
        self.sequence += 1

    cdef inline uint32_t left(self) noexcept:
        """How many have not completed."""
        return self.sequence - self.retired

    cdef inline bint has_before(self, uint32_t low) noexcept:
        """Whether an entry is left that completes with the one of this sequence number."""
        return ((self.retired ^ (low + 1)) & LOW_MASK) != 0

    cdef inline uint32_t retire(self, uint32_t *length, PyObject **reference) noexcept:
        """Take the eldest entry out; returns its kind. `reference`, or NULL, is the caller's to release."""
        cdef log_entry *entry = &self.entries[self.retired % LOG]
        self.retired += 1
        length[0] = entry.length
        reference[0] = entry.reference
        entry.reference = NULL
        return entry.kind

    cdef object operation_at(self, uint32_t low):
        """The one-sided operation that this send is, or None."""
        cdef log_entry *entry = &self.entries[low % LOG]
        return <object>entry.reference if entry.kind == OPERATION and entry.reference != NULL else None

    cdef list take_operations(self):
        """The one-sided operations that have not completed, and now will not."""
        cdef uint32_t i
        cdef list operations = []
        for i in range(LOG):
            if self.entries[i].kind == OPERATION and self.entries[i].reference != NULL:
                operation = <object>self.entries[i].reference
                self.entries[i].reference = NULL
                Py_DECREF(operation)
                operations.append(operation)
        return operations

    cdef list take_loans(self):
        """The memory that was lent. The device reads it no more."""
        cdef uint32_t i
        cdef list loans = []
        for i in range(LOG):
            if self.entries[i].reference != NULL and type(<object>self.entries[i].reference) is Loan:
                loan = <object>self.entries[i].reference
                self.entries[i].reference = NULL
                Py_DECREF(loan)
                loans.append(loan)
        return loans

    cdef void drop_references(self) noexcept:
        cdef uint32_t i
        for i in range(LOG):
            if self.entries[i].reference != NULL:
                Py_DECREF(<object>self.entries[i].reference)
                self.entries[i].reference = NULL
