"""The C face of lifecycle.py."""

cimport cython

from rdmanet.stream.parts cimport Life


@cython.final
cdef class Lifecycle(Life):
    cpdef _close(self, object event)
    cdef _say_abort(self, object event, str reason)
    cdef _deliver_eof(self)
    cdef _end(self, int actions)
