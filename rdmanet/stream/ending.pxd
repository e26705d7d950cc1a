"""The C face of ending.py.

What is handed on as a callable (`lose`, `disconnect`, `steps_of_end`) is no C function: taking a reference to one makes
a function, each time. So are the methods that are steps of the end (`stop`, `over`, `detach`).
"""

from rdmanet.stream.parts cimport Life


cpdef leave_to_device(Life life)
cpdef tell_over(Life life)
cpdef end_now(Life life, object error)
cpdef loop_ended(Life life)
cdef _keep_received(Life life)
