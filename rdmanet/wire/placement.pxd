"""The C face of placement.py: what the data engine needs of it without a Python object."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

# placement.OVER for C; tests/unit/test_placement.py compares them.
cdef enum:
    WANT_OVER = 4

cdef uint32_t _FIXED, _NAMED, _SAID, _UNWANTED, _OVER, _WANTS_MAX, _SERIAL_MAX


@cython.final
cdef class PeerWant:
    cdef readonly uint32_t serial, rkey
    cdef readonly uint64_t position, address, length
    cdef readonly bint fixed


@cython.final
cdef class PeerWants:
    cdef readonly uint64_t position
    cdef readonly uint32_t count
    cdef readonly uint32_t answer_due
    cdef list _open
    cdef uint32_t _last, _unwanted
    cdef bint _finished

    cpdef int hear(self, tuple wants, uint32_t unwanted) except -1
    @cython.locals(serial=uint32_t, fixed=cython.bint, room=PeerWant)
    cdef int _hear_one(self, want) except -1
    cdef bint _is_passed(self, PeerWant want)
    @cython.locals(want=PeerWant)
    cpdef PeerWant current(self)
    cpdef uint64_t room(self, PeerWant want)
    cpdef uint64_t target(self, PeerWant want)
    cpdef int sent(self, uint64_t count) except -1
    @cython.locals(answer=uint32_t)
    cpdef uint32_t answered(self)
    cpdef int finish(self) except -1


@cython.final
cdef class OurWant:
    cdef readonly uint32_t serial, rkey
    cdef readonly uint64_t position, address, length
    cdef readonly bint fixed, used
    cdef readonly uint32_t state


@cython.final
cdef class OurWants:
    cdef readonly uint64_t position
    cdef readonly uint32_t count
    cdef readonly uint32_t unwant_due, unanswered
    cdef readonly uint64_t target, placed
    cdef list _open
    cdef uint32_t _last
    cdef bint _ended

    cpdef bint may_name(self, bint fixed)
    @cython.locals(last=OurWant, want=OurWant, position=uint64_t)
    cpdef OurWant name(self, uint64_t address, uint64_t length, bint fixed)
    @cython.locals(want=OurWant)
    cpdef OurWant next_to_say(self)
    cpdef say(self, OurWant want, uint32_t rkey)
    cpdef int drop(self, OurWant want) except -1
    @cython.locals(want=OurWant, said=cython.bint)
    cpdef int unwant(self) except -1
    @cython.locals(unwant=uint32_t)
    cpdef uint32_t unwanted(self)
    @cython.locals(want=OurWant)
    cpdef int hear(self, uint32_t answered) except -1
    cpdef int received(self, uint64_t count) except -1
    @cython.locals(want=OurWant)
    cpdef OurWant place(self, uint32_t serial, uint64_t upto)
    @cython.locals(want=OurWant)
    cpdef int end(self) except -1
    @cython.locals(want=OurWant)
    cdef int _pass(self) except -1
    @cython.locals(want=OurWant)
    cdef int _sweep(self) except -1
