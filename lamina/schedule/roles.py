"""How many replicas only run prompts, by targets for the times to the first and between tokens. Pure: no clock.

A replica changes its role when one target has been missed for a while and the other one would still be met without that
replica. The work of a role is taken to be shared evenly by its replicas, so that one replica less makes a time longer
by n / (n - 1). If both targets are missed, no change of roles helps: there are too few workers.
"""

from dataclasses import dataclass

from lamina.schedule.turn import Turn

LOOK_S = 0.25  # time between two decisions
HOLD_S = 5.0  # a target must have been missed for so long
ROOM = 0.85  # share of its target that the other role may take once it has a replica less


@dataclass(frozen=True)
class Times:
    """What requests wait for now, as shares of the targets.

    Attributes:
        first: Time until all prompts that have arrived are computed, over the target for the first token.
        between: Time of a step that decodes, over the target for the time between tokens.
    """

    first: float
    between: float


@dataclass(frozen=True)
class Targets:
    """Seconds to the first token of a request, and between two tokens."""

    first_s: float
    between_s: float


def expected_times(turn: Turn, targets: Targets, prefill: int) -> Times:
    """Return what requests wait for now, as shares of the targets. ``prefill``: replicas that run prompts."""
    decodes = any(plan.decoding.sequences for plan in turn.in_flight.values())
    between_s = turn.between_s if decodes else 0.0
    return Times(turn.scheduler.prompts_s / max(1, prefill) / targets.first_s, between_s / targets.between_s)


class RoleBalance:
    """Decides which role a replica is to have, asked every ``LOOK_S``."""

    def __init__(self, least: int, most: int) -> None:
        """``least`` and ``most``: replicas that only run prompts. ``least`` is at least 1."""
        self._least, self._most = least, most
        self._wanted = 0  # result that ``decide`` returns once it has been wanted for ``HOLD_S``, from ``_since`` on
        self._since = 0.0

    def decide(self, times: Times, prefill: int, decode: int, now: float) -> int:
        """Return 1 if a replica that decodes is to run prompts only, -1 for the reverse, else 0.

        Args:
            prefill: Replicas that only run prompts.
            decode: Replicas that only decode, or do both while there are none for prompts.
            now: Seconds of a monotonic clock.
        """
        if not self._least <= prefill <= self._most:
            change = 1 if prefill < self._least else -1
            return change if change < 0 or decode > 1 else 0
        wanted = 0
        if prefill < self._most and decode > 1 and _should_help(times.first, times.between, decode):
            wanted = 1
        elif prefill > self._least and _should_help(times.between, times.first, prefill):
            wanted = -1
        if wanted != self._wanted:
            self._wanted, self._since = wanted, now
        if not wanted or now - self._since < HOLD_S:
            return 0
        self.drop_samples()
        return wanted

    def drop_samples(self) -> None:
        """Forget earlier times, which other replicas had."""
        self._wanted = 0


def _should_help(missed: float, other: float, replicas: int) -> bool:
    """Return True if a target is missed, and the other one would still be met by one of its ``replicas`` less.

    There must be at least two.
    """
    return missed > 1 and other * replicas / (replicas - 1) <= ROOM
