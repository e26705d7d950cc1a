# Requests that are awaited.
#
# An Operation is one request, or one chain, that somebody awaits. It is posted in one of two places, and stands there
# where its completion finds it without another table:
#
#     by an OperationQueue (awaited.pxi)   in the queue pair's in-flight table, where otherwise the user's wr_id does
#     on a connection of the byte stream,  in the connection's log of sends (sendlog.pxi)
#     beside its frames
#
# Nothing but its completion ends it, or the end of its queue pair: when the task that awaits is cancelled, the
# operation stays, and with it its buffers, until the device has no more to do with them. It ends once. Then it gives
# back what it held, and tells its future, unless that was cancelled or its loop is closed.

@cython.final
@cython.freelist(64)
@cython.no_gc_clear     # a queue pair that the collector destroys ends what is in flight on it
cdef class Operation:
    """One request, or one chain, that is awaited.

        operation = queue.write(...)
        return operation.result() if operation.done else await operation.wait()
    """

    cdef OperationQueue queue   # None beside a stream, and when it has ended
    cdef readonly bint done
    cdef bint posted, chain
    cdef list requests          # SendWRs or RecvWRs; none where a window of type 1 is bound
    cdef object binding         # (mw, MWBind), then
    cdef object future
    cdef uint64_t last          # the device's wr_id of the last request
    cdef Py_ssize_t due         # completions of a chain that were asked for and have not come
    cdef object value           # a WC, or a list of them
    cdef object error
    cdef MR cell_mr             # where an atomic operation's answer comes to
    cdef size_t cell
    cdef object closing         # to be closed when it has ended

    @staticmethod
    def beside(future, int opcode, sg_list, uint64_t remote_addr, uint32_t rkey, uint64_t compare_add=0,
               uint64_t swap=0):
        """A one-sided request on a connection of the byte stream; its post() posts it, its end() ends it.

        :param future: which is told of the end
        :param compare_add: for an atomic operation, as `swap` is: see SendWR
        """
        cdef Operation operation = operation_of([
            SendWR(opcode, sg_list, remote_addr=remote_addr, rkey=rkey, compare_add=compare_add, swap=swap)], False)
        operation.future = future
        return operation

    def post(self, connection, uint64_t total=0):
        """Post it beside the frames of a stream; False if there is no room now.

        :param total: it moves a part of so many bytes
        """
        return connection.post_operation(self, total)

    def end(self, error=None):
        """It has completed, or never will: then `error` says why. Doing it again does nothing."""
        if self.queue is not None:
            raise ValueError("this operation ends by its completion")
        self.fail(error)

    def failure(self, int status, uint32_t vendor_err, uint32_t qp_num):
        """The exception for its completion, which failed."""
        return self.error_of(0, status, vendor_err, qp_num, False)

    def wait(self):
        """The loop's future of its end: what result() returns or raises."""
        if self.future is None:
            if self.queue is None:
                raise ValueError("this operation has ended")
            self.future = self.queue.watcher.create_future()
        return self.future

    def close_after(self, resource):
        """Close what the device needs until this has ended: then, or now if it has."""
        if self.done:
            resource.close()
        else:
            self.closing = resource

    def result(self):
        """The completion, of a chain a list of them, of an atomic operation what was there before.

        :raises CompletionError: it failed, or the first of a chain that did
        """
        if not self.done:
            raise ValueError("this operation has not ended")
        if self.error is not None:
            raise self.error
        return self.value

    cdef inline Py_ssize_t count(self) noexcept:
        return 1 if self.requests is None else len(self.requests)

    cdef bint given_up(self) except -1:
        """Whether nobody awaits it any more."""
        return self.future is not None and self.future.done()

    cdef object name(self, Py_ssize_t i):
        if self.requests is None:
            return "BIND_MW"
        if not self.is_send():
            return "RECV"
        if not self.requests:
            return "send"   # the collector has emptied the list
        return getattr((<SendWR>self.requests[i]).opcode, "name", "send")

    cdef object remote(self, Py_ssize_t i):
        """(address, length, rkey) of the peer's memory, if that request accesses any."""
        return (<SendWR>self.requests[i]).remote() if self.requests and self.is_send() else None

    cdef inline bint is_send(self) noexcept:
        return self.queue is None or self.queue.sends

    cdef object error_of(self, Py_ssize_t i, int status, uint32_t vendor_err, uint32_t qp_num, bint peer_gone):
        return completion_error(status, self.name(i), vendor_err, qp_num, self.remote(i), peer_gone)

    cdef int ended(self, WC wc) except -1:
        """One of its requests has."""
        cdef Py_ssize_t n, i
        if self.done:
            return 0
        n = self.count()
        i = n - 1 - <Py_ssize_t>(((self.last >> POSITION_SHIFT) - (wc.c.wr_id >> POSITION_SHIFT)) & POSITION_MASK)
        wc.wr_id = 0 if self.requests is None else self.requests[i].wr_id
        if wc.c.status != verbs.IBV_WC_SUCCESS and self.error is None:
            self.error = self.error_of(i, wc.c.status, wc.c.vendor_err, wc.c.qp_num, wc.lost_its_peer())
        if self.chain:
            # The last is not always the last to complete: see _InFlight.
            self.value.append(wc)
            self.due -= self.is_due(i)
        elif self.cell_mr is not None:
            self.value = (<uint64_t *>(self.cell_mr.addr + self.cell))[0]
        else:
            self.value = wc
        if self.due == 0:
            self.finish()
        return 0

    cdef bint is_due(self, Py_ssize_t i) except -1:
        """Whether this request of a chain was to give a completion, and not only if it fails."""
        cdef SendWR wr = self.requests[i]
        return i == len(self.requests) - 1 or wr.c.send_flags & verbs.IBV_SEND_SIGNALED != 0

    cdef int lost(self) except -1:
        """The queue pair is gone, or was reset: there will be no completion."""
        if not self.done:
            self.fail(completion_error(verbs.IBV_WC_WR_FLUSH_ERR, self.name(0), 0, self.queue.qp_num))
        return 0

    cdef int fail(self, error) except -1:
        if not self.done:
            if self.error is None:
                self.error = error
            self.finish()
        return 0

    cdef int finish(self) except -1:
        cdef object future = self.future, closing = self.closing
        self.leave()
        # A cancelled future holds its exception, that the frame that awaited, and that us: a circle.
        self.future = None
        if closing is not None:
            try:
                closing.close()
            except Exception:
                logger.exception("%r cannot be closed, and leaks", closing)
        if future is None:
            return 0
        try:
            if future.done():
                return 0    # cancelled
            if self.error is None:
                future.set_result(self.value)
            else:
                future.set_exception(self.error)
        except RuntimeError:
            pass    # the loop is closed: nobody is left to be told
        except Exception:
            logger.exception("the end of an operation cannot be told to %r", future)
        return 0

    cdef int leave(self) except -1:
        """It is over: give back what it had of the queue."""
        self.done = True
        if self.queue is not None:
            self.queue.watcher.pending -= 1
            if self.cell_mr is not None:
                self.queue.cells.append((self.cell_mr, self.cell))
                self.cell_mr = None
            self.queue = None
        self.requests = None
        self.binding = None
        self.closing = None
        return 0


cdef inline Operation operation_of(list requests, bint chain):
    cdef Operation operation = Operation.__new__(Operation)
    cdef Py_ssize_t i
    operation.requests = requests
    operation.chain = chain
    if chain:
        operation.value = []
        for i in range(len(requests)):
            operation.due += operation.is_due(i)
    return operation


cdef inline int route_to_awaiter(CQ cq, object found, verbs.ibv_wc *c) except -1:
    """End the operation that has completed, or put the completion with those to be collected."""
    cdef WC wc = route_to_request(cq, c)
    cdef Operation operation
    if wc is None:
        return 0
    if type(wc.wr_id) is Operation:
        operation = wc.wr_id    # ended() takes it from there, and it may be the last one to hold it
        return operation.ended(wc)
    found.append(wc)
    return 0
