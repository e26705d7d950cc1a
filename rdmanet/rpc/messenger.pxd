"""The C face of messenger.py."""

cimport cython

from rdmanet.rpc.framing cimport Frames, Outbox, framed
from rdmanet.rpc.turns cimport Turns

cdef Py_ssize_t _COLLECT_BYTES


cdef class Messenger:
    cdef public object transport, peer, error
    cdef public bint paused, is_over, lends
    cdef public double heard_at
    cdef public Py_ssize_t longest, tail_bytes
    cdef readonly object loop, closed
    cdef readonly Turns turns
    cdef readonly Frames _framer
    cdef readonly dict _handlers
    cdef readonly Outbox _collected
    cdef public object _before
    cdef readonly bint _is_server
    cdef public object _on_unfinished
    cdef Py_ssize_t _unfinished_bytes
    cdef bint _is_reading, _has_had_turn, _in_turn, _had_one
    cpdef send(self, object message, object body=*)
    @cython.locals(length=Py_ssize_t)
    cpdef Py_ssize_t send_plain(self, bytes head, object value, bint is_alone) except -1
    @cython.locals(length=Py_ssize_t)
    cdef Py_ssize_t _send(self, bytes head, object body) except -1
    cdef _send_short(self, bytes head, bytes body)
    cpdef send_tailed(self, object message, object tail)
    cpdef _flush(self)
    cpdef _handle(self, object data=*)
