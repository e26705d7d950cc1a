# cython: language_level=3, auto_pickle=False
"""The first step of a method: taken when its call comes, without a task of its own. Mostly it is the last one, too.

Theory
------
To make a task, to enter it among all tasks, to have the loop begin it, and to take it out again, costs more than a
short method does. So the first step of a method is taken at once, in a context of its own, and within a task that
stands by:

    it ends the method          the task stands by for the next call
    the method waits            the task has become that of the call, and waits for what the method waits for. Another
                                one is made, to stand by for later calls

For the method it is a task of its own: what `asyncio.current_task()` has told it in the first step goes on with it. If
the method has left its mark on a task that was to stand by, that task ends with the call, as any task of a call does:
it was cancelled, somebody has a reference to it, also a weak one, it has another name or attributes, or it is to call
somebody when it is done. While a task stands by, it is not among `asyncio.all_tasks()`: so `asyncio.run()` neither
cancels it nor waits for it. What differs is what a task says of itself: its `get_context()` is not the context in which
the method runs, and its `get_coro()` is a `Spare`, without a stack.

How a task stands by: a `Spare` is its coroutine, and the future for which that waits, too. As a future it is given the
callback that wakes the task. When a method waits, it gives that to the future for which the method waits.
"""

import asyncio
from weakref import getweakrefcount, ref

from cpython.contextvars cimport PyContext_CopyCurrent, PyContext_Enter, PyContext_Exit, PyContextVar_Set
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF

from rdmanet.rpc.context import CURRENT
from rdmanet.rpc.running cimport Running

cdef extern from "Python.h":
    int PyIter_Send(object, PyObject *, PyObject **) except -1
    bint PyCoro_CheckExact(object)
    PyObject **_PyObject_GetDictPtr(object)
    Py_ssize_t Py_REFCNT(object)

cdef object enter_task = asyncio.tasks._enter_task
cdef object leave_task = asyncio.tasks._leave_task
cdef object register_task = asyncio.tasks._register_task
cdef object unregister_task = asyncio.tasks._unregister_task
# A task that is in its first step is entered among all tasks more cheaply, since Python 3.12. Before that there are
# functions of Python around a set of weak references.
cdef object register_first = getattr(asyncio.tasks, "_register_eager_task", None)
cdef object unregister_first = getattr(asyncio.tasks, "_unregister_eager_task", None)
cdef set all_tasks = asyncio.tasks._all_tasks.data if register_first is None else None

cdef object NOTHING = object()


cdef class FirstSteps:
    """Takes the first steps of a server's methods, one after another.

    :param loop: it runs them
    """

    def __init__(self, loop):
        self._loop = loop

    def __dealloc__(self):
        if self._spare is not None:
            self._spare.task = self._spare.wake = None  # which has the task, and that has the spare

    cpdef bint enter(self, Running running) except -1:
        """Begin a call, whose task and context are the current ones from now on. False: there is no task for it now."""
        cdef Spare spare = self._spare
        if self._loop.get_task_factory() is not None:
            return False  # it is to make the tasks
        if spare is None:
            self._spare = Spare(self._loop)
            return False
        if spare.wake is None or spare.is_in_step:
            return False
        task, name, context = spare.task, running.method.label, PyContext_CopyCurrent()
        if spare.name is not name:
            task.set_name(name)
            spare.name = name
        try:
            enter_task(self._loop, task)
        except RuntimeError:  # this is within a task
            return False
        PyContext_Enter(context)
        try:
            PyContextVar_Set(CURRENT, running.call)
            if all_tasks is None:
                register_first(task)
            else:
                all_tasks.add(spare.reference)
        except BaseException:
            PyContext_Exit(context)
            leave_task(self._loop, task)
            raise
        self._entered, self._task, self._context = spare, task, context
        spare.is_in_step = True
        running.task = task
        self._references, self._weak_references = Py_REFCNT(task), getweakrefcount(task)
        return True

    cpdef first(self, coroutine):
        """Take the first step of a method. Returns its result, or a `Rest`, which is to be awaited."""
        cdef PyObject *outcome = NULL
        cdef int state
        if not PyCoro_CheckExact(coroutine):
            iterator = coroutine.__await__()
            return Rest(iterator if hasattr(iterator, "send") else generator_of(iterator))
        state = PyIter_Send(coroutine, <PyObject *>None, &outcome)
        result = <object>outcome
        Py_DECREF(result)
        return result if state == 0 else Rest(coroutine, result)

    cpdef go_on(self, work):
        """Run the coroutine of the call, until it waits for something: from then on the task runs it."""
        cdef PyObject *outcome = NULL
        cdef int state
        try:
            state = PyIter_Send(work, <PyObject *>None, &outcome)
        except BaseException as exc:
            self._spare = None
            self._entered.take(Rest(None, NOTHING, exc), self._context, None)  # the loop is to hear of it
            return
        yielded = <object>outcome
        Py_DECREF(yielded)
        if state == 1:
            self._spare = None
            self._entered.take(work, self._context, yielded)

    cpdef leave(self):
        """The first step is over."""
        cdef Spare spare = self._entered
        task, context = self._task, self._context
        is_marked = self._spare is spare and (
            spare.was_cancelled
            or Py_REFCNT(task) != self._references
            or getweakrefcount(task) != self._weak_references
            or has_attributes(task)
            or task._callbacks is not None
            or task.get_name() is not spare.name
        )
        self._task = self._entered = self._context = None
        spare.is_in_step = False
        PyContext_Exit(context)
        leave_task(self._loop, task)
        if all_tasks is None:
            unregister_first(task)
        else:
            all_tasks.discard(spare.reference)
        if is_marked:
            self._spare = None
            spare.dismiss()
        if self._spare is not spare:
            register_task(task)
            task._log_destroy_pending = True


