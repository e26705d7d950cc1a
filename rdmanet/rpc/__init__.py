"""Calls of typed functions in other processes, on asyncio, with buffers by reference.

A service is a class. The server serves an instance, and the client gets an object with the same methods:

    class Store(rpc.Service):
        async def get(self, name: str) -> memoryview: ...

    server = await rpc.serve(Store(), host, port)

    async with rpc.connect(Store, host, port) as store:
        tensor = await store.get("w")

Its modules, from the top, are in docs/architecture.md.
"""

from __future__ import annotations

from rdmanet.rpc import blocking as blocking
from rdmanet.rpc.buffer import Buffer as Buffer
from rdmanet.rpc.builtin import Health as Health
from rdmanet.rpc.builtin import Reflection as Reflection
from rdmanet.rpc.client import connect as connect
from rdmanet.rpc.client import explain as explain
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
