"""The OpenAI-compatible HTTP application for one engine."""

import functools
import time
from collections.abc import Callable

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

import lamina
from lamina.config.server_config import DEFAULTS, ServerConfig
from lamina.engine.streams import Runtime
from lamina.observe.metrics import Metrics, Traffic
from lamina.serve import admin, gate, http_errors, monitoring, token_routes
from lamina.serve.generation import MakeWriter, respond
from lamina.serve.intake import BoundedBodies, Intake, body_limit
from lamina.serve.json_fields import IgnoredLog
from lamina.serve.messages_api import (
    COUNT_PATH,
    MESSAGES_PATH,
    MessagesWriter,
    as_anthropic_errors,
    read_messages,
)
from lamina.serve.openai_answers import ChatWriter, CompletionWriter
from lamina.serve.openapi import CHAT_PATH, COMPLETIONS_PATH, interface
from lamina.serve.request_log import RequestLog
from lamina.serve.requests import GenerationRequest, read_chat, read_completion, require_model
from lamina.serve.responses_api import RESPONSES_PATH, ResponsesWriter, read_response


def create_app(engine: Runtime, owner: int | None = None, config: ServerConfig = DEFAULTS) -> ASGIApp:
    """Build the application.

    Args:
        engine: What answers; the caller closes it.
        owner: The process that SIGTERM stops the server in, for ``POST /admin/stop``; None: it cannot be stopped so.
        config: Keys, limits and origins.
    """
    # No docs pages: they load from a CDN.
    app = FastAPI(title="Lamina", version=lamina.__version__, docs_url=None, redoc_url=None)
    http_errors.install(app)
    app.add_middleware(BoundedBodies, limit=body_limit(engine.max_model_len))
    gate.install(app, config)
    intake = Intake()
    metrics = Metrics(engine)

    _install_answers(app, engine, metrics.traffic, intake)
    _install_models(app, engine)
    monitoring.install(app, engine, metrics)
    token_routes.install(app, engine, intake)
    admin.install(app, engine, owner)
    app.openapi = functools.partial(interface, app, engine)  # type: ignore[method-assign]
    return RequestLog(app, config.access_log)  # around all else, so that it also sees answers to unexpected errors


def _install_answers(app: FastAPI, engine: Runtime, traffic: Traffic, intake: Intake) -> None:
    """Add the routes that generate text to ``app``."""
    ignored = IgnoredLog()

    async def answer(
        request: Request, read: Callable[[Runtime, bytes], GenerationRequest], writer: MakeWriter
    ) -> Response:
        wanted = await intake.decode_in_thread(request, functools.partial(read, engine))
        ignored.report(wanted.ignored)
        return await respond(request, engine, traffic, writer, wanted)

    @app.post(COMPLETIONS_PATH)
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        return await answer(request, read_completion, CompletionWriter)

    @app.post(CHAT_PATH)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await answer(request, read_chat, ChatWriter)

    @app.post(RESPONSES_PATH)
    async def responses(request: Request) -> Response:
        """Answer a conversation, in the form of OpenAI's responses."""
        return await answer(request, read_response, ResponsesWriter)

    @app.post(MESSAGES_PATH)
    async def messages(request: Request) -> Response:
        """Answer a conversation, in the form of Anthropic's messages."""
        with as_anthropic_errors():
            return await answer(request, read_messages, MessagesWriter)

    @app.post(COUNT_PATH)
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation, in the form of Anthropic's messages."""
        with as_anthropic_errors():
            wanted = await intake.decode_in_thread(request, functools.partial(read_messages, engine, counting=True))
            return JSONResponse({"input_tokens": len(wanted.prompts[0])})


def _install_models(app: FastAPI, engine: Runtime) -> None:
    started = int(time.time())

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


def _model(engine: Runtime, name: str, created: int) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "lamina",
        "max_model_len": engine.max_model_len,
    }
