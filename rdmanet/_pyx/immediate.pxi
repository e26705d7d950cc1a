# Awaitables that mostly have their result at once: the base class of a StreamReader's reads and of drain().
#
# A coroutine costs a frame, and an exception for its result, also if it does not wait. An Immediate is asked for its
# result by way of its type's slots (am_send, tp_iternext), which `answer_at_once` sets. A subclass says in `begin` what
# the result is, or that it is not there yet: then `inner` is awaited, and `over` or `give_up` hears how that ended.

cdef extern from "Python.h":
    ctypedef struct PyAsyncMethods:
        int (*am_send)(PyObject *, PyObject *, PyObject **) except -1
    ctypedef struct PyTypeObject:
        PyObject *(*tp_iternext)(PyObject *) except? NULL
        PyAsyncMethods *tp_as_async
        unsigned long tp_flags
    void PyType_Modified(type)
    int PyIter_Send(object, PyObject *, PyObject **)
    void PyErr_SetObject(PyObject *, PyObject *) noexcept

cdef extern from *:
    """
    #ifdef _Py_TPFLAGS_HAVE_AM_SEND     /* CPython says by a flag that there is an am_send */
    #define HAS_AM_SEND _Py_TPFLAGS_HAVE_AM_SEND
    #else
    #define HAS_AM_SEND 0
    #endif
    """
    unsigned long HAS_AM_SEND

cdef object TURN = object()     # what begin() answers: go by way of the loop, and begin again
cdef object WAIT = object()     # await `inner`


@cython.no_gc_clear
cdef class Immediate:
    """An awaitable that mostly has its result at once, and else awaits another one. It is used once.

    It has a coroutine's methods, so tasks, wait_for() and gather() take it as one. The interpreter asks it by way of
    its type's slots, which are set below: neither a frame nor an exception is made for a result that is there.
    """

    cdef object inner           # the iterator of what it awaits
    cdef object error           # what `inner` raises: tasks throw that in again
    cdef bint begun, ended

    cdef object begin(self):
        """The result, or TURN, or WAIT with `inner` set."""
        raise NotImplementedError

    cdef int give_up(self) except -1:
        """It waited, and whoever awaited is gone."""
        return 0

    cdef int over(self) except -1:
        """It waited, and whoever awaited has the result, or the error."""
        return 0

    cdef int step(self, PyObject *value, PyObject **outcome) except -1:
        """1: `outcome` is for the loop. 0: it is the result."""
        cdef int state
        outcome[0] = NULL
        if self.ended:
            raise RuntimeError(f"cannot reuse already awaited {type(self).__name__}")
        if self.inner is None:
            self.begun = self.ended = True     # should it raise
            result = self.begin()
            if result is TURN:
                self.ended = False
                Py_INCREF(None)
                outcome[0] = <PyObject *>None
                return 1
            if result is not WAIT:
                Py_INCREF(result)
                outcome[0] = <PyObject *>result
                return 0
            self.ended = False
        state = PyIter_Send(self.inner, value, outcome)
        if state != 1:
            self.ended = True
            self.inner = None
        if state == 0:
            try:
                self.over()
            except BaseException:
                Py_DECREF(<object>outcome[0])
                outcome[0] = NULL
                raise
        return state    # -1: it has raised

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value):
        """As a coroutine's."""
        cdef PyObject *outcome
        cdef int state = self.step(<PyObject *>value, &outcome)
        result = <object>outcome
        Py_DECREF(result)
        if state == 0:
            raise StopIteration(result)
        return result

    def throw(self, kind, value=None, traceback=None):
        """As a coroutine's."""
        cdef bint over = True
        error = kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else kind()
        self.begun = True
        inner = self.inner
        try:
            if inner is None:
                raise error
            outcome = inner.throw(error)    # a future's raises it
            over = False
            return outcome
        finally:
            if over:
                self.ended = True
                if inner is not None:
                    self.inner = None
                    if error is self.error:
                        self.over()
                    else:
                        self.give_up()

    def close(self):
        """As a coroutine's."""
        inner, self.inner = self.inner, None
        self.begun = self.ended = True
        if inner is not None:
            self.give_up()
            inner.close()

    def __dealloc__(self):
        if not self.begun:
            warn_never_awaited(type(self).__name__)


cdef int warn_never_awaited(str name) noexcept:
    try:
        warnings.warn(f"{name} was never awaited", RuntimeWarning, stacklevel=1)
    except Warning as exc:      # they are errors, and nobody is there to catch one
        logger.error("%s", exc)
    return 0


cdef int immediate_send(PyObject *self, PyObject *value, PyObject **outcome) except -1:
    return (<Immediate>self).step(value, outcome)


cdef PyObject *immediate_next(PyObject *self) except? NULL:
    cdef PyObject *outcome
    if (<Immediate>self).step(<PyObject *>None, &outcome) == 1:
        return outcome
    if outcome != <PyObject *>None:     # without an exception it means StopIteration(None)
        PyErr_SetObject(<PyObject *>(<object>StopIteration), outcome)
    Py_DECREF(<object>outcome)
    return NULL


cdef int answer_at_once(type kind) except -1:
    """Give a kind of Immediate these for its slots."""
    cdef PyTypeObject *c = <PyTypeObject *>kind
    c.tp_iternext = immediate_next
    c.tp_as_async.am_send = immediate_send
    c.tp_flags |= HAS_AM_SEND
    PyType_Modified(kind)
    return 0
