"""How a connection is built: its sizes, its times, and what they are by default."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from rdmanet import credit
from rdmanet._core import STREAM_DATA_SLOTS_MAX, STREAM_SHARED_SLOTS_MAX

SLOT_BYTES = 65536
DATA_SLOTS = 16
SHARED_SLOTS = 256
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
    connect_timeout: float | None = CONNECT_TIMEOUT_S
    close_timeout: float | None = CLOSE_TIMEOUT_S
    busy_poll: float | None = None
    shared_receive: bool = False
    shared_slots: int = SHARED_SLOTS

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("shared_slots", self.shared_slots, 0, STREAM_SHARED_SLOTS_MAX),
            ("slot_bytes", self.slot_bytes, credit.SLOT_BYTES_MIN, credit.SLOT_BYTES_MAX),
            ("data_slots", self.data_slots, 1, STREAM_DATA_SLOTS_MAX),
        ):
            if not least <= operator.index(value) <= most:
                raise ValueError(f"{name}={value!r} is not between {least} and {most}")
