"""The HTTP application for one engine: routes of the APIs, of models, tokens and administration."""

import asyncio
import functools
import hmac
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

import lamina
from lamina.cluster.pool import parse_change
from lamina.config.environment import environment
from lamina.config.server_config import DEFAULTS, ServerConfig
from lamina.core.errors import EngineDeadError, LaminaError, RequestError, UserError
from lamina.engine.streams import Runtime
from lamina.observe.metrics import Metrics, Traffic
from lamina.serve import gate, http_errors, monitoring
from lamina.serve.bodies import DetokenizeBody, TokenizeBody
from lamina.serve.gate import BoundedBodies, body_limit
from lamina.serve.generation import Intake, MakeWriter, respond
from lamina.serve.http_errors import APIError, first_line
from lamina.serve.json_fields import IgnoredLog, decode_field, decode_messages, decode_tools
from lamina.serve.messages_api import (
    COUNT_PATH,
    MESSAGES_PATH,
    MessagesWriter,
    as_anthropic_errors,
    in_form_of,
    read_messages,
)
from lamina.serve.openai_answers import ChatWriter, CompletionWriter
from lamina.serve.openapi import CHAT_PATH, COMPLETIONS_PATH, DETOKENIZE_PATH, TOKENIZE_PATH, interface
from lamina.serve.request_log import RequestLog
from lamina.serve.requests import GenerationRequest, read_chat, read_completion, require_model
from lamina.serve.responses_api import RESPONSES_PATH, ResponsesWriter, read_response
from lamina.serve.tracing import Tracing
from lamina.text.prompts import check_tokens, encode_prompt

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


log = logging.getLogger(__name__)

SCALE_PATH, STOP_PATH = "/admin/scale", "/admin/stop"
MOST_CHANGE_NBYTES = 1024  # largest body of a request to scale or stop
POOLS = ("compute", "memory", "prefill")


def create_app(
    engine: Runtime,
    owner: int | None = None,
    config: ServerConfig = DEFAULTS,
    traces: "TracerProvider | None" = None,
    closing: asyncio.Event | None = None,
) -> ASGIApp:
    """Build the application.

    Args:
        engine: What answers; the caller closes it.
        owner: The server's process, to which ``POST /admin/stop`` sends SIGTERM; None: it cannot be stopped so.
        config: Keys, limits and origins.
        traces: Records spans of requests; None: nothing does.
        closing: Set once the server stops, which ends the streams of dashboards.
    """
    # No docs pages: they load from a CDN.
    app = FastAPI(title="Lamina", version=lamina.__version__, docs_url=None, redoc_url=None)
    http_errors.install(app, in_form_of)
    app.add_middleware(BoundedBodies, limit=body_limit(engine.max_model_len))
    gate.install(app, config)
    intake = Intake()
    metrics = Metrics(engine)

    _install_answers(app, engine, metrics.traffic, intake)
    _install_models(app, engine)
    monitoring.install(app, engine, metrics, closing or asyncio.Event())
    _install_tokens(app, engine, intake)
    _install_administration(app, engine, owner)
    app.openapi = functools.partial(interface, app, engine)  # type: ignore[method-assign]
    inner: ASGIApp = app if traces is None else Tracing(app, traces, engine.model_name, config.root_path)
    return RequestLog(inner, config.access_log)  # around all else, so that it also sees answers to unexpected errors


def _install_answers(app: FastAPI, engine: Runtime, traffic: Traffic, intake: Intake) -> None:
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


