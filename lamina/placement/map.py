"""How many token slots of each memory worker are reserved, and which worker a request fits. No clock, no sockets."""

from collections.abc import Mapping
from typing import NamedTuple

from lamina.errors import RequestError
from lamina.topology import Topology

AHEAD = 8  # steps for which all sequences of a worker can grow; slots of one whose KV is dropped come back meanwhile
WATERMARK = 0.05  # share of a worker's slots that stays free, beyond those, when a request is admitted
AFFINITY = 2  # a prefix found on a worker outweighs so many times its tokens of room that another one has more


class Found(NamedTuple):
    """The first ``length`` tokens of a request are cached on a worker, and the first ``held`` of them reserved."""

    length: int
    held: int


class Placement:
    """Token slots of every memory worker: capacity, and those reserved as of the latest plan.

    A request is admitted with room for the tokens that it has; more is reserved step by step as its sequences grow. So
    workers may run out of slots, and then KV is dropped (``lamina.placement.recovery``).

    Attributes:
        reserved: slots by worker. returning: those of them that will be released without another decision.
        sequences: sequences placed on each worker that may grow.
        idle: slots by worker that are not reserved, but hold what is cached (``lamina.placement.prefix_cache``).
        crowded: workers with more slots reserved and idle than they have: what is idle must make way.
    """

    def __init__(self, capacities: Mapping[str, int]) -> None:
        """``capacities``: token slots by memory worker."""
        self.capacities = dict(capacities)
        self.reserved = dict.fromkeys(capacities, 0)
        self.returning = dict.fromkeys(capacities, 0)
        self.sequences = dict.fromkeys(capacities, 0)
        self.idle = dict.fromkeys(capacities, 0)
        self.crowded = set[str]()
        self._watermarks = {worker: int(WATERMARK * capacity) for worker, capacity in capacities.items()}
        self.largest = max(capacities.values())
        self.left_in_all = sum(capacities.values())
        self._roomiest: dict[str | None, tuple[int, str]] = {}  # by excluded worker, until something changes

    def apply(self, topology: Topology) -> None:
        """Only the memory workers of ``topology`` hold KV from now on. Nothing may be reserved on any other."""
        for worker in self.capacities.keys() - topology.capacities.keys():
            if self.reserved.pop(worker):
                raise AssertionError(f"{worker} does not take part any more, but has tokens reserved")
            for figures in (self.capacities, self.returning, self.sequences, self.idle, self._watermarks):
                del figures[worker]
            self.crowded.discard(worker)
        self.largest = max(self.capacities.values())
        self.left_in_all = sum(self.capacities.values()) - sum(self.reserved.values())
        self._roomiest.clear()

    def require_possible(self, tokens: int) -> None:
        """Raises RequestError if no worker could hold ``tokens`` even when empty."""
        if tokens > self.largest:
            raise RequestError(
                f"the request may need {tokens} KV tokens; the largest memory worker holds {self.largest}. "
                f"Shorten the prompt, lower max_tokens or n, or give memory workers more room"
            )

    def reserve(
        self, tokens: int, sequences: int, besides: str | None = None, found: Mapping[str, Found] | None = None
    ) -> str | None:
        """Reserve ``tokens`` for ``sequences`` on the worker with most room and name it; None if they fit nowhere now.

        Worker ``besides`` is excluded. What is ``found`` on a worker counts as ``AFFINITY`` times as much room there,
        and is not reserved again.
        """
        worker = self.fitting(tokens, sequences, besides, found)
        if worker is not None:
            self.reserve_on(worker, tokens - (found[worker].length if found and worker in found else 0))
            self.sequences[worker] += sequences
        return worker

    def fitting(
        self, tokens: int, sequences: int, besides: str | None = None, found: Mapping[str, Found] | None = None
    ) -> str | None:
        """The worker that ``reserve`` would name."""
        if found and (nearest := self._nearest(tokens, sequences, besides, found)) is not None:
            return nearest
        room, worker = self._most_room(besides)
        if tokens + AHEAD * sequences > room:
            # An empty worker takes whatever it holds: nothing else there needs room to grow.
            empty = [one for one in self.capacities if one != besides and not self.reserved[one]]
            return next((one for one in empty if tokens <= self.capacities[one]), None)
        return worker

    def _nearest(self, tokens: int, sequences: int, besides: str | None, found: Mapping[str, Found]) -> str | None:
        """The worker with a prefix that a request goes to; None if it goes to one without, or fits none of these."""
        rooms = {worker: self.room(worker) for worker in found if worker != besides}
        fitting = [one for one in rooms if tokens - found[one].held + AHEAD * sequences <= rooms[one]]
        if not fitting:
            return None
        nearest = max(fitting, key=lambda one: rooms[one] + AFFINITY * found[one].length)
        room, _ = self._most_room(besides)
        return nearest if rooms[nearest] + AFFINITY * found[nearest].length >= room else None

    def _most_room(self, besides: str | None) -> tuple[int, str]:
        """The most room of a worker, and its name."""
        if besides in self._roomiest:
            return self._roomiest[besides]
        most, roomiest = -1, ""
        for worker, capacity in self.capacities.items():  # as ``room``, but a hundred workers must cost little
            room = capacity - self.reserved[worker] - AHEAD * self.sequences[worker] - self._watermarks[worker]
            if room > most and worker != besides:
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
        self._note_crowded(worker)
        self._roomiest.clear()

    def _note_crowded(self, worker: str) -> None:
        if self.reserved[worker] + self.idle[worker] > self.capacities[worker]:
            self.crowded.add(worker)

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

    def roomiest(self, tokens: int) -> str:
        """Of the workers whose capacity is at least ``tokens``, the one with most room."""
        return next(name for name in self.by_room() if self.capacities[name] >= tokens)

    def by_room(self) -> dict[str, int]:
        """The room of every worker for one more sequence, most first."""
        rooms = sorted(((self.room(name) - AHEAD, name) for name in self.capacities), key=lambda one: -one[0])
        return {name: room for room, name in rooms}
