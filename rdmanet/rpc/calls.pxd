"""The C face of calls.py."""

cimport cython


@cython.final
cdef class CallerBook:
    cdef public Py_ssize_t calls_max, begun
    cdef readonly dict _calls
    cdef public object _last
    cpdef begin(self, object kind, object owner, object inflow=*, object outflow=*)
    cpdef reply(self, object number)


@cython.final
cdef class CalleeBook:
    cdef public Py_ssize_t calls_max, left
    cdef readonly dict calls, lending
    cpdef begin(self, object number, object kind, object owner, object inflow=*, object outflow=*)
