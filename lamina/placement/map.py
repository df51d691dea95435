"""How many token slots of each memory worker are reserved, and which workers a request fits. No clock, no sockets."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from lamina.errors import RequestError
from lamina.topology import Topology
from lamina.types import Partition, Segment

AHEAD = 8  # steps for which all sequences of a worker can grow; slots of one whose KV is dropped come back meanwhile
LEAST_SEGMENT = 64  # tokens: many small segments would cost more than what is computed again for a dropped request
NOWHERE: frozenset[str] = frozenset()
WATERMARK = 0.05  # share of a worker's slots that stays free, beyond those, when a request is admitted
AFFINITY = 2  # a prefix found on a worker outweighs so many times its tokens of room that another one has more


class Found(NamedTuple):
    """The first ``length`` tokens of a request are cached on a worker, and the first ``held`` of them reserved."""

    length: int
    held: int


NOTHING: Mapping[str, Found] = {}


class Placement:
    """Token slots of every memory worker: capacity, and those reserved as of the latest plan.

    A request is admitted with room for the tokens that it has; more is reserved step by step as its sequences grow. It
    is placed on one worker, unless it is too long for any. A sequence whose worker runs out of slots goes on elsewhere;
    once all workers run out, KV is dropped (``lamina.placement.recovery``).

    Every worker is a *place*: what takes a number of tokens of a request. ``lamina.placement.stripes`` has places of
    several workers, with some of the heads each.

    Attributes:
        moves: KV may move from one worker to another.
        longest: most tokens of a sequence in one segment, if more than one worker has room; None: any number.
        reserved: slots by worker. returning: those of them that will be released without another decision.
        sequences: sequences on each worker that may grow there. closed: workers that take no more requests.
        idle: slots by worker that are not reserved, but hold what is cached (``lamina.placement.prefix_cache``).
        local: compute workers' own memory: what is there does not move, and nothing moves there.
        crowded: workers with more slots reserved and idle than they have: what is idle must make way.
        stalled: lanes that wait for slots (``lamina.schedule.growth``).
        promised: slots in all before workers were lost whose successors are on their way; else 0.
    """

    moves = True

    def __init__(
        self,
        capacities: Mapping[str, int],
        longest: int | None = None,
        partition: Partition = "auto",
        local: Collection[str] = NOWHERE,
    ) -> None:
        """``capacities``: token slots by memory worker. ``partition``: with token, the tokens that a request has when
        it is admitted are divided evenly among the workers; with request, one must have room for all it may need."""
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
        self._roomiest: dict[frozenset[str], tuple[int, str]] = {}  # by excluded workers, until something changes
        self.largest = self.total = self.promised = 0
        self.left_in_all = sum(capacities.values())
        self._note_open()

    def apply(self, topology: Topology) -> None:
        """The memory workers of ``topology`` hold KV from now on. Nothing may be reserved on any other."""
        self._take_over(topology.capacities)
        self.local = topology.local
        self.closed &= topology.names
        self._note_open()
        self.left_in_all = sum(self.capacities.values()) - sum(self.reserved.values())
        self._roomiest.clear()

    def _take_over(self, capacities: Mapping[str, int]) -> None:
        """These are the places from now on."""
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
        """The places that ``topology`` has not."""
        return self.capacities.keys() - topology.names

    def touching(self, places: Collection[str]) -> set[str]:
        """All places that share a memory worker with one of these, themselves included."""
        return set(places)

    def places_on(self, worker: str) -> Collection[str]:
        """The places that have part of a memory worker."""
        return {worker}

    def idle_on(self, worker: str) -> int:
        """Slots of a memory worker that only hold what is cached."""
        return self.on_workers(self.idle).get(worker, 0)

    def on_workers(self, tokens: Mapping[str, int]) -> Mapping[str, int]:
        """Slots by memory worker, for tokens by place."""
        return tokens

    def expand(self, segments: Iterable[Segment]) -> list[Segment]:
        """Segments on memory workers, for those on places; what was on a place that is lost is left out."""
        return [segment for segment in segments if segment.worker in self.capacities]

    def by_worker(self, kept: Mapping[str, Mapping[int, int]]) -> dict[str, dict[int, int]]:
        """Tokens of sequences by memory worker, for those by place."""
        return {place: dict(sequences) for place, sequences in kept.items()}

    def held(self, workers: Collection[str]) -> int:
        """Tokens on these memory workers together, without those that will be released."""
        return sum(self.reserved[worker] - self.returning[worker] for worker in workers)

    def close(self, worker: str) -> None:
        """Place nothing more on a worker. What is there goes elsewhere (``lamina.schedule.draining``)."""
        self.closed.add(worker)
        self._note_open()

    def open(self, worker: str) -> None:
        """Undo ``close``."""
        self.closed.discard(worker)
        self._note_open()

    def _note_open(self) -> None:
        """If no worker takes requests, they wait for as many slots as there were before."""
        capacities = [self.capacities[worker] for worker in self._open]
        if capacities:
            self.largest = max(capacities)
            self.total = self.largest if self._partition == "request" else sum(capacities)
        self._roomiest.clear()

    @property
    def possible(self) -> int:
        """The tokens that a request may count on: it may have to wait for the successors of lost workers."""
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
        """True if so many tokens of a request go to more than one worker."""
        longest = self._longest(tokens)
        return tokens > self.largest or (longest is not None and tokens > longest and len(self._open) > 1)

    def _longest(self, tokens: int) -> int | None:
        """Most of so many tokens of a request in one segment, if that is bounded."""
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

        Returns the workers and how many tokens go there, in order: the one with most room alone, unless the request
        ``splits``. Workers ``besides`` are excluded. What is ``found`` on a worker counts as ``AFFINITY`` times as much
        room there, and is not reserved again; nothing may be for a request that splits.
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
        """What ``reserve`` would return."""
        if self.splits(tokens):
            return self._spread(tokens, sequences, besides) or None
        worker = self._nearest(tokens, sequences, besides, found) or self._whole(tokens, sequences, besides)
        return None if worker is None else [(worker, tokens)]

    def _spread(self, tokens: int, sequences: int, besides: Collection[str]) -> list[tuple[str, int]]:
        """Tokens for several workers, those with most room first; empty if they do not fit."""
        workers = [worker for worker in self._open if worker not in besides]
        rooms = {worker: self.room(worker) for worker in workers}
        if sum(max(room, 0) for room in rooms.values()) < tokens + AHEAD * sequences:
            if besides or any(self.reserved.values()) or tokens > self.total:
                return []
            rooms = {worker: self.capacities[worker] for worker in workers}  # an empty pool takes whatever it holds
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
        """The worker that all ``tokens`` go to; None if they fit none now."""
        room, worker = self._most_room(besides)
        if tokens + AHEAD * sequences > room:
            # An empty worker takes whatever it holds: nothing else there needs room to grow.
            empty = [one for one in self._open if one not in besides and self.is_empty(one)]
            return next((one for one in empty if tokens <= self.capacities[one]), None)
        return worker

    def _nearest(self, tokens: int, sequences: int, besides: frozenset[str], found: Mapping[str, Found]) -> str | None:
        """The worker with a prefix that a request goes to; None if it goes to one without, or fits none of these."""
        rooms = {worker: self.room(worker) for worker in found if worker not in besides}
        fitting = [one for one in rooms if tokens - found[one].held + AHEAD * sequences <= rooms[one]]
        if not fitting:
            return None
        nearest = max(fitting, key=lambda one: rooms[one] + AFFINITY * found[one].length)
        room, _ = self._most_room(besides)
        return nearest if rooms[nearest] + AFFINITY * found[nearest].length >= room else None

    def next_worker(self, worker: str) -> str | None:
        """Where a sequence of ``worker`` goes on: of the others, the one with most slots that those there do not need
        soon; None if none has enough for a segment worth it."""
        best, most = None, -1
        for other in self._open:
            spare = self.left(other) - AHEAD * (self.sequences[other] + 1)
            if other != worker and spare > most and spare >= min(LEAST_SEGMENT, self._watermarks[other]):
                best, most = other, spare
        return best

    def go_on(self, worker: str, other: str) -> None:
        """A sequence grows on ``other`` from now on, and no longer on ``worker``."""
        self.sequences[worker] -= 1
        self.sequences[other] += 1
        self._roomiest.clear()

    def _most_room(self, besides: frozenset[str]) -> tuple[int, str]:
        """The most room of a worker, and its name."""
        if besides in self._roomiest:
            return self._roomiest[besides]
        most, roomiest = -1, ""
        for worker, capacity in self.capacities.items():  # as ``room``, but a hundred workers must cost little
            room = capacity - self.reserved[worker] - AHEAD * self.sequences[worker] - self._watermarks[worker]
            if room > most and worker not in besides and worker not in self.closed:
                most, roomiest = room, worker
        self._roomiest[besides] = most, roomiest
        return most, roomiest

    def room(self, worker: str) -> int:
        """Tokens of another request that fit this worker, and leave those on it room to grow; may be negative."""
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
        self.note_crowded(worker)
        self._roomiest.clear()

    def is_empty(self, worker: str) -> bool:
        """True if nothing is reserved on a worker, and no sequence is to grow there, or waits to grow anywhere."""
        return not self.stalled and not self.reserved[worker] and not self.sequences[worker]

    def excess(self, worker: str) -> int:
        """Idle slots of a worker that must make way."""
        return self.reserved[worker] + self.idle[worker] - self.capacities[worker]

    def note_crowded(self, worker: str) -> None:
        """What is reserved or idle on a worker has changed."""
        if self.excess(worker) > 0:
            self.crowded.add(worker)

    def fits(self, change: Mapping[str, int]) -> bool:
        """True if so many tokens more, or less, fit on each worker."""
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
            self.note_crowded(worker)
        self._roomiest.clear()
        return True

    def shortages(self, workers: Mapping[str, int]) -> dict[str, int]:
        """Of these workers, those about to run out of slots: how many more must be free for all to grow."""
        short = {}
        for worker in workers:
            free = self.capacities[worker] - self.reserved[worker] + self.returning[worker]
            lacking = AHEAD * self.sequences[worker] - free
            if lacking > 0:
                short[worker] = lacking
        return short

    def will_release(self, worker: str, tokens: int) -> None:
        """``release`` will be called for ``tokens`` of this worker, whatever else is decided."""
        self.returning[worker] += tokens

    def release(self, worker: str, tokens: int) -> None:
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

    def leave(self, worker: str, sequences: int) -> None:
        """So many sequences of a worker do not grow any more."""
        self.sequences[worker] -= sequences
        self._roomiest.clear()

    def roomiest(self, tokens: int) -> str | None:
        """Of the workers whose capacity is at least ``tokens``, the one with most room, if there is one."""
        return next((name for name in self.by_room() if self.capacities[name] >= tokens), None)

    @property
    def _open(self) -> list[str]:
        """The workers that take requests."""
        return [worker for worker in self.capacities if worker not in self.closed]

    @property
    def _workers(self) -> int:
        """How many memory workers these are."""
        return len(self._open)

    def by_room(self) -> dict[str, int]:
        """The room of every worker that takes requests, for one more sequence, most first."""
        rooms = sorted(((self.room(name) - AHEAD, name) for name in self._open), key=lambda one: -one[0])
        return {name: room for room, name in rooms}
