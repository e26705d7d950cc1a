"""The C face of slots.py: what the data engine needs of it without a Python object."""

cimport cython
from libc.stdint cimport uint32_t

cdef uint32_t _LEAST, _MOST, _MASK


@cython.final
cdef class OurSlots:
    cdef readonly uint32_t size
    cdef readonly uint32_t posted, received
    cdef uint32_t _from
    cdef bint _waits, _shrinks

    cpdef int posted_some(self, uint32_t count) except -1
    cpdef int received_one(self) except -1
    cpdef bint may_change(self) noexcept
    cpdef bint wants_frames(self) noexcept
    cpdef uint32_t change(self, uint32_t size) except? 0xFFFFFFFF


@cython.final
cdef class PeerSlots:
    cdef readonly uint32_t limit
    cdef readonly uint32_t depth, sent
    cdef uint32_t _from, _next

    @cython.locals(ahead=uint32_t)
    cpdef int hear(self, uint32_t number, uint32_t size) except -1
    cpdef uint32_t sent_one(self) noexcept
