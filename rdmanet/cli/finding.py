"""What a check of `rdmanet doctor` has found."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check: what was found, with the numbers, and what to do if it is wrong."""

    check: str
    status: Status
    found: str
    advice: str = ""
