"""How many token slots of each memory worker are reserved, and which worker a request fits. No clock, no sockets."""

from collections.abc import Mapping

from lamina.errors import RequestError
from lamina.topology import Topology

AHEAD = 8  # steps for which all sequences of a worker can grow; slots of one whose KV is dropped come back meanwhile
WATERMARK = 0.05  # share of a worker's slots that stays free, beyond those, when a request is admitted


class Placement:
    """Token slots of every memory worker: capacity, and those reserved as of the latest plan.

    A request is admitted with room for the tokens that it has; more is reserved step by step as its sequences grow. So
    workers may run out of slots, and then KV is dropped (``lamina.placement.recovery``).

    Attributes:
        reserved: slots by worker. returning: those of them that will be released without another decision.
        sequences: sequences placed on each worker that may grow. closed: workers that take no more requests.
    """

    def __init__(self, capacities: Mapping[str, int]) -> None:
        """``capacities``: token slots by memory worker."""
        self.capacities = dict(capacities)
        self.reserved = dict.fromkeys(capacities, 0)
        self.returning = dict.fromkeys(capacities, 0)
        self.sequences = dict.fromkeys(capacities, 0)
        self._watermarks = {worker: int(WATERMARK * capacity) for worker, capacity in capacities.items()}
        self.closed = set[str]()
        self.largest = max(capacities.values())
        self.left_in_all = sum(capacities.values())
        self._roomiest: dict[str | None, tuple[int, str]] = {}  # by excluded worker, until something changes

    def apply(self, topology: Topology) -> None:
        """The memory workers of ``topology`` hold KV from now on. Nothing may be reserved on any other."""
        for worker in self.capacities.keys() - topology.capacities.keys():
            if self.reserved.pop(worker):
                raise AssertionError(f"{worker} does not take part any more, but has tokens reserved")
            for figures in (self.capacities, self.returning, self.sequences, self._watermarks):
                del figures[worker]
        for worker, capacity in topology.capacities.items():
            if worker not in self.capacities:
                self.capacities[worker] = capacity
                self.reserved[worker] = self.returning[worker] = self.sequences[worker] = 0
                self._watermarks[worker] = int(WATERMARK * capacity)
        self.closed &= topology.names
        self._note_largest()
        self.left_in_all = sum(self.capacities.values()) - sum(self.reserved.values())
        self._roomiest.clear()

    def close(self, worker: str) -> None:
        """Place nothing more on a worker. What is there may grow, and goes elsewhere (``Relocations.drain``)."""
        self.closed.add(worker)
        self._note_largest()

    def open(self, worker: str) -> None:
        """Undo ``close``."""
        self.closed.discard(worker)
        self._note_largest()

    def _note_largest(self) -> None:
        """If no worker takes requests, they wait for one as large as those before."""
        self.largest = max((self.capacities[worker] for worker in self._open), default=self.largest)
        self._roomiest.clear()

    def require_possible(self, tokens: int) -> None:
        """Raises RequestError if no worker could hold ``tokens`` even when empty."""
        if tokens > self.largest:
            raise RequestError(
                f"the request may need {tokens} KV tokens; the largest memory worker holds {self.largest}. "
                f"Shorten the prompt, lower max_tokens or n, or give memory workers more room"
            )

    def reserve(self, tokens: int, sequences: int, besides: str | None = None) -> str | None:
        """Reserve ``tokens`` for ``sequences`` on the worker with most room and name it; None if they fit nowhere now.

        Worker ``besides`` is excluded.
        """
        worker = self.fitting(tokens, sequences, besides)
        if worker is not None:
            self.reserve_on(worker, tokens)
            self.sequences[worker] += sequences
        return worker

    def fitting(self, tokens: int, sequences: int, besides: str | None = None) -> str | None:
        """The worker that ``reserve`` would name."""
        if besides not in self._roomiest:
            self._roomiest[besides] = self._most_room(besides)
        room, worker = self._roomiest[besides]
        if tokens + AHEAD * sequences > room:
            # An empty worker takes whatever it holds: nothing else there needs room to grow.
            empty = [one for one in self._open if one != besides and not self.reserved[one]]
            return next((one for one in empty if tokens <= self.capacities[one]), None)
        return worker

    def _most_room(self, besides: str | None) -> tuple[int, str]:
        """The most room of a worker, and its name."""
        most, roomiest = -1, ""
        for worker, capacity in self.capacities.items():  # as ``room``, but a hundred workers must cost little
            room = capacity - self.reserved[worker] - AHEAD * self.sequences[worker] - self._watermarks[worker]
            if room > most and worker != besides and worker not in self.closed:
                most, roomiest = room, worker
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
        self._roomiest.clear()

    def grow(self, rows: Mapping[str, int]) -> bool:
        """Reserve a step's new tokens, by worker; False, and nothing is reserved, if they do not all fit."""
        reserved, capacities = self.reserved, self.capacities
        for worker, tokens in rows.items():
            if reserved[worker] + tokens > capacities[worker]:
                return False
        for worker, tokens in rows.items():
            reserved[worker] += tokens
            self.left_in_all -= tokens
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

    def by_room(self) -> dict[str, int]:
        """The room of every worker that takes requests, for one more sequence, most first."""
        rooms = sorted(((self.room(name) - AHEAD, name) for name in self._open), key=lambda one: -one[0])
        return {name: room for room, name in rooms}
