"""The tests by their names, and in groups."""

from typing import Final, NamedTuple


class Kind(NamedTuple):
    """A test.

    :ivar family: "verbs", "stream" or "rpc": who runs it
    :ivar over: the verb; or the fabric, as fabrics.py names it
    :ivar latency: whether one message at a time is sent and times are taken; else as many as fit
    """

    name: str
    family: str
    over: str
    latency: bool

    @property
    def title(self) -> str:
        """What is printed above its table."""
        if self.family != "verbs":
            return self.name
        verb = {"send": "Send", "atomic": "Atomic"}.get(self.over, f"RDMA_{self.over.title()}")
        return f"{verb} {'Latency' if self.latency else 'BW'} Test"


def _kinds() -> dict[str, Kind]:
    named = [("verbs", verb, verb) for verb in ("write", "read", "send", "atomic")]
    named += [
        ("stream", name, over) for name, over in (("stream", "rdmanet"), ("tcp", "tcp"), ("unix", "unix"))
    ]
    named += [
        ("rpc", name, over) for name, over in (("rpc", "rdmanet"), ("rpc_tcp", "tcp"), ("rpc_unix", "unix"))
    ]
    return {
        f"{name}_{end}": Kind(f"{name}_{end}", family, over, end == "lat")
        for family, name, over in named
        for end in ("lat", "bw")
    }


KINDS: Final = _kinds()

GROUPS: Final = {
    "verbs": [name for name, kind in KINDS.items() if kind.family == "verbs"],
    "streams": [name for name, kind in KINDS.items() if kind.family == "stream"],
    "rpc": [name for name, kind in KINDS.items() if kind.family == "rpc"],
    "all": list(KINDS),
}

QUICK: Final = [
    "write_lat",
    "write_bw",
    "stream_lat",
    "tcp_lat",
    "unix_lat",
    "stream_bw",
    "tcp_bw",
    "unix_bw",
]
"""What is measured where no test is named."""

SIZES: Final = {"lat": [64], "bw": [65536]}
"""The sizes, where none is given; perftest has 2 B for latency, which no program sends."""
