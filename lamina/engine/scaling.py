"""Scaling by load: looks at the pools a few times a second, and has them resized as ``schedule.autoscale`` decides."""

import collections
import dataclasses
import logging
import time
from collections.abc import Mapping

from lamina.cluster.pool import PoolChange
from lamina.core.errors import LaminaError
from lamina.core.topology import Role
from lamina.engine.members import Members
from lamina.engine.pools import Pools, Resize
from lamina.engine.stats import ScalingStats
from lamina.schedule.autoscale import WINDOWS, Autoscaler, Bounds, Load, compute_load, memory_load
from lamina.schedule.turn import Turn

log = logging.getLogger(__name__)

LOOK_S = 0.25
BUSY_S = 10.0  # over which the time in slices is averaged: a step may take seconds
REFUSED_S = 30.0  # before a change is tried again that was refused, or whose workers did not start


class Scaling:
    """The pools that scale by load. The engine's thread owns it; any thread may read ``stats``."""

    def __init__(self, bounds: Mapping[Role, Bounds], turn: Turn, members: Members) -> None:
        self._turn, self._members = turn, members
        self._scalers = {role: Autoscaler(each, WINDOWS[role]) for role, each in bounds.items()}
        self._resizes: list[tuple[Role, int, Resize]] = []  # in progress
        self._refused: dict[Role, float] = {}  # until when
        self._looked = 0.0
        self._busy = collections.deque[tuple[float, float]](maxlen=round(BUSY_S / LOOK_S))  # time, seconds in slices
        self.stats: Mapping[str, ScalingStats] = {role: ScalingStats(*each) for role, each in bounds.items()}

    def look(self, now: float) -> None:
        """Look at all pools if the last time was ``LOOK_S`` ago. ``now``: seconds of a monotonic clock."""
        pools = self._members.pools
        if now < self._looked + LOOK_S or pools is None or not self._scalers:
            return
        self._looked = now
        self._busy.append((now, self._turn.busy_s))
        (begin, before), (end, after) = self._busy[0], self._busy[-1]
        busy = (after - before) / max(end - begin, LOOK_S)
        self._note_failures(now)
        for role, scaler in self._scalers.items():
            if not self._members.is_steady or not self._members.topology.serves:
                scaler.restart()
            elif self._refused.get(role, 0.0) <= now:
                load = self._load(role, pools, busy)
                self._note(role, load=load.demand, why=load.why)
                if change := scaler.decide(load, now):
                    self._resize(role, change, load, pools, now)

    def _load(self, role: Role, pools: Pools, busy: float) -> Load:
        leaving, coming = pools.leaving(role), pools.coming(role)
        topology = self._members.topology
        if role == "memory":
            return memory_load(self._turn.scheduler, topology, leaving, coming)
        return compute_load(self._turn.scheduler, busy, len(topology.computes) - leaving, coming)

    def _resize(self, role: Role, change: int, load: Load, pools: Pools, now: float) -> None:
        if change < 0 and (pools.coming(role) or pools.leaving(role)):
            return  # one at a time, so that each has made room before it is decided whether another one may leave
        resize = Resize()
        try:
            pools.resize({role: PoolChange(change)}, resize)
        except LaminaError as error:
            self._refuse(role, change, error, now)
            return
        self._resizes.append((role, change, resize))
        log.warning("the %s pool of %d scales by %+d: %s", role, load.workers, change, load.why)
        before = self.stats[role]
        grown, shrunk = before.grown + max(change, 0), before.shrunk - min(change, 0)
        self._note(role, grown=grown, shrunk=shrunk, last=_reason(change, load), at=time.time())

    def _note_failures(self, now: float) -> None:
        """Drop the changes that have ended, and record those that failed."""
        ended = [one for one in self._resizes if one[2].future.done()]
        self._resizes = [one for one in self._resizes if one not in ended]
        for role, change, resize in ended:
            if isinstance(error := resize.future.exception(), LaminaError):
                self._refuse(role, change, error, now)

    def _refuse(self, role: Role, change: int, error: LaminaError, now: float) -> None:
        self._refused[role] = now + REFUSED_S
        self._scalers[role].restart()
        log.warning("the %s pool cannot scale by %+d: %s", role, change, error)
        self._note(role, last=f"{change:+d}, refused or failed", at=time.time())

    def _note(self, role: Role, **changes: float | int | str) -> None:
        self.stats = {**self.stats, role: dataclasses.replace(self.stats[role], **changes)}  # type: ignore[arg-type]


def _reason(change: int, load: Load) -> str:
    """Without figures: it is a label of a metric."""
    why = "it was hardly used" if change < 0 else "requests waited" if load.starved else "it was nearly full"
    return f"{change:+d}, {why}"
