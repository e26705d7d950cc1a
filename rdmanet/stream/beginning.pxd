"""The C face of beginning.py."""

from rdmanet.stream.parts cimport Life


cpdef established(Life life, object event)
cpdef failed(Life life, object error)
cdef _begin(Life life)
