"""Routes for health, metrics and the placement of KV, the dashboard and the chat page.

The pages load no other site's files.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

import lamina
from lamina.control.timeline import Span
from lamina.core.errors import LaminaError
from lamina.engine.stats import EngineStats, imbalance
from lamina.engine.streams import Runtime
from lamina.observe.metrics import CONTENT_TYPE, Metrics
from lamina.serve.answers import event
from lamina.serve.http_errors import APIError, first_line

WEB = Path(__file__).parent / "web"
FILES = {  # by path: the file, and its media type
    "/": ("chat.html", "text/html"),
    "/dashboard": ("dashboard.html", "text/html"),
    "/web/style.css": ("style.css", "text/css"),
    "/web/icon.svg": ("icon.svg", "image/svg+xml"),
    "/web/chat.js": ("chat.js", "text/javascript"),
    "/web/dashboard.js": ("dashboard.js", "text/javascript"),
    "/web/uPlot.css": ("uPlot.min.css", "text/css"),
    "/web/uPlot.js": ("uPlot.iife.min.js", "text/javascript"),
}
# Pages run only scripts of this server, and no other site may embed them. uPlot sizes its elements by inline styles.
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
STATE_PATH = "/dashboard/state"
LANES_PATH = "/dashboard/lanes"
EVENTS_PATH = "/dashboard/events"
EVERY_S = 1.0
"""Time between two events of the dashboard."""
MOST_SHOWN = 120
"""Spans of a worker in one window of the lanes."""
FULL = 0.9  # share of token slots in use above which requests wait for slots rather than for compute workers


def install(app: FastAPI, engine: Runtime, metrics: Metrics, closing: asyncio.Event) -> None:
    """Add the routes to ``app``. ``closing``: set once the server stops, which ends the streams of dashboards."""

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
        """Return where the KV of requests is, its moves between memory workers, and hits of the prefix cache."""
        return JSONResponse(placement_of(await asyncio.to_thread(engine.stats)))

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> Response:
        """Answer 200 while the engine runs, 503 once it has stopped."""
        return Response(status_code=503 if engine.dead is not None else 200)

    @app.get("/version")
    async def version() -> Response:
        """Return the version of Lamina."""
        return JSONResponse({"version": lamina.__version__})

    @app.get("/load")
    async def load() -> Response:
        """Return the number of requests that the engine has, running or waiting."""
        stats = await asyncio.to_thread(engine.stats)
        return JSONResponse({"server_load": stats.running + stats.waiting})

    _install_dashboard(app, engine, metrics, closing)


def _install_dashboard(app: FastAPI, engine: Runtime, metrics: Metrics, closing: asyncio.Event) -> None:
    feed = Feed(engine, metrics)

    @app.get(STATE_PATH, include_in_schema=False)
    async def state() -> Response:
        stats = await asyncio.to_thread(engine.stats)
        totals = await asyncio.to_thread(metrics.totals)
        return JSONResponse(state_of(stats, totals, engine), headers={"Cache-Control": "no-store"})

    @app.get(LANES_PATH, include_in_schema=False)
    async def lanes() -> Response:
        spans = await asyncio.to_thread(engine.timeline)
        return JSONResponse(lanes_of(spans), headers={"Cache-Control": "no-store"})

    @app.get(EVENTS_PATH, include_in_schema=False)
    async def events() -> Response:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_events(feed, closing), 200, headers, "text/event-stream")

    for path, (name, media_type) in FILES.items():
        app.add_api_route(path, _sender(name, media_type), methods=["GET", "HEAD"], include_in_schema=False)


class Feed:
    """What dashboards are sent. Any number of them costs the engine one question of each kind per ``EVERY_S``."""

    def __init__(self, engine: Runtime, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics
        self._lock = asyncio.Lock()
        self._at = -math.inf
        self._latest = b""

    async def latest(self) -> bytes:
        """Return the event to send now."""
        async with self._lock:
            if time.monotonic() > self._at + EVERY_S / 2:
                self._latest = await asyncio.to_thread(self._look)
                self._at = time.monotonic()
            return self._latest

    def _look(self) -> bytes:
        try:
            state = state_of(self._engine.stats(), self._metrics.totals(), self._engine)
            lanes, lives = lanes_of(self._engine.timeline()), self._engine.lives()
        except LaminaError as error:
            return event({"message": str(error)}, "failed")
        return event({"state": state, "lanes": lanes, "lives": lives}, "view")


async def _events(feed: Feed, closing: asyncio.Event) -> AsyncIterator[bytes]:
    while not closing.is_set():
        yield await feed.latest()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing.wait(), EVERY_S)


def placement_of(stats: EngineStats) -> dict[str, Any]:
    """Return the placement of KV as JSON. Counts are in tokens (one slot each), except ``moved_bytes``."""
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


def _sender(name: str, media_type: str) -> Any:
    async def send() -> Response:
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
        return FileResponse(WEB / name, media_type=media_type, headers=headers)

    return send


def state_of(stats: EngineStats, totals: dict[str, Any], engine: Runtime) -> dict[str, Any]:
    """Return the dashboard's data as JSON. Counts grow from the engine's start; the page takes differences."""
    what, remedy = limit_of(stats)
    return {
        "time": time.time(),
        "model": engine.model_name,
        "max_model_len": engine.max_model_len,
        "requests": {"running": stats.running, "waiting": stats.waiting},
        "counts": {
            "steps": stats.steps,
            "preempted": stats.preempted,
            "recoveries": stats.recoveries,
            "recomputed": stats.recomputed,
            "spilled": stats.spilled,
            "fetched": stats.fetched,
        },
        "dead": stats.dead,
        "silent_s": {worker: round(seconds, 1) for worker, seconds in stats.silent.items()},
        "workers": dict(stats.workers),
        "places": dict(stats.places),
        "links": [
            {"transport": choice.transport.value, "reason": choice.reason, "pairs": pairs}
            for choice, pairs in stats.links
        ],
        "placement": placement_of(stats),
        "limit": {"what": what, "remedy": remedy},
        **totals,
    }


def lanes_of(spans: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """Return a window of the workers' timelines as JSON: spans by worker, as [stage, lane, begin, length] in us.

    The window ends with the last span, and has at most ``MOST_SHOWN`` of each worker, so that they can be told apart.
    """
    latest = [each[-MOST_SHOWN:] for each in spans.values() if each]
    begin = min((each[0].begin_ns for each in latest), default=0)
    begin = max((each[0].begin_ns for each in latest if len(each) == MOST_SHOWN), default=begin)
    end = max((each[-1].end_ns for each in latest), default=0)
    return {
        "length_us": (end - begin) // 1000,
        "workers": {
            worker: [
                [span.stage, span.lane, (span.begin_ns - begin) // 1000, (span.end_ns - span.begin_ns) // 1000]
                for span in each
                if span.begin_ns >= begin
            ]
            for worker, each in sorted(spans.items())
        },
    }


def limit_of(stats: EngineStats) -> tuple[str, str]:
    """Return what limits the throughput now, and a command that would help; "" if none would."""
    if stats.dead is not None:
        return f"The engine has stopped: {stats.dead.splitlines()[0]}", "lamina launch"
    if stats.silent:
        return f"Requests wait for {', '.join(stats.silent)}, which does not answer.", ""
    if not stats.waiting:
        return "Nothing waits: the pools have room for more requests.", ""
    used, capacity = stats.slots
    if used >= FULL * capacity:
        return (
            f"KV: requests use {used:,} of {capacity:,} token slots, and {stats.waiting:,} more requests wait.",
            "lamina scale --memory +1",
        )
    return (
        f"Compute: {stats.waiting:,} requests wait while {capacity - used:,} of {capacity:,} token slots are free.",
        "lamina scale --compute +1",
    )
