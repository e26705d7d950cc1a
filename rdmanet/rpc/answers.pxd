"""The C face of answers.py."""

cimport cython

from rdmanet.rpc.calls cimport CalleeBook
from rdmanet.rpc.coded cimport Coded
from rdmanet.rpc.framing cimport reply_head
from rdmanet.rpc.messenger cimport Messenger
from rdmanet.rpc.running cimport Running
from rdmanet.rpc.shares cimport Share


cpdef bint is_long(Coded method, object result) except -1


@cython.final
cdef class Answers:
    cdef public Share share
    cdef Messenger _link
    cdef object _limits
    cdef CalleeBook _book
    @cython.locals(calls=dict, link=Messenger)
    cpdef send_plain(self, Running running, object result)
