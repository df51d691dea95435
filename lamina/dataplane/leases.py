"""Leases parts of a worker's arena to the peers that may write there, from when a link is made until it has ended.

Pure: the arena's owner keeps the leases and tells every peer its lease. A later lease never moves an earlier one, so
that a worker can join while others exchange messages.

The arena begins with what its owner uses itself: landing slots that fetched bytes arrive in, staging slots of segments
that move away, and the pool of what peers fetch. Leases follow. Address space is reserved for later links: untouched
pages of an anonymous file cost nothing. RDMA pins all of an arena, so that nothing is reserved where it may be used.
"""

import bisect
from collections.abc import Sequence

import msgspec

from lamina.core.errors import TransportError
from lamina.core.types import AttentionSpec, DType
from lamina.dataplane.wire import reply_nbytes, request_nbytes
from lamina.transport.arena import PAGE

ALIGNMENT = 64  # slots start at cache lines, which vector loads prefer too
SLOTS = 2  # messages that may be on their way at once over a link, in each direction
SLOT_ROWS = 256  # most rows that a slot has room for; larger messages are fetched, which copies them twice more
LEAST_SLOT_ROWS = 64
SLOT_ROWS_OF_ALL = 4096  # of all links of a worker together, unless each would have fewer than ``LEAST_SLOT_ROWS``
HEADER_NBYTES = 64  # in front of the message in every slot
PROOF_NBYTES = 64  # at the beginning of every lease
VERDICT = PROOF_NBYTES - 1  # the owner's byte in there: 1 if the proof of the peer's device has arrived in the inbox
# Doorbells of a lease, counted from its first. The owner of the arena waits on them, the peer rings.
PROOF = 0
ARRIVED = 1  # by slot: a piece of a message is in it
GIVEN_BACK = ARRIVED + SLOTS  # by slot of the peer's arena: uses freed
FETCHED = GIVEN_BACK + SLOTS  # regions fetched
DOORBELLS = FETCHED + 1
POOLED_MESSAGES = 4  # of the largest size that the pool has room for
LANDINGS = 4  # fetches that a worker has in flight at once
LANDING_NBYTES = 128 << 10  # of a fetch: a message may have to wait for one
SUMS_NBYTES = 1 << 20  # of a slot between two ranks: larger tensors are added up in pieces
ORDER_NBYTES = 512  # at the end of such a slot, for the order of slices, see compute.ranks
SPARE_LINKS = 64  # that address space is reserved for
STAGING_SLOTS = 2  # one piece of a segment is laid out while the one before travels


class Lease(msgspec.Struct, frozen=True):
    """Bytes [offset, offset + nbytes) and ``DOORBELLS`` doorbells from ``doorbell`` on of an arena, for one peer.

    The proof that the link works comes first, then ``SLOTS`` slots of equal size: none if ``nbytes`` leaves no room.

    Attributes:
        inbox: what the peer's device opens the inbox (``transport.device.inboxes``) with; empty without an inbox.
        inbox_key: what the peer's NIC writes into the inbox with; empty if it cannot.
    """

    offset: int
    nbytes: int
    doorbell: int
    inbox: bytes = b""
    inbox_key: bytes = b""

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot, with its header."""
        return (self.nbytes - PROOF_NBYTES) // SLOTS

    @property
    def body_nbytes(self) -> int:
        """Most bytes of a message's body in a slot; negative without slots."""
        return self.slot_nbytes - HEADER_NBYTES

    def slot(self, number: int) -> int:
        """Return where a slot begins."""
        return self.offset + PROOF_NBYTES + number * self.slot_nbytes


