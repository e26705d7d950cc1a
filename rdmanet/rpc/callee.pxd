"""The C face of callee.py."""

cimport cython

from rdmanet.rpc.calls cimport CalleeBook
from rdmanet.rpc.coded cimport Coded
from rdmanet.rpc.executing cimport Executing
from rdmanet.rpc.framing cimport PlainCall, with_tail
from rdmanet.rpc.parting cimport Parting
from rdmanet.rpc.running cimport Running
from rdmanet.rpc.stats cimport Counter


cdef class Callee(Executing):
    cdef readonly object peer
    cdef str _service
    cdef list _methods, _counters
    cdef bint _is_builtin, _is_greeted
    cdef readonly object _keepalive
    cdef object _stream_bytes, _greeting
    cdef readonly Parting _parting
    cdef readonly dict _handlers
    cpdef _on_call(self, object message)
    cpdef _on_plain_call(self, PlainCall message)
    @cython.locals(running=Running, method=Coded, counter=Counter, book=CalleeBook, nbytes=cython.longlong,
                   received_bytes=cython.longlong, parting=Parting)
    cdef _take(self, object number, Py_ssize_t place, long long timeout_us, object raw_arguments, object raw_metadata,
               object memory, bint asks, bytes tail)
