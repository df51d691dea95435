"""Sequences by lane, and which lane has fewest. Pure."""

import heapq


class Seats:
    """How many sequences each lane has. A change and a question cost O(log lanes)."""

    def __init__(self, lanes: int) -> None:
        self.taken = [0] * lanes
        self.total = 0
        self._fewest = [(0, lane) for lane in range(lanes)]  # a heap of (taken, lane); some are out of date

    def change(self, lane: int, sequences: int) -> None:
        """``lane`` has so many more sequences, or fewer."""
        self.taken[lane] += sequences
        self.total += sequences
        heapq.heappush(self._fewest, (self.taken[lane], lane))
        if len(self._fewest) > 4 * len(self.taken):
            self._fewest = [(taken, lane) for lane, taken in enumerate(self.taken)]
            heapq.heapify(self._fewest)

    @property
    def emptiest(self) -> int:
        """The lane with fewest sequences, the first of several."""
        while self._fewest[0][0] != self.taken[self._fewest[0][1]]:
            heapq.heappop(self._fewest)
        return self._fewest[0][1]
