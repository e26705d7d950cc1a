"""The C face of parting.py."""

cimport cython


@cython.final
cdef class Parting:
    cdef public Py_ssize_t taken
    cdef public object refusal
    cdef object _link, _on_refusing, _timer, _asked
    cdef bint _is_ending
    cdef str _reason
