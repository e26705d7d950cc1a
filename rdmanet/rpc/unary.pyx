# cython: language_level=3, nonecheck=True, auto_pickle=False
"""A call that has one result, as its caller awaits it: without a coroutine, whose frame would be resumed each time.

Theory
------
A coroutine function that sends a message, awaits a future and returns what has come has a frame, to be made and resumed
for each call. `Unary` has none, and is what a coroutine is, for whoever awaits it: it has `send`, `throw` and `close`,
and a task can run it. Its first step begins the call, and gives the future; the next one is the last. If more has to be
awaited, before the call is sent or after its answer has come, a coroutine does that, to which this passes everything
on.

A task of CPython runs it by `am_send`. So does a coroutine that awaits it, and since Python 3.12 by `tp_iternext`.
Cython cannot define the first, and lets the second add a traceback to each StopIteration. So both are put into the type
here.
"""

import warnings
from asyncio import CancelledError

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF

from rdmanet.rpc.awaiting import fetched
from rdmanet.rpc.errors import late
from rdmanet.rpc.messages import Cancel, Release
from rdmanet.rpc.stats import ending_of

from rdmanet.rpc.stats cimport Counter

cdef extern from "Python.h":
    int PyIter_Send(object, PyObject *, PyObject **) except -1

cdef extern from *:
    """
    static sendfunc rn_unary_send;

    static PyObject *rn_unary_next(PyObject *self)
    {
        PyObject *outcome = NULL, *end;
        PySendResult state = rn_unary_send(self, Py_None, &outcome);

        if (state != PYGEN_RETURN)
            return outcome;
        if (outcome != Py_None && (end = PyObject_CallFunctionObjArgs(PyExc_StopIteration, outcome, NULL))) {
            PyErr_SetObject(PyExc_StopIteration, end);
            Py_DECREF(end);
        }
        Py_DECREF(outcome);
        return NULL;
    }

    static void rn_unary_slots(PyObject *type, void *send)
    {
        rn_unary_send = (sendfunc)send;
        ((PyTypeObject *)type)->tp_as_async->am_send = rn_unary_send;
        ((PyTypeObject *)type)->tp_iternext = rn_unary_next;
    }
    """
    void rn_unary_slots(object type, void *send)

cdef enum:
    RETURNS = 0                     # PYGEN_RETURN
    YIELDS = 1                      # PYGEN_NEXT


cdef class Calling:
    """What makes calls on a connection: when one may be sent, and what becomes of one that nobody waits for any more.

    channel.py has the rest.

    :ivar link: the protocol of the connection's transport
    :ivar book: its unfinished calls
    :ivar fetching: takes results that are not all in their messages
    """

    cpdef bint _is_full(self) except -1:
        """Whether a call that waits has to wait for another's end."""
        if len(self.book) >= self.book.calls_max:
            self._places.pause()
        return self._places.busy

    cpdef bint _has_to_wait(self, CallDetails call) except -1:
        """Whether the call has to wait for its turn before it can be sent."""
        return self.link.turns.busy or (call.waits and self._is_full())

    cpdef _begin(self, Pending pending, CallDetails call, object arguments, object memory=None, object inflow=None,
                 object outflow=None, bint apart=False, object tail=None):
        """Send it. Returns the timer of its deadline, or None."""
        raise NotImplementedError

    def _abandon(self, Pending pending):
        """Nobody waits for the call any more. False: its answer has come."""
        if not self.book.abandon(pending.number):
            return False
        self.link.send(Cancel(pending.number))
        return True

    def _time_is_over(self, Pending pending):
        if self._abandon(pending):
            pending.fail(late())

    cpdef _gives_up(self, Pending pending):
        """Its caller was cancelled."""
        if not self._abandon(pending) and pending.has_loan:
            self._release(pending.number)  # it came in this turn: nobody else will

    def _release(self, number):
        """The result of this call is not needed any more."""
        self.link.send(Release(number))


