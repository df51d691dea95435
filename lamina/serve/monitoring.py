"""The routes by which people and programs watch a server: health, metrics and the placement of KV."""

import asyncio
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from lamina.engine.stats import EngineStats, imbalance
from lamina.engine.streams import Runtime
from lamina.observe.metrics import CONTENT_TYPE, Metrics
from lamina.serve.http_errors import APIError, first_line


def install(app: FastAPI, engine: Runtime, metrics: Metrics) -> None:
    """Add the routes."""

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """200 while all workers respond. 503: "degraded", with the silent workers, or why the engine has stopped."""
        stats = await asyncio.to_thread(engine.stats)
        if stats.dead is not None:
            raise APIError(503, f"the engine has stopped: {first_line(stats.dead)}", code="engine_dead")
        requests = {"running": stats.running, "waiting": stats.waiting}
        if stats.silent:  # new requests wait for these workers, and fail if they do not come back
            silent = {worker: round(seconds, 1) for worker, seconds in stats.silent.items()}
            return JSONResponse({"status": "degraded", **requests, "silent_s": silent}, status_code=503)
        return JSONResponse({"status": "ok", **requests})

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics")
    async def metrics_text() -> Response:
        """Metrics for Prometheus."""
        return Response(await asyncio.to_thread(metrics.text), media_type=CONTENT_TYPE)

    @app.head("/placement", include_in_schema=False)
    @app.get("/placement")
    async def placement() -> Response:
        """Who has KV where, what moves between memory workers, and what the prefix cache has found."""
        return JSONResponse(placement_of(await asyncio.to_thread(engine.stats)))


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
