"""Long bytes that end a message are written from where they lie, behind the rest of it.

Theory
------
What msgpack encodes, it copies, and that is a good part of the time that a message of 64 KiB takes. The last argument
of a call, and the result of its answer, are the end of their message, if no metadata follows. So the message is encoded
with b"" in their place (`Messenger.send_tailed`), and a transport over RDMA sends them from where they are. The peer
sees no difference. This is for `bytes`, which nobody can change; what else is long is `Apart` in its message.
"""

from __future__ import annotations

from typing import Any

from rdmanet.rpc.lending import whole_bytes
from rdmanet.rpc.link import Link
from rdmanet.rpc.paging import LEAST_BYTES


def last_argument(link: Link, call: Any, at: int) -> bytes | memoryview | None:
    """The argument at this place of a `CallDetails`, if it is to be written behind its message."""
    if at < len(call.arguments) - 1 or call.metadata is not None or call.response is not None:
        return None
    return whole_bytes(link, call.arguments[at], link.tail_bytes, at in call.method.inline)


def last_result(link: Link, running: Any, result: Any) -> bytes | memoryview | None:
    """The result of a `Running`, if it is to be written behind its message. Longer ones count while they wait."""
    method = running.method
    if running.asks or running.borrowed or not method.result_is_buffer or method.result_is_array:
        return None
    tail = whole_bytes(link, result, link.tail_bytes)
    return tail if tail is not None and len(tail) < LEAST_BYTES else None
