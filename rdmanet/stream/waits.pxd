"""The C face of waits.py."""

cimport cython


@cython.final
cdef class Wait:
    cdef public dict line
    cdef public object over, call, arguments
    cpdef cancel(self)


@cython.final
cdef class Waits:
    cdef object _loop, _timer, _timer_at
    cdef readonly dict _lines
    cdef dict _due
    cdef bint _has_timers
