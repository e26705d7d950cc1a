"""Memory of another device, such as a GPU: registered by its dma-buf.

The processor does not reach such memory, so there is no array of it here. What a program has is a dma-buf, a descriptor
that stands for the memory: CUDA gives one by ``cuMemGetHandleForAddressRange``, ROCm by
``hsa_amd_portable_export_dmabuf``. An adapter that can register one reads and writes the other device's memory itself.
So it can be granted to peers. Operations of the endpoint's own need an array, and do not reach it.
"""

from __future__ import annotations

import operator
import os
from typing import Final, NamedTuple

from rdmanet._core import MR, PD, AccessFlags
from rdmanet.stream.registered import RegisteredMemory

_END_MOST: Final = 1 << 62
"""Descriptors say no more (descriptor.py)."""


class DmaBuf(NamedTuple):
    """Memory of another device, for `Endpoint.register`.

    :ivar fd: its dma-buf. It stays the caller's, who may close it when it is registered
    :ivar nbytes: how many bytes it is
    :ivar offset: where it begins within the dma-buf, in bytes
    :ivar address: what the RDMA device calls its first byte: any address at the same place of a page as `offset`. The
        embedded device takes a sealed memfd for a dma-buf, for tests
    """

    fd: int
    nbytes: int
    offset: int = 0
    address: int = 0


class RegisteredDmaBuf(RegisteredMemory):
    """Its registration with each device that asks."""

    def __init__(self, given: DmaBuf) -> None:
        # Here, and not when a peer claims it, whose connection that would end.
        given = DmaBuf(*map(operator.index, given))
        _, nbytes, offset, address = given
        if nbytes <= 0 or min(offset, address) < 0 or max(offset, address) + nbytes > _END_MOST:
            raise ValueError(
                f"register(): a dma-buf of {nbytes} bytes from offset {offset} on, at address {address}"
            )
        super().__init__(b"")  # nothing of it is in this process
        self._given = given._replace(fd=os.dup(given.fd))

    @property
    def length(self) -> int:
        return self._given.nbytes

    def _made_in(self, pd: PD) -> MR:
        fd, nbytes, offset, address = self._given
        access = AccessFlags.MW_BIND | AccessFlags.LOCAL_WRITE
        return pd.reg_dmabuf_mr(fd, nbytes, offset=offset, iova=address, access=access)

    def close(self) -> None:
        was_open = self._view is not None
        super().close()
        if was_open:
            os.close(self._given.fd)
