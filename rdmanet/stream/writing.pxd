"""The C face of writing.py."""

cimport cython

from rdmanet.stream.callbacks cimport Callbacks
from rdmanet.stream.machine cimport Machine


@cython.final
cdef class WritingHalf:
    cdef public bint eof_written
    cdef public int late_writes
    cdef object _loop, _connection, _owner, _half_closed
    cdef Machine _machine
    cdef Callbacks _callbacks
    cdef bint _reserved, _for_file
    cdef list _for_room
    cpdef bint waits_for_tls(self)
    cpdef tell_half_closed(self)
    cpdef disown(self)
    cdef _reserve(self, bint reserved)
    cdef _wake_until_room(self)
