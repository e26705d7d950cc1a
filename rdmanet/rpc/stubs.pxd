"""The C face of stubs.py."""

cimport cython

from rdmanet.rpc.coded cimport Coded
from rdmanet.rpc.pending cimport CallDetails


@cython.final
cdef class Options:
    cdef readonly object timeout, metadata, into, response
    cdef readonly bint wait


cdef class Bound:
    cdef readonly object _caller
    cdef readonly Options _options


@cython.locals(options=Options)
cdef _called(Coded method, bint streams_back, Bound client, object arguments, dict by_name)
