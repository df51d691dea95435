"""Decides what takes the place of lost workers, and when: workers of this engine, or those of other machines."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamina.cluster.degrees import parse_computes
from lamina.cluster.pool import REMOTE, Kinds, size
from lamina.cluster.pool import kinds as kinds_of
from lamina.config.engine_config import EngineConfig
from lamina.control.liveness import Restarts
from lamina.core.errors import LaminaError
from lamina.core.topology import Pool, Role, Topology, may_run, role_of

log = logging.getLogger(__name__)

AWAIT_S = 600.0  # longest wait for another machine's worker to replace the last worker of a pool
RETRY_S = 5.0  # wait before a replica with workers of other machines, which has not started, is started again


@dataclass(frozen=True)
class _Vacancy:
    """Lost workers that had joined together, some of them of other machines.

    Attributes:
        pool: Their pool.
        kinds: Their kinds.
        at: When workers may be started in their place.
        until: Until when the pool may need them: a request may wait for their memory.
    """

    pool: Pool
    kinds: Kinds
    at: float
    until: float


class Replacements:
    """The replacements of lost workers that have not been started. The engine's thread owns it.

    Times are of the clock ``Liveness.awake_s``.
    """

    def __init__(self, max_restarts: int) -> None:
        """``max_restarts``: see ``EngineConfig``."""
        self._reasons: dict[Role, LaminaError] = {}  # why the latest worker of a role was lost or did not start
        self._restarts: Mapping[Role, Restarts] = {"compute": Restarts(max_restarts), "memory": Restarts(max_restarts)}
        self._due: list[tuple[float, Pool, Kinds]] = []  # when to start workers
        self._vacant: list[_Vacancy] = []  # to be filled by workers of other machines

    def reason(self, role: Role) -> LaminaError:
        """Return why no worker has a role. Compute workers may have been the only ones with KV."""
        return self._reasons[role if role in self._reasons else "compute"]

    def __bool__(self) -> bool:
        """Return whether a lost worker is to be replaced."""
        return bool(self._due or self._vacant)

    def may_restart(self, role: Role) -> bool:
        """Return whether this engine starts workers for lost ones."""
        return self._restarts[role].most > 0

    def add(self, pool: Pool, kinds: Kinds, reason: LaminaError, now: float, free: bool = False) -> None:
        """Record that workers that had joined together are lost, or have not started.

        Args:
            now: The time.
            free: Replace them at once, and do not count them as losses.
        """
        role = role_of(pool)
        self._reasons[role] = reason
        restarts = self._restarts[role]
        if REMOTE in kinds:
            self.add_vacancy(pool, kinds, now)
            log.warning("%s; another takes its place once enough workers of other machines come", reason)
            return
        at = now if free and restarts.most else restarts.next(now)
        if at is None:
            log.error("%s; it is not replaced: max_restarts %d is used up", reason, restarts.most)
        else:
            self._due.append((at, pool, kinds))

    def add_vacancy(self, pool: Pool, kinds: Kinds, at: float) -> None:
        """Record the kinds of workers to start once enough agents of other machines offer to run them, not before
        ``at``."""
        self._vacant.append(_Vacancy(pool, kinds, at, at + AWAIT_S))

    def drop_vacancies(self, pool: Pool) -> None:
        """Forget the lost workers of a pool that wait for agents of other machines."""
        self._vacant = [one for one in self._vacant if one.pool != pool]

    def pop_due(self, now: float) -> list[tuple[Pool, Kinds]]:
        """Return what is to be started by ``now``."""
        due = [(pool, kinds) for at, pool, kinds in self._due if at <= now]
        self._due = [one for one in self._due if one[0] > now]
        return due

    def has_vacancy(self, offered: Pool) -> bool:
        """Return whether lost workers wait for agents that offer workers of a pool."""
        return any(may_run(offered, one.pool) for one in self._vacant)

    def pop_vacancy(self, offers: Sequence[Pool], now: float) -> tuple[Pool, Kinds] | None:
        """Return the first lost workers to start again; None if too few agents of other machines wait.

        ``offers``: the pool of each agent that waits.
        """
        for place, one in enumerate(self._vacant):
            if one.at <= now and fitting(offers, one.pool) >= one.kinds.count(REMOTE):
                del self._vacant[place]
                return one.pool, one.kinds
        return None

    def count(self, pool: Pool) -> int:
        """Return how many workers of a pool this engine will start."""
        return sum(len(kinds) for _, one, kinds in self._due if one == pool)

    def awaits(self, role: Role, now: float) -> bool:
        """Return whether a worker of another machine may still replace a lost one."""
        return any(role_of(one.pool) == role and one.until > now for one in self._vacant)


def fitting(offers: Sequence[Pool], pool: Pool) -> int:
    """Return how many of the agents with these ``offers`` may run a worker of a pool."""
    return sum(may_run(one, pool) for one in offers)


def lost_replicas(pool: Pool, count: int, default: Kinds, config: EngineConfig, topology: Topology) -> list[Kinds]:
    """Return the kinds of ``count`` replicas of a pool that ``topology`` lacks.

    Args:
        default: Kinds of a replica beyond those of ``config``.
        config: Names the replicas at the start.
    """
    all_planned, prefills = kinds_of(parse_computes(config)), size(config.prefill)
    planned = all_planned[:prefills] if pool == "prefill" else all_planned[prefills:]
    each = len(default)
    lost = Counter(tuple(planned[first : first + each]) for first in range(0, len(planned), each))
    kind_by_name = {member.name: member.kind for member in topology.members}
    present = [replica for replica in topology.replicas if topology.pool_of(replica[0]) == pool]
    lost.subtract(tuple(kind_by_name[name] for name in replica) for replica in present)
    return [*lost.elements(), *[default] * count][:count]