def _install_tokens(app: FastAPI, engine: Runtime, intake: Intake) -> None:
    """Add routes that tokenize and detokenize, under the names that vLLM has for them."""

    @app.post(TOKENIZE_PATH)
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt or a conversation."""
        return JSONResponse(await intake.decode_in_thread(request, functools.partial(_tokenize, engine)))

    @app.post(DETOKENIZE_PATH)
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        return JSONResponse(await intake.decode_in_thread(request, functools.partial(_detokenize, engine)))

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        """Refuse: the model generates text."""
        raise APIError(501, "this model generates text and gives no embeddings", code="not_supported")


def _tokenize(engine: Runtime, raw: bytes) -> dict[str, Any]:
    body = decode_field("", msgspec.json.Decoder(TokenizeBody).decode, raw)
    require_model(engine, body.model)
    converses = bytes(body.messages) != b"null"
    if (body.prompt is not None) == converses:
        raise APIError(400, "give prompt or messages", param="prompt")
    special = body.add_special_tokens
    if not converses:
        text, special = body.prompt or "", special is not False
    else:
        messages, _ = decode_field("messages", decode_messages, bytes(body.messages))
        tools, _ = decode_field("tools", decode_tools, bytes(body.tools))
        prompts = body.add_generation_prompt and not body.continue_final_message
        variables = body.chat_template_kwargs or {}
        text = engine.tokenizer.apply_chat_template(
            messages, prompts, tools or None, variables, body.continue_final_message
        )
        special = bool(special)
    tokens = encode_prompt(engine.tokenizer, text, engine.max_model_len, special)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens}
    answer["token_strs"] = [engine.tokenizer.token(token) for token in tokens] if body.return_token_strs else None
    return answer


def _detokenize(engine: Runtime, raw: bytes) -> dict[str, Any]:
    body = decode_field("", msgspec.json.Decoder(DetokenizeBody).decode, raw)
    require_model(engine, body.model)
    try:
        check_tokens(body.tokens, engine.vocab_size, engine.tokenizer)
    except RequestError as error:
        raise APIError(400, str(error), param="tokens") from error
    return {"prompt": engine.tokenizer.decode(body.tokens, skip_special_tokens=False)}


def _install_administration(app: FastAPI, engine: Runtime, owner: int | None) -> None:
    """Add routes that change the pools of a running server or stop it, with a key that other clients do not have.

    ``owner``: see ``create_app``.
    """

    @app.post(SCALE_PATH)
    async def scale(request: Request) -> Response:
        """Add or remove workers, as {"memory": "cpu:+2", "compute": "-1"}; answers once they have joined or left.

        {"memory": "3"} adds or removes as many as the pool needs to have 3.
        {"prefill": "+1", "compute": "-1"} changes the role of a replica instead.
        """
        _authorize(request)
        changes = _changes(await request.body())
        done = asyncio.wrap_future(engine.scale(**changes))
        try:
            workers = await asyncio.shield(done)  # a client that leaves does not undo it
        except (UserError, EngineDeadError):
            raise
        except LaminaError as error:  # a worker did not start
            raise APIError(503, first_line(str(error)), code="not_scaled") from error
        return JSONResponse({"workers": workers})

    @app.post(STOP_PATH)
    async def stop(request: Request) -> Response:
        """Stop the server; answers with the workers that end with it."""
        _authorize(request)
        if owner is None:
            raise APIError(
                404, "this server runs inside another program; stop that program instead", code="not_stoppable"
            )
        stats = await asyncio.to_thread(engine.stats)
        log.warning("%s was called: the server stops", STOP_PATH)
        return JSONResponse(
            {"workers": sorted({**stats.workers, **stats.memory})},
            background=BackgroundTask(os.kill, owner, signal.SIGTERM),
        )


def _authorize(request: Request) -> None:
    """Raise APIError unless the request has the key of ``LAMINA_ADMIN_KEY``."""
    key = environment().admin_key
    if not key:
        raise APIError(
            403,
            f"{request.url.path} is off: start the server with the variable LAMINA_ADMIN_KEY set",
            code="no_admin_key",
        )
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), key.encode()):
        raise APIError(
            401,
            "the key is missing or wrong; send the server's LAMINA_ADMIN_KEY as Authorization: Bearer KEY",
            code="invalid_admin_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _changes(body: bytes) -> dict[str, str]:
    """Return the change of each pool, as ``parse_change`` takes it. Raises APIError, ConfigError."""
    example = 'give an object such as {"memory": "+2", "compute": "-1"}'
    if len(body) > MOST_CHANGE_NBYTES:
        raise APIError(413, f"the body has {len(body)} bytes; {example}")
    try:
        wanted: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not JSON ({error}); {example}") from error
    if not isinstance(wanted, dict) or not wanted or not wanted.keys() <= set(POOLS):
        raise APIError(400, f"the body names no pool, or one that does not exist; {example}")
    for pool, change in wanted.items():
        if not isinstance(change, str):
            raise APIError(400, f"{pool} is {change!r}; {example}", param=pool)
        parse_change(pool, change)
    return wanted
