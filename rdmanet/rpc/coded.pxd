"""The C face of coded.py."""


cdef class Coded:
    cdef public object kind, exact, scale, stream
    cdef public str label, name
    cdef public list buffers
    cdef public Py_ssize_t number, count, bytes_at, weighed_bytes
    cdef public bint brings, result_brings, result_is_apart, result_is_buffer, result_is_array, result_is_memory
    cdef public bint is_limited
    cdef object _result, _result_scale
    cdef Py_ssize_t _weighed_result_bytes
    cpdef decode_result(self, object raw, object most)
    cpdef tailed_result(self, bytes raw, bytes tail, object most)
