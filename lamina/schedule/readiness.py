"""Which lanes may have something to plan. Pure."""


class Readiness:
    """Every lane is in one of these states: it may have something to plan, it has as many steps in flight as the driver
    allows, or it had nothing to plan last time and rests."""

    def __init__(self, lanes: int) -> None:
        """All may have something to plan."""
        self._lanes = lanes
        self._changed = set(range(lanes))
        self._ahead = set[int]()
        self._resting = set[int]()

    def extend(self, lanes: int) -> None:
        """There are ``lanes`` now; the new ones rest."""
        self._resting.update(range(self._lanes, lanes))
        self._lanes = max(self._lanes, lanes)

    def wake(self) -> None:
        """Any lane may have something to plan, unless enough of its steps are in flight."""
        self._changed |= self._resting
        self._resting.clear()

    def restart(self) -> None:
        """Any lane may have something to plan: none has a step in flight."""
        self._changed, self._ahead, self._resting = set(range(self._lanes)), set(), set()

    def note_change(self, lane: int) -> None:
        """This lane may have something to plan."""
        self._changed.add(lane)
        self._resting.discard(lane)

    def note_completed(self, lane: int) -> None:
        """A step of this lane is not in flight any more."""
        self._ahead.discard(lane)
        self.note_change(lane)

    def note_ahead(self, lane: int) -> None:
        """Note that this lane has as many steps in flight as allowed."""
        self._ahead.add(lane)
        self._changed.discard(lane)
        self._resting.discard(lane)

    def note_nothing(self, lane: int) -> None:
        """This lane had nothing to plan."""
        self._changed.discard(lane)
        self._resting.add(lane)

    def candidates(self, moving: bool, dealing: bool) -> set[int]:
        """Return the lanes to plan for. ``moving``: all requests are about to be dealt out again; ``dealing``: some
        wait."""
        if moving:
            return set(range(self._lanes)) - self._ahead
        if dealing and self._resting:  # the first lane planned deals to all of them
            return self._changed | {min(self._resting)}
        return self._changed
