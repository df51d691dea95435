"""Decodes one HTTP request in a thread, runs it on the engine and writes its answer, whichever API it came through."""

import asyncio
import codecs
import hashlib
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from lamina.core.errors import NO_TOKEN_LEFT, LaminaError
from lamina.core.types import Client
from lamina.engine.streams import AsyncOutputs, Runtime
from lamina.engine.updates import RequestUpdate
from lamina.observe.metrics import Timing, Traffic
from lamina.serve.answers import MOST_POSITIONS, AnswerWriter, Piece, Sent, Usage
from lamina.serve.connections import CONNECTION, Connection
from lamina.serve.gate import SMALL
from lamina.serve.http_errors import APIError, as_api_error, first_line
from lamina.serve.json_fields import ignored_header
from lamina.serve.requests import GenerationRequest

MOST_UNREAD = 65536
"""Tokens of a stream that are buffered for a client that does not read; about 300 bytes each with 20 logprobs."""


T = TypeVar("T")

MakeWriter = Callable[[GenerationRequest, str], AnswerWriter]
"""Makes the writer of one answer, with the model's name."""


class Generation:
    """One HTTP request in progress: its prompts run in the engine until it is answered or its client leaves.

    Attributes:
        wanted: The request.
        model: The model's name in its answer.
        usage: Its token counts so far.
        timing: When its tokens came.
        failed: The HTTP status of an error that has ended its stream; None if none has.
    """

    def __init__(
        self,
        engine: Runtime,
        writer: AnswerWriter,
        wanted: GenerationRequest,
        outputs: AsyncOutputs,
        timing: Timing,
        connection: Connection | None = None,
    ) -> None:
        """``connection``: takes parts of a stream that has begun; None: they pass through the middleware."""
        self.wanted, self.model, self.timing = wanted, engine.model_name, timing
        self.usage = Usage({index: len(prompt) for index, prompt in enumerate(wanted.prompts)})
        self.failed: int | None = None
        self._writer = writer
        self._outputs = outputs
        self._connection = connection
        self._sent = Sent(engine.tokenizer, wanted)

    async def answer(self, request: Request) -> Response:
        """Return the complete answer; cancel the engine's requests and raise ClientDisconnect if the client leaves."""
        gathered: dict[int, RequestUpdate] = {}
        try:
            await _unless_disconnected(request, self._read_all(gathered))
        finally:
            self._outputs.close()
            self.timing.flush()
        return StreamingResponse(self._whole(gathered), media_type="application/json")

    def stream(self) -> Response:
        """Return server-sent events. A client that leaves cancels the engine's requests."""
        # The background task also covers a client that leaves before the first event.
        close = BackgroundTask(self._outputs.close)
        # Otherwise proxies keep events until the answer is complete.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        if self._connection is not None:
            self._outputs.push = self._push
        return StreamingResponse(self._events(), 200, headers, "text/event-stream", close)

    def fail(self, error: APIError) -> bytes:
        """Return the events of a stream that an error ends."""
        self.failed = error.status
        return self._writer.fail_stream(error)

    def _push(self) -> bool:
        """Write the events of new tokens to the connection at once; return False if ``_events`` has to pass them on."""
        connection = self._connection
        if connection is None or not connection.may_write:
            return False
        updates, events = self._outputs.pop_middle(MOST_POSITIONS), b""
        for prompt, update in updates:
            self._receive(prompt, update)
            if pieces := [*self._sent.advance(prompt, update)]:
                events += self._writer.write_events(pieces, self.usage)
        if events:
            connection.write_chunk(events)
        return bool(updates)

    def _receive(self, prompt: int, update: RequestUpdate) -> None:
        """Count an update, without tokens that are not wanted."""
        self.timing.observe(prompt, update)
        if self.wanted.echoes_alone:
            update.drop_answers()
        self.usage.count(prompt, update)

    async def _read_all(self, gathered: dict[int, RequestUpdate]) -> None:
        async for prompt, update in self._outputs:
            self._receive(prompt, update)
            if prompt in gathered:
                gathered[prompt].extend(update)
            else:
                gathered[prompt] = update
            _check(update)

    async def _whole(self, gathered: dict[int, RequestUpdate]) -> AsyncIterator[bytes]:
        """Yield the answer's JSON choice by choice, to bound memory: logprobs make it large."""
        yield self._writer.begin_answer()
        for place, prompt in enumerate(sorted(gathered)):
            if place % MOST_POSITIONS == MOST_POSITIONS - 1:
                await asyncio.sleep(0)  # let other requests run, and hear of a client that has left
            update = gathered.pop(prompt)
            pieces = self._sent.advance(prompt, update, most=None)
            # Long encoding runs in a thread, so that the event loop stays responsive.
            long = update.positions > MOST_POSITIONS
            while (choice := await asyncio.to_thread(self._next, pieces) if long else self._next(pieces)) is not None:
                yield choice
        yield self._writer.end_answer(self.usage)

    def _next(self, pieces: Iterator[Piece]) -> bytes | None:
        """Return the next piece as JSON; None after the last."""
        piece = next(pieces, None)
        return None if piece is None else self._writer.write_choice(piece)

    async def _events(self) -> AsyncIterator[bytes]:
        writer = self._writer
        async with self._outputs:
            try:
                if opening := writer.begin_stream(self.usage):
                    yield opening
                async for prompt, update in self._outputs:
                    self._receive(prompt, update)
                    _check(update)
                    pieces = self._sent.advance(prompt, update)
                    # One event for all completions, unless many tokens are buffered for a slow client.
                    long = update.positions > MOST_POSITIONS
                    at_once = 1 if long else len(update.completions)
                    while batch := list(itertools.islice(pieces, at_once)):
                        if events := writer.write_events(batch, self.usage):
                            yield events
                        if long:
                            await asyncio.sleep(0)  # let other requests run
                yield writer.end_stream(self.usage)
            except (LaminaError, APIError) as error:
                yield self.fail(as_api_error(error))
            finally:
                self.timing.flush()


