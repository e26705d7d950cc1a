"""The C face of channel.py."""

cimport cython

from rdmanet.rpc.framing cimport PlainReply, call_head
from rdmanet.rpc.pending cimport CallDetails, Pending
from rdmanet.rpc.unary cimport Calling, Unary


cdef class Channel(Calling):
    cdef readonly object schema, limits
    cdef public object refusal
    cdef readonly str service
    cdef object _refusal_code, _taken, _stream_bytes, _greeting, _keepalive_seconds, _most
    cdef readonly object _keepalive
    cdef list _numbers, _fitted
    cdef readonly dict _handlers
    cpdef _on_reply(self, object message)
    cpdef _on_plain_reply(self, PlainReply message)
    @cython.locals(pending=Pending)
    cdef _take(self, object number, object result, bint returned, object memory, object metadata, bytes tail)
    cpdef _begin(self, Pending pending, CallDetails call, object arguments, object memory=*, object inflow=*,
                 object outflow=*, bint apart=*, object tail=*)
