"""The C face of establish.py."""

cimport cython


@cython.final
cdef class Endpoint:
    cdef public object role, id
    cdef public bint connecting, connected
    cdef readonly object _connection, _awaited
    cdef bint _was_connected
    cdef object _loop_context, _config, _owner, _cq, _waiter, _late, _hello
    cdef _check_device(self, object cm_id)
    cdef _request(self, object cm_id, object local)
    cpdef bint fail(self, object error)
    cpdef accept(self, object cm_id, object hello, object context)
    cpdef hello(self)
    cdef _new_hello(self)
    cpdef agree(self, object hello)
    cdef _prepare(self, object cm_id, object context, bint may_grow=*)
    cdef _begin_step(self, object awaited)
    cpdef heard_first(self)
    cdef bint _is_established_unsaid(self)
    cdef _step_done(self, object event, object owner, bint established)
    cpdef disown(self)
