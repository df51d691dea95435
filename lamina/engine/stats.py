"""Statistics that the engine reports: requests, pools, and the placement of KV."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from lamina.core.topology import Place
from lamina.core.types import AttentionSpec, KvElement
from lamina.dataplane.transport_choice import Choice
from lamina.kv.placement import Placement
from lamina.kv.prefix_cache import PrefixCache
from lamina.schedule.lane import Lane
from lamina.schedule.scheduler import Scheduler


@dataclass(frozen=True)
class MemoryStats:
    """Token slots of one memory worker, from its latest report, at most ``USAGE_S`` old.

    Attributes:
        used: Slots of requests.
        capacity: All slots.
        sequences: Sequences of requests.
        cached: Slots of cached prefixes that no request uses, which are evicted when requests need them.
        parked: Messages for attention that have waited until K and V of earlier chunks were stored.
        parked_nbytes: Bytes in them.
    """

    used: int
    capacity: int
    sequences: int
    cached: int = 0
    parked: int = 0
    parked_nbytes: int = 0

    def without(self, cached: int, sequences: int) -> "MemoryStats":
        """Return the stats with ``cached`` slots and ``sequences``, which hold cached prefixes, not counted as used."""
        cached = min(cached, self.used)
        left = max(0, self.sequences - sequences)
        return dataclasses.replace(self, used=self.used - cached, sequences=left, cached=cached)


@dataclass(frozen=True)
class PlacementStats:
    """Where the KV of requests is, at most ``LOOK_S`` old, and its moves.

    Attributes:
        held: Tokens of the largest requests, by memory worker and request; shared tokens count for each request.
        moving: Moves in flight, as (source, target, tokens).
        moved: Bytes of KV received by moves, by memory worker.
        moves: Completed moves.
        refused: Moves for which the target had too little free KV.
        cancelled: Moves whose requests ended or were preempted first.
    """

    held: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    moving: Sequence[tuple[str, str, int]] = field(default_factory=list)
    moved: Mapping[str, int] = field(default_factory=dict)
    moves: int = 0
    refused: int = 0
    cancelled: int = 0


@dataclass(frozen=True)
class ScalingStats:
    """State of a pool that scales by load.

    Attributes:
        least: Smallest size.
        most: Largest size.
        load: Latest load, in workers that it would fill.
        why: The figures of the load, in words.
        grown: Total number of workers that scaling by load has requested.
        shrunk: Total number of workers that scaling by load has told to leave.
        last: The latest change and its reason; empty before the first.
        at: Unix time of the latest change.
    """

    least: int
    most: int
    load: float = 0.0
    why: str = ""
    grown: int = 0
    shrunk: int = 0
    last: str = ""
    at: float = 0.0


def imbalance(memory: Mapping[str, MemoryStats]) -> float:
    """Return the slots used on the fullest memory worker over the mean of all workers; 1 if all are equal or empty."""
    used = [stats.used for stats in memory.values()]
    return max(used) * len(used) / sum(used) if sum(used) else 1.0


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine.

    Attributes:
        running: Running requests; 0 once the engine has stopped.
        waiting: Waiting requests; 0 once the engine has stopped.
        steps: Completed steps.
        preempted: Preemptions, after which a request's KV is computed again.
        recoveries: Recoveries from lost workers.
        recomputed: Tokens whose KV was lost with workers and computed again.
        memory: Token slots, by worker with a slab.
        dead: Why the engine has stopped; None while it runs.
        silent: Seconds without a reply, by worker that may be declared lost soon.
        workers: State by worker: "serving", or the stage of a joining or leaving worker.
        links: Number of linked pairs, by transport and its reason.
        prefix_queries: Prompt tokens of admitted requests.
        prefix_hits: Those of ``prefix_queries`` found in the prefix cache.
        placement: Where KV is, and its moves.
        spilled: Tokens copied to disks of memory workers.
        fetched: Tokens copied back from disks.
        scaling: Pools that scale by load.
        places: Where each compute worker is in the pipeline.
        handovers: Requests that went from a replica that only runs prompts to one that decodes.
        scratch: Tokens reserved in scratch memory of compute workers for running prompts.
    """

    running: int
    waiting: int
    steps: int
    preempted: int
    recoveries: int
    recomputed: int
    memory: Mapping[str, MemoryStats]
    dead: str | None
    silent: Mapping[str, float] = field(default_factory=dict)
    workers: Mapping[str, str] = field(default_factory=dict)
    links: Sequence[tuple[Choice, int]] = ()
    prefix_queries: int = 0
    prefix_hits: int = 0
    placement: PlacementStats = PlacementStats()
    spilled: int = 0
    fetched: int = 0
    scaling: Mapping[str, ScalingStats] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)
    handovers: int = 0
    scratch: int = 0

    @property
    def slots(self) -> tuple[int, int]:
        """Token slots in use, and all. The stages and ranks of a replica hold the same tokens, which count once."""
        places = {worker: self.places.get(worker, {}) for worker in self.memory}
        first = {worker for worker, at in places.items() if {at.get("stage", ""), at.get("rank", "")} <= {"", "0"}}
        counted = [stats for worker, stats in self.memory.items() if worker in first]
        return sum(stats.used for stats in counted), sum(stats.capacity for stats in counted)


class StatsOf(msgspec.Struct, tag=True, frozen=True):
    """Engine to frontend: reply to ``GetStats`` number ``number``."""

    number: int
    stats: EngineStats


LOOK_S = 1.0
MOST_HELD = 16  # requests listed for a worker


class PlacementView:
    """Computes ``PlacementStats`` every ``LOOK_S``. Any thread may read ``stats``."""

    def __init__(self, scheduler: Scheduler, attentions: Sequence[AttentionSpec], element: KvElement) -> None:
        self._scheduler = scheduler
        self._token_nbytes = sum(spec.slab_bytes_per_token(element) for spec in attentions)
        self._looked = 0.0
        self.stats = PlacementStats()

    def look(self, now: float) -> None:
        """Update ``stats`` if it is older than ``LOOK_S``. ``now``: monotonic seconds."""
        if now < self._looked + LOOK_S:
            return
        self._looked = now
        moves, counts = self._scheduler.moves, self._scheduler.moves.counts
        held = holdings(moves.lanes, self._scheduler.prefixes, self._scheduler.placement)
        self.stats = PlacementStats(
            held={
                worker: dict(sorted(tokens.items(), key=lambda one: -one[1])[:MOST_HELD])
                for worker, tokens in held.items()
            },
            moving=[(move.source, move.target, move.tokens) for move in moves.in_progress],
            moved={worker: tokens * self._token_nbytes for worker, tokens in counts.by_worker.items()},
            moves=counts.moves,
            refused=counts.refused,
            cancelled=counts.cancelled,
        )


def holdings(lanes: Sequence[Lane], prefixes: PrefixCache, placement: Placement) -> dict[str, dict[str, int]]:
    """Return the slots of running requests by memory worker and request, with slots shared with cached prefixes."""
    held: dict[str, dict[str, int]] = {}
    for lane in lanes:
        for group in lane.running:
            tokens = lane.held(group)
            for node in prefixes.path(group):
                tokens[node.worker] = tokens.get(node.worker, 0) + len(node.tokens)
            for worker, count in placement.on_workers(tokens).items():
                held.setdefault(worker, {})[group.request.request_id] = count
    return held
