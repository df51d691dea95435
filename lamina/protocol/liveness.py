"""Which workers respond: a process may stop without exiting (SIGSTOP, a debugger, a machine or network that hangs).

The engine pings every worker from which nothing has come for a second, and a native thread of the worker echoes the
ping (``protocol.control``):
neither a long step nor a native call that holds Python's lock nor a slow load delays the echo.
"""

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
