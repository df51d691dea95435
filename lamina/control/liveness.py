"""Which workers have been silent for too long, and when a lost worker may be replaced. Pure."""

import collections

PING_S = 1.0
UNHEARD_S = 2.0  # silence after which a ping has not been answered, as far as is known
SUSPECT_S = 4.0  # silence after which a worker is reported
LOST_S = 13.0  # silence after which a worker counts as lost
MAX_TURN_S = 1.0


class Liveness:
    """Measures how long each worker has been silent.

    Attributes:
        awake_s: the clock, in seconds. Each turn advances it by at most ``MAX_TURN_S``: while the engine's own process
            is stopped (Ctrl-Z) or starved, answers lie unread in its sockets, and must not count as silence.
    """

    def __init__(self, now: float) -> None:
        self.awake_s = 0.0
        self._turned = now
        self._pinged = float("-inf")
        self._heard: dict[str, float] = {}  # by worker: when its last message arrived, the longest silent first

    def turn(self, now: float) -> bool:
        """Begin a turn at ``now``, in seconds of a monotonic clock. Return True if pings must be sent."""
        self.awake_s += min(now - self._turned, MAX_TURN_S)
        self._turned = now
        due = self.awake_s >= self._pinged + PING_S
        if due:
            self._pinged = self.awake_s
        return due

    def on_message(self, worker: str) -> None:
        """Record that a message from ``worker`` arrived in this turn. From then on, the worker is watched."""
        self._heard.pop(worker, None)
        self._heard[worker] = self.awake_s

    def unwatch(self, worker: str) -> None:
        self._heard.pop(worker, None)

    def is_quiet(self, worker: str) -> bool:
        """True if ``worker`` has been silent for ``PING_S``, so that it needs a ping."""
        return self.awake_s - self._heard.get(worker, float("-inf")) >= PING_S

    def unheard(self) -> dict[str, float]:
        """Return the seconds of silence of each worker that has been silent for ``UNHEARD_S``."""
        return self._silent(UNHEARD_S)

    def suspects(self) -> dict[str, float]:
        """Return the seconds of silence of each worker that has been silent for ``SUSPECT_S``."""
        return self._silent(SUSPECT_S)

    def lost(self) -> dict[str, float]:
        """Return the seconds of silence of each worker that has been silent for ``LOST_S``."""
        return self._silent(LOST_S)

    def _silent(self, limit_s: float) -> dict[str, float]:
        silent = {}
        for worker, at in self._heard.items():
            if self.awake_s - at < limit_s:
                break
            silent[worker] = self.awake_s - at
        return silent


WINDOW_S = 600.0
FIRST_WAIT_S = 1.0  # wait after the second loss within the window; each further loss doubles it
MOST_WAIT_S = 60.0


class Restarts:
    """Limits how often workers of one pool are replaced: at most ``most`` times within ``WINDOW_S``, the first time at
    once, then after waits that double."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._starts: collections.deque[float] = collections.deque()

    def next(self, now: float) -> float | None:
        """Count a replacement and return when to start it; None if there have been too many."""
        while self._starts and now - self._starts[0] >= WINDOW_S:
            self._starts.popleft()
        before = len(self._starts)
        if before >= self.most:
            return None
        at = now + (min(FIRST_WAIT_S * 2.0 ** (before - 1), MOST_WAIT_S) if before else 0.0)
        self._starts.append(now)
        return at
