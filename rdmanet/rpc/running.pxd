"""The C face of running.py."""

cimport cython

from rdmanet.rpc.coded cimport Coded
from rdmanet.rpc.shares cimport Holder
from rdmanet.rpc.stats cimport Counter


@cython.final
cdef class Running(Holder):
    cdef readonly object number, function, call
    cdef readonly Coded method
    cdef readonly Counter counter
    cdef readonly double begun_at
    cdef public object task, code, received, sent, released, packed, threads
    cdef public list borrowed
    cdef public bint late, is_cancelled, taking, asks
