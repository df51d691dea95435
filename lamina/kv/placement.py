"""How many token slots of each memory worker are reserved, and which workers a request fits. No clock, no sockets."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from lamina.core.errors import RequestError
from lamina.core.topology import Topology
from lamina.core.types import Partition, Segment

AHEAD = 8  # steps for which all sequences of a worker can grow: as long as slots of a dropped sequence take to return
LEAST_SEGMENT = 64  # tokens; many smaller segments would cost more than dropping a request and computing it again
NOWHERE: frozenset[str] = frozenset()
WATERMARK = 0.05  # share of a worker's slots that admission leaves free, besides those for growth
AFFINITY = 2  # a token of a cached prefix counts as much as this many free slots when a worker is chosen


class Found(NamedTuple):
    """The first ``length`` tokens of a request are cached on a worker, and the first ``held`` of them reserved."""

    length: int
    held: int


NOTHING: Mapping[str, Found] = {}


class Placement:
    """Token slots of every memory worker: capacity, and those reserved as of the latest plan.

    A request is admitted with room for the tokens that it has; more is reserved step by step as its sequences grow. It
    is placed on one worker, unless it is too long for any. A sequence whose worker runs out of slots continues on
    another one; once all workers run out, requests are preempted (``lamina.schedule.growth``).

    Tokens are placed on *places*. Here, each worker is one place. In ``lamina.kv.stripes``, a place is a group
    of workers that hold different heads of the same tokens.

    Attributes:
        moves: whether KV may move from one worker to another.
        longest: most tokens of a sequence in one segment if several workers have room; None: no limit.
        reserved: slots by worker.
        returning: the part of them whose release is already decided.
        sequences: by worker, the number of sequences that may grow there.
        closed: workers that take no more requests.
        idle: slots by worker that are not reserved, but hold cached prefixes (``lamina.kv.prefix_cache``).
        local: memory of compute workers: KV moves neither there nor away.
        crowded: workers whose reserved and idle slots exceed their capacity: idle ones must be evicted.
        stalled: lanes that wait for slots (``lamina.schedule.growth``).
        token_s: seconds to read a token, by worker, once all have been measured: requests go where all KV is read
            soonest, instead of where most room is.
        promised: while replacements of lost workers start, the slots that there were before; else 0.
    """

    moves = True

    def __init__(
        self,
        capacities: Mapping[str, int],
        longest: int | None = None,
        partition: Partition = "auto",
        local: Collection[str] = NOWHERE,
    ) -> None:
        """``capacities``: token slots by memory worker. ``partition``: "token" divides the tokens that a request has at
        admission evenly among the workers; "request" keeps all of a request on one."""
        self.longest = longest
        self._partition = partition
        self.local = frozenset(local)
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
        """Place KV on the memory workers of ``topology`` from now on. Nothing may be reserved on any other."""
        self._take_over(topology.capacities)
        self.token_s = {}
        self.local = topology.local
        self.closed &= topology.names
        self._note_open()
        self.left_in_all = sum(self.capacities.values()) - sum(self.reserved.values())
        self._roomiest.clear()

    def _take_over(self, capacities: Mapping[str, int]) -> None:
        """Replace the places by these."""
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
        """Return all places that share a memory worker with one of these, themselves included."""
        return set(places)

    def places_on(self, worker: str) -> Collection[str]:
        """Return the places that use slots of a memory worker."""
        return {worker}

    def idle_on(self, worker: str) -> int:
        """Slots of a memory worker that only hold cached prefixes."""
        return self.on_workers(self.idle).get(worker, 0)

    def on_workers(self, tokens: Mapping[str, int]) -> Mapping[str, int]:
        """Convert tokens by place to slots by memory worker."""
        return tokens

    def expand(self, segments: Iterable[Segment]) -> list[Segment]:
        """Convert segments on places to segments on memory workers, leaving out those on lost places."""
        return [segment for segment in segments if segment.worker in self.capacities]

    def by_worker(self, kept: Mapping[str, Mapping[int, int]]) -> dict[str, dict[int, int]]:
        """Convert the tokens of sequences by place to tokens by memory worker."""
        return {place: dict(sequences) for place, sequences in kept.items()}

    def held(self, workers: Collection[str]) -> int:
        """Tokens reserved on these memory workers together, without those that are being released."""
        return sum(self.reserved[worker] - self.returning[worker] for worker in workers)

    def close(self, worker: str) -> None:
        """Place nothing more on a worker. What is there goes elsewhere (``lamina.schedule.growth``)."""
        self.closed.add(worker)
        self._note_open()

    def open(self, worker: str) -> None:
        self.closed.discard(worker)
        self._note_open()

    def _note_open(self) -> None:
        """Update the totals of open workers. If none is open, requests wait, and the last totals stay."""
        capacities = [self.capacities[worker] for worker in self._open]
        if capacities:
            self.largest = max(capacities)
            self.total = self.largest if self._partition == "request" else sum(capacities)
        self._roomiest.clear()

    @property
    def possible(self) -> int:
        """Most tokens of a request: replacements of lost workers count, for which it may have to wait."""
        return max(self.total, self.promised)

    def require_possible(self, tokens: int) -> None:
        """Raises RequestError if all workers together could not hold ``tokens`` even when empty."""
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
        even = max(-(-tokens // max(len(self._open), 1)), LEAST_SEGMENT)
        return even if self.longest is None else min(even, self.longest)

    def reserve(
        self,
        tokens: int,
        sequences: int,
        besides: frozenset[str] = NOWHERE,
        found: Mapping[str, Found] = NOTHING,
    ) -> list[tuple[str, int]] | None:
        """Reserve ``tokens`` for ``sequences``, which will grow on the last worker; None if they do not fit now.

        Returns (worker, tokens) in the order of the tokens: only the worker with most room, or the one that reads all
        its KV soonest then (``token_s``), unless the request ``splits``. Workers in ``besides`` are excluded.
        ``found``: cached prefixes by worker, which count ``AFFINITY`` times as much as free room, and are not reserved
        again; must be empty for a request that splits.
        """
        spans = self.fitting(tokens, sequences, besides, found)
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
        found: Mapping[str, Found] = NOTHING,
    ) -> list[tuple[str, int]] | None:
        """Return what ``reserve`` would return."""
        if self.splits(tokens):
            return self._spread(tokens, sequences, besides) or None
        worker = self._nearest(tokens, sequences, besides, found) or self._whole(tokens, sequences, besides)
        return None if worker is None else [(worker, tokens)]

    def _spread(self, tokens: int, sequences: int, besides: Collection[str]) -> list[tuple[str, int]]:
        """Divide tokens over several workers, those with most room first; empty if they do not fit."""
        workers = [worker for worker in self._open if worker not in besides]
        rooms = {worker: self.room(worker) for worker in workers}
        if sum(max(room, 0) for room in rooms.values()) < tokens + AHEAD * sequences:
            if besides or any(self.reserved.values()) or tokens > self.total:
                return []
            rooms = {worker: self.capacities[worker] for worker in workers}  # an empty pool may be filled
        left = {worker: room for worker, room in sorted(rooms.items(), key=lambda one: -one[1]) if room > 0}
        spans: list[tuple[str, int]] = []
        longest = self._longest(tokens)
        while tokens:
            for worker, room in left.items():
                part = min(tokens, room, longest or room)
                if part:
                    spans.append((worker, part))
                    left[worker] -= part
                    tokens -= part
        return spans

    def _whole(self, tokens: int, sequences: int, besides: frozenset[str]) -> str | None:
        """Return a worker for all ``tokens``; None if they fit none now."""
        room, worker = self._best(tokens, sequences, besides)
        if tokens + AHEAD * sequences > room:
            # An empty worker may be filled: nothing else there needs room to grow.
            empty = [one for one in self._open if one not in besides and self.is_empty(one)]
            return next((one for one in empty if tokens <= self.capacities[one]), None)
        return worker

    def _nearest(self, tokens: int, sequences: int, besides: frozenset[str], found: Mapping[str, Found]) -> str | None:
        """Return the best worker with a cached prefix of a request; None if none has room, or one without is better."""
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

    def next_worker(self, worker: str) -> str | None:
        """Return the worker on which a sequence of ``worker`` should continue: the other one with most slots that its
        own sequences do not need soon; None if none has enough for a segment that is worth it."""
        best, most = None, -1
        for other in self._open:
            spare = self.left(other) - AHEAD * (self.sequences[other] + 1)
            if other != worker and spare > most and spare >= min(LEAST_SEGMENT, self._watermarks[other]):
                best, most = other, spare
        return best

    def go_on(self, worker: str, other: str) -> None:
        """Note that a sequence now grows on ``other`` instead of ``worker``."""
        self.sequences[worker] -= 1
        self.sequences[other] += 1
        self._roomiest.clear()

    def _best(self, tokens: int, sequences: int, besides: frozenset[str]) -> tuple[int, str]:
        """Return the room of the worker for a request, and its name."""
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
        """Tokens that another request may have here while all sequences can still grow; may be negative."""
        return self.left(worker) - AHEAD * self.sequences[worker] - self._watermarks[worker]

    def left(self, worker: str) -> int:
        """Slots that are not reserved."""
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
        """Idle slots of a worker that must be evicted; negative: free slots."""
        return self.reserved[worker] + self.idle[worker] - self.capacities[worker]

    def add_idle(self, worker: str, tokens: int) -> None:
        """Change the idle slots of a worker by ``tokens``."""
        self.idle[worker] += tokens
        self._note_crowded(worker)

    def _note_crowded(self, worker: str) -> None:
        if self.excess(worker) > 0:
            self.crowded.add(worker)

    def set_idle(self, worker: str, tokens: int) -> None:
        """Replace the number of idle slots of a worker, some of which are lost."""
        self.idle[worker] = tokens

    def set_speeds(self, token_s: Mapping[str, float]) -> None:
        """Place requests by the seconds that each worker takes to read a token; without any, by room."""
        self.token_s = token_s

    def promise(self, tokens: int) -> None:
        """Accept requests of up to ``tokens`` tokens although fewer slots are there: replacements start. 0: not so."""
        self.promised = tokens

    def fits(self, change: Mapping[str, int]) -> bool:
        """True if these additional tokens (negative: fewer) fit on each worker."""
        return all(tokens <= self.left(worker) for worker, tokens in change.items())

    def grow(self, rows: Mapping[str, int]) -> bool:
        """Reserve a step's new tokens, by worker; False, and nothing is reserved, if they do not all fit."""
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

    def shortages(self, workers: Mapping[str, int]) -> dict[str, int]:
        """Workers of these that are about to run out of slots, and how many they lack for all sequences to grow."""
        short = {}
        for worker in workers:
            free = self.capacities[worker] - self.reserved[worker] + self.returning[worker]
            lacking = AHEAD * self.sequences[worker] - free
            if lacking > 0:
                short[worker] = lacking
        return short

    def will_release(self, worker: str, tokens: int) -> None:
        """Announce that ``free_slots`` will be called for ``tokens`` of this worker."""
        self.returning[worker] += tokens

    def keep(self, worker: str, tokens: int) -> None:
        """Undo ``will_release``."""
        self.returning[worker] -= tokens

    def free_slots(self, worker: str, tokens: int) -> None:
        """Release ``tokens`` of ``worker`` that were announced."""
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
        """Note that this many sequences of a worker no longer grow there."""
        self.sequences[worker] -= sequences
        self._roomiest.clear()

    def roomiest(self, tokens: int) -> str | None:
        """Return the worker with most room among those with a capacity of at least ``tokens``; None if there is
        none."""
        return next((name for name in self.by_room() if self.capacities[name] >= tokens), None)

    @property
    def _open(self) -> list[str]:
        """The workers that take requests."""
        return [worker for worker in self.capacities if worker not in self.closed]

    @property
    def _workers(self) -> int:
        """The number of memory workers that take requests."""
        return len(self._open)

    def by_room(self) -> dict[str, int]:
        """Return the room for one more sequence of every worker that takes requests, most room first."""
        rooms = sorted(((self.room(name) - AHEAD, name) for name in self._open), key=lambda one: -one[0])
        return {name: room for room, name in rooms}
