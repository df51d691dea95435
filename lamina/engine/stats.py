"""Figures that the engine reports, and where KV is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from lamina.core.types import AttentionSpec, KvElement
from lamina.dataplane.transport_choice import Choice
from lamina.kv.placement import Placement
from lamina.kv.prefix_cache import PrefixCache
from lamina.schedule.lane import Lane
from lamina.schedule.scheduler import Scheduler


@dataclass(frozen=True)
class MemoryStats:
    """Token slots of one memory worker, from its latest report: at most half a second old.

    Attributes:
        used: by requests.
        cached: by prefixes that no request uses now; they are given up when requests need them.
        sequences: of requests.
    """

    used: int
    capacity: int
    sequences: int
    cached: int = 0

    def without(self, cached: int, sequences: int) -> "MemoryStats":
        """Return the usage with ``cached`` slots counted as cached instead of used, and without ``sequences``, which
        hold cached prefixes."""
        cached = min(cached, self.used)
        return MemoryStats(self.used - cached, self.capacity, max(0, self.sequences - sequences), cached)


@dataclass(frozen=True)
class PlacementStats:
    """Who has KV where, at most ``LOOK_S`` old, and what moves.

    Attributes:
        held: by memory worker and request, the tokens of the requests with most; shared ones count for each.
        moving: ranges on their way, as (source, target, tokens).
        moved: bytes of KV that moves have brought, by memory worker.
        moves: that were completed.
        refused, cancelled: moves for which a target had no room, and those that their requests did not wait for.
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
        least, most: workers.
        load: how many its load would fill, at the last look.
        why: the figures of that.
        grown, shrunk: workers that were asked to join, and to leave, so far.
        last: the latest such change, and its reason; empty before.
        at: when that was, in Unix time.
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
    """Slots that requests use on the fullest memory worker, over the mean of all; 1 if all are equal, or empty."""
    used = [stats.used for stats in memory.values()]
    return max(used) * len(used) / sum(used) if sum(used) else 1.0


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine.

    Attributes:
        running, waiting: requests; both 0 once the engine has stopped.
        steps: completed.
        preempted: requests whose KV was dropped and computed again, counted each time.
        recoveries: times that workers were lost and the others went on.
        recomputed: tokens whose KV was lost with them, and is computed again.
        dead: why the engine has stopped, if it has.
        workers: all of them, by name: "serving", or how far those are that join or leave.
        silent: seconds without an answer, by worker, of workers that may be declared lost soon.
        links: pairs of workers, by transport and its reason.
        prefix_queries, prefix_hits: tokens of requests admitted, and those of them found in the prefix cache.
        placement: who has KV where, and what moves.
        spilled, fetched: tokens copied to disks of memory workers, and back.
        scaling: of the pools that scale by load.
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


class StatsOf(msgspec.Struct, tag=True, frozen=True):
    """Engine to frontend: the answer to ``GetStats`` number ``number``."""

    number: int
    stats: EngineStats


LOOK_S = 1.0
MOST_HELD = 16  # requests of a worker that are named


class PlacementView:
    """The latest look at where KV is. ``stats`` may be read by any thread."""

    def __init__(self, scheduler: Scheduler, attentions: Sequence[AttentionSpec], element: KvElement) -> None:
        self._scheduler = scheduler
        self._token_nbytes = sum(spec.slab_bytes_per_token(element) for spec in attentions)
        self._looked = 0.0
        self.stats = PlacementStats()

    def look(self, now: float) -> None:
        """Look again if the last time was ``LOOK_S`` ago. ``now``: seconds of any monotonic clock."""
        if now < self._looked + LOOK_S:
            return
        self._looked = now
        moves, counts = self._scheduler.moves, self._scheduler.moves.counts
        held = holdings(moves.lanes, self._scheduler.prefixes, self._scheduler.placement)
        self.stats = PlacementStats(
            {
                worker: dict(sorted(tokens.items(), key=lambda one: -one[1])[:MOST_HELD])
                for worker, tokens in held.items()
            },
            [(move.source, move.target, move.tokens) for move in moves.in_progress],
            {worker: tokens * self._token_nbytes for worker, tokens in counts.by_worker.items()},
            counts.moves,
            counts.refused,
            counts.cancelled,
        )


def holdings(lanes: Sequence[Lane], prefixes: PrefixCache, placement: Placement) -> dict[str, dict[str, int]]:
    """Slots of each running request, by memory worker and request; what it shares with cached prefixes included."""
    held: dict[str, dict[str, int]] = {}
    for lane in lanes:
        for group in lane.running:
            tokens = dict(lane.held(group))
            for node in prefixes.path(group):
                tokens[node.worker] = tokens.get(node.worker, 0) + len(node.tokens)
            for worker, count in placement.on_workers(tokens).items():
                held.setdefault(worker, {})[group.request.request_id] = count
    return held