@cython.final
cdef class Unary:
    """A call that has one result. It begins when it is awaited.

    A task keeps its coroutine when that has ended. So this keeps of its call what is still to be used, and no more.

    :param arguments: as they are sent, with `memory`, `apart` and `tail` (Channel._begin)
    """

    def __init__(self, Calling calling, CallDetails call, arguments, memory=None, bint apart=False, tail=None):
        self._calling = calling
        self._method = call.method
        self._call = call
        self._arguments = arguments
        self._memory = memory
        self._apart = apart
        self._tail = tail

    cdef int step(self, value, PyObject **outcome) except -1:
        if self._pending is not None:
            return self._ends(outcome)
        if self._rest is not None:
            return self._goes_on(value, outcome)
        return self._begins(value, outcome)

    cdef int _begins(self, value, PyObject **outcome) except -1:
        cdef CallDetails call = self._call
        cdef Calling calling = self._calling
        cdef Pending pending
        if call is None:
            raise RuntimeError("cannot reuse already awaited coroutine")
        if value is not None:
            raise TypeError("can't send non-None value to a just-started coroutine")
        arguments, memory, tail = self._arguments, self._memory, self._tail
        self._forget_call()
        if calling._has_to_wait(call):
            self._rest = calling._call(call, arguments, (), memory, self._apart, tail)
            return self._goes_on(None, outcome)
        future = calling.loop.create_future()
        pending = Pending(self._method, future, calling._counters[self._method.number], call.into)
        self._timer = calling._begin(pending, call, arguments, memory, None, None, self._apart, tail)
        self._deadline = call.deadline
        self._calling, self._pending = calling, pending
        future._asyncio_future_blocking = True
        Py_INCREF(future)
        outcome[0] = <PyObject *>future
        return YIELDS

    cdef int _ends(self, PyObject **outcome) except -1:
        cdef Pending pending = self._pending
        cdef Calling calling = self._calling
        cdef Counter counter = pending.counter
        try:
            result = pending.future.result()
        except BaseException as exc:
            self._fails(exc)
            raise
        timer = self._timer
        self._forget()
        if pending.method.result_is_apart and type(result) is not bytes:
            self._rest = fetched(calling, pending, result, self._deadline, timer)
            return self._goes_on(None, outcome)
        counter.ok += 1
        counter.seconds += calling.link.heard_at - pending.begun_at
        if timer is not None:
            timer.cancel()
        Py_INCREF(result)
        outcome[0] = <PyObject *>result
        return RETURNS

    cdef int _goes_on(self, value, PyObject **outcome) except -1:
        return PyIter_Send(self._rest, <PyObject *>value, outcome)

    cdef int _fails(self, error) except -1:
        """Nobody waits for its answer any more, or that is this error."""
        cdef Pending pending = self._pending
        cdef Calling calling = self._calling
        timer = self._timer
        self._forget()
        if timer is not None:
            timer.cancel()
        pending.counter.count_failed(ending_of(error), calling.loop.time() - pending.begun_at)
        if isinstance(error, CancelledError):
            calling._gives_up(pending)
        return 0

    cdef int _forget(self) except -1:
        """It has ended, or `_rest` has what is left of it."""
        self._calling = self._pending = self._timer = None
        return 0

    cdef int _forget_call(self) except -1:
        """It has begun, or never will."""
        self._calling = self._call = self._arguments = self._memory = self._tail = None
        return 0

    # -- as a coroutine's ----------------------------------------------------------------------------------

    @property
    def __name__(self):
        return self._method.name

    @property
    def __qualname__(self):
        return self._method.label

    def __await__(self):
        if self._pending is not None or (self._rest is not None and self._rest.cr_await is not None):
            raise RuntimeError("coroutine is being awaited already")
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value):
        """As a coroutine's."""
        cdef PyObject *outcome = NULL
        cdef int state = self.step(value, &outcome)
        found = <object>outcome
        Py_DECREF(found)
        if state == RETURNS:
            raise StopIteration(found)
        return found

    def throw(self, kind, value=None, traceback=None):
        """As a coroutine's."""
        error = kind if isinstance(kind, BaseException) else value
        if not isinstance(error, BaseException):
            error = kind() if error is None else kind(error)
        if self._pending is None and self._rest is not None:
            return self._rest.throw(error)
        if self._pending is not None:
            self._fails(error)
        elif self._call is not None:
            self._forget_call()
        raise error

    def close(self):
        """As a coroutine's."""
        if self._pending is not None:
            self._fails(GeneratorExit())
        elif self._rest is not None:
            self._rest.close()
        elif self._call is not None:
            self._forget_call()

    def __del__(self):
        if self._call is not None:
            warnings.warn(f"coroutine '{self._method.label}' was never awaited", RuntimeWarning, stacklevel=1)
        elif self._pending is not None:
            self.close()


cdef int send(Unary self, object value, PyObject **outcome) except -1:
    outcome[0] = NULL
    return self.step(value, outcome)


rn_unary_slots(Unary, <void *>send)
