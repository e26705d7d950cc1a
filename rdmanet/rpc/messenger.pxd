"""The C face of messenger.py."""

from rdmanet.rpc.framing cimport Frames
from rdmanet.rpc.turns cimport Turns


cdef class Messenger:
    cdef public object transport, peer, error
    cdef public bint paused, is_over, lends
    cdef public double heard_at
    cdef public Py_ssize_t longest, tail_bytes
    cdef readonly object loop, closed
    cdef readonly Turns turns
    cdef readonly Frames _framer
    cdef readonly dict _handlers
    cdef readonly list _collected
    cdef public object _before
    cdef readonly bint _is_server
    cdef public object _on_unfinished
    cdef Py_ssize_t _unfinished_bytes, _collected_bytes
    cdef bint _is_reading, _has_had_turn, _in_turn, _had_one
    cpdef send(self, object message, object body=*)
    cpdef send_plain(self, bytes head, object value, bint is_alone)
    cdef Py_ssize_t _send(self, bytes head, object body) except -1
    cdef _send_short(self, bytes frame)
    cpdef send_tailed(self, object message, object tail)
    cpdef _flush(self)
    cpdef _handle(self, object data=*)
