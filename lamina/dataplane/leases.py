"""Layout of a worker's arena, and the leases of its parts to the peers that may write there. Pure.

The arena's owner keeps the leases and tells every peer its lease. A later lease never moves an earlier one, so a worker
can join while others exchange messages.

The arena begins with what its owner uses: landing slots, in which fetched bytes arrive, staging slots for segments that
move to another worker, and the pool of regions that peers fetch. Leases follow. Address space is reserved for later
links, since untouched pages of an anonymous file cost nothing; for fewer with RDMA, which pins the whole arena.
"""

import bisect
from collections import Counter
from collections.abc import Sequence

import msgspec

from lamina.core.errors import TransportError
from lamina.core.types import AttentionSpec, DType
from lamina.dataplane.wire import reply_nbytes, request_nbytes
from lamina.transport.arena import PAGE

ALIGNMENT = 64  # slots start at cache lines, which vector loads prefer too
SLOTS = 2  # messages in flight over a link, in each direction
SLOT_ROWS = 256  # most rows of a slot; larger messages are fetched, which copies them twice more
LEAST_SLOT_ROWS = 64
SLOT_ROWS_OF_ALL = 4096  # slot rows of all links of a worker together, if each link has ``LEAST_SLOT_ROWS``
HEADER_NBYTES = 64  # size of the header in front of the message in every slot
PROOF_NBYTES = 64  # size of the proof at the beginning of every lease
VERDICT = PROOF_NBYTES - 1  # byte of the proof that the owner sets: 1 if the proof of the peer's device has arrived
# Doorbells of a lease, counted from its first. The owner of the arena waits on them, the peer rings.
PROOF = 0
ARRIVED = 1  # one per slot of the lease: a piece of a message has arrived
FREED = ARRIVED + SLOTS  # one per slot in the peer's arena: freed uses
FETCHED = FREED + SLOTS  # regions fetched
STAGED = FETCHED + 1  # pieces of moving segments laid out for the owner
TAKEN = STAGED + 1  # pieces of moving segments that the peer has fetched
DOORBELLS = TAKEN + 1
POOLED_MESSAGES = 4  # messages of the largest size that fit into the pool
LANDINGS = 4  # most fetches of a worker in flight
LANDING_NBYTES = 128 << 10  # least size of a landing slot; larger ones would delay messages that wait for a fetch
SUMS_NBYTES = 1 << 20  # bytes of a slot between two ranks; larger tensors are summed in pieces
ORDER_NBYTES = 512  # bytes at the end of a slot between ranks, for the order of slices (``compute.ranks``)
SPARE_LINKS = 64  # links of workers that join later, for which address space is reserved
PINNED_SPARE_LINKS = 8  # the same of an arena that RDMA may pin, where they cost memory
STAGING_SLOTS = 2  # one piece of a segment is written while the piece before is fetched


class Lease(msgspec.Struct, frozen=True):
    """The part of an arena that one peer may write: bytes [offset, offset + nbytes), and ``DOORBELLS`` doorbells from
    ``doorbell`` on.

    The proof that the link works comes first, then ``SLOTS`` slots of equal size; none if ``nbytes`` is too small.

    Attributes:
        inbox: handle with which the peer's device opens the inbox (``transport.device.inboxes``); empty without one.
        inbox_key: key with which the peer's NIC writes into the inbox; empty if it cannot.
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

    def allocate(self, count: int) -> int | None:
        """Allocate the lowest free part of ``count`` numbers, and return its start; None if all parts are shorter."""
        count = self._aligned(count)
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= count:
                self._free[index : index + 1] = [(start + count, stop)] if start + count < stop else []
                return start
        return None

    def deallocate(self, start: int, count: int) -> None:
        """Free a result of ``allocate`` for the same count. Raises ValueError if any of it is free."""
        stop = start + self._aligned(count)
        if start == stop:
            return
        index = bisect.bisect(self._free, (start, stop))
        before, after = self._free[index - 1 : index] if index else [], self._free[index : index + 1]
        if (before and before[0][1] > start) or (after and after[0][0] < stop):
            raise ValueError(f"[{start}, {stop}) is freed twice")
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
        stages: True if segments may move from this worker to another.
        pool_nbytes: bytes for regions that peers fetch.
        leases: most leases by their bytes. Leases of one size have a part of their own, so that room for a number of
            links stays room for that number, whichever others end before.
    """

    landing_nbytes: int
    stages: bool
    pool_nbytes: int
    leases: dict[int, int]

    def landing(self, number: int) -> int:
        """Return the offset of a landing slot, whose doorbell has the same number."""
        return number * aligned(self.landing_nbytes)

    def staging(self, number: int) -> int:
        """Return the offset of the staging slot for piece ``number`` of a segment that moves."""
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
        return self.leased_at + sum(nbytes * count for nbytes, count in self.leases.items())

    @property
    def links(self) -> int:
        """Most leases."""
        return sum(self.leases.values())

    @property
    def doorbells(self) -> int:
        return LANDINGS + self.links * DOORBELLS


