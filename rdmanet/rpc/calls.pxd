"""The C face of calls.py."""

cimport cython

cdef long long _LAST_NUMBER


@cython.final
cdef class CallerBook:
    cdef public Py_ssize_t calls_max, begun
    cdef readonly dict _calls
    cdef public long long _last
    cdef long long _after(self, long long number) noexcept
    @cython.locals(number=object)  # made once
    cpdef begin(self, object kind, object owner, object inflow=*, object outflow=*)
    cpdef reply(self, object number)


@cython.final
cdef class CalleeBook:
    cdef public Py_ssize_t calls_max, left
    cdef readonly dict calls, lending
    cpdef begin(self, object number, object kind, object owner, object inflow=*, object outflow=*)
