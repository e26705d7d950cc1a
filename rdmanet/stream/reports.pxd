"""The C face of reports.py."""

cimport cython

from rdmanet.stream.parts cimport Life


@cython.final
cdef class Reports:
    cdef Life _life
    cdef readonly object facts