class Leases:
    """Allocates the leases of one arena. Each begins at a page, since a device registers a lease as a whole, and copies
    must not span two registrations."""

    def __init__(self, plan: ArenaPlan) -> None:
        self._spaces, start = dict[int, Space](), plan.leased_at
        for nbytes, count in plan.leases.items():
            self._spaces[nbytes] = Space(start, start := start + nbytes * count, PAGE)
        self._doorbells = Space(LANDINGS, plan.doorbells)

    def lease(self, slot_nbytes: int) -> Lease:
        """Return a lease with slots of ``slot_nbytes``, a multiple of ``ALIGNMENT``.

        Raises TransportError if the arena has no room for one more of this size.
        """
        nbytes, space = PROOF_NBYTES + SLOTS * slot_nbytes, self._spaces.get(lease_nbytes(slot_nbytes))
        if space is None or (offset := space.allocate(nbytes)) is None:
            raise TransportError(
                f"the arena has no {nbytes} free bytes for another link; release a link, or make a larger arena"
            )
        doorbell = self._doorbells.allocate(DOORBELLS)
        assert doorbell is not None, "there are doorbells for all leases"
        return Lease(offset, nbytes, doorbell)

    def end_lease(self, lease: Lease) -> None:
        """Free a part of the arena, whose peer must not be able to write any more."""
        self._spaces[_whole_pages(lease.nbytes)].deallocate(lease.offset, lease.nbytes)
        self._doorbells.deallocate(lease.doorbell, DOORBELLS)


class Messages(msgspec.Struct, frozen=True):
    """The sizes of a cluster's messages in bytes.

    Attributes:
        request: bytes of a slot for requests (``dataplane.wire``).
        reply: bytes of a slot for replies.
        context: bytes of a slot between compute workers of different stages or replicas, for contexts, or for requests
            and replies if replicas attend for each other; 0: they send no messages.
        fetched_from_compute: most bytes to be fetched for a compute worker's message.
        fetched_from_memory: most bytes to be fetched for a memory worker's message.
        landing: most bytes of one fetch.
        slot_rows: rows that a slot holds.
        sums: bytes of a slot between the ``ranks`` of a replica; 0: there is one rank.
        lends: whether compute workers attend for other replicas, so that segments may move from and to them.
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
    lends: bool = False

    def compute_arena(self, computes: int, memories: int, spare: int = 0) -> ArenaPlan:
        """Return the arena of a compute worker with links to all other workers, and to ``spare`` more of each kind."""
        leases = Counter({lease_nbytes(self.reply): memories + spare})
        if self.context:
            leases[lease_nbytes(self.context)] += computes - 1 + spare
        leases[lease_nbytes(self.sums)] += self.ranks - 1
        return ArenaPlan(self.landing, self.lends, POOLED_MESSAGES * self.fetched_from_compute, dict(+leases))

    def memory_arena(self, computes: int, memories: int, spare: int = 0) -> ArenaPlan:
        """Return the arena of a memory worker with links to all other workers, and to ``spare`` more of each kind."""
        leases = Counter({lease_nbytes(self.request): computes + spare})
        leases[lease_nbytes(0)] += memories - 1 + spare
        pool = POOLED_MESSAGES * self.fetched_from_memory
        return ArenaPlan(self.landing, memories + spare > 1 or self.lends, pool, dict(+leases))


def slot_rows(rows: int, links: int) -> int:
    """Return the rows that a slot holds, for steps of at most ``rows`` rows and workers with ``links`` links at the
    start: the more links, the fewer rows of a step travel over each."""
    return min(rows, SLOT_ROWS, max(LEAST_SLOT_ROWS, SLOT_ROWS_OF_ALL // links))


def messages(
    attentions: Sequence[AttentionSpec],
    dtype: DType,
    rows: int,
    context_nbytes: int,
    ranks: int = 1,
    links: int = 1,
    lends: bool = False,
) -> Messages:
    """Return the sizes for steps of at most ``rows`` rows.

    Args:
        attentions: The model's attentions.
        dtype: The model's element type.
        rows: Most rows of a step.
        context_nbytes: Size of a context for ``rows`` rows; 0: no context is sent.
        ranks: Ranks of a replica.
        links: Links of each worker at the start.
        lends: Whether compute workers attend for other replicas.
    """
    few = slot_rows(rows, links)
    context = aligned(-(-context_nbytes * few // rows))
    request, reply = request_nbytes(attentions, dtype, few), reply_nbytes(attentions, few)
    fetched = max(aligned(request_nbytes(attentions, dtype, rows)), context_nbytes) + ALIGNMENT
    if lends:
        context = max(context, aligned(request), aligned(reply))
        fetched = max(fetched, aligned(reply_nbytes(attentions, rows)) + ALIGNMENT)
    return Messages(
        request=HEADER_NBYTES + aligned(request),
        reply=HEADER_NBYTES + aligned(reply),
        context=HEADER_NBYTES + context if context else 0,
        fetched_from_compute=fetched,
        fetched_from_memory=reply_nbytes(attentions, rows),
        landing=max(LANDING_NBYTES, *(spec.kv_bytes_per_token(dtype) for spec in attentions)),
        slot_rows=few,
        sums=SUMS_NBYTES + ORDER_NBYTES if ranks > 1 else 0,
        ranks=ranks,
        lends=lends,
    )


def lease_nbytes(slot_nbytes: int) -> int:
    """Return the bytes of a lease with slots of this size, in whole pages."""
    return _whole_pages(PROOF_NBYTES + SLOTS * slot_nbytes)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def aligned(nbytes: int) -> int:
    """Round ``nbytes`` up to a multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
