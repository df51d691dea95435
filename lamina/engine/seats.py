"""Sequences by lane, and which lanes have fewest. Pure."""


class Seats:
    """How many sequences each lane has. What a question costs does not depend on the number of lanes, since the lanes
    that the scheduler fills differ little: they are kept by their number of sequences."""

    def __init__(self, lanes: int) -> None:
        self.taken = [0] * lanes
        self.total = 0
        self._lanes_with = {0: set(range(lanes))}

    def change(self, lane: int, sequences: int) -> None:
        """``lane`` has so many more sequences, or fewer."""
        before = self.taken[lane]
        self.taken[lane] = before + sequences
        self.total += sequences
        self._lanes_with[before].remove(lane)
        if not self._lanes_with[before]:
            del self._lanes_with[before]
        self._lanes_with.setdefault(before + sequences, set()).add(lane)

    @property
    def emptiest(self) -> set[int]:
        """The lanes with fewest sequences. Not to be changed."""
        return self._lanes_with[min(self._lanes_with)]
