"""The tests by their names, and in groups."""

from typing import Final, NamedTuple


class Kind(NamedTuple):
    """A test.

    :ivar family: "verbs", "stream" or "rpc": who runs it
    :ivar over: the verb; or the fabric, as fabrics.py names it
    :ivar measures: "lat", one message at a time, whose time is taken; "bw", as many as fit; "rr", requests and
        responses, several at a time: how many a second
    """

    name: str
    family: str
    over: str
    measures: str

    @property
    def latency(self) -> bool:
        return self.measures == "lat"

    @property
    def metric(self) -> str:
        """The number that it is about, by its name in results.METRICS."""
        return {"lat": "p50", "bw": "bw", "rr": "rate"}[self.measures]

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
        f"{name}_{end}": Kind(f"{name}_{end}", family, over, end)
        for family, name, over in named
        for end in (("lat", "bw", "rr") if family == "stream" else ("lat", "bw"))
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

SIZES: Final = {"lat": [64], "bw": [65536], "rr": [64]}
"""The sizes, where none is given; perftest has 2 B for latency, which no program sends."""
