"""Scales pools by load.

Load is measured in units that it would fill: memory workers, or replicas of compute workers. A pool grows when its
utilisation has been above ``HIGH`` for ``grow_s``, or requests wait because of it. It shrinks when its utilisation with
one unit less would have been below ``LOW`` for ``shrink_s``, which is longer. As in Kubernetes'
HorizontalPodAutoscaler, the lowest demand within ``grow_s`` and the highest within ``shrink_s`` count, so that short
peaks and lulls change nothing. Since ``LOW`` is below ``HIGH``, the size under constant load does not oscillate.

A memory worker serves a second after its start; a compute worker must load weights first. So the memory pool follows
its load within seconds, and the compute pool within minutes.
"""

import collections
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from lamina.cluster.pool import PoolChange
from lamina.core.errors import LaminaError
from lamina.core.topology import COMPUTE_POOLS, Pool, Topology
from lamina.engine.members import Members
from lamina.engine.pools import Pools, Resize
from lamina.engine.resizing import together
from lamina.engine.stats import ScalingStats
from lamina.schedule.roles import LOOK_S, RoleBalance, Targets, expected_times
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.turn import Turn

HIGH, LOW = 0.85, 0.6
Bounds = tuple[int, int]
"""The least and the most workers or units of a pool."""


@dataclass(frozen=True)
class Windows:
    """Seconds that a pool must be too small before it grows, and too large before it shrinks."""

    grow_s: float
    shrink_s: float


WINDOWS: Mapping[Pool, Windows] = {"compute": Windows(10.0, 300.0), "memory": Windows(1.0, 60.0)}


@dataclass(frozen=True)
class Load:
    """Load of a pool, in units that join and leave as a whole: memory workers, or replicas of compute workers.

    Attributes:
        serving: Units that do not leave.
        units: ``serving`` plus joining units.
        demand: Units that the load would fill.
        why: The figures of the load, in words.
        beside: Capacity outside of the pool (local memory of compute workers), in units.
        starved: Whether requests wait for more workers.
        missed: The target that is missed, in words; empty for pools without one.
    """

    serving: int
    units: int
    demand: float
    why: str
    beside: float = 0.0
    starved: bool = False
    missed: str = ""

    @property
    def enough(self) -> int:
        """Fewest units with a utilisation up to ``HIGH``; more than ``serving`` if requests wait."""
        needed = math.ceil(round(self.demand / HIGH - self.beside, 6))
        return max(needed, self.serving + 1 if self.starved else 0)

    @property
    def plenty(self) -> int:
        """Fewest units with a utilisation up to ``LOW``."""
        return max(math.ceil(round(self.demand / LOW - self.beside, 6)), self.enough)


@dataclass(frozen=True)
class _Seen:
    """Units that a pool needed at a moment."""

    at: float
    enough: int
    plenty: int


class Autoscaler:
    """Decides the size of one pool. ``decide`` is called a few times per second."""

    def __init__(self, bounds: Bounds, windows: Windows) -> None:
        self.bounds, self._windows = bounds, windows
        self._seen = collections.deque[_Seen]()

    def decide(self, load: Load, now: float) -> int:
        """Return how many units should join now; -1 if one should leave. ``now``: monotonic seconds."""
        least, most = self.bounds
        self._seen.append(_Seen(now, load.enough, load.plenty))
        while len(self._seen) > 1 and self._seen[1].at <= now - self._windows.shrink_s:
            self._seen.popleft()
        enough = self._within(self._windows.grow_s, now)
        grow_to = least if not enough else min(max(least, min(one.enough for one in enough)), most)
        if grow_to > load.units:
            return grow_to - load.units
        plenty = self._within(self._windows.shrink_s, now)
        keep = most if not plenty else min(max(least, *(one.plenty for one in plenty)), most)
        return -1 if keep < load.units else 0

    def _within(self, window_s: float, now: float) -> list[_Seen]:
        """Return the observations of the last ``window_s``; empty if observations began later."""
        if self._seen[0].at > now - window_s:
            return []
        late = list(itertools.takewhile(lambda one: one.at > now - window_s, reversed(self._seen)))
        return [*late, self._seen[-1 - len(late)]] if len(late) < len(self._seen) else late

    def restart(self) -> None:
        """Drop all observations."""
        self._seen.clear()


