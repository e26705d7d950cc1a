"""The C face of beginning.py."""

cimport cython


@cython.final
cdef class _Beginning:
    pass
