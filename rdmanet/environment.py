"""The environment's variables: which there are, and what becomes of those that there are not.

A variable that is misspelt does nothing, and often it was a protection. The embedded device does not open with a wrong
name among its own, RDMANET_SOFT_...; of the others a line in the log tells, once a process, when it first looks for
devices. docs/environment.md explains them to users.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable

logger = logging.getLogger("rdmanet")

OURS = ("RDMANET_DEVICE", "RDMANET_REQUIRE", "RDMANET_SOFT")
"""What this package reads, and the device's own scope."""

DEVICE = "RDMANET_SOFT_"
"""How the others of the embedded device begin. It knows them itself (soft/settings.c)."""

DEVICES = (
    "RDMANET_SOFT_ADOPT",
    "RDMANET_SOFT_ARM",
    "RDMANET_SOFT_CHAOS",
    "RDMANET_SOFT_CMA",
    "RDMANET_SOFT_CM_TIMEOUT",
    "RDMANET_SOFT_DEFER",
    "RDMANET_SOFT_LIBRARY",
    "RDMANET_SOFT_LINK",
    "RDMANET_SOFT_LOG",
    "RDMANET_SOFT_PADDED",
    "RDMANET_SOFT_PTRACER",
    "RDMANET_SOFT_RULES",
    "RDMANET_SOFT_SECRET",
    "RDMANET_SOFT_SECRET_FILE",
    "RDMANET_SOFT_SILENCE",
    "RDMANET_SOFT_TIMEWAIT",
    "RDMANET_SOFT_TRANSPORT",
)
"""Those: what may be meant by a name that begins otherwise."""

OF_THE_TREE = ("RDMANET_COVERAGE", "RDMANET_DEBUG", "RDMANET_KERNEL", "RDMANET_SANITIZE", "RDMANET_WERROR")
"""Those of setup.py and scripts/, which a shell may have set still."""

OF_THE_TESTS = ("RDMANET_TEST_", "RDMANET_STRESS_")
"""How those of the tests begin."""

_is_told = False


def unknown(names: Iterable[str]) -> dict[str, str]:
    """The variables that begin like ours and are none, each with the one that is probably meant, "" if none is near."""
    wrong = {}
    for name in names:
        if not name.startswith("RDMANET_") or name.startswith((DEVICE, *OF_THE_TESTS)):
            continue
        if name not in OURS and name not in OF_THE_TREE:
            near = difflib.get_close_matches(name, OURS + DEVICES, n=1)
            wrong[name] = near[0] if near else ""
    return wrong


def tell_unknown() -> None:
    """A line in the log for each of this process's, the first time. The values are not told: one may be a secret."""
    global _is_told
    if _is_told:
        return
    _is_told = True
    for name, meant in unknown(os.environ).items():
        logger.warning(
            "there is no variable %s, and nobody reads it%s", name, f"; is {meant} meant?" if meant else ""
        )
