"""What `rdmanet perf server` does for a client that nobody knows: whoever reaches its port may ask for anything.

The time of a run is limited, also if it is to end by a number of messages, and so is its memory. So is the time of a
client that others wait for. The server that a client starts for itself has no such limits: it ends with the client.
"""

import select
import socket
import time
from typing import NamedTuple

from rdmanet.cli.perf.control import Control, PerfError, Run
from rdmanet.cli.perf.kinds import KINDS

SETUP_S = 5.0
"""For what comes before and after the messages."""
STREAM_BYTES = 1 << 20
"""At most so much memory has a connection that is measured, beside its message."""


class Limits(NamedTuple):
    """
    :ivar seconds: the longest run (--most-seconds)
    :ivar memory: bytes of one run (--most-memory)
    :ivar session_s: the longest session of a client, if another one waits (--most-session)
    """

    seconds: float
    memory: int
    session_s: float


class Guard:
    """The limits, held against one client.

    :param listener: where the next ones wait
    """

    def __init__(self, limits: Limits, control: Control, listener: socket.socket) -> None:
        self.limits, self.control, self.listener = limits, control, listener
        self.began_s = time.monotonic()

    def begin(self, run: Run) -> None:
        """A run begins.

        :raises PerfError: it asks for too much
        """
        asked = 0.0 if run.settings.iterations else run.settings.seconds
        asked += run.settings.warm_up_s
        if asked > self.limits.seconds:
            raise PerfError(
                f"{run.kind}: a run of {asked:g} s, and at most {self.limits.seconds:g} s are allowed (--most-seconds)"
            )
        if (needed := memory_of(run)) > self.limits.memory:
            raise PerfError(
                f"{run.kind}: {needed} bytes of memory, and at most {self.limits.memory} are allowed (--most-memory)"
            )
        self.control.end_after(
            self.limits.seconds + SETUP_S,
            f"{run.kind}: a run of more than {self.limits.seconds:g} s is not allowed (--most-seconds)",
        )

    def check_turn(self) -> None:
        """Before the next run.

        :raises PerfError: another client waits, and this one has had its time
        """
        self.control.end_after(None)
        if time.monotonic() - self.began_s > self.limits.session_s and self._others_wait():
            raise PerfError(
                f"another client waits, and this one has had its {self.limits.session_s:g} s (--most-session)"
            )

    def _others_wait(self) -> bool:
        return bool(select.select([self.listener], [], [], 0)[0])


def memory_of(run: Run) -> int:
    """About what the server needs."""
    kind, settings = KINDS[run.kind], run.settings
    if kind.family == "verbs":
        return 2 * run.size * settings.queue_pairs
    if kind.family == "stream":
        return (run.size + STREAM_BYTES) * settings.connections
    return run.size * (1 if kind.latency else settings.in_flight)
