"""The OpenAI-compatible HTTP application over one engine."""

import asyncio
import time

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

import lamina
from lamina.engine.engine import Engine
from lamina.engine.prompts import chat_prompt
from lamina.observe.metrics import CONTENT_TYPE, Metrics
from lamina.serve import errors
from lamina.serve.errors import APIError, first_line
from lamina.serve.generation import Form, check_model, respond
from lamina.serve.protocol import ChatRequest, CompletionRequest
from lamina.serve.responses import chat_choice, completion_choice

COMPLETION = Form("text_completion", "text_completion", "cmpl", completion_choice, completion_choice, None)
CHAT = Form(
    "chat.completion",
    "chat.completion.chunk",
    "chatcmpl",
    lambda piece: chat_choice(piece, "message"),
    lambda piece: chat_choice(piece, "delta"),
    {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
)


def create_app(engine: Engine) -> FastAPI:
    """The application. It uses ``engine`` and leaves closing it to the caller."""
    app = FastAPI(title="Lamina", version=lamina.__version__)
    errors.install(app)
    started = int(time.time())

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue one or several prompts."""
        check_model(engine, body.model)
        texts = [p if isinstance(p, str) else engine.tokenizer.decode(p) for p in body.prompt] if body.echo else []
        return await respond(request, engine, COMPLETION, body, body.prompt, body.sampling_params(), texts)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        check_model(engine, body.model)
        params = body.sampling_params(engine.default_max_tokens)
        messages = [message.model_dump() for message in body.messages]
        prompt = await asyncio.to_thread(chat_prompt, engine.tokenizer, messages)
        return await respond(request, engine, CHAT, body, [prompt], params)

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model served."""
        return JSONResponse({"object": "list", "data": [_model(engine, started)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The model served, if ``name`` is its name."""
        check_model(engine, name)
        return JSONResponse(_model(engine, started))

    @app.get("/health")
    async def health() -> Response:
        """200 while all workers answer, else 503: "degraded", naming the silent ones, or the reason of the end."""
        stats = engine.stats()
        if stats.dead is not None:
            raise APIError(503, f"the engine has stopped: {first_line(stats.dead)}", code="engine_dead")
        requests = {"running": stats.running, "waiting": stats.waiting}
        if stats.silent:  # what is sent here now waits for them, and fails if they do not come back
            silent = {worker: round(seconds, 1) for worker, seconds in stats.silent.items()}
            return JSONResponse({"status": "degraded", **requests, "silent_s": silent}, status_code=503)
        return JSONResponse({"status": "ok", **requests})

    metrics = Metrics(engine)

    @app.get("/metrics")
    async def metrics_text() -> Response:
        """The engine's figures for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    return app


def _model(engine: Engine, created: int) -> dict[str, object]:
    return {
        "id": engine.model_name,
        "object": "model",
        "created": created,
        "owned_by": "lamina",
        "max_model_len": engine.max_model_len,
    }
