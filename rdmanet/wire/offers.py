"""Memory regions on offer: the books of both sides of a connection. No I/O, no loop.

Theory
------
A side offers a region of its memory by saying (id, address, length, rkey, access, name) in a Credit
message. It takes the offer back by revoking the id, and may unregister the memory once the peer has
acknowledged: the peer does so when its last operation on the region has completed. All three are
news that wait here until a Credit frame may go, and each frame takes as many as fit.

    ours     QUEUED --> ANNOUNCED --> REVOKING --> REVOKED --> (gone)
               |        sent          revoke()     sent        acknowledged
               +--------------- revoke() --------------------> (gone)

    theirs   usable --> revoked, operations drain --> acknowledgement waits --> (gone)

An offer that was never sent is gone at once when it is taken back. The peer's id stays taken until
our acknowledgement is on its way, ours until the peer's has come, so an id never means two things.
A message that breaks these rules is the peer's fault as a whole: it raises and changes nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Final, NamedTuple

from rdmanet import credit as frames
from rdmanet.errors import ProtocolError, RdmaError, RegionRevokedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rdmanet.base.bodies import Credit, Region

ALIVE_MAX: Final = 256
"""Offers alive per side: what one side can make the other remember, a quarter of a megabyte with the longest names.

To offer more memory, use larger regions: an offer has one address and one length.
"""
ACCEPTED_MAX: Final = 768
"""Offers of the peer's. A protocol on the connection that tells its peer so may have that many of its own: rpc."""


class OfferState(Enum):
    QUEUED = auto()
    ANNOUNCED = auto()
    REVOKING = auto()
    REVOKED = auto()


class RemoteRegion:
    """A region that the peer offers, and what we are doing with it."""

    __slots__ = ("operations", "region", "revoked")

    def __init__(self, region: Region) -> None:
        self.region = region
        self.operations = 0
        """RDMA operations of ours that have not completed."""
        self.revoked = False

    def __repr__(self) -> str:
        revoked = " revoked" if self.revoked else ""
        return f"<RemoteRegion {self.region} operations={self.operations}{revoked}>"


class News(NamedTuple):
    """What a Credit message changed."""

    offered: list[RemoteRegion]
    revoked: list[RemoteRegion]
    acked: list[int]
    """Ids of offers of ours that are gone: their memory may be unregistered."""


