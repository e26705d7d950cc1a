"""The names of the environment variables, and a warning about misspelt ones.

A misspelt variable has no effect, and it may have been meant as a protection. The embedded device refuses to open if a
name that begins with RDMANET_SOFT_ is wrong; a switched program does not start then (loop/settings.py). Other wrong
names are logged, once per process, when it first looks for devices. docs/environment.md explains the variables to
users.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable

logger = logging.getLogger("rdmanet")

EFFECTS = {
    "RDMANET_DEVICE": "streams use only this device",
    "RDMANET_PEERS": "whom the event loop reaches by RDMA",
    "RDMANET_PLACE_BYTES": "reads of less are copied",
    "RDMANET_REQUIRE": "the event loop never takes TCP, and with `rdma` streams never use the embedded device",
    "RDMANET_SOFT": "the embedded device reaches no other host",
    "RDMANET_SOFT_ADOPT": "memory that a program registers is turned into memory that peers map",
    "RDMANET_SOFT_ARM": "when arming a completion queue raises an event",
    "RDMANET_SOFT_CHAOS": "faults are injected",
    "RDMANET_SOFT_CMA": "whether the kernel copies between processes",
    "RDMANET_SOFT_CM_TIMEOUT": "how long the connection manager waits for an answer, in ms",
    "RDMANET_SOFT_DEFER": "how much later each work request is executed, in µs",
    "RDMANET_SOFT_FILES": "where the files are that programs under soft-run see",
    "RDMANET_SOFT_LIBRARY": "the build of the embedded device",
    "RDMANET_SOFT_LINK": "the link layer of the embedded device's port",
    "RDMANET_SOFT_LOG": "whether the embedded device logs more lines",
    "RDMANET_SOFT_PADDED": "whether private data is padded",
    "RDMANET_SOFT_PTRACER": "whether processes of this user may trace this one where Yama restricts it",
    "RDMANET_SOFT_RULES": "whose rules the embedded device follows",
    "RDMANET_SOFT_SECRET": "peers on other hosts and of other users must have the same secret",
    "RDMANET_SOFT_SECRET_FILE": "peers on other hosts and of other users must have the same secret",
    "RDMANET_SOFT_SILENCE": "how long a stranger may say nothing, in ms",
    "RDMANET_SOFT_TIMEWAIT": "when TIMEWAIT_EXIT is reported, in ms; 0 is never",
    "RDMANET_SOFT_TRANSPORT": "how peers of this host are reached",
    "RDMANET_TRACE": "the file in which a process leaves what its connections have done",
}
"""The variables, and what each does, in a few words."""

DEVICE = "RDMANET_SOFT_"
"""The prefix of the embedded device's variables. It checks their names itself (soft/base/settings.c)."""

OF_THE_TREE = (
    "RDMANET_CLANG", "RDMANET_COVERAGE", "RDMANET_DEBUG", "RDMANET_KERNEL", "RDMANET_SANITIZE",
    "RDMANET_WERROR",
)  # fmt: skip
"""The variables of setup.py and scripts/, which may still be set in a shell."""

OF_THE_TESTS = ("RDMANET_TEST_", "RDMANET_STRESS_")
"""The prefixes of the tests' variables."""

_DIGITS_MAX = 18  # what a size_t can hold for certain

_is_told = False


_REQUIRED = (None, "", "rdma", "no-tcp")


def requires_rdma() -> bool:
    """Whether RDMANET_REQUIRE excludes the embedded device, and TCP in its place.

    :raises OSError: it has an unknown value, which was meant to protect (EINVAL)
    """
    required = os.environ.get("RDMANET_REQUIRE")
    if required not in _REQUIRED:
        raise OSError(errno.EINVAL, f"RDMANET_REQUIRE={required}: set it to rdma or no-tcp, or unset it")
    return required == "rdma"


def excludes_tcp() -> str:
    """The setting of RDMANET_REQUIRE that excludes TCP: ``rdma``, or ``no-tcp``, by which the embedded device counts as
    RDMA; "" if there is none.

    :raises OSError: it has an unknown value (EINVAL)
    """
    requires_rdma()
    required = os.environ.get("RDMANET_REQUIRE")
    return f"RDMANET_REQUIRE={required}" if required else ""


def place_bytes() -> int | None:
    """From how many bytes on a read may have them placed, by RDMANET_PLACE_BYTES; None if the device is to decide.

    :raises OSError: it is no positive number (EINVAL)
    """
    least = os.environ.get("RDMANET_PLACE_BYTES")
    if least in (None, ""):
        return None
    if not (least.isascii() and least.isdigit() and len(least) <= _DIGITS_MAX and int(least) > 0):
        raise OSError(errno.EINVAL, f"RDMANET_PLACE_BYTES={least}: set it to a number of bytes, or unset it")
    return int(least)


def unknown(names: Iterable[str]) -> dict[str, str]:
    """The unknown names that begin with RDMANET_, each with the name that was probably meant, or ""."""
    wrong = {}
    for name in names:
        if not name.startswith("RDMANET_") or name.startswith((DEVICE, *OF_THE_TESTS)):
            continue
        if name not in EFFECTS and name not in OF_THE_TREE:
            import difflib  # most programs never need it

            near = difflib.get_close_matches(name, EFFECTS, n=1)
            wrong[name] = near[0] if near else ""
    return wrong


def tell_unknown() -> None:
    """Log the unknown variables of this process, once. Their values are not logged: one may be a secret."""
    global _is_told
    if _is_told:
        return
    _is_told = True
    for name, meant in unknown(os.environ).items():
        logger.warning(
            "unknown environment variable %s has no effect%s",
            name,
            f"; did you mean {meant}?" if meant else "",
        )
