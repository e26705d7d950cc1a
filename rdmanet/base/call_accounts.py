"""What is known of the calls of `rdmanet.rpc` that are under way now, of a server or of a client: `CallsInfo`.

It is made when somebody asks (rpc/explaining.py), and goes to `rdmanet ss` as it is.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py

import msgspec

from rdmanet.base.accounts import time_text

CALLS_MOST = 8
"""So many calls are named: those that have taken longest."""


class CallUnderWay(msgspec.Struct):
    """A call that has not ended.

    :ivar method: its label: "Store.get"
    :ivar us: for how many microseconds it has run
    :ivar doing: what it does, or waits for; "" if that is not known
    """

    method: str
    us: int
    doing: str = ""


class CallsInfo(msgspec.Struct):
    """A server or a client, and its calls.

    :ivar key: another one for each in its process
    :ivar side: "server" or "client"
    :ivar service: the names of the services
    :ivar where: the addresses of the servers
    :ivar under_way: how many calls have not ended
    :ivar calls: those of them that have taken longest
    :ivar notes: what else is to be known: who is left out, and why calls wait
    """

    key: int
    side: str
    service: str
    where: str
    under_way: int
    calls: list[CallUnderWay] = []
    notes: list[str] = []

    def explain(self) -> str:
        """The same in words: a few lines of text."""
        how = "serving" if self.side == "server" else "calling"
        lines = [f"{how} {self.service} at {self.where}: {self.under_way} calls under way"]
        for call in self.calls:
            lines.append(
                f"  {call.method} for {time_text(call.us)}" + (f": {call.doing}" if call.doing else "")
            )
        if (more := self.under_way - len(self.calls)) > 0 and self.calls:
            lines.append(f"  and {more} more")
        return "\n".join(lines + [f"  note: {words}" for words in self.notes])