class Offers:
    """The offers of one connection, ours and the peer's."""

    def __init__(self, *, alive_max: int = ALIVE_MAX, accepted_max: int = ACCEPTED_MAX) -> None:
        self._alive_max = alive_max
        self._accepted_max = accepted_max
        self._ours: dict[int, OfferState] = {}
        self._theirs: dict[int, RemoteRegion] = {}
        self._last_id = 0
        self._lost = False
        # News that wait, in the order they came; dicts, so that one in the middle is found at once.
        self._announce: dict[int, Region] = {}
        self._revoke: dict[int, None] = {}
        self._ack: dict[int, None] = {}

    # -- ours --

    def offer(
        self, address: int, length: int, rkey: int, access: int, name: str = "", most: int | None = None
    ) -> Region:
        """Queue a region of ours to be announced; its id is in what is returned.

        :param most: how many there may be, if the peer is known to accept more than ALIVE_MAX
        """
        self._check_not_lost()
        most = self._alive_max if most is None else most
        if len(self._ours) >= most:
            raise RdmaError(
                f"{len(self._ours)} regions are on offer to this peer, or taken back and not acknowledged by it: "
                f"no more than {most} are allowed"
            )
        region_id = self._last_id
        while region_id in self._ours or region_id == self._last_id:
            region_id = (region_id + 1) & 0xFFFF_FFFF
        region = frames.Region(region_id, address, length, rkey, access, name)
        try:
            frames.check_region(region)
        except ProtocolError as error:
            raise ValueError(str(error)) from None
        self._last_id = region_id
        self._ours[region_id] = OfferState.QUEUED
        self._announce[region_id] = region
        return region

    def revoke(self, region_id: int) -> bool:
        """Take an offer back. True: it is gone; False: it will be when News.acked has it."""
        state = self._ours.get(region_id)
        if state is None:
            return True
        if state is OfferState.QUEUED:
            del self._announce[region_id], self._ours[region_id]
            return True
        if state is OfferState.ANNOUNCED:
            self._ours[region_id] = OfferState.REVOKING
            self._revoke[region_id] = None
        return False

    def state(self, region_id: int) -> OfferState | None:
        """How an offer of ours stands; None: it is gone, or never was."""
        return self._ours.get(region_id)

    # -- theirs --

    def begin(self, remote: RemoteRegion) -> None:
        """Count an operation on the peer's region that is about to be posted."""
        if remote.revoked:
            raise RegionRevokedError(f"region {remote.region.id} {remote.region.name!r} was taken back")
        remote.operations += 1

    def end(self, remote: RemoteRegion) -> None:
        """Count an operation that has completed, well or not."""
        if not remote.operations:
            raise RuntimeError(f"{remote!r}: an operation ended that never began")
        remote.operations -= 1
        if remote.revoked and not remote.operations and not self._lost:
            self._ack[remote.region.id] = None

    @property
    def remote(self) -> list[RemoteRegion]:
        """The peer's regions that may be used now."""
        return [remote for remote in self._theirs.values() if not remote.revoked]

    # -- the messages --

    @property
    def pending(self) -> bool:
        """Is there news for a Credit to carry?"""
        return bool(self._ack or self._revoke or self._announce)

    def next_credit_body(self, room: int, granted: int) -> Credit | None:
        """Take news that fit into a body of `room` bytes; None if there is none.

        What is taken counts as sent: it goes, or the connection is lost. Acknowledgements first,
        since memory waits for them, and new regions last.
        """
        room -= _CREDIT_BYTES
        acked, room = _take(self._ack, room, _id_bytes)
        revoked, room = _take(self._revoke, room, _id_bytes)
        announced, room = _take(self._announce, room, lambda i: frames.region_bytes(self._announce[i]))
        if not (acked or revoked or announced):
            return None
        regions = tuple(self._announce.pop(region_id) for region_id in announced)
        for region_id in acked:
            del self._ack[region_id], self._theirs[region_id]
        for region_id in revoked:
            del self._revoke[region_id]
            self._ours[region_id] = OfferState.REVOKED
        for region_id in announced:
            self._ours[region_id] = OfferState.ANNOUNCED
        return frames.Credit(granted, regions, tuple(revoked), tuple(acked))

    def received(self, credit: Credit) -> News:
        """Read the peer's news; ProtocolError, and nothing is changed, if they cannot be."""
        for region_id in credit.acked:
            if self._ours.get(region_id) is not OfferState.REVOKED:
                raise ProtocolError(f"the peer acknowledges region {region_id}, which we did not revoke")
        for region_id in credit.revoked:
            remote = self._theirs.get(region_id)
            if remote is None or remote.revoked:
                raise ProtocolError(f"the peer revokes region {region_id}, which it does not offer")
        for region in credit.regions:
            if region.id in self._theirs:
                raise ProtocolError(f"the peer offers region {region.id} twice")
        if len(self._theirs) + len(credit.regions) > self._accepted_max:
            raise ProtocolError(f"the peer offers more than {self._accepted_max} regions")

        for region_id in credit.acked:
            del self._ours[region_id]
        revoked = [self._theirs[region_id] for region_id in credit.revoked]
        for remote in revoked:
            remote.revoked = True
            if not remote.operations:
                self._ack[remote.region.id] = None
        offered = [RemoteRegion(region) for region in credit.regions]
        for remote in offered:
            self._theirs[remote.region.id] = remote
        return News(offered, revoked, list(credit.acked))

    def lost(self) -> list[int]:
        """The connection is gone: nothing of the peer's may be used, and no offer waits for anything.

        Returns the ids of our offers that were alive. Operations in flight still `end()`.
        """
        self._lost = True
        alive = list(self._ours)
        for remote in self._theirs.values():
            remote.revoked = True
        for book in (self._ours, self._theirs, self._announce, self._revoke, self._ack):
            book.clear()
        return alive

    def _check_not_lost(self) -> None:
        if self._lost:
            raise ConnectionResetError(
                errno.ECONNRESET, "the connection is lost, there is nobody to offer memory to"
            )


# msgpack: one byte for the array, one for the tag, five for the grant, three for each of the
# arrays in it, one for each of the five fields that say nothing of regions (whoever fills them takes their room away).
# None of those arrays is longer than ACCEPTED_MAX, so three bytes are enough for its length.
_CREDIT_BYTES: Final = 1 + 1 + 5 + 3 * 3 + 5


def _id_bytes(region_id: int) -> int:
    return 1 if region_id < 0x80 else 2 if region_id < 0x100 else 3 if region_id < 0x1_0000 else 5


def _take(waiting: Iterable[int], room: int, size: Callable[[int], int]) -> tuple[list[int], int]:
    """The first of what waits that fits into `room`, and the room that is left."""
    taken: list[int] = []
    for region_id in waiting:
        if (room := room - size(region_id)) < 0:
            return taken, 0
        taken.append(region_id)
    return taken, room
