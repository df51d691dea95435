"""Request and reply over any endpoint: the data path between a compute worker and a memory worker.

Message n (from 1) travels in slot ``n % slots`` both ways, and n is the value its doorbell is rung with. A reply is
also the credit for its request's slot: request n may be sent once reply n - slots has arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.errors import DeadlineError
from lamina.transport.base import Arena, Buffer, Endpoint, Part, Peer

ALIGNMENT = 64  # slots start at cache lines, which is also what vector loads like best


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class ChannelLayout:
    """What both sides of a channel agree on, over the control plane.

    Attributes:
        slots: messages in flight.
        request_nbytes: largest request, in the responder's arena.
        reply_nbytes: largest reply, in the requester's arena; 0 if replies are mere credits.
    """

    slots: int
    request_nbytes: int
    reply_nbytes: int

    def __post_init__(self) -> None:
        if self.slots < 1 or self.request_nbytes < 0 or self.reply_nbytes < 0:
            raise ValueError(f"a channel needs at least one slot and no negative size: {self}")

    @property
    def requests_nbytes(self) -> int:
        """Bytes that the requests of this channel take in the responder's arena."""
        return self.slots * _aligned(self.request_nbytes)

    @property
    def replies_nbytes(self) -> int:
        """Bytes that the replies of this channel take in the requester's arena."""
        return self.slots * _aligned(self.reply_nbytes)

    def request_offset(self, n: int) -> int:
        """Offset of request n from the channel's first request slot."""
        return n % self.slots * _aligned(self.request_nbytes)

    def reply_offset(self, n: int) -> int:
        """Offset of reply n from the channel's first reply slot."""
        return n % self.slots * _aligned(self.reply_nbytes)


class Requester:
    """The compute side: writes requests into its peer's arena and waits for replies in its own.

    Args:
        arena: this endpoint's own. peer: the responder's, as connected by ``endpoint``.
        request_offset, request_doorbell: this channel's place in the peer's arena.
        reply_offset, reply_doorbell: its place in ``arena``.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        arena: Arena,
        peer: Peer,
        layout: ChannelLayout,
        *,
        request_offset: int,
        request_doorbell: int,
        reply_offset: int,
        reply_doorbell: int,
    ) -> None:
        self._endpoint = endpoint
        self._peer = peer
        self._layout = layout
        self._requests = [request_offset + layout.request_offset(n) for n in range(layout.slots)]
        self._request_doorbell = request_doorbell
        self._replies = [
            arena.view(reply_offset + layout.reply_offset(n), layout.reply_nbytes) for n in range(layout.slots)
        ]
        self._reply_doorbell = reply_doorbell
        self._sent = 0
        self._replied = 0  # the highest reply known to have arrived

    def send(self, parts: Sequence[Part], timeout_s: float) -> int:
        """Write the parts one after another into the next slot and ring; returns the message's number, from 1.

        Waits until the slot is free. That the view of reply n - slots is no longer needed is the caller's business.

        Raises:
            ValueError: the parts are larger than a slot; nothing was sent.
            DeadlineError: no slot became free in time. PeerLostError.
        """
        n = self._sent + 1
        self._await_reply(n - self._layout.slots, timeout_s)
        self._endpoint.post(
            self._peer,
            self._requests[n % self._layout.slots],
            self._layout.request_nbytes,
            parts,
            self._request_doorbell,
            n,
        )
        self._sent = n
        return n

    def target(self, n: int) -> tuple[int, int]:
        """Where reply n is announced: (doorbell, sequence) for ``Endpoint.wait`` over several channels."""
        return self._reply_doorbell, n

    def reply(self, n: int, timeout_s: float) -> Buffer:
        """Wait for reply n; a view of its slot, valid until message n + slots is sent.

        Raises:
            ValueError: message n was not sent, or its reply's slot is in use again.
            DeadlineError: it is not there in time. PeerLostError.
        """
        if not self._sent - self._layout.slots < n <= self._sent or n < 1:
            raise ValueError(
                f"reply {n} cannot be read: {self._sent} messages are sent and {self._layout.slots} replies are kept"
            )
        self._await_reply(n, timeout_s)
        return self._replies[n % self._layout.slots]

    def drain(self, timeout_s: float) -> None:
        """Wait until the peer has taken in every message sent. Raises DeadlineError, PeerLostError."""
        self._await_reply(self._sent, timeout_s)

    def _await_reply(self, n: int, timeout_s: float) -> None:
        if n <= self._replied:
            return
        try:
            self._endpoint.wait(((self._reply_doorbell, n),), timeout_s)
        except DeadlineError as error:
            raise DeadlineError(f"{self._peer.name} has not answered message {n} of {self._sent}: {error}") from error
        self._replied = n


class Responder:
    """The memory side: takes requests in order from its own arena and answers them in order.

    Arguments are those of :class:`Requester`, with the places swapped: requests lie in ``arena``, replies in the
    peer's.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        arena: Arena,
        peer: Peer,
        layout: ChannelLayout,
        *,
        request_offset: int,
        request_doorbell: int,
        reply_offset: int,
        reply_doorbell: int,
    ) -> None:
        self._endpoint = endpoint
        self._peer = peer
        self._layout = layout
        self._requests = [
            arena.view(request_offset + layout.request_offset(n), layout.request_nbytes) for n in range(layout.slots)
        ]
        self._request_doorbell = request_doorbell
        self._replies = [reply_offset + layout.reply_offset(n) for n in range(layout.slots)]
        self._reply_doorbell = reply_doorbell
        self._received = 0
        self._replied = 0

    @property
    def target(self) -> tuple[int, int]:
        """Where the next request is announced: (doorbell, sequence) for ``Endpoint.wait`` over several channels."""
        return self._request_doorbell, self._received + 1

    def receive(self, timeout_s: float) -> Buffer:
        """Wait for the next request; a view of its slot, valid until it is answered.

        Several may be received before the first is answered. Raises DeadlineError, PeerLostError.
        """
        self._endpoint.wait((self.target,), timeout_s)
        self._received += 1
        return self._requests[self._received % self._layout.slots]

    def reply(self, parts: Sequence[Part]) -> None:
        """Answer the oldest request that has no reply yet, and give its slot back; no parts: only a credit.

        Raises ValueError if every request is answered or the parts are larger than a reply slot; PeerLostError.
        """
        if self._replied == self._received:
            raise ValueError(f"all {self._received} requests of {self._peer.name} are answered")
        n = self._replied + 1
        self._endpoint.post(
            self._peer,
            self._replies[n % self._layout.slots],
            self._layout.reply_nbytes,
            parts,
            self._reply_doorbell,
            n,
        )
        self._replied = n
