"""Serves frontend processes on the engine's side: receives their requests, sends each frontend one message per turn.

The sockets are in a folder that only this user may enter. A thread reads frontends' messages; the engine's own thread
sends new tokens. The number of unread messages of a frontend is bounded, so that a suspended frontend cannot fill the
engine's memory. Messages before a frontend's ``Resume`` are ignored: they may be meant for an engine that has ended.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from lamina.control.frontend_messages import (
    Abort,
    AnswerBatch,
    CompletionTokens,
    Finish,
    FromFrontend,
    FrontendBootstrap,
    FrontendHello,
    GetLives,
    GetStats,
    GetTimeline,
    RequestTokens,
    Resume,
    Resumed,
    Scale,
    Scaled,
    Stopped,
    Submit,
    Submitted,
    Welcome,
    unpack_tokens,
)
from lamina.core.errors import LaminaError, TransportError
from lamina.core.outputs import FinishReason
from lamina.core.threads import join_thread
from lamina.engine.engine import Engine
from lamina.engine.lives import LivesOf
from lamina.engine.stats import StatsOf
from lamina.engine.timelines import TimelineOf
from lamina.engine.updates import OnTokens, PlainTokens, TokenUpdate

log = logging.getLogger(__name__)

MOST_UNSENT = 16384  # unread messages of a frontend, one per turn
MOST_AT_ONCE = 64  # prompts of one message queued before other messages are handled: a millisecond or two
POLL_MS = 100
WELCOME_MS = 5  # time between two attempts to reach a frontend that has not connected yet
_MORE = zmq.NOBLOCK | zmq.SNDMORE


@dataclass(eq=False)
class _Member:
    """One frontend process.

    Attributes:
        name: Name of the frontend.
        resumed: Whether its ``Resume`` has arrived.
        running: Its requests that have not ended, by its own numbers.
        news: News of this turn. Only the engine's thread writes them.
        plain: Tokens of this turn of which nothing else is new, as in ``AnswerBatch``. The same thread writes them.
        lost: Why it cannot be reached; None if it can.
    """

    name: str
    resumed: bool = False
    running: set[int] = field(default_factory=set)
    news: list[RequestTokens] = field(default_factory=list)
    plain: list[int] = field(default_factory=list)
    lost: str | None = None

    def request_id(self, number: int) -> str:
        return f"{self.name}-{number}"


@dataclass(eq=False)
class _Submission:
    """A ``Submit`` of which the first ``queued`` prompts are in the engine.

    Attributes:
        aborted: Numbers of requests to cancel as soon as they are queued.
    """

    member: _Member
    message: Submit
    queued: int = 0
    aborted: set[int] = field(default_factory=set)

    @property
    def numbers(self) -> range:
        return range(self.message.first, self.message.first + len(self.message.prompts))


class Frontends:
    """All frontends that have connected. ``on_frontend_exit`` may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        supervisor_pid: int,
        incarnation: int = 0,
        names: Iterable[str] = (),
        on_lost: Callable[[str, str], None] = lambda name, why: None,
        on_death: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Listen in ``folder``. Raises TransportError if that fails.

        Args:
            engine: The engine.
            folder: Folder of the sockets.
            supervisor_pid: Process id of the supervisor.
            incarnation: Number of the engine's process among the server's engines.
            names: Frontends that were connected to an earlier engine.
            on_lost: Called from any thread with the name of a frontend that cannot be reached, and the reason.
            on_death: Called with the reason when the engine has stopped by itself, before frontends are told.
        """
        self._engine = engine
        self._incarnation = incarnation
        self._on_lost = on_lost
        self._on_death = on_death
        self._members: dict[str, _Member] = {name: _Member(name) for name in names}
        self._unwelcomed = set(names)  # frontends that were not told yet of this engine
        self._exited = set[str]()  # their last messages may be read after their ends
        self._supervisor_pid = supervisor_pid
        self._submissions: deque[_Submission] = deque()  # owned by the thread that reads
        self._context = zmq.Context()
        self._requests = self._context.socket(zmq.ROUTER)
        self._answers = self._context.socket(zmq.ROUTER)
        self._answers.router_mandatory = True
        self._answers.sndhwm = MOST_UNSENT
        self._addresses = f"ipc://{folder / 'requests'}", f"ipc://{folder / 'answers'}"
        for socket, address in zip((self._requests, self._answers), self._addresses, strict=True):
            socket.linger = 0
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                self._context.destroy(linger=0)
                raise TransportError(
                    f"cannot create the socket for frontends at {address}: {error}; set TMPDIR to another folder"
                ) from error
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()  # guards _answers and _encoder
        self._closed = threading.Event()
        self._told_of_death = False
        self._thread = threading.Thread(target=self._run, name="lamina-frontends", daemon=True)
        self._thread.start()
        engine.observe_turns(self._flush)

    @property
    def bootstrap(self) -> FrontendBootstrap:
        """The bootstrap of a frontend process, without its name."""
        engine = self._engine
        return FrontendBootstrap(
            "",
            *self._addresses,
            self._supervisor_pid,
            engine.model_name,
            engine.max_model_len,
            dict(engine.sampling_defaults),
            engine.vocab_size,
            engine.new_seed(),
            tuple(engine.model_aliases),
            engine.tokenizer.chat_settings,
        )

    def on_frontend_exit(self, name: str) -> None:
        """Cancel the requests of a frontend whose process has ended, and ignore what it has sent."""
        self._exited.add(name)
        member = self._members.pop(name, None)
        if member is None:
            return
        member.lost = "its process has ended"
        for number in list(member.running):
            self._engine.abort(member.request_id(number))

    def close(self) -> None:
        """Close the sockets. The engine must have stopped, or have no requests of frontends."""
        self._closed.set()
        if join_thread(self._thread):
            with self._lock:
                self._context.destroy(linger=0)

    # -- the thread that reads -------------------------------------------------------------------------------------

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromFrontend)
        while not self._closed.is_set():
            for name in list(self._unwelcomed):
                if (waiting := self._members.get(name)) is None:  # it has left
                    self._unwelcomed.discard(name)
                else:
                    self._welcome(waiting)
            if self._requests.poll(0 if self._submissions else WELCOME_MS if self._unwelcomed else POLL_MS):
                self._receive(decoder)
            if self._submissions:
                # In turns: a message with one prompt must not wait for one with thousands.
                submission = self._submissions.popleft()
                if not self._submit(submission):
                    self._submissions.append(submission)

    def _receive(self, decoder: msgspec.msgpack.Decoder[FromFrontend]) -> None:
        identity, payload = self._requests.recv_multipart()
        name = identity.decode()
        try:
            message = decoder.decode(payload)
        except msgspec.DecodeError as error:
            if (known := self._members.get(name)) is not None:
                self._lose(known, f"it sent an invalid message: {error}")
            return
        if isinstance(message, FrontendHello):
            greeted = self._members.setdefault(name, _Member(name))
            if name in self._exited:  # read after ``greeted`` is known: the process may end meanwhile
                self.on_frontend_exit(name)
            else:
                self._welcome(greeted)
        elif (member := self._members.get(name)) is not None:  # else it has left
            self._take(member, message)

    def _welcome(self, member: _Member) -> None:
        """Send a frontend ``Welcome``, and ``Stopped`` if the engine has stopped; retry until its socket connects."""
        if self._send(member, Welcome(self._incarnation), connected=False):
            self._unwelcomed.discard(member.name)
            if self._told_of_death and (reason := self._engine.dead) is not None:  # the others have heard of it before
                self._send(member, Stopped(reason))

    def _take(self, member: _Member, message: FromFrontend) -> None:
        if isinstance(message, Resume):
            if message.incarnation == self._incarnation and not member.resumed:
                member.resumed = True
                for one in message.requests:
                    self._resume(member, one)
                if member.lost is not None:  # while they were resumed
                    for one in message.requests:
                        self._engine.abort(member.request_id(one.request))
        elif not member.resumed:
            return
        elif isinstance(message, Submit):
            self._submissions.append(_Submission(member, message))
        elif isinstance(message, Finish):
            self._engine.end_completion(member.request_id(message.request), message.index)
        elif isinstance(message, Abort):
            for number in message.requests:
                self._abort(member, number)
        elif isinstance(message, GetStats | GetTimeline | GetLives | Scale):
            self._reply(member, message)

    def _reply(self, member: _Member, message: GetStats | GetTimeline | GetLives | Scale) -> None:
        if isinstance(message, GetStats):
            self._send(member, StatsOf(message.number, self._engine.stats()))
        elif isinstance(message, GetTimeline):
            self._send(member, TimelineOf(message.number, self._engine.timeline()))
        elif isinstance(message, GetLives):
            self._send(member, LivesOf(message.number, self._engine.lives()))
        else:
            self._scale(member, message)

    def _resume(self, member: _Member, one: Resumed) -> None:
        """Continue a request of an earlier engine; end it with the error if that is impossible."""
        drawn = {index: unpack_tokens(tokens) for index, tokens in one.drawn.items()}
        begun = any(drawn.values()) or len(drawn) < one.params.n
        member.running.add(one.request)
        try:
            self._engine.submit_tokens(
                member.request_id(one.request),
                unpack_tokens(one.prompt),
                one.params,
                self._receiver(member, one.request),
                one.client,
                one.seed,
                drawn if begun else None,
                again=True,
                plain=PlainTokens(member.plain, one.request),
            )
        except LaminaError as error:
            member.running.discard(one.request)
            ends = [CompletionTokens(index, [], [], FinishReason.ERROR) for index in drawn]
            self._send(member, AnswerBatch([RequestTokens(one.request, ends, True, str(error))]))

    def _scale(self, member: _Member, message: Scale) -> None:
        def done(future: Future[list[str]]) -> None:
            error = future.exception()
            if error is None:
                self._send(member, Scaled(message.number, future.result()))
            else:
                self._send(member, Scaled(message.number, [], type(error).__name__, str(error)))

        try:
            future = self._engine.scale(compute=message.compute, memory=message.memory, prefill=message.prefill)
        except LaminaError as error:
            self._send(member, Scaled(message.number, [], type(error).__name__, str(error)))
        else:
            future.add_done_callback(done)

    def _submit(self, submission: _Submission) -> bool:
        """Queue the next prompts; return True once all are queued, or one was rejected and none is queued."""
        member, message = submission.member, submission.message
        begin, end = submission.queued, min(submission.queued + MOST_AT_ONCE, len(message.prompts))
        try:
            for place in range(begin, end):
                number = submission.numbers[place]
                params = message.params[place if len(message.params) > 1 else 0]
                member.running.add(number)
                self._engine.submit_tokens(
                    member.request_id(number),
                    unpack_tokens(message.prompts[place]),
                    params,
                    self._receiver(member, number),
                    message.client,
                    message.seeds[place],
                    plain=PlainTokens(member.plain, number),
                )
                submission.queued += 1
                if number in submission.aborted:
                    self._engine.abort(member.request_id(number))
        except LaminaError as error:
            for number in submission.numbers[: submission.queued + 1]:
                member.running.discard(number)
                self._engine.abort(member.request_id(number))
            self._send(member, Submitted(message.first, type(error).__name__, str(error)))
            return True
        if member.lost is not None:  # while its prompts were queued
            for number in submission.numbers[: submission.queued]:
                self._engine.abort(member.request_id(number))
            return True
        if end == len(message.prompts):
            self._send(member, Submitted(message.first))
        return end == len(message.prompts)

    def _abort(self, member: _Member, number: int) -> None:
        self._engine.abort(member.request_id(number))
        for submission in self._submissions:
            if submission.member is member and number in submission.numbers:
                submission.aborted.add(number)

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def _receiver(self, member: _Member, number: int) -> OnTokens:
        def receive(update: TokenUpdate) -> None:
            if update.finished:
                member.running.discard(number)
            news = RequestTokens(number, update.completions, update.finished, update.error, update.cached_tokens)
            member.news.append(news)

        return receive

    def _flush(self) -> None:
        if self._closed.is_set():
            return
        for member in list(self._members.values()):
            if member.news or member.plain:
                self._send(member, AnswerBatch(member.news, member.plain))
                member.news.clear()
                member.plain.clear()
        if (reason := self._engine.dead) is not None and not self._told_of_death:
            self._told_of_death = True
            self._on_death(reason)
            for member in list(self._members.values()):
                self._send(member, Stopped(reason))

    # -- both ------------------------------------------------------------------------------------------------------

    def _send(self, member: _Member, message: msgspec.Struct, connected: bool = True) -> bool:
        """Send a message and return whether it was sent; record the frontend as lost if its queue is full.

        ``connected``: it is also lost if it is not connected.
        """
        if member.lost is not None:
            return False
        try:
            with self._lock:
                payload = self._encoder.encode(message)  # first: an error after one part would leave it half sent
                self._answers.send(member.name.encode(), _MORE)
                self._answers.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            self._lose(member, f"it has not taken {MOST_UNSENT} messages")
        except zmq.ZMQError as error:
            if connected:
                self._lose(member, f"it cannot be reached: {error}")
        else:
            return True
        return False

    def _lose(self, member: _Member, why: str) -> None:
        member.lost = why
        self._on_lost(member.name, why)
