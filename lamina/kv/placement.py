"""Reserves token slots of memory workers, and selects the workers that hold a request's KV. Pure."""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from lamina.core.errors import RequestError
from lamina.core.pipeline import Pipeline
from lamina.core.topology import FIRST, Topology
from lamina.core.types import Partition, Segment

AHEAD = 8  # steps for which slots are left for growth: a preempted sequence's slots return within as many
LEAST_SEGMENT = 64  # tokens; many smaller segments would cost more than preempting a request
NOWHERE: frozenset[str] = frozenset()
WATERMARK = 0.05  # share of a worker's slots that admission leaves free, besides those for growth
AFFINITY = 2  # a token of a cached prefix counts as much as this many free slots when a worker is chosen


def nowhere(lane: int) -> frozenset[str]:
    """Return ``NOWHERE``, as ``Placement.others`` without local memory."""
    return NOWHERE


NO_MEMBERS = Topology(FIRST, (), Pipeline(1, 1))


class CachedPrefix(NamedTuple):
    """Cached prefix of a request on one worker: its first ``length`` tokens, of which other requests hold ``held``."""

    length: int
    held: int


NOTHING: Mapping[str, CachedPrefix] = {}

Parts: TypeAlias = tuple[tuple[str, range], ...]
"""The workers of a place, each with its shards of heads."""


