"""How a connection is built: its sizes, its times, and what they are by default."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from rdmanet import credit
from rdmanet._core import STREAM_DATA_SLOTS_MAX, STREAM_FIRST_SLOT_BYTES, STREAM_SHARED_SLOTS_MAX

SLOT_BYTES = 65536
FIRST_SLOT_BYTES = STREAM_FIRST_SLOT_BYTES
DATA_SLOTS = 16
SHARED_SLOTS = 256
UNREAD_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 30.0
REVOKE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """The options of one connection, or of all that a server accepts; times in seconds, sizes in bytes.

    :raises ValueError: a size is out of range
    """

    slot_bytes: int = SLOT_BYTES
    data_slots: int = DATA_SLOTS
    first_slot_bytes: int = FIRST_SLOT_BYTES
    connect_timeout: float | None = CONNECT_TIMEOUT_S
    close_timeout: float | None = CLOSE_TIMEOUT_S
    busy_poll: float | None = None
    shared_receive: bool = False
    shared_slots: int = SHARED_SLOTS
    lost_peer: str = "error"
    """What a reader gets when the peer is lost and no byte of ours with it: "error", or "eof" as TCP's do."""
    reference_writes: bool = True
    """Whether a large memoryview of memory that can change is sent from where it lies."""
    unread_bytes: int = UNREAD_BYTES
    """How much a connection takes in at least, though the program does not read, whatever its ring."""
    reason: str = "the program asked for RDMA"
    """What get_extra_info("fabric_reason") says."""

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("shared_slots", self.shared_slots, 0, STREAM_SHARED_SLOTS_MAX),
            ("slot_bytes", self.slot_bytes, credit.SLOT_BYTES_MIN, credit.SLOT_BYTES_MAX),
            ("first_slot_bytes", self.first_slot_bytes, credit.SLOT_BYTES_MIN, credit.SLOT_BYTES_MAX),
            ("data_slots", self.data_slots, 1, STREAM_DATA_SLOTS_MAX),
        ):
            if not least <= operator.index(value) <= most:
                raise ValueError(f"{name}={value!r} is not between {least} and {most}")
        if self.lost_peer not in ("error", "eof"):
            raise ValueError(f"lost_peer={self.lost_peer!r} is neither 'error' nor 'eof'")
