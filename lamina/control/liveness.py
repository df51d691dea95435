"""Which workers respond, and how often a lost one may be started again. Pure but for pings."""

import collections

PING_S = 1.0
SUSPECT_S = 4.0  # without an answer for this long, a worker is reported
LOST_S = 13.0  # and after this long it is considered lost
MAX_TURN_S = 1.0


class Liveness:
    """How long each worker has been silent, in seconds of a clock that stops while the engine does.

    Attributes:
        awake_s: that clock. Each turn advances it by ``MAX_TURN_S`` at most: while the engine's own process is stopped
            (Ctrl-Z) or starved, answers lie unread in its sockets, and that time must not count against the workers.
    """

    def __init__(self, now: float) -> None:
        self.awake_s = 0.0
        self._turned = now
        self._pinged = float("-inf")
        # When, by awake_s, the longest silent first: looking at these alone does not cost more with more workers. A
        # worker is watched once it has been heard.
        self._heard: dict[str, float] = {}

    def turn(self, now: float) -> bool:
        """Begin a turn at ``now`` of a monotonic clock; True if pings are to be sent."""
        self.awake_s += min(now - self._turned, MAX_TURN_S)
        self._turned = now
        due = self.awake_s >= self._pinged + PING_S
        if due:
            self._pinged = self.awake_s
        return due

    def heard(self, worker: str) -> None:
        """A message from ``worker`` arrived in this turn."""
        self._heard.pop(worker, None)
        self._heard[worker] = self.awake_s

    def unwatch(self, worker: str) -> None:
        """Watch a worker no more."""
        self._heard.pop(worker, None)

    def is_quiet(self, worker: str) -> bool:
        """True if nothing has come from ``worker`` for ``PING_S``, so that a ping would tell something."""
        return self.awake_s - self._heard.get(worker, float("-inf")) >= PING_S

    def suspects(self) -> dict[str, float]:
        """Seconds of silence of the workers that have been silent for ``SUSPECT_S``."""
        return self._silent(SUSPECT_S)

    def lost(self) -> dict[str, float]:
        """Seconds of silence of the workers that have been silent for ``LOST_S``."""
        return self._silent(LOST_S)

    def _silent(self, limit_s: float) -> dict[str, float]:
        silent = {}
        for worker, at in self._heard.items():
            if self.awake_s - at < limit_s:
                break
            silent[worker] = self.awake_s - at
        return silent


WINDOW_S = 600.0
FIRST_WAIT_S = 1.0  # after the second loss within the window; it doubles with each further one
MOST_WAIT_S = 60.0


class Restarts:
    """Replacements of the workers of one pool: at most ``most`` within ``WINDOW_S``, the first at once and the others
    after waits that double."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._starts: collections.deque[float] = collections.deque()

    def next(self, now: float) -> float | None:
        """When to start the next replacement, which is counted; None if it is one too many."""
        while self._starts and now - self._starts[0] >= WINDOW_S:
            self._starts.popleft()
        before = len(self._starts)
        if before >= self.most:
            return None
        at = now + (min(FIRST_WAIT_S * 2.0 ** (before - 1), MOST_WAIT_S) if before else 0.0)
        self._starts.append(now)
        return at