cdef class Spare:
    """A task that stands by: it is the coroutine that this runs, and the future for which this waits.

    :ivar wake: wakes the task; None: it does not stand by
    """

    def __init__(self, loop):
        self._loop = loop
        self._given = NOTHING
        self._asyncio_future_blocking = True
        task = self.task = asyncio.Task(self, loop=loop)
        task._log_destroy_pending = False
        if all_tasks is not None:
            self.reference = ref(task, all_tasks.discard)  # weak references with a callback are not shared, so count
            hash(self.reference)  # it keeps this; the callback, which looks for it in the set, comes after the task
        unregister_task(task)

    cdef int take(self, work, context, yielded) except -1:
        """The task has become that of a call, whose coroutine waits for this."""
        self._work, self._works_context, self.is_in_step = work, context, False
        if getattr(yielded, "_asyncio_future_blocking", None) and yielded is not self.task:
            if hasattr(yielded, "get_loop") and yielded.get_loop() is self._loop:
                yielded._asyncio_future_blocking = False
                yielded.add_done_callback(self.wake, context=self._tasks_context)
                self.wake, self._waits_for = None, yielded
                if self.task._must_cancel:  # it was cancelled in its first step
                    self._was_passed_on = yielded.cancel(msg=self.task._cancel_message)
                self.task = None  # which has the spare
                return 0
        if yielded is not None:
            self._given = yielded  # asyncio says what is wrong with it
        return self._wake_soon()

    cdef int dismiss(self) except -1:
        """End the task."""
        return self._wake_soon()

    cdef int _wake_soon(self) except -1:
        self._loop.call_soon(self.wake, self, context=self._tasks_context)
        self.wake = self.task = None  # which has the spare
        return 0

    # -- the task's coroutine ------------------------------------------------------------------------------

    @property
    def __name__(self):
        return "method"

    @property
    def __qualname__(self):
        return "method"

    def __await__(self):
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value):
        """As a coroutine's."""
        if not self._has_begun:
            self._has_begun = True
            return self  # as the future for which the task waits
        if self._given is not NOTHING:
            given, self._given = self._given, NOTHING
            return given
        self._waits_for, self._was_passed_on = None, False
        if self._work is None:
            raise StopIteration
        PyContext_Enter(self._works_context)
        try:
            return self._work.send(value)
        finally:
            PyContext_Exit(self._works_context)

    def throw(self, kind, value=None, traceback=None):
        """As a coroutine's."""
        waited, self._waits_for, self._given = self._waits_for, None, NOTHING
        error = error_of(kind, value)
        if self._was_passed_on and waited.done():  # the task cannot forget that it was cancelled: what came of it?
            try:
                waited.result()
            except BaseException as exc:
                error = exc
            else:
                return self.send(None)
        self._was_passed_on = False
        if self._work is None:
            raise error
        PyContext_Enter(self._works_context)
        try:
            return self._work.throw(error)
        finally:
            PyContext_Exit(self._works_context)

    def close(self):
        """As a coroutine's."""
        if self._work is not None:
            self._work.close()

    # -- the future for which the task waits ---------------------------------------------------------------

    def get_loop(self):
        """As a future's."""
        return self._loop

    def add_done_callback(self, wake, *, context):
        """As a future's: the task stands by."""
        self.wake, self._tasks_context = wake, context

    def cancel(self, msg=None):
        """As a future's. False: the task remembers it, and raises it where the method waits."""
        self.was_cancelled = True
        if self._waits_for is not None and self._waits_for.cancel(msg=msg):
            return True
        self._was_passed_on = False
        return False

    def result(self):
        """As a future's."""


cdef class Rest:
    """What is to be awaited of a method whose first step has been taken.

    :param coroutine: its iterator
    :param yielded: what that has yielded, if it waits
    :param error: what the method has raised
    """

    def __init__(self, coroutine, yielded=NOTHING, error=None):
        self._coroutine = coroutine
        self._yielded = yielded
        self._error = error

    def __await__(self):
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value):
        """As a coroutine's."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._yielded is not NOTHING:
            yielded, self._yielded = self._yielded, NOTHING
            return yielded
        return self._coroutine.send(value)

    def throw(self, kind, value=None, traceback=None):
        """As a coroutine's."""
        self._yielded = NOTHING
        error = error_of(kind, value)
        if self._coroutine is None:
            raise error
        return self._coroutine.throw(error)

    def close(self):
        """As a coroutine's."""
        if self._coroutine is not None:
            self._coroutine.close()


def generator_of(iterator):
    """What is awaited may have an iterator that is no more than that."""
    return (yield from iterator)


cdef bint has_attributes(task) except -1:
    """Whether attributes have been given to a task. In Python 3.14 each has a dictionary once that is looked for."""
    cdef PyObject **attributes = _PyObject_GetDictPtr(task)
    return attributes != NULL and attributes[0] != NULL and len(<dict>attributes[0]) > 0


cdef object error_of(kind, value):
    if isinstance(kind, BaseException):
        return kind
    return value if isinstance(value, BaseException) else kind() if value is None else kind(value)
