"""Decides which cached prefixes memory workers copy to their disks, and which they read back for a request. Pure.

A worker's disk holds blocks of ``BLOCK`` consecutive tokens. The key of a block is a digest of its tokens and all
tokens before them, so that equal keys mean equal prefixes. Once a worker is half full, it copies its prefixes to disk,
oldest first, while they stay in memory. So eviction never waits for the disk: a prefix that is evicted before it was
copied is lost, as without a disk. Prefixes that several workers hold together are not copied.

If a request begins with blocks that are on disk but not in memory, they are fetched into reserved slots before the
request queues, and are then cached like any other prefix. The cached prefix that they extend must not move meanwhile.
"""

import collections
import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from lamina.core.requests import Group, Ids, ids_of
from lamina.core.steps import BLOCK, Fetch, Fork, Spill, blocks_of
from lamina.kv.placement import AHEAD, Placement
from lamina.kv.prefix_cache import PrefixCache
from lamina.kv.prefix_tree import Node, PrefixTree

FULL = 0.5  # a worker copies prefixes while this share of its slots is reserved or cached
MOST_BLOCKS = 32  # most blocks in one copy


def keys_of(salt: str, ids: Ids, tokens: int) -> list[bytes]:
    """Return the keys of the whole blocks among the first ``tokens`` tokens."""
    digest, keys = hashlib.blake2b(salt.encode(), digest_size=16).digest(), []
    for start in range(0, tokens - BLOCK + 1, BLOCK):
        digest = hashlib.blake2b(digest + ids[start : start + BLOCK].tobytes(), digest_size=16).digest()
        keys.append(digest)
    return keys


class Blocks:
    """The blocks of one disk."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._kept: collections.OrderedDict[bytes, int] = collections.OrderedDict()  # by key, in order of use
        self._pinned = collections.Counter[int]()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def count_kept(self, keys: Sequence[bytes], first: int) -> int:
        """Return the number of consecutive ``keys`` from place ``first`` on whose blocks are on the disk."""
        return next((n for n, key in enumerate(keys[first:]) if key not in self._kept), len(keys[first:]))

    def pin(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks with these keys, mark them as just used, and keep them until ``unpin``."""
        for key in keys:
            self._kept.move_to_end(key)
        blocks = [self._kept[key] for key in keys]
        self._pinned.update(blocks)
        return blocks

    def unpin(self, blocks: Sequence[int]) -> None:
        self._pinned.subtract(blocks)

    def allocate_blocks(self, count: int) -> list[int]:
        """Return up to ``count`` blocks to write to: free blocks, then the least recently used."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        for key, block in list(self._kept.items()) if len(taken) < count else ():
            if len(taken) == count:
                break
            if not self._pinned[block]:
                del self._kept[key]
                taken.append(block)
        return taken

    def record_written(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Record that allocated blocks now hold these keys."""
        for key, block in zip(keys, blocks, strict=True):
            self._free += [self._kept.pop(key)] if key in self._kept else []
            self._kept[key] = block

    def free_unwritten(self, blocks: Sequence[int]) -> None:
        """Free blocks that were allocated but not written."""
        self._free += blocks

    def discard_unreadable(self, keys: Sequence[bytes]) -> None:
        """Forget blocks that cannot be read."""
        self._free += [self._kept.pop(key) for key in keys if key in self._kept]


@dataclass(frozen=True)
class _Copying:
    """A copy in flight of blocks of ``leaf`` with these ``keys``. Blocks from ``following`` on are to be examined."""

    leaf: Node
    spill: Spill
    keys: list[bytes]
    following: int


@dataclass(eq=False)
class _Coming:
    """A fetch of blocks for a request. They extend ``base``, a cached prefix that must not move."""

    group: Group
    salt: str
    ids: Ids
    keys: list[bytes]
    base: tuple[PrefixTree, Node] | None
    fetch: Fetch
    failed: bool = False


@dataclass(frozen=True)
class DiskChanges:
    """Changes for the next plan.

    Attributes:
        forks: forks of cached prefixes, which ``fetches`` extend.
        spills: copies to disks.
        fetches: copies from disks.
    """

    forks: list[Fork]
    spills: list[Spill]
    fetches: list[Fetch]


