"""Where slots lie, and that what is sent into one arrives there alone; on the null transport."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.errors import DeadlineError, PeerLostError
from lamina.protocol.channel import ALIGNMENT, Inbox, Layout, Outbox, Slot
from lamina.transport.base import Endpoint
from lamina.transport.null import NullEndpoint

SLOT = Slot(offset=7, nbytes=10, doorbell=2)


class Channel(NamedTuple):
    outbox: Outbox
    inbox: Inbox
    near: Endpoint
    far: Endpoint


@pytest.fixture
def channel() -> Iterator[Channel]:
    near, far = NullEndpoint("near"), NullEndpoint("far")
    near.register(1, 1)
    arena = far.register(30, 3)
    yield Channel(Outbox(near, near.connect(far.descriptor(), 1.0), SLOT), Inbox(arena, SLOT), near, far)
    near.close()
    far.close()


def test_a_message_arrives_in_its_slot_and_is_announced(channel: Channel) -> None:
    channel.outbox.send([np.array([1, 2], np.uint16), b"abc"], 1)
    assert channel.far.wait([(channel.inbox.doorbell, 1)], 0.0) == 0
    assert bytes(channel.inbox.view[:7]) == np.array([1, 2], np.uint16).tobytes() + b"abc"
    assert len(channel.inbox.view) == SLOT.nbytes


def test_a_message_may_come_in_pieces_and_skip_numbers(channel: Channel) -> None:
    channel.outbox.send([b"later"], 4, at=5)
    channel.far.wait([(2, 3)], 0.0)
    with pytest.raises(DeadlineError):
        channel.far.wait([(2, 5)], 0.0)
    channel.outbox.send([b"first"], 5)
    channel.far.wait([(2, 5)], 0.0)
    assert bytes(channel.inbox.view) == b"firstlater"


def test_what_is_too_large_is_not_sent(channel: Channel) -> None:
    for at in (0, 3):
        with pytest.raises(ValueError, match=f"does not fit into {10 - at}"):
            channel.outbox.send([b"12345", b"678901"], 1, at)
    with pytest.raises(DeadlineError):
        channel.far.wait([(2, 1)], 0.0)
    assert bytes(channel.inbox.view) == bytes(10)


def test_a_lost_peer_is_told_of(channel: Channel) -> None:
    channel.far.close()
    with pytest.raises(PeerLostError, match="far"):
        channel.outbox.send([], 1)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_slots_never_overlap_and_lie_inside_their_arenas(
    lanes: int, memories: int, request: int, reply: int, context: int
) -> None:
    layout = Layout(lanes, memories, request, reply, context)
    requests = [layout.request(lane) for lane in range(lanes)]
    others = [layout.reply(lane, memory) for lane in range(lanes) for memory in range(memories)]
    others += [layout.context(lane) for lane in range(lanes)]
    for slots, (nbytes, doorbells) in ((requests, layout.memory_arena), (others, layout.compute_arena)):
        taken = sorted((slot.offset, slot.offset + slot.nbytes) for slot in slots)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
        assert all(slot.offset % ALIGNMENT == 0 and slot.offset + slot.nbytes <= nbytes for slot in slots)
        assert sorted(slot.doorbell for slot in slots) == list(range(doorbells))
