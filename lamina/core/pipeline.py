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

Replicas that only run prompts may have another number of ranks and stages than the others. Their lanes and those of the
other replicas exchange no context: memory workers have the KV of both, or the workers that have local memory.
"""

import bisect
import dataclasses
import sys
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
class Shape:
    """The compute workers of one replica.

    Attributes:
        ranks: compute workers that share every slice of a stage (``lamina.splitter.shard``).
        stages: parts of the replica with different slices.
        starts: the first slice of each stage. Empty with one stage, and until the model is known.
    """

    ranks: int = 1
    stages: int = 1
    starts: tuple[int, ...] = ()

    @property
    def workers(self) -> int:
        """Compute workers of the replica."""
        return self.ranks * self.stages

    def __str__(self) -> str:
        return f"{self.ranks} ranks x {self.stages} stages"


ONE = Shape()
"""The shape of a replica of one compute worker."""


@dataclass(frozen=True)
class Pipeline:
    """Which replica runs which slice, and in which order.

    Attributes:
        lanes: most batches in flight.
        replicas: copies of the weights.
        rotates: True for the rotational order, which needs ``lanes == replicas + 1``.
        choices: arrangements between which the runtime may change, the first of which it begins with. Empty: the
            arrangement is fixed by ``lanes`` and ``rotates``.
        shape: the compute workers of each replica. Workers and stages are numbered over all replicas: by replica, then
            by stage, then by rank.
        prefill_shape: the compute workers of each of the ``prefill`` replicas; None: ``shape``.
        prefill: how many replicas, the first ones, only run prompts; the others decode. 0: all do both. At least
            one replica always decodes.
        lends: True if compute workers with local memory attend to the KV there for other replicas too, which ask the
            workers that have the layers and heads in question.
        one_way: True if they do so only for replicas that only run prompts, which hold no KV. Then no replica waits for
            a replica that may wait for it, so that ranks need not serve requests while they wait for each other.
    """

    lanes: int
    replicas: int
    rotates: bool = False
    choices: tuple[Arrangement, ...] = ()
    shape: Shape = ONE
    prefill_shape: Shape | None = None
    prefill: int = 0
    lends: bool = False
    one_way: bool = False

    def __post_init__(self) -> None:
        most = max(each.stages for each in self._shapes_in_use)
        if self.replicas < 1 or self.lanes < self.replicas * most:
            stages = f" of {most} stages" if most > 1 else ""
            raise ValueError(
                f"{self.lanes} lanes cannot keep {self.replicas} replicas{stages} busy; give each at least one"
            )
        if most > 1 and (self.rotates or any(one.rotates for one in self.choices)):
            raise ValueError("lanes visit the stages of their replica in turn, and cannot rotate over replicas besides")
        if self.prefill and (self.rotates or self.choices):
            raise ValueError("lanes of replicas that only run prompts, or only decode, are fixed")
        if self.rotates and self.lanes != self.replicas + 1:
            raise ValueError(
                f"rotational pipelining runs {self.replicas + 1} lanes on {self.replicas} replicas, not {self.lanes}"
            )

    @property
    def _shapes_in_use(self) -> list[Shape]:
        counts = self.prefill, self.replicas - self.prefill
        return [shape for shape, count in zip(self.shapes, counts, strict=True) if count] or [self.shape]

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """The shapes of replicas that only run prompts, and of the others."""
        return self.prefill_shape or self.shape, self.shape

    @property
    def is_uniform(self) -> bool:
        """True if replicas that only run prompts have the shape of the others, so that they can change their role."""
        return self.prefill_shape in (None, self.shape)

    @property
    def most_ranks(self) -> int:
        """Ranks of the replicas that have most, also while no such replica is left."""
        return max(shape.ranks for shape in self.shapes)

    @property
    def most_stages(self) -> int:
        """Stages of the replicas that have most, also while no such replica is left."""
        return max(shape.stages for shape in self.shapes)

    @property
    def stage_count(self) -> int:
        """Stages of all replicas together."""
        early, late = self.shapes
        return self.prefill * early.stages + (self.replicas - self.prefill) * late.stages

    @property
    def decoding_stages(self) -> int:
        """Stages of all replicas that decode."""
        prefill = min(self.prefill, self.replicas - 1)
        return self.stage_count - prefill * self.shapes[0].stages

    def shape_in(self, pool: str) -> Shape:
        """Return the shape of the replicas of a pool: ``prefill`` or ``compute``."""
        return self.shapes[pool != "prefill"]

    def shape_of(self, replica: int) -> Shape:
        """Return the shape of a replica."""
        early = self.prefill_shape
        return self.shape if early is None or replica >= self.prefill else early

    @property
    def first_arrangement(self) -> Arrangement:
        return self.choices[0] if self.choices else Arrangement(self.lanes, self.rotates)

    @property
    def may_rotate(self) -> bool:
        """True if a lane's context may travel between replicas."""
        return self.replicas > 1 and any(one.rotates for one in (self.first_arrangement, *self.choices))

    @property
    def moves_local(self) -> bool:
        """True if KV may move from and to local memory. The parts of several stages would have to move at once."""
        return self.spreads and self.most_stages == 1

    @property
    def spreads(self) -> bool:
        """True if the KV of a sequence may be in the local memory of several replicas."""
        return self.lends and not self.one_way

    @property
    def announces(self) -> bool:
        """True if the first rank of each stage announces the order of slices to its other ranks.

        The total number of lanes counts, since one replica runs all of them once the other replicas are lost.
        """
        return self.most_ranks > 1 and self.lanes > 1

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

    def with_workers(self, prefills: int, computes: int) -> "Pipeline":
        """Return this pipeline on the replicas of ``prefills`` compute workers that only run prompts and of
        ``computes`` others; with no worker at all, on one replica."""
        early, late = self.shapes
        prefill = prefills // early.workers
        return self.with_replicas(max(1, prefill + computes // late.workers), prefill)

    def without_rotation(self) -> "Pipeline":
        """Return this pipeline without the choices in which lanes rotate."""
        return dataclasses.replace(self, choices=tuple(one for one in self.choices if not one.rotates))

    def workers_in(self, replica: int) -> range:
        """Return the numbers of a replica's compute workers."""
        early, late = self.shapes
        before = min(replica, self.prefill)
        first = before * early.workers + (replica - before) * late.workers
        return range(first, first + (early if replica < self.prefill else late).workers)

    def replica_at(self, number: int) -> int:
        """Return the replica of compute worker ``number``."""
        early, late = self.shapes
        after = number - self.prefill * early.workers
        return number // early.workers if after < 0 else self.prefill + after // late.workers

    def stage_at(self, number: int) -> int:
        """Return the stage of compute worker ``number``, counted over all replicas."""
        early, late = self.shapes
        after = number - self.prefill * early.workers
        return number // early.ranks if after < 0 else self.prefill * early.stages + after // late.ranks

    def place(self, number: int) -> int:
        """Return the stage of compute worker ``number``, counted in its replica."""
        replica = self.replica_at(number)
        return (number - self.workers_in(replica).start) // self.shape_of(replica).ranks

    def ranks_at(self, number: int) -> range:
        """Return the numbers of the compute workers of the stage of compute worker ``number``, by rank."""
        stage = self.stage_at(number)
        first = self.worker_at(stage, 0)
        return range(first, first + self.shape_of(self.replica_at(number)).ranks)

    def worker_at(self, stage: int, rank: int) -> int:
        """Return the number of the compute worker with a rank of a ``stage``, counted over all replicas."""
        early, late = self.shapes
        after = stage - self.prefill * early.stages
        if after < 0:
            return stage * early.ranks + rank
        return self.prefill * early.workers + after * late.ranks + rank

    def door(self, lane: int, rank: int) -> int:
        """Return the number of a rank's requests of a lane, which memory workers serve as a lane of their own."""
        return lane * self.most_ranks + rank

    def lane_of(self, door: int) -> int:
        """Return the lane of a ``door``."""
        return door // self.most_ranks

    def rank_of(self, door: int) -> int:
        """Return the rank of a ``door``."""
        return door % self.most_ranks

    def home(self, number: int) -> int:
        """Return the compute worker by whose name segments refer to the local memory of compute worker ``number``: the
        worker of the same rank in the first stage of the replica. Each stage there has K and V of its own layers."""
        return self.workers_in(self.replica_at(number)).start + number - self.ranks_at(number).start

    def slices_at(self, number: int) -> tuple[int, int]:
        """Return the slices [start, stop) that compute worker ``number`` runs, of a model that is loaded."""
        starts = (*self.shape_of(self.replica_at(number)).starts, sys.maxsize)
        place = self.place(number)
        return (starts[place], starts[place + 1]) if len(starts) > 1 else (0, sys.maxsize)

    def holder(self, home: int, attention: int) -> int:
        """Return the number of the compute worker that has K and V of an attention, of segments that name ``home``."""
        shape = self.shape_of(self.replica_at(home))
        return home + (bisect.bisect(shape.starts, attention) - 1 if shape.starts else 0) * shape.ranks

    def shares_heads(self, one: int, other: int) -> bool:
        """True if the ranks of two compute workers have heads in common. Each has an equal part of all heads."""
        own, theirs = self.ranks_at(one), self.ranks_at(other)
        near, far = one - own.start, other - theirs.start
        return near * len(theirs) < (far + 1) * len(own) and far * len(own) < (near + 1) * len(theirs)

    def holders(self, computes: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return, by compute worker that is a ``home`` of several stages, the workers of these stages.

        ``computes``: Names of the compute workers, by number.
        """
        found = dict[str, tuple[str, ...]]()
        if self.most_stages == 1 or not computes:
            return found
        for replica in range(self.replicas):
            shape, own = self.shape_of(replica), self.workers_in(replica)
            for home in own[: shape.ranks] if shape.stages > 1 else ():
                found[computes[home]] = tuple(computes[home : own.stop : shape.ranks])
        return found

    def replica(self, lane: int, turn: int, rotates: bool | None = None) -> int:
        """Return the replica that runs slice ``turn`` of ``lane``. ``rotates`` overrides the pipeline's."""
        rotating = self.rotates if rotates is None else rotates
        return (lane + turn) % self.replicas if rotating else lane % self.replicas

    def stage(self, lane: int, turn: int, index: int, rotates: bool | None = None) -> int:
        """Return the stage that runs slice ``index`` of a step of ``lane`` that begins at ``turn``, counted over all
        replicas."""
        replica = self.replica(lane, turn + index, rotates)
        before = 0 if self.prefill_shape is None else min(replica, self.prefill)
        first, starts = (replica - before) * self.shape.stages, self.shape_of(replica).starts
        if before:
            first += before * self.shapes[0].stages
        return first + bisect.bisect(starts, index) - 1 if starts else first

    def stages_of(self, lane: int, turn: int, slices: int, rotates: bool | None = None) -> list[int]:
        """Return the ``stage`` of each of the ``slices`` slices of a step of ``lane`` that begins at ``turn``."""
        rotating = self.rotates if rotates is None else rotates
        if rotating or self.shape_of(lane % self.replicas).starts:
            return [self.stage(lane, turn, index, rotates) for index in range(slices)]
        return [self.stage(lane, turn, 0, rotates)] * slices

    def exchanges(self, one: int, other: int) -> bool:
        """True if the compute workers of these numbers may send each other a lane's context or its drawn tokens, or
        requests and replies of attention in local memory.

        A worker that attends for another replica replies to the stage there that runs the next slice.
        """
        near, far = self.replica_at(one), self.replica_at(other)
        if near != far and self.lends:
            return self.shares_heads(one, other) and (self._asks(one, other) or self._asks(other, one))
        if one - self.ranks_at(one).start != other - self.ranks_at(other).start:
            return False
        stages, apart = self.shape_of(near).stages, abs(self.place(one) - self.place(other))
        if near != far:
            return self.is_uniform and stages == 1
        return stages > 1 and apart in (1, stages - 1)

    def _asks(self, one: int, other: int) -> bool:
        """True if compute worker ``one`` needs layers that compute worker ``other`` has: it asks for attention after
        each of its slices, and gets the replies to the requests of the slice before its first one."""
        (start, stop), (first, last) = self.slices_at(one), self.slices_at(other)
        return start <= last and first < stop

    def replicas_of(self, lane: int, rotates: bool | None = None) -> tuple[int, ...]:
        """Return every replica that runs slices of ``lane``. ``rotates`` overrides the pipeline's."""
        rotating = self.rotates if rotates is None else rotates
        return tuple(range(self.replicas)) if rotating else (lane % self.replicas,)

    def workers_of(self, lane: int, rotates: bool | None = None) -> tuple[int, ...]:
        """Return the compute workers that run slices of ``lane``: all stages and ranks of its replicas."""
        replicas = self.replicas_of(lane, rotates)
        return tuple(range(self.workers_in(replicas[0]).start, self.workers_in(replicas[-1]).stop))

    def tick(self, lane: int, turn: int, index: int = 0) -> int:
        """Return the place in time of slice ``index`` of a step of ``lane`` that begins at ``turn``: a replica runs the
        ready slice of the lowest tick.

        With stages, all slices of a step have the same tick: a stage finishes the oldest step first, and runs slices of
        others while that one waits. By slices, all steps that begin together would leave each stage together, and only
        one stage at a time would have work.
        """
        staged = self.shape_of(lane % self.replicas).stages > 1
        return (turn if staged else turn + index) * self.lanes + lane
