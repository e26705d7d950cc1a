"""The C face of framing.pyx."""


cdef class Frames:
    cdef public double budget
    cdef readonly Py_ssize_t unfinished_bytes
    cdef object _decode
    cdef Py_ssize_t _message_bytes
    cdef Py_ssize_t _most
    cdef object _rest               # from _at on, it is still to be looked at
    cdef Py_ssize_t _at
    cdef object _body               # memory for a body of _length, of which _have bytes have come; or None
    cdef Py_ssize_t _length
    cdef Py_ssize_t _have
    cpdef list feed(self, data=*)
    cdef int _feed(self, list messages, data, const unsigned char *received, Py_ssize_t at, Py_ssize_t end) except -1
    cdef int _begin(self, received, Py_ssize_t length) except -1


cpdef bytes framed(bytes body)