async def respond(
    request: Request, engine: Runtime, traffic: Traffic, make_writer: MakeWriter, wanted: GenerationRequest
) -> Response:
    """Run ``wanted`` and answer, at once or as a stream.

    Raises:
        APIError, RequestError, OverloadedError, EngineDeadError: before anything is sent; nothing is left running.
    """
    most_unread = MOST_UNREAD if wanted.stream else None  # otherwise the whole answer is collected
    prompts, params = zip(*wanted.submissions(engine.max_model_len), strict=True)
    timing = Timing(traffic)
    outputs = await AsyncOutputs.submit(engine, uuid.uuid4().hex, prompts, params, _client(request), most_unread)
    connection = request.scope.get("extensions", {}).get(CONNECTION)
    generation = Generation(engine, make_writer(wanted, engine.model_name), wanted, outputs, timing, connection)
    request.state.generation = generation
    response = generation.stream() if wanted.stream else await generation.answer(request)
    response.headers.update(ignored_header(wanted.ignored))
    return response


def _client(request: Request) -> Client:
    """Return the client for fair scheduling: its API key, if sent, and its connection.

    Keys are not checked, and many clients send the same placeholder, so the connections of one key share its part.
    """
    connection = "" if request.client is None else f"{request.client.host}:{request.client.port}"
    key = request.headers.get("authorization")
    return Client(connection if key is None else hashlib.sha256(key.encode()).hexdigest(), connection)


def _check(update: RequestUpdate) -> None:
    if update.error is not None:
        if update.error.startswith(NO_TOKEN_LEFT):
            raise APIError(400, first_line(update.error))
        raise APIError(503, first_line(update.error), code="engine_failed")


class Intake:
    """Threads that decode bodies and tokenise prompts.

    A single thread decodes large bodies one after another, which bounds memory and use of the GIL; other threads decode
    small bodies, which never wait for a large one.
    """

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(2, thread_name_prefix="lamina-small")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="lamina-large")

    async def decode_in_thread(self, request: Request, function: Callable[[bytes], T]) -> T:
        """Apply ``function`` to the body in a thread. Raises ClientDisconnect as soon as the client leaves."""
        if not _is_json(request.headers.get("content-type", "")):
            raise APIError(400, "the body must be a JSON object, sent with Content-Type: application/json")
        if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
            message = (
                f"the body is compressed (Content-Encoding: {coding[:32]}), which is not supported; send it as it is"
            )
            raise APIError(415, message)
        body = (await request.body()).removeprefix(codecs.BOM_UTF8)
        executor = self._small if len(body) <= SMALL else self._large
        work = asyncio.get_running_loop().run_in_executor(executor, function, body)
        del body
        try:
            return await _unless_disconnected(request, work)
        except RecursionError:
            raise APIError(400, "the body is nested too deeply") from None


async def _unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of ``work``; if the client leaves first, cancels it and raises ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
