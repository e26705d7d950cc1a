"""The C face of first_steps.pyx."""

from rdmanet.rpc.running cimport Running


cdef class Spare:
    cdef object task, reference, wake, name
    cdef bint is_in_step, was_cancelled
    cdef object _loop
    cdef object _tasks_context      # in which it is woken
    cdef object _work               # the coroutine of the call whose task it has become
    cdef object _works_context
    cdef object _waits_for          # the future for which that waits
    cdef object _given              # what that waits for instead
    cdef bint _has_begun
    cdef bint _was_passed_on        # the cancel of the first step, to what the method waits for
    cdef public bint _asyncio_future_blocking
    cdef int take(self, work, context, yielded) except -1
    cdef int dismiss(self) except -1
    cdef int _wake_soon(self) except -1


cdef class FirstSteps:
    cdef object _loop, _task, _context
    cdef Spare _spare               # stands by, or is about to
    cdef Spare _entered             # in whose task this is now
    cdef Py_ssize_t _references, _weak_references
    cpdef bint enter(self, Running running) except -1
    cpdef first(self, coroutine)
    cpdef go_on(self, work)
    cpdef leave(self)


cdef class Rest:
    cdef object _coroutine, _yielded, _error
