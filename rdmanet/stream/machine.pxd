"""The C face of machine.py: the machine's fields without a table of attributes."""

cimport cython


@cython.final
cdef class Machine:
    cdef public object state, writing, told, error
    cpdef object receive(self, object event, object error=*)
    cpdef object tell(self, object event)
