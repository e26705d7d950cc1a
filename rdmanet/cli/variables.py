"""The check `variables` of `rdmanet doctor`: each environment variable of ours that is set, what it does, and whether
its value makes sense.

A wrong value keeps the embedded device from opening, or connections from being made, and what then fails is far from
the variable. So each variable that is set has one finding, and other checks refer to it. The embedded device judges its
own variables, by the error of opening it; docs/environment.md explains them all. Values of secrets are not shown.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from rdmanet import _core
from rdmanet.base import environment
from rdmanet.cli.finding import Finding
from rdmanet.loop.peers import Peers

_SECRET = "RDMANET_SOFT_SECRET"
# Where the embedded device's error begins to be about another variable. An error may itself contain a semicolon.
_NEXT = re.compile(r"(?:^|; )(?=(?:unknown variable )?(RDMANET_SOFT\w*)\b)")


def variables(root: Path) -> Iterator[Finding]:
    """Each environment variable that is set: to what, whether that is valid, and what it does."""
    wrong = complaints(_device_error())
    count = 0
    for name in sorted(os.environ):
        value = os.environ[name]
        if name in environment.EFFECTS:
            if value == "" and name not in wrong:
                continue  # as if it were not set
            yield _known(name, value, wrong.get(name, ""))
        elif name in wrong:
            yield _finding("fail", wrong[name], f"correct its name, or unset {name}")
        elif name in (unknown := environment.unknown([name])):
            meant = unknown[name]
            yield _finding(
                "warn",
                f"{name} is no variable of rdmanet, and has no effect",
                f"unset it, or set {meant} if you meant that" if meant else "unset it",
            )
        else:
            continue
        count += 1
    if not count:
        yield _finding("ok", "none is set, so the defaults apply")


def is_blamed(text: object) -> bool:
    """Whether an error is about a variable, which then has a finding of its own."""
    return re.search(r"\bRDMANET_[A-Z_]+", str(text)) is not None


def complaints(text: str) -> dict[str, str]:
    """The errors in a text of the embedded device, by the variables that they are about."""
    starts = list(_NEXT.finditer(text))
    ends = [start.start() for start in starts[1:]]
    found: dict[str, str] = {}
    for start, end in zip(starts, [*ends, len(text)], strict=False):  # no error: only the last end
        found.setdefault(start[1], text[start.end() : end])
    return found


def _device_error() -> str:
    """What the embedded device says of its variables: why it does not open; "" if it does."""
    for device in _core.devices():
        if not device.library.embedded_device:
            continue
        try:
            device.open().close()
        except OSError as exc:
            return (exc.strerror or "").partition(": ")[2]
    return ""


def _known(name: str, value: str, complaint: str) -> Finding:
    shown = f"{name} is set" if name == _SECRET else f"{name}={value}"
    try:
        complaint = complaint or _our_complaint(name, value)
    except OSError as exc:
        complaint = exc.strerror or str(exc)
    if not complaint:
        return _finding("ok", f"{shown}: {environment.EFFECTS[name]}")
    said = complaint if name in complaint else f"{shown}: {complaint}"
    return _finding(
        "fail", said, f"correct it, or unset {name}; docs/environment.md says which values there are"
    )


def _our_complaint(name: str, value: str) -> str:
    """Why a value is of no use, if this package is to judge it; "" if it is good.

    :raises OSError: it is not valid
    """
    if name == "RDMANET_REQUIRE":
        if environment.requires_rdma() and all(device.library.embedded_device for device in _core.devices()):
            return f"{environment.EFFECTS[name]}, and this machine has no other device: no connection can be made"
    elif name == "RDMANET_PLACE_BYTES":
        environment.place_bytes()
    elif name == "RDMANET_DEVICE":
        names = [device.name for device in _core.devices()]
        if value not in names:
            return f"there is no such device; there is {', '.join(names) or 'none'}"
    elif name == "RDMANET_PEERS":
        try:
            Peers(value)
        except ValueError as exc:
            return str(exc)
    elif name == "RDMANET_SOFT_LIBRARY":
        return _core.Library.missing().get("embedded", "")
    return ""


def _finding(status: str, found: str, advice: str = "") -> Finding:
    return Finding("variables", status, found, advice)  # type: ignore[arg-type]
