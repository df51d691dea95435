"""When a lost worker may be replaced, and how often. Pure: time is an argument."""

import collections

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
