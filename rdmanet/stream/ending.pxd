"""The C face of ending.py.

What is handed on as a callable (`lose`) is no C function: taking a reference to one makes a function, each time. Nor
are the methods that are steps of the end (`stop`, `over`, `detach`).
"""

from rdmanet.stream.parts cimport Life


cpdef leave_to_device(Life life)
cpdef tell_over(Life life)
cpdef end_now(Life life, object error)
cpdef loop_ended(Life life)
cpdef disconnect(Life life)
cdef _keep_received(Life life)
cpdef list steps_of_end(Life life)
