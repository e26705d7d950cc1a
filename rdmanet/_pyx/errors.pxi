# Codes into exceptions.
#
# calls.h answers >= 0 or -errno for every call of the library; check() is the only place where that
# becomes an exception. OSError picks its own subclass by the number: TimeoutError, PermissionError...


cdef int check(int rc, str call) except -1:
    """rc, when it says success; otherwise raise what it says, naming the call."""
    if rc < 0:
        raise OSError(-rc, f"{call}: {strerror(-rc).decode()}")
    return rc


cdef int check_locked(int rc, str call, size_t length) except -1:
    """check(), for a call that locks memory: what it usually is that there is not enough of."""
    if rc != -ENOMEM:
        return check(rc, call)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "without limit" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    exc = OSError(ENOMEM, f"{call}: {strerror(ENOMEM).decode()}")
    exc.add_note(
        f"{length} bytes could not be registered. An adapter's memory is locked, and this process may lock {limit}: "
        "`ulimit -l unlimited`; for a service LimitMEMLOCK=infinity; for a container --ulimit memlock=-1. "
        "`python -m rdmanet doctor` says more")
    raise exc


cdef object enum_of(object kind, int value):
    """The member of an enumeration, or the bare number where a device knows more than we do."""
    try:
        return kind(value)
    except ValueError:
        return value
