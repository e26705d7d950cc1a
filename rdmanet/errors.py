"""The exceptions. Pure: nothing is imported here but builtins."""


class RdmaError(OSError):
    """Something that RDMA, and nothing else, can get wrong."""


class ProtocolError(ConnectionError):
    """The peer broke the rules of the byte stream; the message says which."""


class RegionRevokedError(RdmaError):
    """A remote memory region was used after its owner had taken it back."""
