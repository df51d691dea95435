"""The data path between workers over any endpoint: slots that hold one message at a time, with a doorbell each.

Per lane there is one request slot in every memory worker's arena, one reply slot per memory worker in every compute
worker's arena, and one context slot there for what compute workers hand to each other. No credits are needed: message
n + 1 of a lane is sent only by who has seen every answer to message n, so its slot is free again. For the same reason
several workers may ring a lane's doorbell: they take turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.transport.base import Arena, Buffer, Endpoint, Part, Peer

ALIGNMENT = 64  # slots start at cache lines, which is also what vector loads like best


@dataclass(frozen=True)
class Slot:
    """A message's place in an arena, and the number of the doorbell that announces it."""

    offset: int
    nbytes: int
    doorbell: int


@dataclass(frozen=True)
class Layout:
    """Where the slots of all lanes lie. Every worker derives the same from it.

    Attributes:
        lanes, memories: how many there are.
        request_nbytes, reply_nbytes, context_nbytes: the largest message of each sort; 0: there are none.
    """

    lanes: int
    memories: int
    request_nbytes: int
    reply_nbytes: int
    context_nbytes: int = 0

    def request(self, lane: int) -> Slot:
        """The slot of a lane's requests, in the arena of each memory worker."""
        return Slot(lane * _aligned(self.request_nbytes), self.request_nbytes, lane)

    def reply(self, lane: int, memory: int) -> Slot:
        """The slot of the replies of memory worker number ``memory`` to a lane, in the arena of each compute worker."""
        place = lane * self.memories + memory
        return Slot(place * _aligned(self.reply_nbytes), self.reply_nbytes, place)

    def context(self, lane: int) -> Slot:
        """The slot of a lane's context, in the arena of each compute worker, after all replies."""
        replies = self.lanes * self.memories
        offset = replies * _aligned(self.reply_nbytes) + lane * _aligned(self.context_nbytes)
        return Slot(offset, self.context_nbytes, replies + lane)

    @property
    def memory_arena(self) -> tuple[int, int]:
        """(bytes, doorbells) of a memory worker's arena."""
        return self.lanes * _aligned(self.request_nbytes), self.lanes

    @property
    def compute_arena(self) -> tuple[int, int]:
        """(bytes, doorbells) of a compute worker's arena."""
        end = self.context(self.lanes)
        return end.offset, end.doorbell


class Outbox:
    """Sends into one slot of a peer's arena."""

    def __init__(self, endpoint: Endpoint, peer: Peer, slot: Slot) -> None:
        self._endpoint = endpoint
        self._peer = peer
        self._slot = slot

    def send(self, parts: Sequence[Part], sequence: int, at: int = 0) -> None:
        """Write the parts one after another from byte ``at`` of the slot on, then ring ``sequence``.

        Raises ValueError, before anything is written, if they do not fit; PeerLostError.
        """
        slot = self._slot
        self._endpoint.post(self._peer, slot.offset + at, slot.nbytes - at, parts, slot.doorbell, sequence)


class Inbox:
    """One slot of this endpoint's own arena.

    Attributes:
        view: the slot's bytes, those of a message from its announcement until whoever sends the next one is answered.
        doorbell: its number, for ``Endpoint.wait``.
    """

    def __init__(self, arena: Arena, slot: Slot) -> None:
        self.view: Buffer = arena.view(slot.offset, slot.nbytes)
        self.doorbell = slot.doorbell


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
