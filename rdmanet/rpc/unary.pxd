"""The C face of unary.pyx."""

from cpython.object cimport PyObject

from rdmanet.rpc.calls cimport CallerBook
from rdmanet.rpc.coded cimport Coded
from rdmanet.rpc.messenger cimport Messenger
from rdmanet.rpc.pending cimport CallDetails, Pending
from rdmanet.rpc.turns cimport Turns


cdef class Calling:
    cdef readonly object loop
    cdef readonly Messenger link
    cdef readonly CallerBook book
    cdef readonly Turns _places     # of calls that wait until the book has room for one more
    cdef readonly object fetching
    cdef list _counters
    cpdef bint _is_full(self) except -1
    cpdef bint _has_to_wait(self, CallDetails call) except -1
    cpdef _begin(self, Pending pending, CallDetails call, object arguments, object memory=*, object inflow=*,
                 object outflow=*, bint apart=*, object tail=*)
    cpdef _gives_up(self, Pending pending)


cdef class Unary:
    cdef Coded _method
    cdef CallDetails _call          # until it begins, with the four that follow
    cdef object _arguments, _memory, _tail
    cdef bint _apart
    cdef Calling _calling           # until it begins, and while it waits for the answer
    cdef Pending _pending           # while it waits for the answer, with the two that follow
    cdef object _timer, _deadline
    cdef object _rest               # a coroutine that does all that is left
    cdef int step(self, value, PyObject **outcome) except -1
    cdef int _begins(self, value, PyObject **outcome) except -1
    cdef int _ends(self, PyObject **outcome) except -1
    cdef int _goes_on(self, value, PyObject **outcome) except -1
    cdef int _fails(self, error) except -1
    cdef int _forget(self) except -1
    cdef int _forget_call(self) except -1
