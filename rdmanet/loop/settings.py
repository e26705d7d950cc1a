"""What the switch was told: who is to be reached by RDMA, and how much it is to look like TCP."""

from __future__ import annotations

import functools
import os

TYPE_CHECKING = False  # see rdmanet/__init__.py
if TYPE_CHECKING:
    from collections.abc import Iterable

    from rdmanet.loop.peers import Peers
    from rdmanet.stream.options import StreamConfig

UNREAD_BYTES = 4 << 20
"""What a connection takes in that its program does not read: as much as TCP on one host, whose send buffers grow to
4 MiB by default (net.ipv4.tcp_wmem). Two programs that both write, drain, and then read depend on it."""


def _check_environment() -> None:
    """Raise an error if an environment variable keeps RDMA from being used.

    A device that does not open for it is no RDMA: the program would take TCP, without what the variable asks for, such
    as faults. What is not needed for this is not loaded: most switched programs have neither variables nor a network.

    :raises OSError: it makes no sense, or its name begins with RDMANET_SOFT_ and is misspelt (EINVAL)
    """
    names = [name for name, value in os.environ.items() if value and name.startswith("RDMANET_")]
    if not names:
        return
    from rdmanet.base import environment

    environment.requires_rdma()
    environment.place_bytes()
    if any(name.startswith(environment.DEVICE) for name in names):
        from rdmanet._core import Library

        Library.embedded().check_environment()


class Settings:
    """The options of one loop."""

    def __init__(
        self,
        peers: str | Iterable[str] | None = None,
        lost_peer: str = "eof",
        reference_writes: bool = False,
        fallback: bool = True,
    ) -> None:
        """
        :param peers: whom to reach by RDMA; None means what RDMANET_PEERS says, or ``auto``
        :param lost_peer: what a reader gets when its peer is lost: "eof", as by TCP, or "error"
        :param reference_writes: whether large memory that may change is sent from where it lies, as by the direct calls
        :param fallback: whether TCP is taken where RDMA cannot be; if not, that is an error
        :raises ValueError: an option makes no sense
        :raises OSError: an environment variable keeps RDMA from being used (EINVAL)
        """
        if lost_peer not in ("error", "eof"):
            raise ValueError(f"lost_peer={lost_peer!r} is neither 'error' nor 'eof'")
        self.lost_peer = lost_peer
        self.reference_writes = reference_writes
        self._fallback = fallback
        self._config: StreamConfig | None = None  # that of the last connection
        self._peers = os.environ.get("RDMANET_PEERS") if peers is None else peers
        if self._peers is not None:
            self.patterns  # noqa: B018  read now, so that mistakes show here
        _check_environment()

    @functools.cached_property
    def patterns(self) -> Peers:
        """Whom to reach by RDMA."""
        from rdmanet.loop.peers import Peers

        return Peers(self._peers)

    def excludes_tcp(self) -> str:
        """The option, or the variable, by which an error is raised rather than TCP taken; "" if there is none.

        :raises OSError: RDMANET_REQUIRE has an unknown value (EINVAL)
        """
        by_variable = ""
        if os.environ.get("RDMANET_REQUIRE"):
            from rdmanet.base.environment import excludes_tcp

            by_variable = excludes_tcp()
        return by_variable or ("" if self._fallback else "fallback=False")

    def config(self, reason: str) -> StreamConfig:
        """The options of a connection that takes RDMA for this reason: mostly that of the one before."""
        beside_tcp, config = not self.excludes_tcp(), self._config
        if config is None or config.reason != reason or config.beside_tcp != beside_tcp:
            from rdmanet.stream.options import StreamConfig

            config = self._config = StreamConfig(
                lost_peer=self.lost_peer,
                reference_writes=self.reference_writes,
                unread_bytes=UNREAD_BYTES,
                waits_to_hear=True,
                beside_tcp=beside_tcp,
                by_name_alone=True,
                ends_when_read=True,
                reason=reason,
            )
        return config
