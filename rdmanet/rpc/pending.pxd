"""The C face of pending.py."""

cimport cython

from rdmanet.rpc.coded cimport Coded
from rdmanet.rpc.stats cimport Counter


@cython.final
cdef class CallDetails:
    cdef readonly Coded method
    cdef readonly tuple arguments
    cdef readonly object stream, deadline, metadata, into, response
    cdef readonly bint waits


@cython.final
cdef class Pending:
    cdef readonly Coded method
    cdef readonly object future, into
    cdef readonly Counter counter
    cdef public object number, received, sent, response
    cdef public Py_ssize_t place
    cdef public double begun_at
    cdef public bint returned
    cpdef fail(self, object error)
