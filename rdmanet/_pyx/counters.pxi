# What the embedded device counts, and the faults that it can inject.
#
# Only its library exports these functions; they are looked up by name. Other libraries have no counters.

cdef extern from "soft/base/counters.h" nogil:
    struct rn_counters:
        uint64_t send_wrs, recv_wrs, completions, bytes_mapped, bytes_cma, bytes_engine, bytes_local, bytes_inline
        uint64_t wakeups, syscalls, rnr_naks, deferred, queued, bytes_bounced, lost, duplicates, failed
        uint64_t bytes_stream, wrong_keys, bytes_shared
    struct rn_live:
        uint32_t contexts, pds, mrs, channels, cqs, qps, fds, mappings, peers, links, quarantined

ctypedef int (*context_counters_fn)(verbs.ibv_context *, rn_counters *) noexcept nogil
ctypedef int (*qp_counters_fn)(verbs.ibv_qp *, rn_counters *) noexcept nogil
ctypedef void (*live_fn)(rn_live *) noexcept nogil
ctypedef int (*faults_fn)(verbs.ibv_context *, const char *, char *, size_t) noexcept nogil
ctypedef int (*counted_fn)(verbs.ibv_context *, unsigned, char *, size_t, uint64_t *) noexcept nogil


cdef dict context_counters(Library library, verbs.ibv_context *context):
    cdef context_counters_fn call = <context_counters_fn>library.symbol("rdmanet_soft_counters")
    cdef rn_counters c
    if call is NULL:
        return {}
    check(-call(context, &c), "rdmanet_soft_counters")
    return c


cdef dict qp_counters(Library library, verbs.ibv_qp *qp):
    cdef qp_counters_fn call = <qp_counters_fn>library.symbol("rdmanet_soft_qp_counters")
    cdef rn_counters c
    if call is NULL:
        return {}
    check(-call(qp, &c), "rdmanet_soft_qp_counters")
    return c


cdef dict library_live(Library library):
    cdef live_fn call = <live_fn>library.symbol("rdmanet_soft_live")
    cdef rn_live c
    if call is NULL:
        return {}
    memset(&c, 0, sizeof(c))
    call(&c)
    return c


cdef int set_faults(Library library, verbs.ibv_context *context, str text) except -1:
    """Set faults: without a context, for the whole process; without a text, those of the environment."""
    cdef faults_fn call = <faults_fn>library.symbol("rdmanet_soft_chaos")
    cdef bytes encoded = None if text is None else text.encode()
    cdef const char *c_text = NULL
    cdef char why[512]
    cdef int rc
    if call is NULL:
        raise OSError(EOPNOTSUPP, f"set_faults: only the embedded device can inject faults, {library.name} cannot")
    if encoded is not None:
        c_text = encoded
    with nogil:
        rc = call(context, c_text, why, sizeof(why))
    if rc == EINVAL:
        raise ValueError(why.decode(errors="replace"))
    check(-rc, "rdmanet_soft_chaos")
    return 0


cdef dict counted_faults(Library library, verbs.ibv_context *context):
    """The faults of a context, or without one of the whole process: text to how often it has happened."""
    cdef counted_fn call = <counted_fn>library.symbol("rdmanet_soft_chaos_fault")
    cdef char text[256]
    cdef uint64_t happened = 0
    cdef int rc = 0
    cdef dict counts = {}
    cdef unsigned place = 0
    if call is NULL:
        return counts
    while True:
        with nogil:
            rc = call(context, place, text, sizeof(text), &happened)
        if rc == ENOENT:
            return counts
        check(-rc, "rdmanet_soft_chaos_fault")
        place += 1
        fault = text.decode(errors="replace")
        counts[fault] = counts.get(fault, 0) + happened


_NO_FAULT = "no-such-fault"


cdef str why_no_faults(Library library):
    """What is wrong with RDMANET_SOFT_CHAOS of the environment; "" if nothing.

    The device reports the first error of a text and does not set it. A fault that does not exist is appended, so that
    a correct text is not set either.
    """
    cdef str text = os.environ.get("RDMANET_SOFT_CHAOS", "")
    if text and library.embedded_device:
        try:
            set_faults(library, NULL, f"{text}, {_NO_FAULT}")
        except ValueError as exc:
            if not str(exc).startswith(_NO_FAULT):
                return f"RDMANET_SOFT_CHAOS: {exc}"
    return ""
