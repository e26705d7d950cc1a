"""Calls of typed functions in other processes, on asyncio."""

from __future__ import annotations

from rdmanet.rpc.buffer import Buffer as Buffer
from rdmanet.rpc.errors import Code as Code
from rdmanet.rpc.errors import Error as Error
from rdmanet.rpc.limits import Limits as Limits
from rdmanet.rpc.schema import Service as Service
from rdmanet.rpc.schema import method as method
