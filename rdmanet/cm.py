"""The connection manager, under its own names: it connects queue pairs by IP address.

    channel = CMEventChannel(Library.embedded())
    id = channel.create_id()
    id.resolve_addr(None, ("127.0.0.1", 7471))
    # wait until channel.fd is readable
    event = channel.get_event()          # ADDR_RESOLVED, and so on to ESTABLISHED

Nothing blocks; the connection manager answers each step with an event.
"""

from rdmanet._core import CMID, CMEvent, CMEventChannel, CMEventType, Library, PortSpace
from rdmanet.errors import cm_error

__all__ = ["CMID", "CMEvent", "CMEventChannel", "CMEventType", "Library", "PortSpace", "cm_error"]
