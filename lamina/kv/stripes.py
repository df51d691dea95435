"""Placement by heads: a *stripe* is a group of memory workers that each hold some KV heads of a request. Pure."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from lamina.core.heads import HeadShards
from lamina.core.segments import joined
from lamina.core.topology import Topology
from lamina.core.types import Partition, Segment
from lamina.kv.placement import AHEAD, NO_MEMBERS, WATERMARK, Parts, Placement, nowhere

FEWEST = 2  # heads are cut for at least so many workers, since more may join


def head_workers(partition: Partition, workers: int) -> int:
    """Return the number of a pool's memory workers among which the heads of a request may be divided."""
    return max(workers, FEWEST) if partition == "head" else 1


def placement(
    partition: Partition,
    capacities: Mapping[str, int],
    shards: HeadShards,
    longest: int | None,
    topology: Topology,
    balances: bool = False,
) -> Placement:
    """Return the placement for ``partition``, on memory workers with these ``capacities`` in tokens.

    A segment has at most ``longest`` tokens. ``balances``: whether KV is to move between workers, so that with
    ``partition`` "auto" each of them has all heads of its tokens.
    """
    if shards.count > 1 or topology.pipeline.most_ranks > 1:
        return StripedPlacement(capacities, shards, longest, topology, partition, balances)
    return Placement(capacities, longest, partition, topology)


def local_parts(topology: Topology, shards: HeadShards) -> list[Parts]:
    """Return a place for the local memory of each replica that holds KV: every rank has the heads that it computes.
    Empty if all replicas have one rank: they are places themselves."""
    order = topology.pipeline
    if order.most_ranks == 1:
        return []
    found = list[Parts]()
    for number, replica in enumerate(topology.replicas):
        ranks = order.shape_of(number).ranks
        if replica[0] in topology.local:
            found.append(tuple((replica[rank], shards.range_of_rank(rank, ranks)) for rank in range(ranks)))
    return found


def stripes(workers: Sequence[str], shards: int) -> list[Parts]:
    """Return the workers of each stripe with their shards of heads: as even as possible, with the larger parts first.

    A stripe is a run of neighbours in the ring of workers, with at most one worker per shard. Empty for fewer than two
    workers.
    """
    count = min(len(workers), shards)
    if count < 2:
        return []
    each, more = divmod(shards, count)
    bounds = list(itertools.accumulate([each + (place < more) for place in range(count)], initial=0))
    parts = [range(*pair) for pair in itertools.pairwise(bounds)]
    turns = len(workers) if more or count < len(workers) else 1  # otherwise all stripes have the same parts
    return [
        tuple((workers[(first + place) % len(workers)], part) for place, part in enumerate(parts))
        for first in range(turns)
    ]


def _named(places: Iterable[Parts]) -> dict[str, Parts]:
    return {"+".join(f"{worker}[{part.start}:{part.stop}]" for worker, part in parts): parts for parts in places}


