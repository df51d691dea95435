"""Messages in slots: what is sent into one arrives there alone, and none is overwritten; on the null transport."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest

from lamina.core.errors import DeadlineError, PeerLostError
from lamina.dataplane.leases import SLOTS, ArenaPlan, lease_nbytes
from lamina.dataplane.slot import Outbox, Slot
from lamina.transport.base import Arena, Endpoint
from tests.support.channels import Station, link
from tests.support.null_transport import NullEndpoint

SLOT = Slot(offset=7, nbytes=10, doorbell=2)


class Channel(NamedTuple):
    outbox: Outbox
    arena: Arena
    near: Endpoint
    far: Endpoint

    @property
    def view(self) -> memoryview:
        return self.arena.view(SLOT.offset, SLOT.nbytes)


@pytest.fixture
def channel() -> Iterator[Channel]:
    near, far = NullEndpoint("near"), NullEndpoint("far")
    near.register(1, 1)
    arena = far.register(30, 3)
    yield Channel(Outbox(near, near.connect(far.descriptor(), 1.0), SLOT), arena, near, far)
    near.close()
    far.close()


def test_a_message_arrives_in_its_slot_and_is_announced(channel: Channel) -> None:
    channel.outbox.write_and_ring([np.array([1, 2], np.uint16), b"abc"], 1)
    assert channel.far.wait([(SLOT.doorbell, 1)], 0.0) == 0
    assert bytes(channel.view[:7]) == np.array([1, 2], np.uint16).tobytes() + b"abc"


def test_a_message_may_come_in_pieces_and_skip_numbers(channel: Channel) -> None:
    channel.outbox.write_and_ring([b"later"], 4, at=5)
    channel.far.wait([(2, 3)], 0.0)
    with pytest.raises(DeadlineError):
        channel.far.wait([(2, 5)], 0.0)
    channel.outbox.write_and_ring([b"first"], 5)
    channel.far.wait([(2, 5)], 0.0)
    assert bytes(channel.view) == b"firstlater"


def test_what_is_too_large_is_not_sent(channel: Channel) -> None:
    for at in (0, 3):
        with pytest.raises(ValueError, match=f"does not fit into {10 - at}"):
            channel.outbox.write_and_ring([b"12345", b"678901"], 1, at)
    with pytest.raises(DeadlineError):
        channel.far.wait([(2, 1)], 0.0)
    assert bytes(channel.view) == bytes(10)


def test_a_lost_peer_is_told_of(channel: Channel) -> None:
    channel.far.close()
    with pytest.raises(PeerLostError, match="far"):
        channel.outbox.write_and_ring([], 1)


PLAN = ArenaPlan(landing_nbytes=0, stages=False, pool_nbytes=256, leases={lease_nbytes(128): 1})


@pytest.fixture
def pair() -> Iterator[tuple[Station, Station]]:
    near, far = (Station(name, NullEndpoint(name), PLAN) for name in ("near", "far"))
    link([near, far], {("near", "far"): 128, ("far", "near"): 128})
    yield near, far
    near.endpoint.close()
    far.endpoint.close()


def test_a_slot_is_used_again_only_once_it_has_been_given_back(pair: tuple[Station, Station]) -> None:
    near, far = pair
    to, at = near.channels["far"], far.channels["near"]
    for lane in range(3):
        to.begin(lane, 7, 3).send_piece([b"ab", bytes([lane])])
    arrived = []
    for slot, target in list(at.awaited.items()):
        far.endpoint.wait([target], 0.0)
        at.close_slot(slot)
        arrived.append(at.read(slot))
    assert [(each.lane, each.turn, bytes(each.body or b"")) for each in arrived] == [(0, 7, b"ab\0"), (1, 7, b"ab\1")]
    assert list(near.hub.keeping) == [to]
    at.free(1)
    near.hub.send_kept()
    assert list(near.hub.keeping) == [to], "it has not been told yet"
    far.hub.flush()
    near.endpoint.wait(near.hub.credits, 0.0)
    near.hub.send_kept()
    assert not near.hub.keeping
    assert bytes(arrived[0].body or b"") == b"ab\0", "the other slot is untouched"
    assert bytes(at.read(1).body or b"") == b"ab\2"


def test_a_body_that_a_nic_writes_apart_is_read_from_the_inbox_once_it_is_settled(
    pair: tuple[Station, Station],
) -> None:
    near, far = pair
    to, at = near.channels["far"], far.channels["near"]
    inbox, settled = np.zeros(2 * to.most_nbytes, np.uint8), Mock()

    def post_apart(start: int, parts: Sequence[Any], offset: int, header: bytes, doorbell: int, number: int) -> None:
        body = b"".join(parts)
        inbox[start : start + len(body)] = list(body)
        near.endpoint.post(near.peers["far"], offset, len(header), [header], doorbell, number)

    to.post_apart = post_apart
    at.inbox, at.settle_inbox = (inbox[: to.most_nbytes], inbox[to.most_nbytes :]), settled
    to.begin(1, 5, 2).send_piece([b"in"])  # in pieces, as far as this end knows
    to.send_message(2, 6, 4, [b"ap", b"ar"])
    to.send_message(3, 7, 4, [b"kept"])
    first, second = (at.read(slot) for slot in range(SLOTS))
    assert settled.call_count == 1
    assert [(each.lane, each.turn, bytes(each.whole)) for each in (first, second)] == [(1, 5, b"in"), (2, 6, b"apar")]
    assert isinstance(first.body, memoryview) and isinstance(second.body, np.ndarray)
    second.free()
    far.hub.flush()
    near.endpoint.wait(near.hub.credits, 0.0)
    near.hub.send_kept()
    assert bytes(at.read(1).whole) == b"kept"


def test_a_credit_travels_with_a_message_the_other_way(pair: tuple[Station, Station]) -> None:
    near, far = pair
    for number in range(SLOTS):
        near.channels["far"].begin(number, 0, 1).send_piece([b"x"])
    near.channels["far"].begin(SLOTS, 0, 1).send_piece([b"y"])
    far.channels["near"].free(0)
    far.channels["near"].begin(0, 0, 0).send_piece([])
    assert not far.hub.owing
    near.channels["far"].read(0)
    near.hub.send_kept()
    assert not near.hub.keeping
    assert bytes(far.channels["near"].read(0).body or b"") == b"y"


def test_pieces_are_announced_one_after_another_in_one_slot(pair: tuple[Station, Station]) -> None:
    near, far = pair
    message, at = near.channels["far"].begin(4, 9, 6), far.channels["near"]
    message.send_piece([b"abc"])
    far.endpoint.wait([at.awaited[0]], 0.0)
    request = at.read(0)
    at.open_slot(0)
    with pytest.raises(DeadlineError):
        far.endpoint.wait([at.awaited[0]], 0.0)
    message.send_piece([b"de", b"f"])
    far.endpoint.wait([at.awaited[0]], 0.0)
    assert bytes(request.body or b"") == b"abcdef"


def test_what_is_larger_than_a_slot_waits_in_the_pool_until_it_has_been_fetched(pair: tuple[Station, Station]) -> None:
    near, far = pair
    to, at = near.channels["far"], far.channels["near"]
    first = to.begin(0, 0, 100, bulk_nbytes=60)
    first.lay_out(20, [b"bulk"])
    first.send_piece([b"q" * 60])
    first.send_piece([b"k" * 40])
    second = to.begin(1, 0, 200)
    second.send_piece([np.arange(200, dtype=np.uint8)])
    to.begin(2, 0, 5).send_piece([b"small"])  # overtakes it: it needs no region
    assert list(near.hub.keeping) == [to]
    request = at.read(0)
    assert request.body is None and request.nbytes == 100
    body = near.arena.view(request.fetched_at, 100)
    assert bytes(body) == b"q" * 60 + b"k" * 40
    assert bytes(near.arena.view(request.bulk_at + 20, 4)) == b"bulk"
    assert bytes(at.read(1).body or b"") == b"small"
    for slot in (0, 1):
        at.free(slot)
    at.fetched(request.number)
    far.hub.flush()
    near.hub.send_kept()
    assert not near.hub.keeping
    later = at.read(0)
    assert bytes(near.arena.view(later.fetched_at, 200)) == bytes(range(200))
    with pytest.raises(ValueError, match="320 bytes do not fit into a pool of 256 bytes"):
        to.begin(3, 0, 300)


def test_a_link_that_ends_leaves_nothing_kept_and_no_region_in_use(pair: tuple[Station, Station]) -> None:
    near, far = pair
    to = near.channels["far"]
    for lane in range(3):
        to.begin(lane, 0, 100).send_piece([bytes(100)])
    far.endpoint.close()
    near.hub.forget(to)
    assert not near.hub.keeping and near.hub.credits == []
    assert near.hub.regions.allocate(256) is not None
    to.free(0)
    near.hub.flush()  # nobody is told
