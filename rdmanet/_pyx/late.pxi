# Names of this module that are made when they are first used.
#
# To make an enumeration takes a twentieth of a millisecond, and a record as much. The verbs have 28 and 16 of them,
# which was a quarter of what importing a connection of the byte stream takes, and that needs one. So each is a function
# that makes it. The module has no such name at first, and Python calls `__getattr__` below; a part of this module asks
# in the same way, by `core`: core.WCStatus. For an enumeration no file is read, so a program may have given up this
# right; most records import dataclasses (record.pxi).

cdef object core = sys.modules[__name__]
cdef dict makers = {}


def _late(maker):
    """Decorates a function that makes the class of its name."""
    makers[maker.__name__] = maker
    return maker


def __getattr__(name):
    maker = makers.get(name)
    if maker is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals().get(name)          # another thread may have been faster
    if made is None:
        made = maker()
        made.__qualname__ = name
        made = globals().setdefault(name, made)
    return made


def __dir__():
    return sorted({*globals(), *makers})
