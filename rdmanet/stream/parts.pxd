"""The C face of parts.py: the parts of a life as fields, so that those who use one need not look it up."""

cimport cython

from rdmanet.stream.callbacks cimport Callbacks
from rdmanet.stream.deadlines cimport Deadlines
from rdmanet.stream.establish cimport Endpoint
from rdmanet.stream.machine cimport Machine
from rdmanet.stream.teardown cimport Teardown
from rdmanet.stream.writing cimport WritingHalf


cdef class Life:
    cdef public object loop_context, loop, config, connection, known_regions, facts, readiness, on_made, on_over
    cdef public Machine machine
    cdef public Endpoint endpoint
    cdef public WritingHalf writing
    cdef public Callbacks callbacks
    cdef public Deadlines deadlines
    cdef public Teardown teardown
    cdef object __weakref__
    cpdef handle(self, object event)
    cpdef handle_error(self, object event, object error, str reason)
    cpdef close(self)
    cpdef callback_raised(self, object exc, str name)


cpdef tuple facts_now(Life life)
cpdef tuple plain_row(Life life)


@cython.locals(facts=dict, local=tuple, peer=tuple, numbers=list)
cdef tuple _said_now(Life life)
