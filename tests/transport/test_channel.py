"""Credits, order and misuse of channels, on the null transport."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from lamina.errors import DeadlineError, PeerLostError
from lamina.transport.base import Endpoint
from lamina.transport.channel import ChannelLayout, Requester, Responder
from lamina.transport.null import NullEndpoint

LAYOUT = ChannelLayout(slots=2, request_nbytes=10, reply_nbytes=3)


class Channel(NamedTuple):
    requester: Requester
    responder: Responder
    compute: Endpoint
    memory: Endpoint


@pytest.fixture
def channel() -> Iterator[Channel]:
    """A channel that begins at odd places of both arenas."""
    compute, memory = NullEndpoint("compute"), NullEndpoint("memory")
    places = {"request_offset": 7, "request_doorbell": 2, "reply_offset": 5, "reply_doorbell": 1}
    replies, requests = compute.register(5 + LAYOUT.replies_nbytes, 2), memory.register(7 + LAYOUT.requests_nbytes, 3)
    to_memory, to_compute = compute.connect(memory.descriptor(), 1.0), memory.connect(compute.descriptor(), 1.0)
    yield Channel(
        Requester(compute, replies, to_memory, LAYOUT, **places),
        Responder(memory, requests, to_compute, LAYOUT, **places),
        compute,
        memory,
    )
    compute.close()
    memory.close()


def test_messages_are_numbered_from_one_and_answered_in_order(channel: Channel) -> None:
    for n in range(1, 10):
        assert channel.requester.send([np.array([n, 2 * n], np.uint16), b"abc"], 0.0) == n
        assert channel.responder.target == (2, n)
        assert bytes(channel.responder.receive(0.0)[:7]) == np.array([n, 2 * n], np.uint16).tobytes() + b"abc"
        channel.responder.reply([bytes([n])])
        assert channel.requester.target(n) == (1, n)
        assert channel.requester.reply(n, 0.0)[0] == n


def test_as_many_messages_as_slots_are_in_flight(channel: Channel) -> None:
    channel.requester.send([b"1"], 0.0)
    channel.requester.send([b"2"], 0.0)
    with pytest.raises(DeadlineError, match="memory has not answered message 1 of 2"):
        channel.requester.send([b"3"], 0.0)
    assert bytes(channel.responder.receive(0.0)[:1]) == b"1"
    assert bytes(channel.responder.receive(0.0)[:1]) == b"2"  # received ahead of the first answer
    channel.responder.reply([])  # only a credit
    assert channel.requester.send([b"3"], 0.0) == 3  # a refused send did not use up its number
    with pytest.raises(DeadlineError, match="answered message 2 of 3"):
        channel.requester.reply(2, 0.0)


def test_slots_do_not_overlap(channel: Channel) -> None:
    channel.requester.send([b"A" * 10], 0.0)
    channel.requester.send([b"B" * 10], 0.0)
    requests = [channel.responder.receive(0.0) for _ in range(2)]
    assert [bytes(request) for request in requests] == [b"A" * 10, b"B" * 10]
    channel.responder.reply([b"aaa"])
    channel.responder.reply([b"bbb"])
    assert [bytes(channel.requester.reply(n, 0.0)) for n in (1, 2)] == [b"aaa", b"bbb"]


def test_what_is_too_large_is_not_sent(channel: Channel) -> None:
    with pytest.raises(ValueError, match="11 bytes does not fit into 10"):
        channel.requester.send([b"12345", b"678901"], 0.0)
    assert channel.requester.send([b"fits"], 0.0) == 1
    channel.responder.receive(0.0)
    with pytest.raises(ValueError, match="4 bytes does not fit into 3"):
        channel.responder.reply([b"1234"])
    channel.responder.reply([b"123"])
    assert bytes(channel.requester.reply(1, 0.0)) == b"123"


def test_replies_that_cannot_be_there_are_refused(channel: Channel) -> None:
    for _ in range(3):
        channel.requester.send([], 0.0)
        channel.responder.receive(0.0)
        channel.responder.reply([])
    for n in (0, 1, 4):
        with pytest.raises(ValueError, match=f"reply {n} cannot be read: 3 messages are sent and 2 replies"):
            channel.requester.reply(n, 0.0)
    with pytest.raises(ValueError, match="all 3 requests of compute are answered"):
        channel.responder.reply([])


def test_a_lost_peer_ends_every_wait(channel: Channel) -> None:
    channel.requester.send([], 0.0)
    channel.requester.send([], 0.0)
    channel.memory.close()
    with pytest.raises(PeerLostError, match="memory"):
        channel.requester.reply(1, 30.0)
    with pytest.raises(PeerLostError, match="memory"):
        channel.requester.send([], 30.0)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_impossible_layouts_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        ChannelLayout(*sizes)


def test_slots_begin_at_cache_lines() -> None:
    layout = ChannelLayout(slots=3, request_nbytes=65, reply_nbytes=0)
    assert layout.requests_nbytes == 3 * 128
    assert [layout.request_offset(n) for n in (3, 4, 5, 6)] == [0, 128, 256, 0]
    assert layout.replies_nbytes == 0
