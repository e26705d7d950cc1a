# Asynchronous events of a device: what happened, and to which object. Context.get_async_event() reads them.


@_late
def AsyncEvent():
    class AsyncEvent(_FrozenRecord):
        """An asynchronous event: what happened, and to which object; see ibv_get_async_event(3).

        :param event_type: an EventType
        :param qp: the queue pair concerned, if it is one of this program
        :param cq: the completion queue concerned, likewise
        :param srq: the shared receive queue concerned, likewise
        :param port_num: the port concerned
        """
        event_type: EventType
        qp: "QP | None" = None
        cq: "CQ | None" = None
        srq: "SRQ | None" = None
        port_num: int | None = None
        _names = __match_args__ = ("event_type", "qp", "cq", "srq", "port_num")
        __dataclass_fields__ = _LateFields()
    make_named_in(AsyncEvent)
    return AsyncEvent


cdef object event_of(kind, concerned=None, what=None):
    """An AsyncEvent, made without `dataclasses`: a client that has no descriptor left, or may read no file any more,
    hears of its device, too. If this raised OSError, the device would count as lost."""
    event = _FrozenRecord.__new__(core.AsyncEvent)
    event.__dict__["event_type"] = kind
    if concerned is not None:
        event.__dict__[concerned] = what
    return event


_QP_EVENTS = frozenset((
    verbs.IBV_EVENT_QP_FATAL, verbs.IBV_EVENT_QP_REQ_ERR, verbs.IBV_EVENT_QP_ACCESS_ERR, verbs.IBV_EVENT_COMM_EST,
    verbs.IBV_EVENT_SQ_DRAINED, verbs.IBV_EVENT_PATH_MIG, verbs.IBV_EVENT_PATH_MIG_ERR,
    verbs.IBV_EVENT_QP_LAST_WQE_REACHED,
))
_SRQ_EVENTS = frozenset((verbs.IBV_EVENT_SRQ_ERR, verbs.IBV_EVENT_SRQ_LIMIT_REACHED))
_PORT_EVENTS = frozenset((
    verbs.IBV_EVENT_PORT_ACTIVE, verbs.IBV_EVENT_PORT_ERR, verbs.IBV_EVENT_LID_CHANGE, verbs.IBV_EVENT_PKEY_CHANGE,
    verbs.IBV_EVENT_SM_CHANGE, verbs.IBV_EVENT_CLIENT_REREGISTER, verbs.IBV_EVENT_GID_CHANGE,
    verbs.IBV_EVENT_DEVICE_SPEED_CHANGE,
))