def memory_load(scheduler: Scheduler, topology: Topology, leaving: int, coming: int) -> Load:
    """Return the memory pool's load: reserved slots, and slots that waiting requests need.

    ``leaving``, ``coming``: numbers of leaving members and joining workers.
    """
    capacities = topology.capacities
    slots = sum(capacities.values())
    used = slots - scheduler.placement.left_in_all
    queued = [group for group in scheduler.requests if group.lane < 0]
    first = queued[0] if queued else None
    lacking = first is not None and scheduler.placement.fitting(first.to_run, len(first.completions)) is None
    seats = scheduler.limits.max_sequences - scheduler.running
    needed = sum(group.to_run for group in queued[: max(seats, 0)]) if lacking and seats > 0 else 0
    own = [capacities[name] for name in topology.memories] or list(capacities.values())
    each = sum(own) / len(own) if own else 1.0
    serving = len(topology.memories) - leaving
    why = f"{used} of {slots} KV slots are in use" + (f", and requests wait for {needed}" if needed else "")
    beside = sum(capacities[name] for name in topology.local) / each
    return Load(serving, serving + coming, (used + needed) / each, why, beside, starved=needed > 0)


def compute_load(scheduler: Scheduler, busy: float, serving: int, coming: int) -> Load:
    """Return the compute pool's load.

    Args:
        busy: Time in slices over elapsed time, summed over replicas, of which each has the mean of its stages.
        serving: Replicas that do not leave.
        coming: Replicas that are joining.
    """
    queued = [group for group in scheduler.requests if group.lane < 0]
    waits = bool(queued) and scheduler.placement.fitting(queued[0].to_run, len(queued[0].completions)) is not None
    starved = waits and busy > HIGH * serving
    why = f"{busy:.1f} of {serving} replicas' time is spent in slices" + (f", {len(queued)} wait" if starved else "")
    return Load(serving, serving + coming, min(busy, HIGH * serving), why, starved=starved)


log = logging.getLogger(__name__)

BUSY_S = 10.0  # the time in slices is averaged over these seconds: a step may take some of them
REFUSED_S = 30.0  # wait after a change that was refused or whose workers did not start


