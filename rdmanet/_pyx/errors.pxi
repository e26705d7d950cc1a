# Codes into exceptions.
#
# calls.h answers >= 0 or -errno for every call of the library; check() is the only place where that
# becomes an exception. OSError picks its own subclass by the number: TimeoutError, PermissionError...


cdef int check(int rc, str call) except -1:
    """rc, when it says success; otherwise raise what it says, naming the call."""
    if rc < 0:
        raise OSError(-rc, f"{call}: {strerror(-rc).decode()}")
    return rc


cdef object enum_of(object kind, int value):
    """The member of an enumeration, or the bare number where a device knows more than we do."""
    try:
        return kind(value)
    except ValueError:
        return value
