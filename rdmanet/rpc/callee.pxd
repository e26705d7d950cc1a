"""The C face of callee.py."""

cimport cython

from rdmanet.rpc.answers cimport Answers
from rdmanet.rpc.calls cimport CalleeBook
from rdmanet.rpc.coded cimport Coded
from rdmanet.rpc.messenger cimport Messenger
from rdmanet.rpc.parting cimport Parting
from rdmanet.rpc.running cimport Running
from rdmanet.rpc.shares cimport Share
from rdmanet.rpc.stats cimport Counter


cdef class Callee:
    cdef readonly object server, loop, limits, peer
    cdef readonly Messenger link
    cdef readonly CalleeBook book
    cdef readonly Share share
    cdef str _service
    cdef list _methods, _counters
    cdef bint _is_builtin, _intercepts, _is_greeted
    cdef readonly object _keepalive
    cdef object _stream_bytes, _greeting
    cdef readonly Parting _parting
    cdef set _running
    cdef readonly dict _handlers
    cdef Answers _answers
    @cython.locals(running=Running, method=Coded, counter=Counter, book=CalleeBook, calls=dict, nbytes=cython.longlong)
    cpdef _on_call(self, object message)
    cpdef _execute(self, Running running, tuple arguments, list buffers)
