# Exports that are held for long.
#
# The collector takes apart a memoryview that is garbage, even while it is exported itself, and CPython crashes when
# that export ends. So of a memoryview the export of the object below is held, which keeps the same memory in its place.


cdef struct exported:
    char *first
    size_t length
    bint readonly


cdef int hold_export(object buffer, int flags, Py_buffer *held, exported *memory) except -1:
    """What PyObject_GetBuffer() says of a buffer's memory. `held` is to be released, and may say something else."""
    cdef Py_buffer below
    PyObject_GetBuffer(buffer, held, flags)
    memory.first, memory.length, memory.readonly = <char *>held.buf, <size_t>held.len, bool(held.readonly)
    if not PyMemoryView_Check(buffer) or buffer.obj is None:
        return 0
    try:
        PyObject_GetBuffer(buffer.obj, &below, PyBUF_SIMPLE)
    except Exception:       # its memory is not in one piece, for example: then the view has to do
        return 0
    if (
        <char *>below.buf <= memory.first
        and memory.first + memory.length <= <char *>below.buf + below.len
    ):
        PyBuffer_Release(held)
        held[0] = below
    else:
        PyBuffer_Release(&below)
    return 0