class Space:
    """Allocates parts of a range of numbers; each part starts at a multiple of ``alignment``."""

    def __init__(self, start: int, stop: int, alignment: int = 1) -> None:
        self._alignment = alignment
        start = self._aligned(start)
        self._free = [(start, stop)] if start < stop else []  # sorted; no two touch

    def take(self, count: int) -> int | None:
        """Allocate the lowest free part of ``count`` numbers, and return its start; None if there is no such part."""
        count = self._aligned(count)
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= count:
                self._free[index : index + 1] = [(start + count, stop)] if start + count < stop else []
                return start
        return None

    def give(self, start: int, count: int) -> None:
        """Free what ``take`` returned for this count. Raises ValueError if any of it is free."""
        stop = start + self._aligned(count)
        if start == stop:
            return
        index = bisect.bisect(self._free, (start, stop))
        before, after = self._free[index - 1 : index] if index else [], self._free[index : index + 1]
        if (before and before[0][1] > start) or (after and after[0][0] < stop):
            raise ValueError(f"[{start}, {stop}) is given back twice")
        low, high = index, index
        if before and before[0][1] == start:
            low, start = index - 1, before[0][0]
        if after and after[0][0] == stop:
            high, stop = index + 1, after[0][1]
        self._free[low:high] = [(start, stop)]

    def _aligned(self, count: int) -> int:
        return -(-count // self._alignment) * self._alignment


class ArenaPlan(msgspec.Struct, frozen=True):
    """The parts of one worker's arena.

    Attributes:
        landing_nbytes: most bytes of a fetch; 0: this worker fetches nothing.
        stages: segments may move away from here.
        pool_nbytes: for what peers fetch.
        leased_nbytes: for leases.
        links: most leases.
    """

    landing_nbytes: int
    stages: bool
    pool_nbytes: int
    leased_nbytes: int
    links: int

    def landing(self, number: int) -> int:
        """Return where a landing slot begins; its number is that of its doorbell."""
        return number * aligned(self.landing_nbytes)

    def staging(self, number: int) -> int:
        """Return where piece ``number`` of a segment that moves away is laid out."""
        return self.landing(LANDINGS + number % STAGING_SLOTS)

    @property
    def pool(self) -> tuple[int, int]:
        """The bytes [start, stop) of the pool."""
        start = self.landing(LANDINGS + (STAGING_SLOTS if self.stages else 0))
        return start, start + aligned(self.pool_nbytes)

    @property
    def leased_at(self) -> int:
        """Byte at which leases begin."""
        return _whole_pages(self.pool[1])

    @property
    def nbytes(self) -> int:
        """All bytes of the arena."""
        return self.leased_at + self.leased_nbytes

    @property
    def doorbells(self) -> int:
        """All doorbells of the arena."""
        return LANDINGS + self.links * DOORBELLS


class Leases:
    """The leases of one arena, each in pages of its own: copies from registered memory must not span two
    registrations, and a device registers a lease as a whole."""

    def __init__(self, plan: ArenaPlan) -> None:
        self._bytes = Space(plan.leased_at, plan.nbytes, PAGE)
        self._doorbells = Space(LANDINGS, plan.doorbells)

    def lease(self, slot_nbytes: int) -> Lease:
        """Return a lease with slots of ``slot_nbytes``, a multiple of ``ALIGNMENT``.

        Raises TransportError if the arena has no room.
        """
        nbytes = PROOF_NBYTES + SLOTS * slot_nbytes
        offset, doorbell = self._bytes.take(nbytes), self._doorbells.take(DOORBELLS)
        if offset is not None and doorbell is not None:
            return Lease(offset, nbytes, doorbell)
        if offset is not None:
            self._bytes.give(offset, nbytes)
        if doorbell is not None:
            self._doorbells.give(doorbell, DOORBELLS)
        missing = f"{nbytes} free bytes" if offset is None else f"{DOORBELLS} free doorbells"
        raise TransportError(f"the arena has no {missing} for another link; release a link, or make a larger arena")

    def end_lease(self, lease: Lease) -> None:
        """Free a part of the arena. Only once its peer provably cannot write any more."""
        self._bytes.give(lease.offset, lease.nbytes)
        self._doorbells.give(lease.doorbell, DOORBELLS)


class Messages(msgspec.Struct, frozen=True):
    """The sizes of a cluster's messages in bytes.

    Attributes:
        request: of a slot for requests, see ``dataplane.wire``.
        reply: of a slot for replies.
        context: of a slot for contexts; 0: no context is sent.
        fetched_from_compute: most that a compute worker's message leaves to be fetched.
        fetched_from_memory: most that a memory worker's message leaves to be fetched.
        landing: most that one fetch brings.
        slot_rows: see the function of this name.
        sums: of a slot between the ``ranks`` of a replica; 0: there is one rank.
    """

    request: int
    reply: int
    context: int
    fetched_from_compute: int
    fetched_from_memory: int
    landing: int
    slot_rows: int
    sums: int = 0
    ranks: int = 1

    def compute_arena(self, computes: int, memories: int, spare: int = 0) -> ArenaPlan:
        """Return the arena of a compute worker with links to all other workers, and ``spare`` more of any kind."""
        others = computes - 1 if self.context else 0
        leased = memories * lease_nbytes(self.reply) + others * lease_nbytes(self.context)
        leased += spare * lease_nbytes(max(self.reply, self.context)) + (self.ranks - 1) * lease_nbytes(self.sums)
        pool = POOLED_MESSAGES * self.fetched_from_compute
        return ArenaPlan(self.landing, False, pool, leased, memories + others + spare + self.ranks - 1)

    def memory_arena(self, computes: int, memories: int, spare: int = 0) -> ArenaPlan:
        """Return the arena of a memory worker with links to all other workers, and ``spare`` more of any kind."""
        others = memories - 1
        leased = (computes + spare) * lease_nbytes(self.request) + others * lease_nbytes(0)
        pool = POOLED_MESSAGES * self.fetched_from_memory
        return ArenaPlan(self.landing, memories + spare > 1, pool, leased, computes + others + spare)


def slot_rows(rows: int, links: int) -> int:
    """Return the rows that a slot has room for, in steps of at most ``rows``.

    ``links``: of a worker at the start. The more links, the fewer rows of a step travel over each.
    """
    return min(rows, SLOT_ROWS, max(LEAST_SLOT_ROWS, SLOT_ROWS_OF_ALL // links))


def messages(
    attentions: Sequence[AttentionSpec], dtype: DType, rows: int, context_nbytes: int, ranks: int = 1, links: int = 1
) -> Messages:
    """Return the sizes for steps of at most ``rows`` rows.

    Args:
        context_nbytes: of the context between replicas; 0: no context is sent.
        links: see ``slot_rows``.
    """
    few = slot_rows(rows, links)
    context = aligned(-(-context_nbytes * few // rows))
    return Messages(
        request=HEADER_NBYTES + aligned(request_nbytes(attentions, dtype, few)),
        reply=HEADER_NBYTES + aligned(reply_nbytes(attentions, few)),
        context=HEADER_NBYTES + context if context else 0,
        fetched_from_compute=max(aligned(request_nbytes(attentions, dtype, rows)), context_nbytes) + ALIGNMENT,
        fetched_from_memory=reply_nbytes(attentions, rows),
        landing=max(LANDING_NBYTES, *(spec.kv_bytes_per_token(dtype) for spec in attentions)),
        slot_rows=few,
        sums=SUMS_NBYTES + ORDER_NBYTES if ranks > 1 else 0,
        ranks=ranks,
    )


def lease_nbytes(slot_nbytes: int) -> int:
    """Return the bytes of an arena that a lease with slots of this size takes."""
    return _whole_pages(PROOF_NBYTES + SLOTS * slot_nbytes)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def aligned(nbytes: int) -> int:
    """Round ``nbytes`` up to where a slot may start."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
