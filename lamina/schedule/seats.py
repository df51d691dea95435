"""Number of sequences by lane, and the lane with fewest. Pure."""

import heapq


class Seats:
    """Number of sequences of each lane. Changes and lookups cost O(log lanes)."""

    def __init__(self, lanes: int) -> None:
        self.taken = [0] * lanes
        self.total = 0
        self._fewest = [(0, lane) for lane in range(lanes)]  # a heap of (taken, lane); some are out of date

    def change(self, lane: int, sequences: int) -> None:
        """``lane`` has ``sequences`` more than before, or fewer if negative."""
        self.taken[lane] += sequences
        self.total += sequences
        heapq.heappush(self._fewest, (self.taken[lane], lane))
        if len(self._fewest) > 4 * len(self.taken):
            self._fewest = [(taken, lane) for lane, taken in enumerate(self.taken)]
            heapq.heapify(self._fewest)

    @property
    def emptiest(self) -> int:
        """The lane with fewest sequences; of several, the first."""
        while self._fewest[0][0] != self.taken[self._fewest[0][1]]:
            heapq.heappop(self._fewest)
        return self._fewest[0][1]
