"""Calls of typed functions in other processes, on asyncio, with buffers by reference.

A service is a class. The server serves an instance, and the client gets an object with the same methods:

    class Store(rpc.Service):
        async def get(self, name: str) -> memoryview: ...

    server = await rpc.serve(Store(), host, port)

    async with rpc.connect(Store, host, port) as store:
        tensor = await store.get("w")

General layout
--------------
From the top; a module imports only what stands below it:

    blocking                a client for programs without a loop
    client, server          connect() and its object;  serve() and its server
    discovered              a client that learns the schema from the server
    pool, intercepted       the connections of a client that has several, one after another or together;  its calls
                            with interceptors
    lending_objects,        service objects as arguments: a client's side of them;  a server's
      borrowed_objects
    channel, callee         a client's side of one connection;  a server's
    pending, running        a call of a client;  one that a server executes
    builtin                 health and reflection, which every server has
    answers, taking         what a server sends for a result;  what it gets for the arguments
    fetching                what a client gets for a result
    lending, streaming      buffers by reference;  streams of items
    keepalive, around       whether the other program answers;  interceptors
    testing                 a clock and faults, for tests of programs
    inner                   connections within a connection, for these objects
    link, endpoints         one connection as messages;  the transports
    in_memory               a transport within one loop, for tests
    peers                   who is at the other end
    calls                   which message may come when: tables, no I/O
    schema, messages        what a class offers, and how it is encoded;  the wire format
    threads                 @rpc.method, and methods that run in threads
    response                what a method says beside its result
    stats                   what each side counts of each method
    gathering, packing      the memory of arrays that are inside of others
    arrays, array_types     buffers and arrays: annotations, and what is sent for them
    item_types, hints       the types of their items;  the annotations of the parts of a type
    turns                   who writes next when the transport takes more
    buffer, describe, limits, carried, errors, marks, retry, context
"""

from __future__ import annotations

from rdmanet.rpc import blocking as blocking
from rdmanet.rpc.buffer import Buffer as Buffer
from rdmanet.rpc.builtin import Health as Health
from rdmanet.rpc.builtin import Reflection as Reflection
from rdmanet.rpc.client import connect as connect
from rdmanet.rpc.client import options as options
from rdmanet.rpc.client import peer as peer
from rdmanet.rpc.client import stats as stats
from rdmanet.rpc.client import take_back as take_back
from rdmanet.rpc.context import CallInfo as CallInfo
from rdmanet.rpc.context import deadline as deadline
from rdmanet.rpc.context import is_active as is_active
from rdmanet.rpc.context import metadata as metadata
from rdmanet.rpc.context import send_initial_metadata as send_initial_metadata
from rdmanet.rpc.context import set_trailing_metadata as set_trailing_metadata
from rdmanet.rpc.errors import Code as Code
from rdmanet.rpc.errors import Error as Error
from rdmanet.rpc.limits import Limits as Limits
from rdmanet.rpc.peers import Peer as Peer
from rdmanet.rpc.resolving import Resolver as Resolver
from rdmanet.rpc.response import Response as Response
from rdmanet.rpc.retry import Retry as Retry
from rdmanet.rpc.schema import Service as Service
from rdmanet.rpc.server import Server as Server
from rdmanet.rpc.server import serve as serve
from rdmanet.rpc.stats import MethodStats as MethodStats
from rdmanet.rpc.threads import method as method
