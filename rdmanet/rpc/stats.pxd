"""The C face of stats.py."""

cimport cython


@cython.final
cdef class Counter:
    cdef public long long begun, ok, sent_bytes, received_bytes, lent_bytes
    cdef readonly dict failed
    cdef public double seconds
    cpdef count_failed(self, object code, double seconds)
