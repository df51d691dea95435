"""Decides which cached prefixes memory workers copy to their disks, and which they read back for a request. Pure.

A block of a worker's disk holds one shard of the heads of ``BLOCK`` consecutive tokens. The key of these tokens is a
digest of them and all tokens before them, so that equal keys mean equal prefixes. Once a worker is half full, it copies
its prefixes to disk, oldest first, while they stay in memory. So eviction never waits for the disk: a prefix that is
evicted before it was copied is lost, as without a disk. If workers each hold some heads of a prefix, each of them
copies its own heads, and the prefix comes back once all of them have read theirs. Prefixes of which several places
(``lamina.kv.placement``) hold some tokens are not copied.

If a request begins with blocks that are on disk but not in memory, they are fetched into reserved slots before the
request queues, and are then cached like any other prefix. The cached prefix that they extend must not move meanwhile.
"""

import collections
import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from lamina.core.requests import Group, Ids, ids_of
from lamina.core.steps import BLOCK, Fetch, Fork, Spill, blocks_of
from lamina.core.types import Segment
from lamina.kv.disk_blocks import Blocks, PlaceBlocks
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


@dataclass(eq=False)
class _Transfer:
    """A copy or fetch in which each worker of a place has a part.

    Attributes:
        number: Number of the copy or fetch, on all workers.
        place: The place.
        waiting: Workers whose parts have not ended.
        failed: Workers whose parts have failed.
    """

    number: int
    place: str
    waiting: set[str]
    failed: set[str] = field(default_factory=set, init=False)

    def end_part(self, worker: str, complete: bool) -> bool:
        """Record the end of a worker's part. Return whether all parts have ended."""
        self.waiting.discard(worker)
        self.failed |= set() if complete else {worker}
        return not self.waiting


@dataclass(eq=False)
class _Copying(_Transfer):
    """A copy of the tokens of ``leaf`` with these ``keys``. Tokens from block ``following`` on are to be examined."""

    leaf: Node
    spills: list[Spill]
    keys: list[bytes]
    following: int


