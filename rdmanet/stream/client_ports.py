# SPDX-License-Identifier: Apache-2.0
"""The port of a client that found its listener by name: a number that stands for one connection.

Such a client has no port of TCP's (soft/cm/name.c). Programs that tell their clients apart by address need one all the
same. Both sides compute it from the number of the client's queue pair, so that they agree without a message.

The client chooses that number. Programs ask the kernel whose the connection from an address is (ident does), and it
must not be another user's. So when the server's program first asks for its client's address, the kernel gives it the
port, by a socket that is bound and does nothing else, until the connection ends: no TCP connection from there can
begin, nor can another peer have this address. If somebody has the port already, the server gives its client another.

Each such socket is a descriptor. They take at most half of those that the process may have (RLIMIT_NOFILE); a client
beyond that has port 0, and shares its address with others of its kind.
"""

from __future__ import annotations

import resource
import socket
from typing import cast

from rdmanet.stream.addresses import SockAddr

_FIRST_PORT = 32768
_PORTS = 65536 - _FIRST_PORT
_APART = 20251
"""How far apart the ports of a process are. It is odd, so that they differ."""

_held = 0
"""How many ports the process holds."""


class HeldPort:
    """A port that the kernel gives to nobody else, until `close()`; `port` is 0 from then on."""

    def __init__(self, address: SockAddr) -> None:
        """Hold the port of this address, or another if somebody has it; `port` is 0 if there is none to be had."""
        self._socket, self.port = _bound_socket(address) if _held < _most() else (None, 0)
        if self._socket is not None:
            _count(1)

    def close(self) -> None:
        """Let the port go. A second call does nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket, self.port = None, 0
            _count(-1)


def with_port(address: SockAddr, clients_qp: int) -> SockAddr:
    """An address that has no port, with the one that stands for the client's queue pair."""
    return cast(SockAddr, (address[0], port_of(clients_qp), *address[2:]))


def port_of(qp_num: int) -> int:
    """The port that stands for a queue pair of the embedded device.

    Its number consists of a TCP port that its process holds, and of eight bits for the queue pair. So the results
    differ for the first ones of all processes, and for any 256 of one process; and none is the port that the process
    holds, which nobody else can.
    """
    port, index = divmod(qp_num, 256)
    return _FIRST_PORT + (port + (index + 1) * _APART) % _PORTS


def _bound_socket(address: SockAddr) -> tuple[socket.socket | None, int]:
    """A socket that has this port of the address, or another, and the port.

    Without SO_REUSEADDR, bind() succeeds only if no socket of this host has the port, nor a connection that has ended
    lately, and connect() of others avoids it.
    """
    family = socket.AF_INET if len(address) == 2 else socket.AF_INET6
    for port in (address[1], 0):
        try:
            holder = socket.socket(family)
            try:
                holder.bind((address[0], port, *address[2:]))
                return holder, holder.getsockname()[1]
            except BaseException:
                holder.close()
                raise
        except OSError:  # it is taken; or there are no descriptors left, and the second time it is the same
            pass
    return None, 0


def _most() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def _count(more: int) -> None:
    global _held
    _held += more
