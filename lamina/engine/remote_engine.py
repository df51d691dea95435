"""Client of the engine for frontend processes: sends requests to the engine, and detokenizes the replies.

Replies are read in the frontend's event loop, where callbacks run too.

When the engine is restarted, callers notice a pause: requests continue after the tokens already received.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import zmq

from lamina.control.frontend_messages import (
    Abort,
    AnswerBatch,
    CompletionTokens,
    Finish,
    FrontendBootstrap,
    FrontendHello,
    GetLives,
    GetStats,
    GetTimeline,
    Resume,
    Resumed,
    Scale,
    Scaled,
    Stopped,
    Submit,
    Submitted,
    Welcome,
    pack_tokens,
)
from lamina.control.timeline import Span
from lamina.core.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    LaminaError,
    OverloadedError,
    RequestError,
)
from lamina.core.outputs import FinishReason
from lamina.core.types import NOBODY, Client, Request
from lamina.engine.lives import Life, LivesOf
from lamina.engine.stats import EngineStats, StatsOf
from lamina.engine.streams import Submission
from lamina.engine.timelines import TimelineOf
from lamina.engine.updates import RequestText, TokenUpdate, engine_request
from lamina.models.directory import Defaults
from lamina.text.grammars import require_grammar
from lamina.text.prompts import check_token_params, check_tokens, prompt_tokens
from lamina.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
HELLO_S = 0.02
RECONNECT_MS = 10
SUBMIT_TIMEOUT_S = 60.0
STATS_TIMEOUT_S = 5.0
MOST_AT_ONCE = 64  # messages read before the event loop handles other events

_DECODER = msgspec.msgpack.Decoder(
    Welcome | Submitted | AnswerBatch | Stopped | StatsOf | TimelineOf | LivesOf | Scaled
)


@dataclass(eq=False, slots=True)
class _Asked:
    """A request that has not ended, as sent to the engine.

    Attributes:
        request: What the engine runs.
        reading: Converts its tokens to text.
        drawn: Tokens received so far, by completion.
        cached_tokens: Tokens of its prompt that were found in the prefix cache, as far as is known.
        aborted: Whether an engine was told to abort the request; its successor must be told again.
    """

    request: Request
    reading: RequestText
    drawn: list[list[int]]
    cached_tokens: int = 0
    aborted: bool = False

    def resumed(self, number: int) -> Resumed | None:
        """Return the message with which a new engine continues the request; None if all completions have ended."""
        one, open_ = self.request, self.reading.open
        drawn = {index: pack_tokens(self.drawn[index]) for index in open_}
        if not drawn:
            return None
        return Resumed(number, pack_tokens(one.prompt_token_ids), one.params, one.client, one.seed, drawn)


class RemoteEngine:
    """The engine as seen from another process. Callbacks run in the event loop.

    ``submit_all`` and ``stats`` block until the engine replies, so the event loop must not call them. All methods but
    ``disconnect`` may be called by any thread.

    Attributes:
        dead: Why the engine has stopped; None while it runs.
    """

    def __init__(self, bootstrap: FrontendBootstrap, tokenizer: Tokenizer) -> None:
        self.model_name = bootstrap.model_name
        self.model_aliases = bootstrap.model_aliases
        self.max_model_len = bootstrap.max_model_len
        self.sampling_defaults: Defaults = bootstrap.sampling_defaults
        self.tokenizer = tokenizer
        self.dead: str | None = None
        self.vocab_size = bootstrap.vocab_size
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._requests = self._connect(bootstrap.name, bootstrap.requests)
        self._answers = self._connect(bootstrap.name, bootstrap.answers)
        self._supervisor = os.pidfd_open(bootstrap.supervisor_pid)
        self._incarnation: int | None = None  # incarnation of the engine that this client is connected to
        self._seeds = random.Random(bootstrap.seed)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()  # guards _requests, _encoder, _asked, _named and _replies
        self._numbers = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._named: dict[str, int] = {}  # request id to number
        self._replies: dict[int, concurrent.futures.Future[Any]] = {}  # by number of a submission or question
        self._submitting: set[int] = set()  # numbers in ``_replies`` that are submissions
        self._welcome = asyncio.Event()
        self._last = EngineStats(0, 0, 0, 0, 0, 0, {}, None)

    def _connect(self, name: str, address: str) -> "zmq.Socket[bytes]":
        connected = self._context.socket(zmq.DEALER)
        connected.identity = name.encode()
        connected.linger = 0
        connected.sndhwm = connected.rcvhwm = 0
        connected.reconnect_ivl = RECONNECT_MS
        connected.connect(address)
        return connected

    @classmethod
    async def connect(cls, bootstrap: FrontendBootstrap, tokenizer: Tokenizer) -> Self:
        """Connect to the engine, in the running event loop. Raises DeadlineError if the engine does not answer."""
        made = cls(bootstrap, tokenizer)
        made._loop.add_reader(made._answers.fileno(), made._receive)
        made._loop.add_reader(made._supervisor, made._end, "its process has ended")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                while not made._welcome.is_set():
                    made._send(FrontendHello())
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(HELLO_S):
                            await made._welcome.wait()
                    made._receive()
        except TimeoutError:
            raise DeadlineError(f"the engine has not answered within {CONNECT_TIMEOUT_S:.0f} s") from None
        return made

    # -- called from any thread ------------------------------------------------------------------------------------

    def submit_all(self, submissions: Sequence[Submission], client: Client = NOBODY) -> None:
        """Queue several requests atomically, as ``Engine.submit_all`` does."""
        asked, prompts, seeds = [], [], []
        for one in submissions:
            require_grammar(one.params, self.tokenizer.eos_token_ids)
            text = one.prompt if isinstance(one.prompt, str) else None
            tokens = prompt_tokens(self.tokenizer, one.prompt, one.params, self.max_model_len)
            check_tokens(tokens, self.vocab_size, self.tokenizer)
            check_token_params(one.params, self.vocab_size, self.tokenizer)
            seeds.append(self._seeds.getrandbits(62) if one.params.seed is None else one.params.seed)
            request = Request(one.request_id, text, tokens, one.params, seeds[-1], client)
            reading = RequestText(request, self.tokenizer, one.on_update, self._finish)
            run = engine_request(request, self.tokenizer, self.max_model_len)
            asked.append(_Asked(run, reading, [[] for _ in range(run.params.n)]))
            prompts.append(pack_tokens(run.prompt_token_ids))
        params = [one.request.params for one in asked]
        if all(each is params[0] for each in params):
            params = params[:1]
        reply: concurrent.futures.Future[Submitted] = concurrent.futures.Future()
        with self._lock:
            self._require_alive()
            numbers = [next(self._numbers) for _ in asked]  # consecutive, by the lock
            self._asked.update(zip(numbers, asked, strict=True))
            self._named.update(zip((one.request_id for one in submissions), numbers, strict=True))
            self._replies[numbers[0]] = reply
            self._submitting.add(numbers[0])
            self._requests.send(self._encoder.encode(Submit(numbers[0], prompts, params, client, seeds)))
        try:
            answer: Submitted = self._wait(numbers[0], reply, time.monotonic(), SUBMIT_TIMEOUT_S)
            if answer.error:
                raise _error(answer)
        except BaseException:
            self._forget(numbers)
            self._send(Abort(numbers))
            raise
        finally:
            self._submitting.discard(numbers[0])

    def abort(self, request_id: str) -> None:
        """Cancel a request, as ``Engine.abort`` does."""
        with self._lock:
            number = self._named.get(request_id)
            if number is not None:
                self._asked[number].aborted = True
        if number is not None:
            self._send(Abort([number]))

    def stats(self) -> EngineStats:
        """Return the engine's statistics, or the latest known if it has stopped.

        Raises DeadlineError if the engine does not answer.
        """
        found: EngineStats | None = self._ask(GetStats)
        if found is None:
            return dataclasses.replace(self._last, running=0, waiting=0, dead=self.dead)
        self._last = found
        return found

    def timeline(self) -> dict[str, list[Span]]:
        """Return what workers did of late, as ``Engine.timeline`` does. Raises DeadlineError."""
        found: dict[str, list[Span]] | None = self._ask(GetTimeline)
        return found or {}

    def lives(self) -> list[Life]:
        """Return what has happened to the newest requests, as ``Engine.lives`` does. Raises DeadlineError."""
        found: list[Life] | None = self._ask(GetLives)
        return found or []

    def _ask(self, question: Callable[[int], msgspec.Struct]) -> Any:
        """Send the message ``question(number)``; return the engine's or its successor's answer, None if it has stopped.

        Raises DeadlineError after ``STATS_TIMEOUT_S``, however many engines have been asked by then.
        """
        begun = time.monotonic()
        while True:
            reply: concurrent.futures.Future[Any] = concurrent.futures.Future()
            with self._lock:
                if self.dead is not None:
                    return None
                number = next(self._numbers)
                self._replies[number] = reply
                self._requests.send(self._encoder.encode(question(number)))
            with contextlib.suppress(EngineDeadError):
                return self._wait(number, reply, begun, STATS_TIMEOUT_S)

    def scale(
        self, *, compute: int | str = 0, memory: int | str = 0, prefill: int | str = 0
    ) -> concurrent.futures.Future[list[str]]:
        """Change the pools as ``Engine.scale`` does. Errors are set on the future; only EngineDeadError is raised."""
        reply: concurrent.futures.Future[list[str]] = concurrent.futures.Future()
        reply.set_running_or_notify_cancel()  # its caller cannot cancel it
        with self._lock:
            self._require_alive()
            number = next(self._numbers)
            self._replies[number] = reply
            self._requests.send(self._encoder.encode(Scale(number, compute, memory, prefill)))
        return reply

    def close(self) -> None:
        """End all requests with an error."""
        self._loop.call_soon_threadsafe(self._end, "the engine was closed")

    def disconnect(self) -> None:
        """End all requests with an error and close the sockets, in the event loop. Idempotent."""
        self._end("the engine was closed")
        with self._lock:
            if self._context.closed:
                return
            self._loop.remove_reader(self._answers.fileno())
            os.close(self._supervisor)
            self._context.destroy(linger=0)

    def _finish(self, request_id: str, index: int) -> None:
        number = self._named.get(request_id)
        if number is not None:
            self._send(Finish(number, index))

    def _send(self, message: msgspec.Struct) -> None:
        with self._lock:
            if not self._context.closed:
                self._requests.send(self._encoder.encode(message))

    def _wait(self, number: int, reply: concurrent.futures.Future[Any], begun: float, timeout_s: float) -> Any:
        try:
            return reply.result(begun + timeout_s - time.monotonic())
        except TimeoutError:
            raise DeadlineError(f"the engine has not answered within {timeout_s:.0f} s; try again later") from None
        finally:
            with self._lock:
                self._replies.pop(number, None)

    def _forget(self, numbers: Sequence[int]) -> None:
        with self._lock:
            for number in numbers:
                asked = self._asked.pop(number, None)
                if asked is not None:
                    self._named.pop(asked.request.request_id, None)

    def _require_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(_stopped(self.dead))

    # -- the event loop --------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Handle all messages that have arrived: ZeroMQ's descriptor signals only the first of several."""
        for _ in range(MOST_AT_ONCE):
            try:
                payload = self._answers.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._dispatch(_DECODER.decode(payload))
        self._loop.call_soon(self._receive)

    def _dispatch(
        self, message: Welcome | Submitted | AnswerBatch | Stopped | StatsOf | TimelineOf | LivesOf | Scaled
    ) -> None:
        if isinstance(message, AnswerBatch):
            self._read_all(message)
        elif isinstance(message, Submitted):
            self._resolve(message.first, message)
        elif isinstance(message, StatsOf):
            self._resolve(message.number, message.stats)
        elif isinstance(message, TimelineOf):
            self._resolve(message.number, message.spans)
        elif isinstance(message, LivesOf):
            self._resolve(message.number, message.lives)
        elif isinstance(message, Scaled):
            self._resolve(message.number, message.workers, _error(message) if message.error else None)
        elif isinstance(message, Stopped):
            self._end(message.reason)
        elif message.incarnation != self._incarnation:
            self._resume(message.incarnation)

    def _read_all(self, batch: AnswerBatch) -> None:
        plain = iter(batch.plain)
        for number, index, token in zip(plain, plain, plain, strict=True):
            if (asked := self._asked.get(number)) is not None:
                asked.drawn[index].append(token)
                completions = [CompletionTokens(index, [token])]
                self._read(number, asked, TokenUpdate(completions, False, None, asked.cached_tokens))
        for one in batch.news:
            if (asked := self._asked.get(one.request)) is not None:
                asked.cached_tokens = one.cached_tokens
                for part in one.completions:
                    asked.drawn[part.index] += part.token_ids
                if one.finished:
                    self._forget([one.request])
                self._read(one.request, asked, TokenUpdate(one.completions, one.finished, one.error, one.cached_tokens))

    def _resume(self, incarnation: int) -> None:
        """Send all unfinished requests to a new engine, and abort those that the earlier one was told to abort."""
        with self._lock:
            self._incarnation = incarnation
            found = {number: asked.resumed(number) for number, asked in self._asked.items()}
            replies, self._replies = self._replies, {}
            unfinished = [one for one in found.values() if one is not None]
            self._requests.send(self._encoder.encode(Resume(incarnation, unfinished)))
            if aborted := [one.request for one in unfinished if self._asked[one.request].aborted]:
                self._requests.send(self._encoder.encode(Abort(aborted)))
        # All of its completions have ended, but the earlier engine could not report the request's end.
        self._forget([number for number, one in found.items() if one is None])
        for number, reply in replies.items():
            if number in self._submitting:  # if the new engine rejects a request, it ends with the error
                reply.set_result(Submitted(number))
            else:
                reply.set_exception(
                    EngineDeadError(
                        "the engine was restarted meanwhile; check whether the call took effect, then repeat it"
                    )
                )
        self._welcome.set()

    def _read(self, number: int, asked: _Asked, update: TokenUpdate) -> None:
        try:
            asked.reading.on_update(update)
        except Exception:  # a failing callback must not affect other requests
            log.exception("the output callback of request %s failed", asked.request.request_id)
            self._forget([number])
            self._send(Abort([number]))

    def _resolve(self, number: int, value: object, error: LaminaError | None = None) -> None:
        """Set the result of the question ``number``. The thread that waits for it may run only after later messages."""
        with self._lock:
            reply = self._replies.pop(number, None)
        if reply is None:  # the wait has timed out
            return
        if error is None:
            reply.set_result(value)
        else:
            reply.set_exception(error)

    def _end(self, reason: str) -> None:
        """End every request with an error: the engine has stopped, or this client is closed."""
        with self._lock:
            if self.dead is not None:
                return
            self.dead = reason
            asked, self._asked, self._named = self._asked, {}, {}
            replies, self._replies = self._replies, {}
        self._loop.remove_reader(self._supervisor)
        for reply in replies.values():
            reply.set_exception(EngineDeadError(_stopped(reason)))
        for number, one in asked.items():
            ends = [CompletionTokens(index, [], [], FinishReason.ERROR) for index in range(one.request.params.n)]
            self._read(number, one, TokenUpdate(ends, True, _stopped(reason)))


def _stopped(reason: str) -> str:
    return f"the engine has stopped: {reason}. Start a new one"


def _error(answer: Submitted | Scaled) -> LaminaError:
    """Return the error that the engine raised, with its type."""
    kinds: tuple[type[LaminaError], ...] = (ConfigError, RequestError, OverloadedError, EngineDeadError)
    return next((kind for kind in kinds if kind.__name__ == answer.error), LaminaError)(answer.message)
