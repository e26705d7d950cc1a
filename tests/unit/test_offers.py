"""Offers: two books, and the Credit messages between them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmanet.credit import SLOT_BYTES_MIN, Credit, Region, pack_credit, unpack_credit
from rdmanet.errors import ProtocolError, RdmaError, RegionRevokedError
from rdmanet.wire.offers import ACCEPTED_MAX, ALIVE_MAX, News, Offers, OfferState, RemoteRegion

READ = 4


def offer(offers: Offers, name: str = "") -> int:
    return offers.offer(0x1000, 100, 7, READ, name).id


def tell(speaker: Offers, hearer: Offers, room: int = 4096) -> News | None:
    """One Credit frame, by way of its bytes."""
    body = speaker.next_credit_body(room, 5)
    if body is None:
        return None
    packed = pack_credit(body)
    assert len(packed) <= room
    return hearer.received(unpack_credit(packed, 5))


def announced(a: Offers, b: Offers) -> tuple[int, RemoteRegion]:
    region_id = offer(a)
    news = tell(a, b)
    assert news is not None
    return region_id, news.offered[0]


def test_announce_use_revoke_acknowledge() -> None:
    a, b = Offers(), Offers()
    region = a.offer(0x1000, 100, 7, READ, "weights")
    assert a.pending and a.state(region.id) is OfferState.QUEUED
    news = tell(a, b)
    assert news is not None and news.offered[0].region == region
    remote = news.offered[0]
    assert b.remote == [remote]
    assert not a.pending and a.state(region.id) is OfferState.ANNOUNCED

    b.begin(remote)
    b.begin(remote)
    assert not a.revoke(region.id)
    assert a.state(region.id) is OfferState.REVOKING
    news = tell(a, b)
    assert news is not None and news.revoked == [remote]
    assert a.state(region.id) is OfferState.REVOKED
    assert b.remote == []
    with pytest.raises(RegionRevokedError, match="'weights' was taken back"):
        b.begin(remote)
    assert not b.pending, "operations are in flight"
    b.end(remote)
    b.end(remote)
    assert b.pending
    news = tell(b, a)
    assert news is not None and news.acked == [region.id]
    assert a.state(region.id) is None
    assert a.revoke(region.id)
    with pytest.raises(RegionRevokedError):
        b.begin(remote)


def test_an_offer_nobody_heard_of_is_gone_at_once() -> None:
    a = Offers()
    region_id = offer(a)
    assert a.revoke(region_id)
    assert not a.pending and a.next_credit_body(4096, 0) is None


def test_revoking_twice_says_it_once() -> None:
    a, b = Offers(), Offers()
    region_id, _ = announced(a, b)
    assert not a.revoke(region_id) and not a.revoke(region_id)
    body = a.next_credit_body(4096, 0)
    assert body == Credit(0, (), (region_id,), ())
    assert not a.revoke(region_id) and not a.pending


def test_as_many_as_may_be_in_as_many_frames_as_it_takes() -> None:
    a, b = Offers(), Offers()
    ids = [offer(a, "n" * 255) for _ in range(ALIVE_MAX)]
    assert len(set(ids)) == ALIVE_MAX
    frames = 0
    while tell(a, b, SLOT_BYTES_MIN):
        frames += 1
    assert frames == ALIVE_MAX, "the longest name: one a frame of the smallest slots"
    assert [remote.region.id for remote in b.remote] == ids
    for region_id in ids:
        a.revoke(region_id)
    while tell(a, b, SLOT_BYTES_MIN):
        pass
    acked: list[int] = []
    while news := tell(b, a, SLOT_BYTES_MIN):
        acked += news.acked
    assert acked == ids and not b.remote


def test_acknowledgements_go_first() -> None:
    a, b = Offers(), Offers()
    region_id, _ = announced(a, b)
    a.revoke(region_id)
    tell(a, b)
    for _ in range(100):
        offer(b)
    body = b.next_credit_body(64, 0)
    assert body is not None and body.acked == (region_id,) and 0 < len(body.regions) < 6


def test_bounds() -> None:
    a, b = Offers(alive_max=2), Offers(accepted_max=2)
    ids = [offer(a), offer(a)]
    with pytest.raises(RdmaError, match="2 regions are on offer to this peer.*no more than 2"):
        offer(a)
    tell(a, b)
    with pytest.raises(ProtocolError, match="more than 2"):
        b.received(Credit(0, (Region(9, 0, 1, 0, READ, ""),)))
    a.revoke(ids[0])
    tell(a, b)
    with pytest.raises(RdmaError):
        offer(a)  # not acknowledged yet
    tell(b, a)
    offer(a)
    assert tell(a, b) is not None
    assert ALIVE_MAX == 256 and ACCEPTED_MAX == 768


def test_more_to_a_peer_that_is_known_to_accept_them() -> None:
    a, b = Offers(alive_max=2), Offers(accepted_max=3)
    offer(a), offer(a)
    a.offer(0x1000, 100, 7, READ, most=3)
    with pytest.raises(RdmaError, match="3 regions are on offer to this peer.*no more than 3"):
        a.offer(0x1000, 100, 7, READ, most=3)
    assert tell(a, b) is not None and len(b.remote) == 3


@pytest.mark.parametrize(
    ("address", "length", "access", "name"),
    [(0, 1, 1, ""), (0, 1, 0, ""), (2**64 - 1, 2, READ, ""), (0, 1, READ, "n" * 256)],
)
def test_impossible_regions_are_not_offered(address: int, length: int, access: int, name: str) -> None:
    a = Offers()
    with pytest.raises(ValueError, match="region 1"):
        a.offer(address, length, 0, access, name)
    assert not a.pending


def test_violations_change_nothing() -> None:
    a, b = Offers(), Offers()
    region_id, remote = announced(a, b)
    good = Region(50, 0, 1, 0, READ, "")
    for credit, message in [
        (Credit(0, (good,), (99,)), "revokes region 99"),
        (Credit(0, (good, Region(region_id, 0, 1, 0, READ, ""))), "twice"),
        (Credit(0, (good,), (), (1,)), "acknowledges region 1"),
        (Credit(0, (good,), (region_id,), (77,)), "acknowledges region 77"),
    ]:
        with pytest.raises(ProtocolError, match=message):
            b.received(credit)
        assert b.remote == [remote] and not b.pending
    with pytest.raises(ProtocolError, match="acknowledges"):
        a.received(Credit(0, (), (), (region_id,)))
    a.revoke(region_id)
    with pytest.raises(ProtocolError, match="acknowledges"):
        a.received(Credit(0, (), (), (region_id,)))  # our revocation has not gone yet


def test_revoked_is_revoked_once_and_its_id_stays_taken() -> None:
    a, b = Offers(), Offers()
    region_id, _ = announced(a, b)
    b.received(Credit(0, (), (region_id,)))
    with pytest.raises(ProtocolError, match="revokes"):
        b.received(Credit(0, (), (region_id,)))
    again = Credit(0, (Region(region_id, 0, 1, 0, READ, ""),))
    with pytest.raises(ProtocolError, match="twice"):
        b.received(again)
    b.next_credit_body(4096, 0)
    assert len(b.received(again).offered) == 1


def test_an_end_without_a_beginning() -> None:
    a, b = Offers(), Offers()
    _, remote = announced(a, b)
    with pytest.raises(RuntimeError, match="never began"):
        b.end(remote)


def test_lost() -> None:
    a, b = Offers(), Offers()
    region_id, remote = announced(a, b)
    b.begin(remote)
    queued = offer(a)
    assert a.lost() == [region_id, queued]
    assert a.lost() == []
    assert not a.pending and a.revoke(region_id)
    with pytest.raises(ConnectionResetError, match="lost"):
        offer(a)
    b.lost()
    with pytest.raises(RegionRevokedError):
        b.begin(remote)
    b.end(remote)
    assert not b.pending and remote.operations == 0


@settings(max_examples=200)
@given(steps=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(0, 50)), max_size=120))
def test_any_story(steps: list[tuple[int, int, int]]) -> None:
    """An offer of ours is never gone while the peer has operations on it."""
    books = Offers(), Offers()
    seen: tuple[list[RemoteRegion], list[RemoteRegion]] = ([], [])
    mine: tuple[list[int], list[int]] = ([], [])
    running: list[tuple[int, RemoteRegion]] = []
    for who, what, which in steps:
        side, peer = books[who], books[1 - who]
        if what == 0:
            mine[who].append(offer(side, "n" * which))
        elif what == 1 and mine[who]:
            side.revoke(mine[who][which % len(mine[who])])
        elif what in (2, 3):
            if news := tell(side, peer, 40 + 10 * which):
                seen[1 - who].extend(news.offered)
        elif what == 4 and seen[who]:
            remote = seen[who][which % len(seen[who])]
            if not remote.revoked:
                side.begin(remote)
                running.append((who, remote))
        elif what == 5 and running:
            owner, remote = running.pop(which % len(running))
            books[owner].end(remote)
        for user, remote in running:
            assert books[1 - user].state(remote.region.id) is not None
    for user, remote in running:
        books[user].end(remote)
    for who in (0, 1):
        for region_id in mine[who]:
            books[who].revoke(region_id)
    while tell(books[0], books[1]) or tell(books[1], books[0]):
        pass
    for who in (0, 1):
        assert not books[who].pending and not books[who].remote
        assert all(books[who].state(region_id) is None for region_id in mine[who])
