"""Tensors between processes: memory that one reads and writes one-sidedly, and awaits::

    async with tensors.open() as endpoint:                      # the owner
        async with endpoint.register(weights) as memory:
            send(endpoint.address(), memory.describe())         # by any channel
            ...

    async with tensors.open() as endpoint:                      # another process, on this host or another one
        peer = await endpoint.connect(address)
        await peer.read(descriptor, into=mine)

Theory
------
It stands on connections of the byte stream, and not on `rdmanet.verbs_async`. Both have READ, WRITE and memory windows.
A connection has besides what this needs most: keys that are bound to one peer and end by force, in a table that says
when (stream/bindings.py); a channel that tells of them, with flow control; registrations that are kept; the end of a
peer, of its host and of a device, noticed and told once; servers and addresses; and a way on devices without memory
windows. Awaited verbs have a queue of their own depth, which chains of requests use. Chains are what was missing here,
and are now in the connection's own queue (_pyx/blocks.pxi), where `OfferedMemory.read_rows` has them, too.

`descriptor` has what travels by other channels, `messages` what the two ends of a connection say. An `Endpoint` is what
a program has of its own, `Memory` what others may use, a `Peer` what it uses of others'. `link` is a connection.
`blocking` has the same calls for programs without a loop.
"""

from rdmanet.tensors.descriptor import Address, AddressError, Descriptor, DescriptorError
from rdmanet.tensors.dmabuf import DmaBuf
from rdmanet.tensors.endpoint import Endpoint
from rdmanet.tensors.endpoint import open_endpoint as open
from rdmanet.tensors.link import Notification
from rdmanet.tensors.memory import Memory
from rdmanet.tensors.peer import Peer

__all__ = [
    "Address",
    "AddressError",
    "Descriptor",
    "DescriptorError",
    "DmaBuf",
    "Endpoint",
    "Memory",
    "Notification",
    "Peer",
    "open",
]
