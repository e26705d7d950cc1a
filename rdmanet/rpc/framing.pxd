"""The C face of framing.pyx."""

cimport cython
from libc.stdint cimport uint64_t


cdef class Frames:
    cdef public double budget
    cdef readonly Py_ssize_t unfinished_bytes
    cdef public bint gives_plain
    cdef object _decode
    cdef Py_ssize_t _message_bytes
    cdef Py_ssize_t _most
    cdef object _rest               # from _at on, it is still to be looked at
    cdef Py_ssize_t _at
    cdef object _body               # memory for a body of _length, of which _have bytes have come; or None
    cdef bytes _head, _tail         # of a body that has a tail: what is before it, and it, whose memory _body is
    cdef Py_ssize_t _length
    cdef Py_ssize_t _have
    cpdef list feed(self, data=*)
    cdef int _feed(self, list messages, data, const unsigned char *received, Py_ssize_t at, Py_ssize_t end) except -1
    cdef int _begin(self, data, const unsigned char *received, Py_ssize_t at, Py_ssize_t end,
                    Py_ssize_t length) except -1


@cython.final
cdef class Outbox:
    cdef readonly Py_ssize_t nbytes
    cdef Py_ssize_t _size, _usual   # of the object, and of the one before
    cdef bytes _bytes               # ours alone
    cpdef put(self, bytes head, bytes body)
    cpdef bytes take(self)
    cpdef clear(self)


@cython.final
@cython.freelist(64)
cdef class PlainCall:
    cdef readonly object number, arguments
    cdef readonly bytes tail
    cdef readonly Py_ssize_t method
    cdef readonly long long timeout_us


@cython.final
@cython.freelist(64)
cdef class PlainReply:
    cdef readonly object number, result
    cdef readonly bytes tail


cpdef bytes framed(bytes body, bytes head=*)
cpdef bytes call_head(uint64_t number, uint64_t method, timeout_us)
cpdef bytes reply_head(uint64_t number)
cpdef bytes with_tail(bytes value, bytes tail)
