"""The C face of turns.py."""


cdef class Turns:
    cdef readonly bint busy, _is_open
    cdef readonly object _waiting
    cdef object _loop
    cdef bint _is_over, _turn_ends
    cdef Py_ssize_t _woken, _back, _most


cdef class Rounds(Turns):
    cdef Py_ssize_t _budget, _left