class Placement:
    """Counts the token slots of every memory worker that are reserved as of the latest plan.

    An admitted request reserves slots for the tokens that it has; each step reserves the slots of its new tokens. A
    request is placed on one worker, unless it is too long for any. A sequence whose worker runs out of slots continues
    on another one; once all workers run out, requests are preempted (``lamina.schedule.growth``).

    Tokens are placed on *places*. In this class, each worker is a place. In ``lamina.kv.stripes``, a place is a group
    of workers that hold different heads of the same tokens.

    Attributes:
        moves: True if KV may move from one worker to another.
        longest: most tokens of a sequence in one segment if several workers have room; None: no limit.
        reserved: by worker: reserved slots.
        returning: by worker: reserved slots that will be released.
        sequences: by worker: number of sequences that may grow there.
        closed: workers on which no more KV is placed.
        idle: by worker: slots that are not reserved, but hold cached prefixes (``lamina.kv.prefix_cache``).
        local: compute workers that hold KV.
        hosts: by member: the machine or container that it runs in.
        others: returns the workers of ``local`` that do not run a lane. A lane may attend to their KV if ``lends``.
        lends: True if replicas with local memory attend for each other (``Pipeline.spreads``).
        in_one_lane: True if compute workers hold KV, have no stages that could run several chunks of a prompt at once,
            and do not attend to KV for others or divide no request that one of them can hold. Then the chunks of a
            prompt run in one lane, unless admission has divided it.
        may_divide: True if admission may divide a long prompt over local memory: replicas attend for each other, and no
            setting says how KV is divided.
        crowded: workers whose reserved and idle slots exceed their capacity, so that idle slots must be evicted.
        stalled: lanes that wait for slots (``lamina.schedule.growth``).
        token_s: by worker: measured seconds to read a token. Empty: requests go where most room is; else to the worker
            that would read all its KV soonest.
        promised: slots in all before workers were lost, while their replacements start; else 0.
    """

    moves = True

    def __init__(
        self,
        capacities: Mapping[str, int],
        longest: int | None = None,
        partition: Partition = "auto",
        topology: Topology = NO_MEMBERS,
    ) -> None:
        """``capacities`` has token slots by memory worker. ``partition`` "token" divides the tokens that a request has
        at admission evenly among the workers; "request" keeps a request on one worker. Of ``topology``, only the
        compute workers that hold KV count."""
        self.longest = longest
        self._partition = partition
        self._follow_replicas(topology)
        self.capacities = dict(capacities)
        self.reserved = dict.fromkeys(capacities, 0)
        self.returning = dict.fromkeys(capacities, 0)
        self.sequences = dict.fromkeys(capacities, 0)
        self.idle = dict.fromkeys(capacities, 0)
        self.crowded = set[str]()
        self._watermarks = {worker: int(WATERMARK * capacity) for worker, capacity in capacities.items()}
        self.closed, self.stalled = set[str](), set[int]()
        self.token_s: Mapping[str, float] = {}
        self._roomiest: dict[frozenset[str], tuple[int, str]] = {}  # by excluded workers, until something changes
        self.largest = self.total = self.promised = 0
        self.left_in_all = sum(capacities.values())
        self._note_open()

    def apply_topology(self, topology: Topology) -> None:
        """Place KV on the memory workers of ``topology`` from now on. No slot of another worker may be reserved."""
        self._take_over(topology.capacities)
        self.token_s = {}
        self._follow_replicas(topology)
        self.closed &= topology.names
        self._note_open()
        self.left_in_all = sum(self.capacities.values()) - sum(self.reserved.values())
        self._roomiest.clear()

    def _follow_replicas(self, topology: Topology) -> None:
        """Note which compute workers hold KV, and for whom they attend to it."""
        self.local, self.lends = topology.local, topology.pipeline.spreads
        self._diskless = topology.local
        self._moves_local = topology.pipeline.moves_local
        self.hosts = {member.name: member.host for member in topology.members}
        self.others = functools.cache(topology.beyond) if topology.local else nowhere
        divides = self.longest is not None or self._partition == "token"
        shares = (self.lends and divides) or topology.pipeline.most_stages > 1
        self.in_one_lane = bool(topology.local) and not shares
        self.may_divide = self.lends and self.longest is None and self._partition == "auto"

    def _take_over(self, capacities: Mapping[str, int]) -> None:
        for worker in self.capacities.keys() - capacities.keys():
            if self.reserved.pop(worker):
                raise AssertionError(f"{worker} does not take part any more, but has tokens reserved")
            for figures in (self.capacities, self.returning, self.sequences, self.idle, self._watermarks):
                del figures[worker]
            self.crowded.discard(worker)
        for worker, capacity in capacities.items():
            if worker not in self.capacities:
                self.capacities[worker] = capacity
                self.reserved[worker] = self.returning[worker] = self.sequences[worker] = self.idle[worker] = 0
                self._watermarks[worker] = int(WATERMARK * capacity)

    def lost(self, topology: Topology) -> set[str]:
        """Return the places that are not in ``topology``."""
        return self.capacities.keys() - topology.names

    def touching(self, places: Collection[str]) -> set[str]:
        """Return ``places``, and all places that share a memory worker with one of them."""
        return set(places)

    def places_on(self, worker: str) -> Collection[str]:
        """Return the places that use slots of a memory worker."""
        return {worker}

    def workers_at(self, place: str) -> Collection[str]:
        """Return the memory workers whose slots a place uses; none if it is lost."""
        return [worker for worker, _ in self.parts(place)]

    def parts(self, place: str) -> Parts:
        """Return the memory workers whose slots a place uses, with their shards of heads; none if it is lost."""
        return ((place, range(1)),)

    def slots_with_disk(self) -> Mapping[str, int]:
        """Return the slots of each worker that may have a disk: all but compute workers. A slot holds one shard."""
        return {worker: slots for worker, slots in self._slots_by_worker.items() if worker not in self._diskless}

    @property
    def _slots_by_worker(self) -> Mapping[str, int]:
        return self.capacities

    def filled(self, place: str) -> float:
        """Return the share of slots that are reserved or idle, on the fullest worker of a place."""
        return (self.reserved[place] + self.idle[place]) / self.capacities[place]

    def on_workers(self, tokens: Mapping[str, int]) -> Mapping[str, int]:
        """Convert tokens by place to slots by memory worker."""
        return tokens

    def expand(self, segments: Iterable[Segment]) -> list[Segment]:
        """Convert segments on places to segments on memory workers, leaving out those on lost places."""
        return [segment for segment in segments if segment.worker in self.capacities]

    def collect(self, segments: Sequence[Segment]) -> list[Segment] | None:
        """Convert segments on memory workers to segments on places; None if no places consist of these workers."""
        return list(segments) if all(one.worker in self.capacities for one in segments) else None

    def by_worker(self, kept: Mapping[str, Mapping[int, int]]) -> dict[str, dict[int, int]]:
        """Convert the tokens of sequences by place to tokens by memory worker."""
        return {place: dict(sequences) for place, sequences in kept.items()}

    def held(self, workers: Collection[str]) -> int:
        """Return the tokens reserved on these memory workers together, without those that will be released."""
        return sum(self.reserved[worker] - self.returning[worker] for worker in workers)

    def left_on(self, workers: Collection[str]) -> int:
        """Return the tokens for which these memory workers together have slots that are not reserved."""
        return sum(self.left(worker) for worker in workers)

    def close(self, worker: str) -> None:
        """Place no more KV on a worker that leaves. ``lamina.schedule.moves`` moves the KV that it holds."""
        self.closed.add(worker)
        self._note_open()

    def open(self, worker: str) -> None:
        self.closed.discard(worker)
        self._note_open()

    def _note_open(self) -> None:
        """Update the totals of open workers. If none is open, requests wait, and the last totals stay."""
        if self._open:
            self.largest = max(self.capacities[worker] for worker in self._open)
            self.total = self.largest if self._partition == "request" else self.together(self._open)
        self._roomiest.clear()

    def together(self, workers: Collection[str]) -> int:
        """Return the most tokens of a request on these workers: of those with local memory, it can use one, or all if
        replicas lend."""
        if self.lends:
            return sum(self.capacities[worker] for worker in workers)
        own = [self.capacities[worker] for worker in workers if worker in self.local]
        shared = [self.capacities[worker] for worker in workers if worker not in self.local]
        return sum(shared) + max(own, default=0)

    @property
    def possible(self) -> int:
        """Most tokens of a request. Slots of lost workers count while replacements start."""
        return max(self.total, self.promised)

    def require_possible(self, tokens: int) -> None:
        """Raise RequestError if all workers together, when empty, could not hold ``tokens``."""
        if tokens > self.possible:
            workers = f"{self._workers} memory workers hold" if self._workers > 1 else "memory holds"
            if self._partition == "request":
                workers = "a memory worker, which is to hold all of it, has"
            raise RequestError(
                f"the request may need {tokens} KV tokens; {workers} {self.possible} in all. "
                f"Shorten the prompt, lower max_tokens or n, or give memory workers more room"
            )

    def splits(self, tokens: int) -> bool:
        """True if a request with this many tokens is divided over several workers."""
        longest = self._longest(tokens)
        return tokens > self.largest or (longest is not None and tokens > longest and len(self._open) > 1)

    def _longest(self, tokens: int) -> int | None:
        """Most tokens in one segment of a request of this many tokens; None: no limit."""
        if self._partition != "token":
            return self.longest
        shared = [worker for worker in self._open if self.lends or worker not in self.local]
        own = bool(self.local) and not self.lends
        even = max(-(-tokens // max(len(shared) + own, 1)), LEAST_SEGMENT)
        return even if self.longest is None else min(even, self.longest)

    def reserve(
        self,
        tokens: int,
        sequences: int,
        besides: frozenset[str] = NOWHERE,
        found: Mapping[str, CachedPrefix] = NOTHING,
        longest: int | None = None,
    ) -> list[tuple[str, int]] | None:
        """Reserve slots for a request, and return (worker, tokens) in the order of the tokens; None if it does not fit.

        That is a single worker unless the request ``splits``: the one with most room or, once ``token_s`` is known, the
        one that would read all its KV soonest.

        Args:
            tokens: tokens of the request, all sequences together.
            sequences: number of sequences, which will grow on the last worker.
            besides: workers that are excluded.
            found: cached prefixes by worker, which are not reserved again, and count ``AFFINITY`` times as much as free
                slots. Empty for a request that splits.
            longest: most tokens of a segment of a request that is divided although it need not be; else None.
        """
        spans = self.fitting(tokens, sequences, besides, found, longest)
        if spans is None:
            return None
        for worker, part in spans:
            self.reserve_on(worker, part - (found[worker].length if worker in found else 0))
        self.sequences[spans[-1][0]] += sequences
        return spans

    def fitting(
        self,
        tokens: int,
        sequences: int,
        besides: frozenset[str] = NOWHERE,
        found: Mapping[str, CachedPrefix] = NOTHING,
        longest: int | None = None,
    ) -> list[tuple[str, int]] | None:
        """Return what ``reserve`` would return, without reserving."""
        if longest is not None or self.splits(tokens):
            return self._spread(tokens, sequences, besides, longest or self._longest(tokens)) or None
        worker = self._nearest(tokens, sequences, besides, found) or self._whole(tokens, sequences, besides)
        return None if worker is None else [(worker, tokens)]

    def _spread(
        self, tokens: int, sequences: int, besides: Collection[str], longest: int | None
    ) -> list[tuple[str, int]]:
        """Divide tokens over several workers, those with most room first; empty if they do not fit."""
        workers = [worker for worker in self._open if worker not in besides]
        rooms = {worker: self.room(worker) for worker in workers}
        if sum(max(room, 0) for room in rooms.values()) < tokens + AHEAD * sequences:
            # Empty workers may be filled: no other sequence there needs slots to grow.
            rooms = {worker: self.capacities[worker] for worker in workers}
            if any(not self.is_empty(worker) for worker in workers) or tokens > sum(rooms.values()):
                return []
        left = {worker: room for worker, room in sorted(rooms.items(), key=lambda one: -one[1]) if room > 0}
        spans: list[tuple[str, int]] = []
        while tokens:
            for worker, room in left.items():
                part = min(tokens, room, longest or room)
                if part:
                    spans.append((worker, part))
                    left[worker] -= part
                    tokens -= part
        return spans

    def _whole(self, tokens: int, sequences: int, besides: frozenset[str]) -> str | None:
        """Return a worker that has room for all ``tokens``; None if no worker has."""
        room, worker = self._best(tokens, sequences, besides)
        if tokens + AHEAD * sequences > room:
            # An empty worker may be filled: no other sequence there needs slots to grow.
            empty = [one for one in self._open if one not in besides and self.is_empty(one)]
            return next((one for one in empty if tokens <= self.capacities[one]), None)
        return worker

    def _nearest(
        self, tokens: int, sequences: int, besides: frozenset[str], found: Mapping[str, CachedPrefix]
    ) -> str | None:
        """Return the best worker with a cached prefix; None if none has room, or a worker without it is better."""
        rooms = {worker: self.room(worker) for worker in found if worker not in besides}
        fitting = [one for one in rooms if tokens - found[one].held + AHEAD * sequences <= rooms[one]]
        if not fitting:
            return None
        room, other = self._best(tokens, sequences, besides)
        if self.token_s.get(other):  # a prefix counts as so many tokens less to read

            def seconds(one: str, cached: int) -> float:
                return (self.reserved[one] + tokens - AFFINITY * cached) * self.token_s.get(one, 0.0)

            soonest = min(fitting, key=lambda one: seconds(one, found[one].length))
            return soonest if seconds(soonest, found[soonest].length) <= seconds(other, 0) else None
        nearest = max(fitting, key=lambda one: rooms[one] + AFFINITY * found[one].length)
        return nearest if rooms[nearest] + AFFINITY * found[nearest].length >= room else None

    def next_worker(self, worker: str, lane: int) -> str | None:
        """Return the worker on which a sequence of ``lane`` should continue after ``worker``: the one with most slots
        beyond those left for growth; None if none has enough for a segment of ``LEAST_SEGMENT``.

        Local memory of other replicas comes last.
        """
        others = self.others(lane)
        best = self._sparest({worker, *others})
        return self._sparest({worker}) if best is None and self.lends and others else best

    def _sparest(self, besides: Collection[str]) -> str | None:
        best, most = None, -1
        for worker in self._open:
            if worker in besides:
                continue
            spare = self.left(worker) - AHEAD * (self.sequences[worker] + 1)
            if spare > most and spare >= min(LEAST_SEGMENT, self._watermarks[worker]):
                best, most = worker, spare
        return best

    @property
    def fixed(self) -> frozenset[str]:
        """Local memory, if its KV cannot move."""
        return NOWHERE if self._moves_local else self.local

    def beyond(self, lane: int) -> frozenset[str]:
        """Return the workers of ``local`` to whose KV a lane cannot attend."""
        return NOWHERE if self.lends else self.others(lane)

    def continue_on(self, worker: str, other: str) -> None:
        """Record that a sequence now grows on ``other`` instead of ``worker``."""
        self.sequences[worker] -= 1
        self.sequences[other] += 1
        self._roomiest.clear()

    def _best(self, tokens: int, sequences: int, besides: frozenset[str]) -> tuple[int, str]:
        """Return the room and the name of the worker that suits a request best."""
        rooms = {worker: self.room(worker) for worker in self.token_s if worker in self._open and worker not in besides}
        fitting = [worker for worker, room in rooms.items() if tokens + AHEAD * sequences <= room]
        if not fitting:
            return self._most_room(besides)
        soonest = min(fitting, key=lambda worker: (self.reserved[worker] + tokens) * self.token_s[worker])
        return rooms[soonest], soonest

    def _most_room(self, besides: frozenset[str]) -> tuple[int, str]:
        if besides in self._roomiest:
            return self._roomiest[besides]
        most, roomiest = -1, ""
        for worker, capacity in self.capacities.items():  # ``room`` inlined: this must be fast for hundreds of workers
            room = capacity - self.reserved[worker] - AHEAD * self.sequences[worker] - self._watermarks[worker]
            if room > most and worker not in besides and worker not in self.closed:
                most, roomiest = room, worker
        self._roomiest[besides] = most, roomiest
        return most, roomiest

    def room(self, worker: str) -> int:
        """Return the tokens that another request may have here while all sequences can still grow; may be negative."""
        return self.left(worker) - AHEAD * self.sequences[worker] - self._watermarks[worker]

    def left(self, worker: str) -> int:
        """Return the slots that are not reserved."""
        return self.capacities[worker] - self.reserved[worker]

    def reserve_on(self, worker: str, tokens: int) -> None:
        """Reserve ``tokens`` on this worker. Raises ValueError if they do not fit."""
        if tokens > self.left(worker):
            raise ValueError(f"{tokens} tokens do not fit {worker}, which has {self.left(worker)} left")
        self.reserved[worker] += tokens
        self.left_in_all -= tokens
        self._note_crowded(worker)
        self._roomiest.clear()

    def is_empty(self, worker: str) -> bool:
        """True if nothing is reserved on a worker, no sequence grows there, and no lane waits for slots."""
        return not self.stalled and not self.reserved[worker] and not self.sequences[worker]

    def excess(self, worker: str) -> int:
        """Return the idle slots of a worker that must be evicted; negative: free slots."""
        return self.reserved[worker] + self.idle[worker] - self.capacities[worker]

    def add_idle(self, worker: str, tokens: int) -> None:
        self.idle[worker] += tokens
        self._note_crowded(worker)

    def _note_crowded(self, worker: str) -> None:
        if self.excess(worker) > 0:
            self.crowded.add(worker)

    def set_idle(self, worker: str, tokens: int) -> None:
        """Set the number of idle slots of a worker, after some were lost."""
        self.idle[worker] = tokens

    def set_speeds(self, token_s: Mapping[str, float]) -> None:
        self.token_s = token_s

    def promise(self, tokens: int) -> None:
        """Accept requests of up to ``tokens`` tokens while replacements of lost workers start; 0: no longer."""
        self.promised = tokens

    def left_beside(self, worker: str, change: Mapping[str, int]) -> int:
        """Return the slots that are left on a worker after ``change``, tokens by worker; negative: slots lacking."""
        return self.left(worker) - change.get(worker, 0)

    def fits(self, change: Mapping[str, int]) -> bool:
        """True if each worker has slots for these additional tokens, which may be negative."""
        return all(tokens <= self.left(worker) for worker, tokens in change.items())

    def grow(self, rows: Mapping[str, int]) -> bool:
        """Reserve a step's new tokens, by worker. If some do not fit, reserve nothing and return False."""
        reserved, capacities = self.reserved, self.capacities
        for worker, tokens in rows.items():
            if reserved[worker] + tokens > capacities[worker]:
                return False
        for worker, tokens in rows.items():
            reserved[worker] += tokens
            self.left_in_all -= tokens
            self._note_crowded(worker)
        self._roomiest.clear()
        return True

    def steps_of_room(self, rows: Mapping[str, int]) -> int:
        """Return for how many steps with so many new tokens, by worker, no worker is about to run out of slots."""
        return min(
            (self.left(worker) + self.returning[worker] - AHEAD * self.sequences[worker]) // tokens
            for worker, tokens in rows.items()
        )

    def shortages(self, workers: Mapping[str, int]) -> dict[str, int]:
        """Return which of these workers are about to run out of slots, and how many slots they lack for growth."""
        short = {}
        for worker in workers:
            free = self.capacities[worker] - self.reserved[worker] + self.returning[worker]
            lacking = AHEAD * self.sequences[worker] - free
            if lacking > 0:
                short[worker] = lacking
        return short

    def will_release(self, worker: str, tokens: int) -> None:
        """Count ``tokens`` of a worker as ``returning``; ``free_slots`` releases them."""
        self.returning[worker] += tokens

    def undo_release(self, worker: str, tokens: int) -> None:
        self.returning[worker] -= tokens

    def free_slots(self, worker: str, tokens: int) -> None:
        """Release ``tokens`` of ``worker``, after ``will_release``."""
        if tokens > self.returning[worker] or tokens > self.reserved[worker]:
            raise AssertionError(
                f"{worker}: {tokens} tokens released, {self.reserved[worker]} reserved, "
                f"{self.returning[worker]} announced"
            )
        self.returning[worker] -= tokens
        self.reserved[worker] -= tokens
        self.left_in_all += tokens
        self._roomiest.clear()

    def remove_growing(self, worker: str, sequences: int) -> None:
        """Record that so many sequences no longer grow on a worker."""
        self.sequences[worker] -= sequences
        self._roomiest.clear()

    def roomiest(self, tokens: int) -> str | None:
        """Return the worker with most room of those with a capacity of ``tokens`` or more; None if all have less."""
        return next((name for name in self.by_room() if self.capacities[name] >= tokens), None)

    @property
    def _open(self) -> list[str]:
        return [worker for worker in self.capacities if worker not in self.closed]

    @property
    def _workers(self) -> int:
        return len(self._open)

    def by_room(self) -> dict[str, int]:
        """Return the room for one more sequence of each worker that is not closed, most room first."""
        rooms = sorted(((self.room(name) - AHEAD, name) for name in self._open), key=lambda one: -one[0])
        return {name: room for room, name in rooms}
