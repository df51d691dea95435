"""What the engine tells of the placement of KV: looked at now and then in its thread, read by any other."""

from collections.abc import Sequence

from lamina.engine.stats import PlacementStats
from lamina.placement.map import Placement
from lamina.placement.prefix_cache import PrefixCache
from lamina.schedule.lane import Lane
from lamina.schedule.scheduler import Scheduler
from lamina.types import AttentionSpec, KvElement

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
