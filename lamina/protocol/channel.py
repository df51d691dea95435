"""The data path between workers over any endpoint: slots that hold one message at a time, with a doorbell each.

Per lane there is one request slot in every memory worker's arena, one reply slot per memory worker in every compute
worker's arena, and one context slot there for what compute workers hand to each other. No credits are needed: message
n + 1 of a lane is sent only after every answer to message n has been seen, so its slot is free again. For the same
reason several workers may ring a lane's doorbell: they never do so at the same time.

K and V of prompt chunks do not travel as messages: a compute worker lays them out in a bulk slot of its own arena, and
memory workers fetch them piece by piece into their landing slots. A lane has ``BULK_SLOTS`` bulk slots, used in turn.
The answer to attention n says that all of attention n + 1 - ``BULK_SLOTS`` has been fetched, so no credits are needed
here either; the answer to a step's last attention says so of the whole step.

A segment that moves from one memory worker to another travels the same way: the source lays pieces out in its staging
slots, used in turn, and rings; the target fetches each into a landing slot and rings back when a staging slot may be
used again. Every pair of memory workers has its own doorbells for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.transport.base import Arena, Buffer, Endpoint, Part, Peer

ALIGNMENT = 64  # slots start at cache lines, which vector loads prefer too
BULK_SLOTS = 2  # of a lane: one attention's K and V are computed while those of the one before travel
LANDINGS = 4  # fetches that a memory worker has in flight at once
LANDING_NBYTES = 128 << 10  # of a fetch: a message may have to wait for one
STAGING_SLOTS = 2  # one piece of a segment is laid out while the one before travels


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
        lanes, memories: their numbers.
        request_nbytes, reply_nbytes, context_nbytes: the largest message of each kind; 0: none is sent.
        bulk_nbytes: K and V of one attention of a step at most. landing_nbytes: of a fetch. 0: nothing is fetched.
        migrates: True if memory workers fetch segments from each other.
    """

    lanes: int
    memories: int
    request_nbytes: int
    reply_nbytes: int
    context_nbytes: int = 0
    bulk_nbytes: int = 0
    landing_nbytes: int = 0
    migrates: bool = False

    def request(self, lane: int) -> Slot:
        """The slot of a lane's requests, in the arena of each memory worker."""
        return Slot(lane * _aligned(self.request_nbytes), self.request_nbytes, lane)

    def reply(self, lane: int, memory: int) -> Slot:
        """The slot of memory worker ``memory``'s replies to a lane, in the arena of each compute worker."""
        place = lane * self.memories + memory
        return Slot(place * _aligned(self.reply_nbytes), self.reply_nbytes, place)

    def context(self, lane: int) -> Slot:
        """The slot of a lane's context, in the arena of each compute worker, after all replies."""
        replies = self.lanes * self.memories
        offset = replies * _aligned(self.reply_nbytes) + lane * _aligned(self.context_nbytes)
        return Slot(offset, self.context_nbytes, replies + lane)

    def bulk(self, lane: int, turn: int) -> int:
        """Where the K and V of a lane's attention ``turn`` begin, in the arena of each compute worker."""
        place = lane * BULK_SLOTS + turn % BULK_SLOTS
        return self.context(self.lanes).offset + place * _aligned(self.bulk_nbytes)

    @property
    def landings(self) -> int:
        """Landing slots of a memory worker."""
        return LANDINGS if self.landing_nbytes else 0

    def landing(self, number: int) -> Slot:
        """A slot that fetched bytes arrive in, in the arena of each memory worker, after all requests."""
        offset = self.lanes * _aligned(self.request_nbytes) + number * _aligned(self.landing_nbytes)
        return Slot(offset, self.landing_nbytes, self.lanes + number)

    def staging(self, number: int) -> int:
        """Where piece ``number`` of an outgoing segment is laid out, in each memory worker's arena."""
        return self.landing(self.landings).offset + number % STAGING_SLOTS * _aligned(self.landing_nbytes)

    def staged(self, source: int) -> Slot:
        """Rung in a memory worker's arena when memory worker number ``source`` has laid out a piece for it."""
        return Slot(0, 0, self.landing(self.landings).doorbell + source)

    def taken(self, target: int) -> Slot:
        """Rung in a memory worker's arena when memory worker number ``target`` has fetched a piece from it."""
        return Slot(0, 0, self.staged(self.memories).doorbell + target)

    @property
    def memory_arena(self) -> tuple[int, int]:
        """(bytes, doorbells) of a memory worker's arena."""
        end = self.landing(self.landings)
        if not self.migrates:
            return end.offset, end.doorbell
        return end.offset + STAGING_SLOTS * _aligned(self.landing_nbytes), self.taken(self.memories).doorbell

    @property
    def compute_arena(self) -> tuple[int, int]:
        """(bytes, doorbells) of a compute worker's arena."""
        return self.bulk(self.lanes, 0), self.context(self.lanes).doorbell


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
        view: the slot's bytes: a message's from its announcement until the sender of the next one has its answer.
        doorbell: its number, for ``Endpoint.wait``.
    """

    def __init__(self, arena: Arena, slot: Slot) -> None:
        self.view: Buffer = arena.view(slot.offset, slot.nbytes)
        self.doorbell = slot.doorbell


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