class StripedPlacement(Placement):
    """Reserves tokens on stripes, and on single workers once no stripe has room. A slot holds one shard of a token.

    What ``Placement`` calls a worker is a place here: a stripe, a single worker, or the ``local_parts`` of a replica.
    Numbers count tokens with all heads.
    """

    def __init__(
        self,
        capacities: Mapping[str, int],
        shards: HeadShards,
        longest: int | None = None,
        topology: Topology = NO_MEMBERS,
        partition: Partition = "auto",
        balances: bool = False,
    ) -> None:
        """``capacities`` has tokens with all heads by memory worker. With ``partition`` "request" or "token", and with
        "auto" if KV ``balances``, a memory worker has all heads of its tokens. Then no places share a worker, and KV
        may move between them."""
        self._stripes = partition == "head" or (partition == "auto" and not balances)
        self.moves = not self._stripes
        self._shards = shards
        self._parts: dict[str, Parts] = {}  # by place: its parts
        self._slots: dict[str, int] = {}
        self._current: list[str] = []  # stripes on which requests are placed
        self._ranks = frozenset[str]()  # workers that are parts of local memory alone
        self._leaving = set[str]()  # workers
        super().__init__(self._follow(capacities, local_parts(topology, shards)), longest, partition, topology)

    def _follow(self, workers: Mapping[str, int], replicas: Sequence[Parts]) -> dict[str, int]:
        """Return the places on ``workers``, with their capacities. Earlier stripes stay while they have tokens."""
        self._slots = {worker: tokens * self._shards.count for worker, tokens in workers.items()}
        self._ranks = frozenset(worker for parts in replicas for worker, _ in parts)
        memories = [worker for worker in workers if worker not in self._ranks]
        own, found = _named(replicas), _named(stripes(memories, self._shards.count if self._stripes else 1))
        self._current = list(found)
        alone = {worker: ((worker, range(self._shards.count)),) for worker in memories}
        before = {
            place: parts
            for place, parts in self._parts.items()
            if all(worker in workers for worker, _ in parts)
            and (self.reserved[place] or self.idle[place] or self.sequences[place])
        }
        self._parts = {**before, **own, **found, **alone}
        return {
            place: min(self._slots[one] // len(part) for one, part in parts) for place, parts in self._parts.items()
        }

    def lost(self, topology: Topology) -> set[str]:
        names = topology.names
        return {place for place, parts in self._parts.items() if not all(worker in names for worker, _ in parts)}

    def apply_topology(self, topology: Topology) -> None:
        self._leaving &= topology.names
        places = self._follow(topology.capacities, local_parts(topology, self._shards))
        self._take_over(places)
        self._follow_replicas(topology)
        self.closed = self._touching(self._leaving)
        self._note_open()

    def _follow_replicas(self, topology: Topology) -> None:
        super()._follow_replicas(topology)
        self.local = frozenset(_named(local_parts(topology, self._shards)))  # places; a worker of stripes is none
        touched = functools.cache(lambda lane: frozenset(self._touching(topology.beyond(lane))))
        self.others = touched if self.local else nowhere

    def close(self, worker: str) -> None:
        self._leaving.add(worker)
        self.closed = self._touching(self._leaving)
        self._note_open()

    def open(self, worker: str) -> None:
        self._leaving.discard(worker)
        self.closed = self._touching(self._leaving)
        self._note_open()

    def _note_open(self) -> None:
        staying = [self._slots[worker] // self._shards.count for worker in self._alone]
        if staying or self.local:
            # If heads do not divide evenly, each worker may have a remainder of less than one token.
            shared = sum(staying) - (len(staying) if len(staying) > 1 else 0)
            own = [self.capacities[place] for place in self.local]
            self.largest = max(self.capacities[place] for place in self._open)
            together = shared + (sum(own) if self.lends else max(own, default=0))
            self.total = self.largest if self._partition == "request" else together
        self.left_in_all = self._left_of_all()
        self._roomiest.clear()

    def touching(self, places: Collection[str]) -> set[str]:
        return self._touching({worker for place in places for worker, _ in self._parts[place]})

    def places_on(self, worker: str) -> Collection[str]:
        return self._touching([worker])

    def parts(self, place: str) -> Parts:
        return self._parts.get(place, ())

    @property
    def _slots_by_worker(self) -> Mapping[str, int]:
        return self._slots

    def filled(self, place: str) -> float:
        free = self._free({one: self.reserved[one] + self.idle[one] for one in self._parts})
        return max(1 - free[worker] / self._slots[worker] for worker, _ in self._parts[place])

    def on_workers(self, tokens: Mapping[str, int]) -> Mapping[str, int]:
        """Return the usage of each worker in tokens with all heads, rounded up like the usage that memory workers
        report."""
        shards: dict[str, int] = {}
        for place, parts in self._parts.items():
            if count := tokens.get(place, 0):
                for worker, part in parts:
                    shards[worker] = shards.get(worker, 0) + count * len(part)
        return {worker: -(-slots // self._shards.count) for worker, slots in shards.items()}

    def _touching(self, workers: Collection[str]) -> set[str]:
        return {place for place, parts in self._parts.items() if any(worker in workers for worker, _ in parts)}

    def expand(self, segments: Iterable[Segment]) -> list[Segment]:
        """Convert segments as ``Placement.expand`` does, and merge neighbours as workers do when a sequence grows."""
        return joined(
            dataclasses.replace(segment, worker=worker, heads=self._shards.range_of(part.start, part.stop))
            for segment in segments
            for worker, part in self._parts.get(segment.worker, ())
        )

    def collect(self, segments: Sequence[Segment]) -> list[Segment] | None:
        found = list[Segment]()
        bounds = sorted({bound for one in segments for bound in one.tokens if bound is not None})
        for start, stop in zip(bounds, [*bounds[1:], None], strict=True):
            within = [one for one in segments if one.tokens[0] <= start and (one.tokens[1] or math.inf) > start]
            if wanted := {(one.worker, one.heads) for one in within}:
                place = next((place for place in self._parts if self._heads_of(place) == wanted), None)
                if place is None:
                    return None
                whole = dataclasses.replace(within[0], worker=place, heads=self._shards.whole, tokens=(start, stop))
                found.append(whole)
        return found

    def _heads_of(self, place: str) -> set[tuple[str, tuple[int, int]]]:
        return {(worker, self._shards.range_of(part.start, part.stop)) for worker, part in self._parts[place]}

    def by_worker(self, kept: Mapping[str, Mapping[int, int]]) -> dict[str, dict[int, int]]:
        found: dict[str, dict[int, int]] = {worker: {} for worker in self._slots}
        for place, sequences in kept.items():
            for worker, _ in self._parts[place]:
                found[worker] |= sequences
        return found

    # -- room of places, from the room of workers ---------------------------------------------------------------

    def _free(self, tokens: Mapping[str, int]) -> dict[str, int]:
        """Return the slots left on every worker if places hold ``tokens``."""
        free = dict(self._slots)
        for place, count in tokens.items():
            if count:
                for worker, part in self._parts[place]:
                    free[worker] -= count * len(part)
        return free

    def _fitting(self, place: str, free: Mapping[str, int]) -> int:
        """Return the tokens that fit a place, given the ``free`` slots of workers; negative if it lacks slots."""
        return min(free[worker] // len(part) for worker, part in self._parts[place])

    def _roomy(self) -> dict[str, int]:
        """Return the slots of every worker for further requests, without those left for growth."""
        free = self._free({place: self.reserved[place] + AHEAD * self.sequences[place] for place in self._parts})
        return {worker: slots - int(WATERMARK * self._slots[worker]) for worker, slots in free.items()}

    def left(self, worker: str) -> int:
        return self._fitting(worker, self._free(self.reserved))

    def room(self, worker: str) -> int:
        return self._fitting(worker, self._roomy())

    def by_room(self) -> dict[str, int]:
        roomy = self._roomy()
        rooms = sorted(((self._fitting(place, roomy) - AHEAD, place) for place in self._open), key=lambda one: -one[0])
        return {place: room for room, place in rooms}

    def _left_of_all(self) -> int:
        return sum(self._free(self.reserved).values()) // self._shards.count

    def _most_room(self, besides: frozenset[str]) -> tuple[int, str]:
        if besides not in self._roomiest:
            roomy = self._roomy()
            rooms = ((self._fitting(place, roomy), place) for place in self._open if place not in besides)
            self._roomiest[besides] = max(rooms, key=lambda one: one[0], default=(-1, ""))
        return self._roomiest[besides]

    @property
    def _open(self) -> list[str]:
        """Places on which KV may be placed: local memory, and stripes, or single workers if there are no stripes."""
        own = [place for place in self.local if place not in self.closed]
        return own + ([place for place in self._current if place not in self.closed] or self._alone)

    @property
    def _alone(self) -> list[str]:
        return [worker for worker in self._slots if worker not in self._leaving and worker not in self._ranks]

    @property
    def _workers(self) -> int:
        return len(self._alone)

    def held(self, workers: Collection[str]) -> int:
        free = self._free({place: self.reserved[place] - self.returning[place] for place in self._parts})
        return -(-sum(self._slots[worker] - free[worker] for worker in workers) // self._shards.count)

    def left_on(self, workers: Collection[str]) -> int:
        free = self._free(self.reserved)
        return sum(free[worker] for worker in workers) // self._shards.count

    def together(self, workers: Collection[str]) -> int:
        shared = sum(self._slots[worker] // self._shards.count for worker in workers if worker not in self._ranks)
        own = [self.capacities[place] for place in self.local if all(one in workers for one, _ in self._parts[place])]
        return shared + (sum(own) if self.lends else max(own, default=0))

    def is_empty(self, place: str) -> bool:
        return not self.stalled and not any(self.reserved[one] or self.sequences[one] for one in self.touching([place]))

    def _spread(
        self, tokens: int, sequences: int, besides: Collection[str], longest: int | None
    ) -> list[tuple[str, int]]:
        places = [place for place in dict.fromkeys([*self._open, *self._alone]) if place not in besides]
        spans = self._spans(tokens + AHEAD * sequences, places, self._roomy(), longest)
        if not spans and all(self.is_empty(place) for place in places):
            spans = self._spans(tokens, places, dict(self._slots), longest)  # empty workers may be filled
        kept: list[tuple[str, int]] = []
        for place, part in spans:
            if tokens:
                kept.append((place, min(part, tokens)))
                tokens -= kept[-1][1]
        return kept

    def _spans(
        self, tokens: int, places: Sequence[str], free: dict[str, int], longest: int | None
    ) -> list[tuple[str, int]]:
        """Divide tokens among places, the one with most room first; empty if they do not fit."""
        spans: list[tuple[str, int]] = []
        while tokens:
            rooms = {place: self._fitting(place, free) for place in places}
            place = max(rooms, key=lambda one: rooms[one], default="")
            part = min(tokens, rooms.get(place, 0), longest or tokens)
            if part <= 0:
                return []
            spans.append((place, part))
            tokens -= part
            for worker, shards in self._parts[place]:
                free[worker] -= part * len(shards)
        return spans

    # -- taking and releasing slots -----------------------------------------------------------------------------

    def _free_after(self, change: Mapping[str, int]) -> dict[str, int]:
        """Return the slots left on every worker if places hold ``change`` more tokens."""
        return self._free({place: self.reserved[place] + change.get(place, 0) for place in self._parts})

    def left_beside(self, worker: str, change: Mapping[str, int]) -> int:
        return self._fitting(worker, self._free_after(change))

    def fits(self, change: Mapping[str, int]) -> bool:
        return min(self._free_after(change).values()) >= 0

    def grow(self, rows: Mapping[str, int]) -> bool:
        if not self.fits(rows):
            return False
        for place, tokens in rows.items():
            self.reserved[place] += tokens
        self._note_taken()
        return True

    def _note_taken(self) -> None:
        self.left_in_all = self._left_of_all()
        self._roomiest.clear()
        if any(self.idle.values()):
            self.crowded |= {place for place, tokens in self.idle.items() if tokens and self.excess(place) > 0}

    def shortages(self, workers: Mapping[str, int]) -> dict[str, int]:
        needed = {one: self.reserved[one] - self.returning[one] + AHEAD * self.sequences[one] for one in self._parts}
        free = self._free(needed)
        lacking = {place: -self._fitting(place, free) for place in workers}
        return {place: tokens for place, tokens in lacking.items() if tokens > 0}

    def excess(self, place: str) -> int:
        free = self._free({one: self.reserved[one] + self.idle[one] for one in self._parts})
        return min(self.idle[place], -self._fitting(place, free))

    def reserve_on(self, worker: str, tokens: int) -> None:
        if tokens > self.left(worker):
            raise ValueError(f"{tokens} tokens do not fit {worker}, which has {self.left(worker)} left")
        self.reserved[worker] += tokens
        self._note_taken()

    def free_slots(self, worker: str, tokens: int) -> None:
        super().free_slots(worker, tokens)
        self.left_in_all = self._left_of_all()
