"""Measure how long each phase of connecting takes, for many connections at once, as cmtime does.

usage: python examples/cmtime.py -s                       the server; it ends with its last client's connections
       python examples/cmtime.py [-c COUNT] HOST [PORT]   the client

Every step ends with an event on one channel; select() waits for it. Each phase begins for all connections at once.
"""

import argparse
import contextlib
import select
import statistics
import sys
import time
from collections.abc import Callable

import rdmanet.cm as cm
import rdmanet.verbs as v

PORT = 7471


def library() -> v.Library:
    """The one to use: rdma-core's where it has a device, else the embedded device's."""
    return min(v.devices(), key=lambda device: device.library.embedded_device).library


def next_event(channel: cm.CMEventChannel) -> cm.CMEvent:
    while (event := channel.get_event()) is None:
        select.select([channel], [], [])
    return event


class Parents:
    """What the queue pairs share, made when the first address has led to a device."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack
        self.init_attr: v.QPInitAttr | None = None

    def create_qp(self, id: cm.CMID) -> None:
        if self.init_attr is None:
            assert id.context is not None, "it has a device by now"
            self.pd = self.stack.enter_context(v.PD(id.context))
            cq = self.stack.enter_context(v.CQ(id.context, 16))
            self.init_attr = v.QPInitAttr(cq, cq, v.QPCap(max_send_wr=1, max_recv_wr=1))
        id.create_qp(self.pd, self.init_attr)


def run_client(address: tuple[str, int], count: int) -> None:
    with contextlib.ExitStack() as channels, contextlib.ExitStack() as stack, contextlib.ExitStack() as ids:
        channel = channels.enter_context(cm.CMEventChannel(library()))
        parents = Parents(stack)
        clients = [ids.enter_context(channel.create_id()) for _ in range(count)]
        print(f"{'phase':<18}{'total ms':>10}{'min':>10}{'median':>10}   of {count} connections")

        def phase(name: str, begin: Callable[[cm.CMID], None], ending: cm.CMEventType | None = None) -> None:
            """Start the step for all; if it ends with an event, wait until `ending` has come for all."""
            started = time.perf_counter()
            times = []
            for client in clients:
                begin(client)
                times.append((time.perf_counter() - started) * 1e3)
            if ending is not None:
                times.clear()
            while len(times) < count:
                event = next_event(channel)
                if event.type == ending:
                    times.append((time.perf_counter() - started) * 1e3)
                else:
                    event.raise_for_status()
            print(f"{name:<18}{max(times):>10.2f}{min(times):>10.2f}{statistics.median(times):>10.2f}")

        phase("resolve address", lambda id: id.resolve_addr(None, address), cm.CMEventType.ADDR_RESOLVED)
        phase("resolve route", lambda id: id.resolve_route(), cm.CMEventType.ROUTE_RESOLVED)
        phase("create qp", parents.create_qp)
        phase("connect", lambda id: id.connect(), cm.CMEventType.ESTABLISHED)
        phase("disconnect", lambda id: id.disconnect(), cm.CMEventType.DISCONNECTED)
        phase("destroy", lambda id: id.close())


def run_server(port: int) -> None:
    served = 0
    with contextlib.ExitStack() as channels, contextlib.ExitStack() as stack:
        channel = channels.enter_context(cm.CMEventChannel(library()))
        listener = channels.enter_context(channel.create_id())
        parents = Parents(stack)
        live: set[cm.CMID] = set()  # an identifier that is dropped refuses its connection
        listener.bind_addr(("0.0.0.0", port))
        listener.listen(1024)
        assert listener.local_addr is not None
        print("listening on port", listener.local_addr[1], flush=True)
        while live or not served:
            event = next_event(channel)
            if event.type == cm.CMEventType.CONNECT_REQUEST:
                with contextlib.suppress(OSError):  # the client may have left already
                    parents.create_qp(event.id)
                    event.id.accept()
                    live.add(event.id)
                    served += 1
            elif event.type == cm.CMEventType.DISCONNECTED:
                live.remove(event.id)
                event.id.disconnect()
                event.id.close()
    print("served", served, "connections")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-s", "--server", action="store_true")
    parser.add_argument("-c", "--count", type=int, default=100)
    parser.add_argument("host", nargs="?", default="127.0.0.1")
    parser.add_argument("port", nargs="?", type=int, default=PORT)
    args = parser.parse_args()
    run_server(args.port) if args.server else run_client((args.host, args.port), args.count)


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, OSError) as exc:
        sys.exit(str(exc) or 130)
