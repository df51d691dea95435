"""How many token slots of each memory worker are reserved, and which worker a request fits. No clock, no sockets."""

import heapq
from collections.abc import Mapping

from lamina.errors import RequestError


class Placement:
    """Token slots of every memory worker: how many it has, and how many admitted requests may need at most.

    A request is admitted only with its worst case reserved, so nothing admitted ever runs out of slots.
    """

    def __init__(self, capacities: Mapping[str, int]) -> None:
        """``capacities``: token slots by memory worker."""
        self.capacities = dict(capacities)
        self.reserved = dict.fromkeys(capacities, 0)
        self.largest = max(capacities.values())
        self.left_in_all = sum(capacities.values())
        self._places = {name: place for place, name in enumerate(capacities)}
        self._most_left: list[tuple[int, int, str]] = []  # a heap of (-left, place, worker); some are out of date
        self._sort()

    def require_possible(self, tokens: int) -> None:
        """Raises RequestError if no worker could hold ``tokens`` even when empty."""
        if tokens > self.largest:
            raise RequestError(
                f"the request may need {tokens} KV tokens; the largest memory worker holds {self.largest}. "
                f"Shorten the prompt, lower max_tokens or n, or give memory workers more room"
            )

    def reserve(self, tokens: int, besides: str | None = None) -> str | None:
        """Reserve ``tokens`` on the worker with the most left and name it; None if they fit nowhere now.

        Worker ``besides`` is excluded.
        """
        heap, popped = self._most_left, False
        while heap and (heap[0][2] == besides or -heap[0][0] != self._left(heap[0][2])):
            popped |= heapq.heappop(heap)[2] == besides
        most = heap[0] if heap else None
        if besides is not None and popped:
            heapq.heappush(heap, self._entry(besides))
        if most is None or -most[0] < tokens:
            return None
        self._take(most[2], tokens)
        return most[2]

    def reserve_on(self, worker: str, tokens: int) -> None:
        """Reserve ``tokens`` on this worker. Raises ValueError if they do not fit."""
        if tokens > self._left(worker):
            raise ValueError(f"{tokens} tokens do not fit {worker}, which has {self._left(worker)} left")
        self._take(worker, tokens)

    def _take(self, worker: str, tokens: int) -> None:
        self.reserved[worker] += tokens
        self.left_in_all -= tokens
        self._note(worker)

    def release(self, worker: str, tokens: int) -> None:
        """Release ``tokens`` of ``worker``."""
        if tokens > self.reserved[worker]:
            raise AssertionError(f"{worker}: {tokens} tokens released, {self.reserved[worker]} reserved")
        self.reserved[worker] -= tokens
        self.left_in_all += tokens
        self._note(worker)

    def roomiest(self, tokens: int) -> str:
        """Of the workers whose capacity is at least ``tokens``, the one with the most left."""
        return next(name for name in self.by_room() if self.capacities[name] >= tokens)

    def by_room(self) -> dict[str, int]:
        """Tokens left on every worker, most first."""
        left = [
            (reserved - capacity, name)
            for (name, capacity), reserved in zip(self.capacities.items(), self.reserved.values(), strict=True)
        ]
        left.sort()
        return {name: -minus for minus, name in left}

    def _note(self, worker: str) -> None:
        heapq.heappush(self._most_left, self._entry(worker))
        if len(self._most_left) > 4 * len(self.capacities):
            self._sort()

    def _left(self, worker: str) -> int:
        return self.capacities[worker] - self.reserved[worker]

    def _entry(self, worker: str) -> tuple[int, int, str]:
        return -self._left(worker), self._places[worker], worker

    def _sort(self) -> None:
        self._most_left = [self._entry(worker) for worker in self.capacities]
        heapq.heapify(self._most_left)
