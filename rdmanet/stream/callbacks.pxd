"""The C face of callbacks.py."""

cimport cython


@cython.final
cdef class Callbacks:
    cdef object _protocol, _protocol_was, _loop, _factory
    cdef public object context, transport
    cpdef make_protocol(self)
    cpdef connection_lost(self, object error)


cpdef bint is_buffered(object protocol)
