"""From one HTTP request to engine requests and back: what both endpoints share."""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from fastapi import Request
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from lamina.engine.engine import MAX_WAITING, Engine
from lamina.engine.prompts import Prompt
from lamina.engine.streams import AsyncOutputs
from lamina.errors import LaminaError
from lamina.serve.errors import APIError, as_api_error, first_line
from lamina.serve.protocol import GenerationRequest
from lamina.serve.responses import Body, Piece, Sent, envelope, usage
from lamina.types import Client, RequestOutput, SamplingParams


@dataclass(frozen=True)
class Form:
    """How one endpoint words its answers."""

    answer: Literal["text_completion", "chat.completion"]
    chunk: Literal["text_completion", "chat.completion.chunk"]
    id_prefix: str
    answer_choice: Callable[[Piece], Body]
    chunk_choice: Callable[[Piece], Body]
    opening: Body | None  # of each choice of a stream, if there is one


class Generation:
    """One HTTP request under way: its prompts run in the engine until it is answered or its client is gone."""

    def __init__(self, engine: Engine, form: Form, body: GenerationRequest, outputs: AsyncOutputs, sent: Sent) -> None:
        self._engine = engine
        self._form = form
        self._body = body
        self._outputs = outputs
        self._sent = sent
        self._id = f"{form.id_prefix}-{uuid.uuid4().hex}"
        self._newest: dict[int, RequestOutput] = {}

    async def answer(self, request: Request) -> Response:
        """Everything at once. Raises ClientDisconnect, with the engine's requests cancelled, if the client leaves."""
        reading = asyncio.ensure_future(self._read_all())
        leaving = asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise ClientDisconnect
            reading.result()
        finally:
            reading.cancel()
            leaving.cancel()
            self._outputs.close()
        pieces = [
            piece for prompt in sorted(self._newest) for piece in self._sent.advance(prompt, self._newest[prompt])
        ]
        answer = envelope(self._form.answer, self._id, self._engine.model_name)
        answer |= {"choices": [self._form.answer_choice(piece) for piece in pieces], "usage": self._usage()}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    def stream(self, choices: int) -> Response:
        """Server-sent events, ended by ``[DONE]``. A client that leaves cancels the engine's requests."""
        # The background task closes what a client left behind before the first event.
        close = BackgroundTask(self._outputs.close)
        return StreamingResponse(self._events(choices), media_type="text/event-stream", background=close)

    async def _read_all(self) -> None:
        async for prompt, output in self._outputs:
            self._newest[prompt] = output
            _check(output)

    async def _events(self, choices: int) -> AsyncIterator[bytes]:
        form = self._form
        async with self._outputs:
            try:
                if form.opening is not None:
                    yield self._chunk([{"index": i, **form.opening} for i in range(choices)])
                async for prompt, output in self._outputs:
                    self._newest[prompt] = output
                    _check(output)
                    if pieces := [form.chunk_choice(piece) for piece in self._sent.advance(prompt, output)]:
                        yield self._chunk(pieces)
                if self._body.include_usage:
                    yield self._chunk([], self._usage())
            except (LaminaError, APIError) as error:
                yield _event(as_api_error(error).body())
            yield b"data: [DONE]\n\n"

    def _chunk(self, choices: Sequence[Body], counts: Body | None = None) -> bytes:
        chunk = envelope(self._form.chunk, self._id, self._engine.model_name)
        chunk["choices"] = choices
        if self._body.include_usage:
            chunk["usage"] = counts
        return _event(chunk)

    def _usage(self) -> Body:
        return usage(self._newest.values())


async def respond(
    request: Request,
    engine: Engine,
    form: Form,
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    echo: Sequence[str] = (),
) -> Response:
    """Run ``prompts`` and answer, at once or as a stream.

    Raises:
        APIError, RequestError, OverloadedError, EngineDeadError: before anything is answered; nothing is left running.
    """
    if len(prompts) > MAX_WAITING:  # no more would ever fit: to try again later would be in vain
        raise APIError(400, f"prompt holds {len(prompts)} prompts; give at most {MAX_WAITING} at once", param="prompt")
    every = [params] * len(prompts)
    outputs = await AsyncOutputs.submit(engine, uuid.uuid4().hex, prompts, every, _client(request))
    generation = Generation(engine, form, body, outputs, Sent(params.n, echo))
    return generation.stream(len(prompts) * params.n) if body.stream else await generation.answer(request)


def check_model(engine: Engine, name: str | None) -> None:
    """Raise APIError 404 unless ``name`` is the model served here or left out."""
    if name not in (None, engine.model_name):
        message = f"the model {name!r} does not exist; this server has {engine.model_name!r}"
        raise APIError(404, message, code="model_not_found", param="model")


def _client(request: Request) -> Client:
    """Who asks: the API key, if one is sent, and the connection. Keys are not checked, and many clients send the same
    placeholder: so the connections of one key share what it gets."""
    connection = "" if request.client is None else f"{request.client.host}:{request.client.port}"
    key = request.headers.get("authorization")
    return Client(connection if key is None else hashlib.sha256(key.encode()).hexdigest(), connection)


def _check(output: RequestOutput) -> None:
    if output.error is not None:
        raise APIError(503, first_line(output.error), code="engine_failed")


def _event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
