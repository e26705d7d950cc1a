"""The C face of teardown.py."""

cimport cython


@cython.final
cdef class Teardown:
    cdef public object state
    cdef public bint released
    cdef object _loop, _owner, _timer
    cpdef disconnect(self)
    cpdef release(self)
    cdef _receive(self, object event)
