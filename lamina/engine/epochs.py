"""Which workers are lost, and when those that are left may begin the next epoch. Pure: time is an argument."""

import collections
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lamina.control.messages import EpochEnded
from lamina.core.topology import Topology

GRACE_S = 2.0  # from a complaint until the process of the worker must have been seen to end, or the link counts as cut
ACKNOWLEDGE_S = 60.0  # for a worker to end an epoch: it may be inside a long slice


@dataclass
class Complaints:
    """Workers that others have no link to any more, or that the engine cannot reach, while their processes run."""

    _reasons: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict)

    def report(self, reporter: str, worker: str, reason: str, now: float) -> None:
        """``reporter`` cannot reach ``worker``."""
        self._reasons.setdefault((reporter, worker), (reason, now))

    def keep_members(self, topology: Topology) -> None:
        """Forget what is said by or of those that do not take part any more."""
        self._reasons = {
            pair: said
            for pair, said in self._reasons.items()
            if pair[1] in topology.names and (pair[0] in topology.names or pair[0] == "engine")
        }

    def due(self, topology: Topology, now: float) -> tuple[str, str] | None:
        """Return the worker to give up, with the reason, if a complaint is older than ``GRACE_S``."""
        if not any(now - since > GRACE_S for _, since in self._reasons.values()):
            return None
        worker = blamed(list(self._reasons), topology)
        return worker, next(f"{pair[0]}: {reason}" for pair, (reason, _) in self._reasons.items() if worker in pair)


def blamed(pairs: Collection[tuple[str, str]], topology: Topology) -> str:
    """Return the worker to give up, of pairs (complaining, accused) of which at least one cannot reach the other.

    Either may be the one whose network fails: it is the one in most pairs. The last worker of its role is given up only
    if no other is in any pair; of equals, the last memory worker, which costs least.
    """
    counts = collections.Counter(member for pair in set(pairs) for member in topology.members if member.name in pair)
    spare = [member for member in counts if topology.lacks([member.name]) is None]
    return max(spare or counts, key=lambda member: (counts[member], member.role == "memory", member.name)).name


@dataclass
class Ending:
    """How far the members are with the end of an epoch.

    Attributes:
        topology: of the next epoch.
        lost_at: when the first of the losses that end the epoch was noticed.
        since: when the members were told.
    """

    topology: Topology
    lost_at: float
    since: float
    _missing: dict[str, list[str]] = field(default_factory=dict)  # by member that has answered

    def on_epoch_ended(self, worker: str, message: EpochEnded) -> bool:
        """A member has dropped the old epoch. True once all have, and nothing of it can arrive any more."""
        if message.epoch == self.topology.epoch:
            self._missing[worker] = message.missing
        return self._missing.keys() >= self.topology.names and not any(self._missing.values())

    def overdue(self, now: float) -> Mapping[str, str]:
        """Members to give up, with the reason: those without an answer; if all answered, the one most wait for."""
        waited = now - self.since
        if waited < ACKNOWLEDGE_S:
            return {}
        silent = self.topology.names - self._missing.keys()
        if silent:
            return {name: f"it has not ended its steps within {waited:.0f} s" for name in silent}
        pairs = [(worker, peer) for worker, missing in self._missing.items() for peer in missing]
        worker = blamed(pairs, self.topology)
        return {worker: f"what it sends has not reached {_others(pairs, worker)} for {waited:.0f} s"}


def _others(pairs: Collection[tuple[str, str]], worker: str) -> str:
    return ", ".join(sorted({name for pair in pairs if worker in pair for name in pair} - {worker}))