class Scaling:
    """The pools that scale by load. The engine's thread owns it; any thread may read ``stats``."""

    def __init__(self, bounds: Mapping[Pool, Bounds], turn: Turn, members: Members, targets: Targets) -> None:
        """``targets``: latencies to hold by changing the roles of replicas, if there are bounds for ``prefill``."""
        self._turn, self._members, self._targets = turn, members, targets
        units = {pool: (least // (each := self._each(pool)), most // each) for pool, (least, most) in bounds.items()}
        self._scalers = {pool: Autoscaler(each, WINDOWS[pool]) for pool, each in units.items() if pool != "prefill"}
        self._roles = RoleBalance(*units["prefill"]) if "prefill" in bounds else None
        self._resizes: list[tuple[Pool, int, Resize]] = []  # resizes in progress: pool, change, and its future
        self._refused: dict[Pool, float] = {}  # by pool: time before which it is not resized, after a refusal
        self._looked = 0.0
        self._busy = collections.deque[tuple[float, float]](maxlen=round(BUSY_S / LOOK_S))  # time, seconds in slices
        self.stats: Mapping[str, ScalingStats] = {role: ScalingStats(*each) for role, each in bounds.items()}

    def look(self, now: float) -> None:
        """Observe and resize all pools, every ``LOOK_S``. ``now``: monotonic seconds."""
        pools = self._members.pools
        if now < self._looked + LOOK_S or pools is None or not self.stats:
            return
        self._looked = now
        self._busy.append((now, self._turn.busy_s - self._turn.prefill_busy_s))
        (begin, before), (end, after) = self._busy[0], self._busy[-1]
        busy = (after - before) / max(end - begin, LOOK_S) / self._members.topology.pipeline.shape.stages
        self._note_failures(now)
        for role, scaler in self._scalers.items():
            if not self._members.is_steady or not self._members.topology.serves:
                scaler.restart()
            elif self._refused.get(role, 0.0) <= now:
                load = self._load(role, pools, busy)
                self._note(role, load=load.demand * self._each(role), why=load.why)
                if change := scaler.decide(load, now):
                    self._resize(role, change, load, pools, now)
        if self._roles is not None:
            self._balance_roles(self._roles, pools, now)

    def _balance_roles(self, roles: RoleBalance, pools: Pools, now: float) -> None:
        """Let a replica change its role if a target is missed."""
        if not self._members.is_steady or any(state != "serving" for state in self._members.states.values()):
            roles.drop_samples()
            return
        sizes = self._members.topology.sizes
        prefill, decode = (sizes[pool] // self._each(pool) for pool in COMPUTE_POOLS)
        times = expected_times(self._turn, self._targets, prefill or decode)
        why = f"prompts take {times.first:.2f} and steps {times.between:.2f} of their targets"
        load = Load(prefill, prefill, times.first * prefill, why)
        self._note("prefill", load=load.demand * self._each("prefill"), why=why)
        if self._refused.get("prefill", 0.0) <= now and (change := roles.decide(times, prefill, decode, now)):
            missed = "first tokens came too late" if change > 0 else "tokens came too slowly"
            self._resize("prefill", change, dataclasses.replace(load, missed=missed), pools, now)

    def _each(self, pool: Pool) -> int:
        """Return the workers of a unit of a pool."""
        return together(pool, self._members.topology.pipeline)

    def _load(self, role: Pool, pools: Pools, busy: float) -> Load:
        leaving, coming = pools.leaving(role), pools.coming(role)
        topology = self._members.topology
        if role == "memory":
            return memory_load(self._turn.scheduler, topology, leaving, coming)
        each = self._each(role)
        return compute_load(self._turn.scheduler, busy, (topology.sizes[role] - leaving) // each, coming // each)

    def _resize(self, role: Pool, units: int, load: Load, pools: Pools, now: float) -> None:
        """Change a pool by so many units."""
        each = self._each(role)
        change = units * each
        if change < 0 and (pools.coming(role) or pools.leaving(role)):
            return  # one unit leaves at a time
        resize = Resize()
        try:
            changes = {role: PoolChange(change)}
            pools.resize(changes | {"compute": PoolChange(-change)} if role == "prefill" else changes, resize)
        except LaminaError as error:
            self._refuse(role, change, error, now)
            return
        self._resizes.append((role, change, resize))
        log.warning("the %s pool of %d scales by %+d: %s", role, load.units * each, change, load.why)
        before = self.stats[role]
        grown, shrunk = before.grown + max(change, 0), before.shrunk - min(change, 0)
        self._note(role, grown=grown, shrunk=shrunk, last=_reason(change, load), at=time.time())

    def _note_failures(self, now: float) -> None:
        """Drop changes that have ended, and record those that failed."""
        ended = [one for one in self._resizes if one[2].future.done()]
        self._resizes = [one for one in self._resizes if one not in ended]
        for role, change, resize in ended:
            if isinstance(error := resize.future.exception(), LaminaError):
                self._refuse(role, change, error, now)

    def _refuse(self, role: Pool, change: int, error: LaminaError, now: float) -> None:
        self._refused[role] = now + REFUSED_S
        if role in self._scalers:
            self._scalers[role].restart()
        log.warning("the %s pool cannot scale by %+d: %s", role, change, error)
        self._note(role, last=f"{change:+d}, refused or failed", at=time.time())

    def _note(self, role: Pool, **changes: float | int | str) -> None:
        self.stats = {**self.stats, role: dataclasses.replace(self.stats[role], **changes)}  # type: ignore[arg-type]


def _reason(change: int, load: Load) -> str:
    """Return the reason without figures, for a metric's label."""
    if load.missed:
        return f"{change:+d}, {load.missed}"
    why = "it was hardly used" if change < 0 else "requests waited" if load.starved else "it was nearly full"
    return f"{change:+d}, {why}"
