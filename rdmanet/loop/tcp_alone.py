"""What a loop has in its switch's place when it cannot have one: every connection and server is TCP's.

The modules of RDMA are imported with a loop's first connection or server. A program may have given up its rights until
then, or have gone where it cannot read them (chroot); or the global lock is kept off, and the compiled ones refuse.
TCP serves such a program, and the log says why. So this module is imported before that, and imports nothing.

``TcpAlone`` has what the loop's methods (mixin.py) ask of a ``Switch`` and its parts.
"""

from __future__ import annotations

import errno
import logging
import socket

TYPE_CHECKING = False  # see rdmanet/__init__.py
if TYPE_CHECKING:
    from typing import Any

    from rdmanet.loop.settings import Settings

logger = logging.getLogger("rdmanet")

_INTERNET = (socket.AF_INET, socket.AF_INET6)
OUT_OF_REACH = (
    "rdmanet's modules cannot be imported: {}. If the program gives up the right to read them, make a server or a "
    "connection before that"
)
_NOTHING_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def may_work_again(error: Exception) -> bool:
    """Whether only a descriptor or memory was missing for an import: kernel.lacks_resources() asks that elsewhere."""
    return isinstance(error, OSError) and error.errno in _NOTHING_LEFT


class TcpAlone:
    """The switch of a loop that cannot import RDMA's modules.

    :ivar standins: and accepting, chooser: the parts of a switch, which are all in this one
    :ivar transports: connections for which sockets stand: none
    :ivar in_the_clear: the module of that name, which is not there
    """

    transports: tuple[()] = ()
    in_the_clear = None
    begin_call: Any  # only for what `plain` knows

    def __init__(self, above: Any, settings: Settings, error: Exception) -> None:
        """
        :param above: super(), as seen from the loop's class
        :param error: what an import has raised
        """
        self.standins = self.accepting = self.chooser = self
        self._above = above
        self._settings = settings
        self._reason = OUT_OF_REACH.format(error)
        logger.warning("all connections take TCP: %s", self._reason)

    def change(self, settings: Settings) -> None:
        """Have these options from now on."""
        self._settings = settings

    def close(self) -> None:
        """The loop is closed."""

    def _refuse_tcp(self, what: str, sock: Any = None) -> None:
        if sock is not None and (sock.family not in _INTERNET or sock.type != socket.SOCK_STREAM):
            return
        if setting := self._settings.excludes_tcp():
            raise ConnectionRefusedError(
                errno.ECONNREFUSED, f"{what} takes TCP, which {setting} excludes: {self._reason}"
            )

    async def create_connection(
        self, factory: Any, host: Any, port: Any, ssl: Any, family: int, proto: int, flags: int, sock: Any,
        local_addr: Any, kwds: dict[str, Any],
    ) -> Any:  # fmt: skip
        """The base's."""
        self._refuse_tcp("a connection", sock)
        return await self._above.create_connection(
            factory, host, port, ssl=ssl, family=family, proto=proto, flags=flags, sock=sock,
            local_addr=local_addr, **kwds,
        )  # fmt: skip

    async def create_server(
        self, factory: Any, host: Any, port: Any, ssl: Any, start_serving: bool, kwds: dict[str, Any]
    ) -> Any:
        """The base's."""
        self._refuse_tcp("a server", kwds.get("sock"))
        return await self._above.create_server(
            factory, host, port, ssl=ssl, start_serving=start_serving, **kwds
        )

    async def connect_accepted_socket(self, factory: Any, sock: Any, ssl: Any, kwds: dict[str, Any]) -> Any:
        """The base's."""
        return await self._above.connect_accepted_socket(factory, sock, ssl=ssl, **kwds)

    async def sock_connect(self, sock: socket.socket, address: Any) -> bool:
        """False: the base is to connect the socket."""
        self._refuse_tcp("sock_connect()", sock)
        return False

    async def accept(self, listener: socket.socket) -> Any:
        """The base's sock_accept()."""
        return await self._above.sock_accept(listener)

    async def use(self, sock: socket.socket) -> None:
        """The program uses a socket itself: it stands for no connection."""

    def plain(self, *key: Any) -> None:
        """Nothing is remembered of any address."""

    def is_plain(self, sock: socket.socket, address: Any) -> bool:
        """Whether `sock_connect` need not be asked."""
        return False

    def is_connecting(self) -> bool:
        """Whether a create_connection() of the base's is under way, which asks for no transport's facts here."""
        return False

    def facts(self, server: Any) -> dict[str, str]:
        """What get_extra_info() of a transport of asyncio's is to know."""
        return {"fabric": "tcp", "fabric_reason": self._reason}