class Disks:
    """The disks of all memory workers. Does nothing if they have no blocks.

    Attributes:
        spilled: tokens copied to disks so far.
        fetched: tokens fetched from disks so far.
        held: requests that wait for blocks.
    """

    def __init__(
        self,
        placement: Placement,
        prefixes: PrefixCache,
        sequences: Iterator[int],
        overcommit: float,
    ) -> None:
        """``sequences`` yields numbers for new sequences. ``overcommit``: tokens of a worker's memory and disk
        together, as a multiple of its slots."""
        self.spilled = self.fetched = 0
        self.held: dict[Group, None] = {}
        self._placement = placement
        self._prefixes = prefixes
        self._sequences = sequences
        self._overcommit = overcommit
        self._number = 0
        self._disks: dict[str, Blocks] = {}
        # Leaves in the order in which they were cached, with the number of blocks at their start already examined.
        self._uncopied: dict[str, collections.deque[tuple[Node, int]]] = {}
        self._copying: dict[str, _Copying] = {}  # by worker
        self._wanted: list[_Coming] = []  # fetches that are in no plan yet
        self._coming: dict[int, _Coming] = {}  # by number
        self._arrived: list[_Coming] = []
        self._failed = set[str]()  # workers whose disks are not used any more
        self.on_places_changed()

    @property
    def exist(self) -> bool:
        """Whether a memory worker has a disk."""
        return bool(self._disks)

    def on_workers_lost(self, lost: Collection[str], *, ends_epoch: bool) -> list[Group]:
        """Forget the blocks of lost workers; the end of an epoch also ends all transfers.

        Call ``on_places_changed`` afterwards. Returns the requests that no longer wait for blocks.
        """
        for worker in [worker for worker in self._copying if ends_epoch or worker in lost]:
            copying = self._copying.pop(worker)
            self._disks[worker].free_unwritten(copying.spill.blocks)
        if not ends_epoch:
            return []
        begun = [*self._coming.values(), *self._arrived]
        ended = [*begun, *self._wanted]
        queued = [coming.group for coming in ended if self._end_fetch(coming)]
        for coming in begun:
            if coming.fetch.worker not in lost:
                self._prefixes.free_unused(coming.fetch.child)
        self._wanted, self._coming, self._arrived = [], {}, []
        return queued

    def on_places_changed(self) -> None:
        """Adapt to the workers of the placement. Memory of compute workers has no disk."""
        counts = {
            worker: blocks_of(capacity, self._overcommit)
            for worker, capacity in self._placement.capacities.items()
            if worker not in self._placement.local
        }
        before = self._disks
        self._disks = {
            worker: before[worker] if worker in before else Blocks(n) for worker, n in counts.items() if n > 0
        }
        self._uncopied = {worker: self._uncopied.get(worker) or collections.deque() for worker in self._disks}
        self._note_kept()
        known = {leaf for queue in self._uncopied.values() for leaf, _ in queue}
        known |= {copying.leaf for copying in self._copying.values()}
        for leaf in self._prefixes.ends() if self._disks else ():
            if not leaf.copied and leaf not in known:  # the rest of a leaf whose end was lost
                self._queue_copy(leaf)

    # -- to the disk -------------------------------------------------------------------------------------------------

    def _queue_copy(self, leaf: Node) -> None:
        worker = leaf.home
        if worker in self._uncopied and worker not in self._failed:
            self._uncopied[worker].append((leaf, 0))

    def _note_kept(self) -> None:
        for leaf in self._prefixes.pop_kept():
            self._queue_copy(leaf)

    def _copies(self, worker: str) -> list[Spill]:
        """Return the next copy of a worker as a list; empty if none is due."""
        placement, uncopied = self._placement, self._uncopied[worker]
        filled = placement.reserved[worker] + placement.idle[worker]
        if (
            worker in self._copying
            or worker in placement.closed | self._failed
            or filled < FULL * placement.capacities[worker]
        ):
            return []
        while uncopied:
            leaf, first = uncopied.popleft()
            if leaf.sequence is None:
                continue  # evicted, or now the beginning of another leaf
            if leaf.home != worker:
                self._queue_copy(leaf)  # it has moved
                continue
            salt, ids = leaf.whole()
            disk, keys = self._disks[worker], keys_of(salt, ids, len(ids))
            places = [place for place in range(first, len(keys)) if keys[place] not in disk][:MOST_BLOCKS]
            leaf.copied = not places
            blocks = disk.allocate_blocks(len(places))
            if not blocks:
                continue
            places = places[: len(blocks)]
            self._number += 1
            spill = Spill(self._number, worker, leaf.sequence, places, blocks)
            self._copying[worker] = _Copying(leaf, spill, [keys[place] for place in places], places[-1] + 1)
            return [spill]
        return []

    # -- and back ----------------------------------------------------------------------------------------------------

    def fetch_for(self, group: Group) -> bool:
        """Fetch blocks of a request if disks have some. Return False if the request need not wait for any."""
        first = group.completions[0]
        if not any(map(len, self._disks.values())) or self._placement.splits(group.to_run):
            return False
        salt, ids = group.request.params.cache_salt, ids_of(group.known_tokens(first, 0, first.goal))
        keys = keys_of(salt, ids, group.most_shared)
        best, most = None, max((one.length for one in self._prefixes.find(group).values()), default=0)
        for worker, disk in self._disks.items():
            if worker in self._placement.closed | self._failed:
                continue
            _, node, found = self._prefixes.beginning(worker, salt, ids)
            path = [] if node is None else list(node.path())
            if any(one.worker != worker for one in path) or self._prefixes.is_moving(path):
                continue
            resident = min(found // BLOCK, len(keys))
            kept = disk.count_kept(keys, resident)
            if kept and (stop := (resident + kept) * BLOCK) >= most + BLOCK:
                held = next((one.stop for one in path if one.holders), 0)
                best, most, lacking = (worker, resident), stop, stop - min(held, resident * BLOCK)
        if best is None or lacking + AHEAD > self._placement.room(best[0]):
            return False
        worker, resident = best
        self._begin(group, worker, salt, ids[:most], keys[resident : most // BLOCK])
        return True

    def _begin(self, group: Group, worker: str, salt: str, ids: Ids, keys: list[bytes]) -> None:
        start = len(ids) - len(keys) * BLOCK
        base = self._prefixes.pin(worker, salt, ids[:start]) if start else None
        for one in base[1].path() if base is not None else ():
            one.fixed += 1
        self._placement.reserve_on(worker, len(keys) * BLOCK)
        self._number += 1
        blocks = self._disks[worker].pin(keys)
        fetch = Fetch(self._number, worker, next(self._sequences), start, blocks, group.heads)
        self._wanted.append(_Coming(group, salt, ids, keys, base, fetch))
        self.held[group] = None

    def evicted_uncopied(self, worker: str) -> int:
        """Return how many tokens were evicted from a worker with a disk before they were copied."""
        return self._prefixes.evicted[worker] if worker in self._disks else 0

    def abandon(self, group: Group) -> bool:
        """Forget a request that has ended. Return whether it was waiting for blocks, whose fetch continues."""
        return self.held.pop(group, 0) is None

    def _end_fetch(self, coming: _Coming) -> bool:
        """End a fetch, successful or not, and release its slots. Return whether its request still waits for it."""
        worker, tokens = coming.fetch.worker, len(coming.keys) * BLOCK
        self._disks[worker].unpin(coming.fetch.blocks)
        self._placement.will_release(worker, tokens)
        self._placement.free_slots(worker, tokens)
        if coming.base is not None:
            for one in coming.base[1].path():
                one.fixed -= 1
            self._prefixes.unpin(*coming.base)
        return self.abandon(coming.group)

    # -- both --------------------------------------------------------------------------------------------------------

    def on_stored(self, worker: str, number: int, complete: bool, error: str) -> None:
        """Handle a worker's ``Stored`` message: copy or fetch ``number`` has ended. After an ``error``, the worker's
        disk is not used any more. Ignores a copy or fetch that was dropped."""
        copying = self._copying.get(worker)
        if copying is not None and copying.spill.number == number:
            self._note_copied(copying, complete)
        elif (coming := self._coming.pop(number, None)) is not None:
            coming.failed = not complete
            self._arrived.append(coming)
        if error:
            self._failed.add(worker)
            self._uncopied[worker].clear()

    def _note_copied(self, copying: _Copying, complete: bool) -> None:
        worker = copying.spill.worker
        del self._copying[worker]
        if not complete:
            self._disks[worker].free_unwritten(copying.spill.blocks)
            self._queue_copy(copying.leaf)  # it may have moved
            return
        self.spilled += len(copying.keys) * BLOCK
        self._disks[worker].record_written(copying.keys, copying.spill.blocks)
        if worker not in self._failed:
            self._uncopied[worker].appendleft((copying.leaf, copying.following))

    @property
    def has_arrivals(self) -> bool:
        """Whether fetches have ended whose slots are still reserved."""
        return bool(self._arrived)

    def end_fetches(self) -> list[Group]:
        """Add fetched blocks to the prefix cache, and free the slots of fetches that have failed or are not wanted.

        Returns the requests that no longer wait for blocks.
        """
        arrived, self._arrived = self._arrived, []
        queued: list[Group] = []
        for coming in arrived:
            worker = coming.fetch.worker
            queued += [coming.group] if self._end_fetch(coming) else []
            if coming.failed:
                self._disks[worker].discard_unreadable(coming.keys)
            else:
                self.fetched += len(coming.keys) * BLOCK
                fetch = coming.fetch
                self._prefixes.keep_prefix(worker, coming.salt, coming.ids, fetch.child, fetch.heads)
            self._prefixes.free_unused(coming.fetch.child)
        return queued

    def changes(self) -> DiskChanges:
        """Return the changes for the next plan. Call it before ``PrefixCache.changes``."""
        wanted, self._wanted = self._wanted, []
        self._coming |= {coming.fetch.number: coming for coming in wanted}
        forks = [
            Fork(coming.base[1].any_sequence, coming.fetch.child, coming.fetch.start)
            for coming in wanted
            if coming.base is not None
        ]
        self._note_kept()
        spills = [spill for worker in self._disks for spill in self._copies(worker)]
        return DiskChanges(forks, spills, [coming.fetch for coming in wanted])
