"""The C face of deadlines.py."""

cimport cython

from rdmanet.stream.machine cimport Machine
from rdmanet.stream.waits cimport Waits


@cython.final
cdef class Deadlines:
    cdef Waits _waits
    cdef Machine _machine
    cdef object _close_timeout, _owner
    cdef public object close, answer, first_word
    cdef public object _connection  # which a test replaces
    cpdef begin_close(self)
    cpdef end_first_word(self)
    cpdef disown(self)
