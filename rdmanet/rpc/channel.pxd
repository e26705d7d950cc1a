"""The C face of channel.py."""

cimport cython

from rdmanet.rpc.calls cimport CallerBook
from rdmanet.rpc.messenger cimport Messenger
from rdmanet.rpc.pending cimport CallDetails, Pending
from rdmanet.rpc.turns cimport Turns


cdef class Channel:
    cdef readonly object loop, schema, limits, fetching
    cdef readonly Messenger link
    cdef readonly CallerBook book
    cdef public object refusal
    cdef readonly str service
    cdef object _refusal_code, _taken, _stream_bytes, _greeting, _keepalive_seconds, _most
    cdef readonly object _keepalive
    cdef list _counters, _numbers, _fitted
    cdef readonly dict _handlers
    cdef readonly Turns _places
    @cython.locals(pending=Pending)
    cpdef _on_reply(self, object message)
    cpdef _begin(self, Pending pending, CallDetails call, object arguments, object memory=*, object inflow=*,
                 object outflow=*, bint apart=*, object tail=*)
