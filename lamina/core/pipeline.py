"""The order of slices on compute workers: staggered pipelining of several lanes, fixed or rotational.

Pure: no clock, no sockets. Engine, workers and simulator use the same object.

A lane is one batch in flight; its attentions are numbered over its life (``turn``). Slice ``turn`` runs before
attention ``turn``. The last slice of a step and the first of the next count as one, since no attention lies between.

Rotational staggered pipelining (Lamina, section 5.1.1): n lanes share n - 1 replicas, and slice k of lane j runs on
replica (j + k) mod (n - 1). With slices n - 1 times as long as attentions, lane j begins slice k at tick k n + j, so
that one new slice begins at every tick, no replica has two at a time or is ever idle, and the memory workers serve
exactly one lane per tick. Fixed: lane j stays on replica j mod r; nothing moves between replicas.

A replica may consist of stages, which have the weights of some consecutive slices each. A lane's context goes from
stage to stage. After the last slice, the tokens drawn go back to the first stage: although no attention lies between,
the last slice of a step and the first of the next run on different workers then.

Each stage, or the whole replica if it has one, may consist of ranks, which share every slice. Every rank has the
context that its own heads need, and sends it to the rank of the same number. If several lanes run on a stage of several
ranks, its first rank announces whose slice comes next (``compute.ranks``), since messages may arrive in another order
at each rank.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

LaneRole: TypeAlias = Literal["prefill", "decode", "both"]


@dataclass(frozen=True)
class Arrangement:
    """How to use a pipeline: its first ``lanes`` lanes, in rotational or fixed order."""

    lanes: int
    rotates: bool = False


@dataclass(frozen=True)
class Pipeline:
    """Which replica runs which slice, and in which order.

    Attributes:
        lanes: most batches in flight.
        replicas: copies of the weights, each on ``ranks * stages`` compute workers.
        rotates: True for the rotational order, which needs ``lanes == replicas + 1``.
        choices: arrangements between which the runtime may change, the first of which it begins with. Empty: the
            arrangement is fixed by ``lanes`` and ``rotates``.
        ranks: compute workers that share every slice of a stage (``lamina.splitter.shard``). Worker number n is rank
            ``n % ranks`` of stage ``n // ranks``, counted over all replicas.
        stages: parts of each replica with different slices. Stage number s is stage ``s % stages`` of replica
            ``s // stages``.
        starts: the first slice of each stage. Empty without stages, and until the model is known.
        prefill: how many replicas, the first ones, only run prompts; the others only decode. 0: all do both. At least
            one replica always decodes.
        lends: True if compute workers with local memory attend to the KV there for other replicas too.
        one_way: True if they do so only for replicas that only run prompts, which hold no KV. Then no replica waits for
            a replica that may wait for it, so that ranks need not serve requests while they wait for each other.
    """

    lanes: int
    replicas: int
    rotates: bool = False
    choices: tuple[Arrangement, ...] = ()
    ranks: int = 1
    stages: int = 1
    starts: tuple[int, ...] = ()
    prefill: int = 0
    lends: bool = False
    one_way: bool = False

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.lanes < self.replicas * self.stages:
            stages = f" of {self.stages} stages" if self.stages > 1 else ""
            raise ValueError(
                f"{self.lanes} lanes cannot keep {self.replicas} replicas{stages} busy; give each at least one"
            )
        if self.stages > 1 and (self.rotates or any(one.rotates for one in self.choices)):
            raise ValueError("lanes visit the stages of their replica in turn, and cannot rotate over replicas besides")
        if self.prefill and (self.rotates or self.choices):
            raise ValueError("lanes of replicas that only run prompts, or only decode, are fixed")
        if self.rotates and self.lanes != self.replicas + 1:
            raise ValueError(
                f"rotational pipelining runs {self.replicas + 1} lanes on {self.replicas} replicas, not {self.lanes}"
            )

    @property
    def first_arrangement(self) -> Arrangement:
        return self.choices[0] if self.choices else Arrangement(self.lanes, self.rotates)

    @property
    def may_rotate(self) -> bool:
        """True if a lane's context may travel between replicas."""
        return self.replicas > 1 and any(one.rotates for one in (self.first_arrangement, *self.choices))

    @property
    def moves_local(self) -> bool:
        """True if KV may move from and to local memory. Heads of several ranks would have to move at once."""
        return self.spreads and self.ranks == 1

    @property
    def spreads(self) -> bool:
        """True if the KV of a sequence may be in the local memory of several replicas."""
        return self.lends and not self.one_way

    @property
    def announces(self) -> bool:
        """True if the first rank of each stage announces the order of slices to its other ranks.

        The total number of lanes counts, since one replica runs all of them once the other replicas are lost.
        """
        return self.ranks > 1 and self.lanes > 1

    @property
    def interchangeable(self) -> bool:
        """True if sequences may change lanes, and so replicas."""
        return self.replicas == 1 or self.may_rotate or bool(self.choices) or self.prefill > 0

    def role(self, lane: int) -> LaneRole:
        """Return what a lane runs."""
        prefill = min(self.prefill, self.replicas - 1)
        if not prefill:
            return "both"
        return "prefill" if lane % self.replicas < prefill else "decode"

    def with_replicas(self, replicas: int, prefill: int = 0) -> "Pipeline":
        """Return this pipeline on another number of replicas, of which the first ``prefill`` only run prompts.

        Lanes keep their numbers; with fewer replicas, some may not be used. Fixed choices keep their lanes per replica;
        rotational ones have one lane more than replicas. With ``prefill``, lanes are fixed.
        """
        if (replicas, prefill) == (self.replicas, self.prefill):
            return self
        choices = [
            Arrangement(replicas + 1, rotates=True)
            if one.rotates
            else Arrangement(one.lanes // self.replicas * replicas)
            for one in self.choices
            if replicas > 1 or not one.rotates
        ]
        lanes = replicas + 1 if self.rotates else max(self.lanes, self.lanes // self.replicas * replicas)
        unique = tuple(dict.fromkeys(choices))
        made = dataclasses.replace(self, lanes=lanes, replicas=replicas, choices=unique, prefill=0)
        if not prefill:
            return made
        first = made.first_arrangement
        lanes = replicas if first.rotates else first.lanes
        return dataclasses.replace(made, lanes=lanes, rotates=False, choices=(), prefill=prefill)

    def without_rotation(self) -> "Pipeline":
        """Return this pipeline without the choices in which lanes rotate."""
        return dataclasses.replace(self, choices=tuple(one for one in self.choices if not one.rotates))

    @property
    def workers(self) -> int:
        """Compute workers of each replica."""
        return self.ranks * self.stages

    def home(self, number: int) -> int:
        """Return the compute worker by whose name segments refer to the local memory of compute worker ``number``: the
        worker of the same rank in the first stage of the replica. Each stage there has K and V of its own layers."""
        return number // self.workers * self.workers + number % self.ranks

    def holders(self, computes: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return, by compute worker that is a ``home`` of several stages, the workers of these stages.

        ``computes``: Names of the compute workers, by number.
        """
        homes = [number for number in range(len(computes)) if self.stages > 1 and self.home(number) == number]
        return {computes[home]: tuple(computes[home : home + self.workers : self.ranks]) for home in homes}

    def replica(self, lane: int, turn: int, rotates: bool | None = None) -> int:
        """Return the replica that runs slice ``turn`` of ``lane``. ``rotates`` overrides the pipeline's."""
        rotating = self.rotates if rotates is None else rotates
        return (lane + turn) % self.replicas if rotating else lane % self.replicas

    def stage(self, lane: int, turn: int, index: int, rotates: bool | None = None) -> int:
        """Return the stage that runs slice ``index`` of a step of ``lane`` that begins at ``turn``, counted over all
        replicas."""
        own = bisect.bisect(self.starts, index) - 1 if self.starts else 0
        return self.replica(lane, turn + index, rotates) * self.stages + own

    def stages_of(self, lane: int, turn: int, slices: int, rotates: bool | None = None) -> list[int]:
        """Return the ``stage`` of each of the ``slices`` slices of a step of ``lane`` that begins at ``turn``."""
        if self.starts or (self.rotates if rotates is None else rotates):
            return [self.stage(lane, turn, index, rotates) for index in range(slices)]
        return [self.stage(lane, turn, 0, rotates)] * slices

    def exchanges(self, one: int, other: int) -> bool:
        """True if the compute workers of these numbers may send each other a lane's context or its drawn tokens."""
        if one % self.ranks != other % self.ranks:
            return False
        one, other = one // self.ranks, other // self.ranks
        if self.stages == 1:
            return one != other
        same, apart = one // self.stages == other // self.stages, abs(one - other)
        return same and apart in (1, self.stages - 1)

    def replicas_of(self, lane: int, rotates: bool | None = None) -> tuple[int, ...]:
        """Return every replica that runs slices of ``lane``. ``rotates`` overrides the pipeline's."""
        rotating = self.rotates if rotates is None else rotates
        return tuple(range(self.replicas)) if rotating else (lane % self.replicas,)

    def workers_of(self, lane: int, rotates: bool | None = None) -> tuple[int, ...]:
        """Return the compute workers that run slices of ``lane``: all stages and ranks of its replicas."""
        replicas, count = self.replicas_of(lane, rotates), self.workers
        return tuple(range(replicas[0] * count, (replicas[-1] + 1) * count))

    def tick(self, lane: int, turn: int, index: int = 0) -> int:
        """Return the place in time of slice ``index`` of a step of ``lane`` that begins at ``turn``: a replica runs the
        ready slice of the lowest tick.

        With stages, all slices of a step have the same tick: a stage finishes the oldest step first, and runs slices of
        others while that one waits. By slices, all steps that begin together would leave each stage together, and only
        one stage at a time would have work.
        """
        return (turn if self.stages > 1 else turn + index) * self.lanes + lane