@dataclass(eq=False)
class _Coming(_Transfer):
    """A fetch of blocks for a request. They extend ``base``, a cached prefix that must not move."""

    group: Group
    salt: str
    ids: Ids
    keys: list[bytes]
    base: tuple[PrefixTree, Node] | None
    child: int
    fetches: list[Fetch]


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
        self._disks: dict[str, Blocks] = {}  # by worker
        self._places: dict[str, PlaceBlocks] = {}  # by place all of whose workers have disks
        # By place, the one first whose last copy began longest ago: leaves in the order in which they were cached, with
        # the number of blocks at their start already examined.
        self._uncopied: dict[str, collections.deque[tuple[Node, int]]] = {}
        self._copying: dict[str, _Copying] = {}  # by place
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
        """End all transfers at the end of an epoch, in which ``lost`` places are gone.

        Call ``on_places_changed`` afterwards. Returns the requests that no longer wait for blocks.
        """
        if not ends_epoch:
            return []
        self._drop_copies(list(self._copying))
        begun = [*self._coming.values(), *self._arrived]
        ended = [*begun, *self._wanted]
        queued = [coming.group for coming in ended if self._end_fetch(coming)]
        for coming in begun:
            if coming.place not in lost:
                self._prefixes.free_unused(coming.child)
        self._wanted, self._coming, self._arrived = [], {}, []
        return queued

    def _drop_copies(self, places: Iterable[str]) -> None:
        """Forget copies of these places: their workers have dropped them, or do so with the next plan."""
        for place in places:
            self._free_unwritten(self._copying.pop(place))

    def _free_unwritten(self, copying: _Copying) -> None:
        for spill in copying.spills:
            if spill.worker in self._disks:
                self._disks[spill.worker].free_unwritten(spill.blocks)

    def on_places_changed(self) -> None:
        """Adapt to the places of the placement. Memory of compute workers has no disk."""
        placement, before = self._placement, self._disks
        counts = {worker: blocks_of(slots, self._overcommit) for worker, slots in placement.slots_with_disk().items()}
        self._disks = {
            worker: before[worker] if worker in before else Blocks(count)
            for worker, count in counts.items()
            if count > 0
        }
        parts = {place: placement.parts(place) for place in placement.capacities}
        self._places = {
            place: PlaceBlocks({worker: (self._disks[worker], shards) for worker, shards in own})
            for place, own in parts.items()
            if all(worker in self._disks for worker, _ in own)
        }
        self._uncopied = {place: self._uncopied.get(place) or collections.deque() for place in self._places}
        self._drop_copies(self._copying.keys() - self._places.keys())
        self._note_kept()
        known = {leaf for queue in self._uncopied.values() for leaf, _ in queue}
        known |= {copying.leaf for copying in self._copying.values()}
        for leaf in self._prefixes.ends() if self._disks else ():
            if not leaf.copied and leaf not in known:  # the rest of a leaf whose end was lost
                self._queue_copy(leaf)

    # -- to the disk -------------------------------------------------------------------------------------------------

    def _works(self, place: str) -> bool:
        """Whether the disks of all workers of a place work."""
        return place in self._places and self._failed.isdisjoint(self._places[place].parts)

    def _queue_copy(self, leaf: Node) -> None:
        place = leaf.home
        if place is not None and self._works(place):
            self._uncopied[place].append((leaf, 0))

    def _note_kept(self) -> None:
        for leaf in self._prefixes.pop_kept():
            self._queue_copy(leaf)

    def _copies(self, place: str) -> list[Spill]:
        """Return the next copy of a place, one part for each of its workers; empty if none is due."""
        placement, uncopied, disk = self._placement, self._uncopied[place], self._places[place]
        if not uncopied or place in placement.closed or not self._works(place) or placement.filled(place) < FULL:
            return []
        if any(worker in disk.parts for copying in self._copying.values() for worker in copying.waiting):
            return []
        while uncopied:
            leaf, first = uncopied.popleft()
            if leaf.sequence is None:
                continue  # evicted, or now the beginning of another leaf
            if leaf.home != place:
                self._queue_copy(leaf)  # it has moved
                continue
            salt, ids = leaf.whole()
            keys = keys_of(salt, ids, len(ids))
            places = [number for number in range(first, len(keys)) if keys[number] not in disk][:MOST_BLOCKS]
            leaf.copied = not places
            count, blocks = disk.allocate_blocks(len(places))
            if not count:
                continue
            places = places[:count]
            self._number += 1
            spills = [Spill(self._number, worker, leaf.sequence, places, own) for worker, own in blocks.items()]
            copied, following = [keys[number] for number in places], places[-1] + 1
            self._copying[place] = _Copying(self._number, place, set(blocks), leaf, spills, copied, following)
            self._uncopied[place] = self._uncopied.pop(place)  # places that share its disks are served before it
            return spills
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
        for place, disk in self._places.items():
            if place in self._placement.closed or not self._works(place):
                continue
            _, node, found = self._prefixes.beginning(place, salt, ids)
            path = [] if node is None else list(node.path())
            if any(one.worker != place for one in path) or self._prefixes.is_moving(path):
                continue
            resident = min(found // BLOCK, len(keys))
            kept = disk.count_kept(keys, resident)
            if kept and (stop := (resident + kept) * BLOCK) >= most + BLOCK:
                held = next((one.stop for one in path if one.holders), 0)
                best, most, lacking = (place, resident), stop, stop - min(held, resident * BLOCK)
        if best is None or lacking + AHEAD > self._placement.room(best[0]):
            return False
        place, resident = best
        self._begin(group, place, salt, ids[:most], keys[resident : most // BLOCK])
        return True

    def _begin(self, group: Group, place: str, salt: str, ids: Ids, keys: list[bytes]) -> None:
        start = len(ids) - len(keys) * BLOCK
        base = self._prefixes.pin(place, salt, ids[:start]) if start else None
        for one in base[1].path() if base is not None else ():
            one.fixed += 1
        self._placement.reserve_on(place, len(keys) * BLOCK)
        self._number += 1
        blocks, child = self._places[place].pin(keys), next(self._sequences)
        fetches = [
            Fetch(self._number, own.worker, child, start, blocks[own.worker], own.heads)
            for own in self._placement.expand([Segment(child, place, group.heads, (0, None))])
        ]
        coming = _Coming(self._number, place, set(blocks), group, salt, ids, keys, base, child, fetches)
        self._wanted.append(coming)
        self.held[group] = None

    def evicted_uncopied(self, worker: str) -> int:
        """Return how many tokens were evicted from a worker with a disk before they were copied."""
        if worker not in self._disks:
            return 0
        return sum(self._prefixes.evicted[place] for place in self._placement.places_on(worker))

    def abandon(self, group: Group) -> bool:
        """Forget a request that has ended. Return whether it was waiting for blocks, whose fetch continues."""
        return self.held.pop(group, 0) is None

    def _end_fetch(self, coming: _Coming) -> bool:
        """End a fetch, successful or not, and release its slots. Return whether its request still waits for it."""
        tokens = len(coming.keys) * BLOCK
        for fetch in coming.fetches:
            self._disks[fetch.worker].unpin(fetch.blocks)
        self._placement.will_release(coming.place, tokens)
        self._placement.free_slots(coming.place, tokens)
        if coming.base is not None:
            for one in coming.base[1].path():
                one.fixed -= 1
            self._prefixes.unpin(*coming.base)
        return self.abandon(coming.group)

    # -- both --------------------------------------------------------------------------------------------------------

    def on_stored(self, worker: str, number: int, complete: bool, error: str) -> None:
        """Handle a worker's ``Stored`` message: its part of copy or fetch ``number`` has ended. After an ``error``, the
        worker's disk is not used any more. Ignores a copy or fetch that was dropped."""
        if error:
            self._failed.add(worker)
            for place in self._places:
                if not self._works(place):
                    self._uncopied[place].clear()
        copying = next((one for one in self._copying.values() if one.number == number), None)
        if copying is not None and copying.end_part(worker, complete):
            self._note_copied(copying)
        coming = self._coming.get(number)
        if coming is not None and coming.end_part(worker, complete):
            self._arrived.append(self._coming.pop(number))

    def _note_copied(self, copying: _Copying) -> None:
        del self._copying[copying.place]
        if copying.failed:
            self._free_unwritten(copying)
            self._queue_copy(copying.leaf)  # it may have moved
            return
        self.spilled += len(copying.keys) * BLOCK
        self._places[copying.place].record_written(copying.keys, copying.spills)
        if self._works(copying.place):
            self._uncopied[copying.place].appendleft((copying.leaf, copying.following))

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
            queued += [coming.group] if self._end_fetch(coming) else []
            if coming.failed:
                self._places[coming.place].discard_unreadable(coming.keys, coming.failed)
            else:
                self.fetched += len(coming.keys) * BLOCK
                heads = coming.group.heads
                self._prefixes.keep_prefix(coming.place, coming.salt, coming.ids, coming.child, heads)
            self._prefixes.free_unused(coming.child)
        return queued

    def changes(self) -> DiskChanges:
        """Return the changes for the next plan. Call it before ``PrefixCache.changes``."""
        wanted, self._wanted = self._wanted, []
        self._coming |= {coming.number: coming for coming in wanted}
        forks = [
            Fork(coming.base[1].any_sequence, coming.child, coming.fetches[0].start)
            for coming in wanted
            if coming.base is not None
        ]
        self._note_kept()
        spills = [spill for place in list(self._uncopied) for spill in self._copies(place)]
        return DiskChanges(forks, spills, [fetch for coming in wanted for fetch in coming.fetches])
