"""Asks for the number of a queue pair, as cm_client.py asks for a connection."""

import select
import time

from rdmanet.cm import CMEventChannel, CMEventType, Library, PortSpace

channel = CMEventChannel(Library.embedded())


def take(wanted):
    while (event := channel.get_event()) is None:
        select.select([channel], [], [])
    event.raise_for_status()
    assert event.type is wanted, event
    return event


def ask(to, data):
    id = channel.create_id(PortSpace.UDP)
    try:
        id.resolve_addr(None, tuple(to), 1000)
        take(CMEventType.ADDR_RESOLVED)
        id.resolve_route(1000)
        take(CMEventType.ROUTE_RESOLVED)
        id.connect(data)
        return take(CMEventType.ESTABLISHED).private_data
    finally:
        id.close()


say(ready=True)
while (order := hear()) is not None:
    began = time.monotonic()
    try:
        reply = ask(order["to"], order.get("data", "").encode())
    except OSError as exc:
        say(error=type(exc).__name__, errno=exc.errno, text=str(exc), seconds=time.monotonic() - began)
    else:
        say(reply=reply.rstrip(b"\0").decode(), seconds=time.monotonic() - began)
