"""The C face of executing.py."""

cimport cython

from rdmanet.rpc.answers cimport Answers, is_long
from rdmanet.rpc.calls cimport CalleeBook
from rdmanet.rpc.coded cimport Coded
from rdmanet.rpc.first_steps cimport FirstSteps, Rest
from rdmanet.rpc.messenger cimport Messenger
from rdmanet.rpc.running cimport Running
from rdmanet.rpc.shares cimport Share
from rdmanet.rpc.stats cimport Counter


cdef class Executing:
    cdef readonly object server, loop, limits
    cdef readonly Messenger link
    cdef readonly CalleeBook book
    cdef readonly Share share
    cdef bint _intercepts
    cdef set _running
    cdef Answers _answers
    cdef FirstSteps _first_steps
    cdef Running _newest
    cdef _begin(self, Running running, tuple arguments)
    @cython.locals(method=Coded)
    cdef bint _is_quick(self, Running running, tuple arguments) except -1
    @cython.locals(method=Coded)
    cdef bint _is_plain(self, Running running, tuple arguments) except -1
    @cython.locals(steps=FirstSteps, method=Coded)
    cdef bint _begins_at_once(self, Running running, tuple arguments) except -1
    cpdef _execute(self, Running running, tuple arguments, list buffers)
    @cython.locals(counter=Counter, seconds=double)
    cdef _has_ended(self, Running running)
