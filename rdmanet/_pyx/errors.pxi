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
        "`rdmanet doctor` says more")
    raise exc


cdef int check_kernel(int rc, str call) except -1:
    """check(), for the calls that a device of the kernel's begins with: what it usually is that they lack."""
    if rc >= 0:
        return rc
    exc = OSError(-rc, f"{call}: {strerror(-rc).decode()}")
    if exc.errno in (EACCES, EPERM):
        exc.add_note("This user may not open the device's nodes: `ls -l /dev/infiniband`. `chmod 666 /dev/infiniband/*`"
                     " or udev's rules (`apt-get install rdma-core`). `rdmanet doctor` says more")
    elif exc.errno in (ENOSYS, ENODEV, ENOENT):
        exc.add_note("The kernel has no RDMA, or it is not loaded: `modprobe -a ib_uverbs rdma_ucm`; a container needs "
                     "--device=/dev/infiniband. `rdmanet doctor` says more")
    raise exc


cdef object enum_of(object kind, int value):
    """The member of an enumeration; UNKNOWN_n, which is none of them, where a device knows more than we do."""
    try:
        return kind(value)
    except ValueError:
        member = int.__new__(kind, value)
        member._name_, member._value_ = f"UNKNOWN_{value}", value
        return member


cdef int read_size(object value, str what, object error, size_t *size) except -1:
    """A number of bytes, of an argument; `error` if there cannot be so many."""
    cdef object number = PyNumber_Index(value)
    try:
        size[0] = number
    except OverflowError:
        raise error(f"{what} {value} is {'negative' if number < 0 else 'more than an address can be'}") from None
    return 0


cdef object field(object record, str name, uint64_t most, bint optional=False):
    """A number that a record has, or 0 for None if it is optional. An exception names what is none, or has no room."""
    cdef object value = getattr(record, name)
    if value is None and optional:
        return 0
    try:
        value = PyNumber_Index(value)
    except TypeError:
        raise TypeError(f"{type(record).__name__}.{name}: {value!r} is no whole number") from None
    if not 0 <= value <= most:
        raise OverflowError(f"{type(record).__name__}.{name}: {value} is not in 0..{most}")
    return value


cdef bytes copy_of(object data):
    """The bytes of a buffer. bytes() takes a number, too, for as many zeros."""
    return bytes(memoryview(data))
