"""The placement of KV as JSON, for ``GET /placement`` and the dashboard."""

from typing import Any

from lamina.engine.stats import EngineStats, imbalance


def placement_of(stats: EngineStats) -> dict[str, Any]:
    """Return the placement of KV as JSON. Counts are in tokens, which are slots, but for ``moved_bytes``."""
    placement = stats.placement
    return {
        "workers": {
            worker: {
                "capacity": memory.capacity,
                "used": memory.used,
                "cached": memory.cached,
                "moved_bytes": placement.moved.get(worker, 0),
                "largest_requests": dict(placement.held.get(worker, {})),
            }
            for worker, memory in stats.memory.items()
        },
        "imbalance": round(imbalance(stats.memory), 3),
        "moves": {
            "in_progress": [
                {"source": source, "target": target, "tokens": tokens} for source, target, tokens in placement.moving
            ],
            "completed": placement.moves,
            "refused": placement.refused,
            "cancelled": placement.cancelled,
        },
        "prefix_cache": {"queried": stats.prefix_queries, "hit": stats.prefix_hits},
    }
