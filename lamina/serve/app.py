"""The OpenAI-compatible HTTP application for one engine."""

import asyncio
import functools
import time

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

import lamina
from lamina.engine.streams import Runtime
from lamina.observe.metrics import CONTENT_TYPE, Metrics
from lamina.serve import admin, http_errors, pages
from lamina.serve.fields import IgnoredLog
from lamina.serve.generation import respond
from lamina.serve.http_errors import APIError, first_line
from lamina.serve.intake import BoundedBodies, Intake, body_limit
from lamina.serve.openai_answers import ChatWriter, CompletionWriter
from lamina.serve.openapi import CHAT_PATH, COMPLETIONS_PATH, interface
from lamina.serve.placement import placement_of
from lamina.serve.request_log import RequestLog
from lamina.serve.requests import read_chat, read_completion, require_model


def create_app(engine: Runtime, owner: int | None = None) -> ASGIApp:
    """Build the application. The caller closes ``engine``. ``owner``: the process that SIGTERM stops the server in, for
    ``POST /admin/stop``; None: it cannot be stopped so."""
    # No docs pages: they load from a CDN.
    app = FastAPI(title="Lamina", version=lamina.__version__, docs_url=None, redoc_url=None)
    http_errors.install(app)
    app.add_middleware(BoundedBodies, limit=body_limit(engine.max_model_len))
    started = int(time.time())
    intake = Intake()
    ignored = IgnoredLog()
    metrics = Metrics(engine)

    @app.post(COMPLETIONS_PATH)
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        wanted = await intake.decode_in_thread(request, functools.partial(read_completion, engine))
        ignored.report(wanted.ignored)
        return await respond(request, engine, metrics.traffic, CompletionWriter, wanted)

    @app.post(CHAT_PATH)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        wanted = await intake.decode_in_thread(request, functools.partial(read_chat, engine))
        ignored.report(wanted.ignored)
        return await respond(request, engine, metrics.traffic, ChatWriter, wanted)

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> Response:
        """Return the one model served, under each of its names."""
        names = (engine.model_name, *engine.model_aliases)
        return JSONResponse({"object": "list", "data": [_model(engine, name, started) for name in names]})

    @app.head("/v1/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Return the served model, if ``name`` is one of its names."""
        require_model(engine, name)
        return JSONResponse(_model(engine, name, started))

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

    pages.install(app, engine, metrics)
    admin.install(app, engine, owner)
    app.openapi = functools.partial(interface, app, engine)  # type: ignore[method-assign]
    return RequestLog(app)  # around all else, so that it also sees answers to unexpected errors


def _model(engine: Runtime, name: str, created: int) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "lamina",
        "max_model_len": engine.max_model_len,
    }
