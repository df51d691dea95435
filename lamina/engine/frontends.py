"""The engine's end of its frontends: takes their requests, and answers all of a frontend's with one message a turn.

The sockets are in a folder that only this user may enter. A thread reads what frontends send; the engine's own thread
sends what it has drawn. The number of messages that a frontend has not taken is bounded: one that is suspended must not
fill the engine's memory.
"""

import logging
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from lamina.engine.engine import Engine
from lamina.engine.stats import StatsOf
from lamina.engine.updates import OnTokens, TokenUpdate
from lamina.errors import LaminaError, TransportError
from lamina.protocol.frontends import (
    Abort,
    Answers,
    Finish,
    FromFrontend,
    FrontendBootstrap,
    GetStats,
    Hello,
    Ready,
    RequestTokens,
    Scale,
    Scaled,
    Stopped,
    Submit,
    Submitted,
    Welcome,
    unpacked,
)

log = logging.getLogger(__name__)

MOST_UNSENT = 16384  # messages, one a turn, that a frontend has not taken
MOST_AT_ONCE = 64  # prompts of one message queued before other messages are looked at: a millisecond or two
POLL_MS = 100
CLOSE_TIMEOUT_S = 5.0


@dataclass(eq=False)
class _Member:
    """One frontend process.

    Attributes:
        heard: messages that have come from it.
        running: its requests that have not ended, by its own numbers.
        news: of this turn, written by the engine's thread alone.
        lost: why it can no longer be answered, if so.
    """

    name: str
    heard: int = 0
    ready: bool = False
    running: set[int] = field(default_factory=set)
    news: list[RequestTokens] = field(default_factory=list)
    lost: str | None = None

    def request_id(self, number: int) -> str:
        """The engine's name of its request."""
        return f"{self.name}-{number}"


@dataclass(eq=False)
class _Submission:
    """A ``Submit`` of which the first ``queued`` prompts are in the engine.

    Attributes:
        aborted: numbers of requests to end as soon as they are in the engine.
    """

    member: _Member
    message: Submit
    queued: int = 0
    aborted: set[int] = field(default_factory=set)

    @property
    def numbers(self) -> range:
        """Of its requests, in order."""
        return range(self.message.first, self.message.first + len(self.message.prompts))


class Frontends:
    """Frontends that have joined. ``join``, ``leave`` and the properties may be used by any thread."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        """Listen in ``folder``. Raises TransportError if that fails."""
        self._engine = engine
        self._members: dict[str, _Member] = {}
        self._submissions: deque[_Submission] = deque()  # of the thread that reads
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
                raise TransportError(f"frontends cannot be reached at {address}: {error}; set TMPDIR") from error
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()  # guards _answers and _encoder
        self._closed = threading.Event()
        self._told_of_death = False
        self._thread = threading.Thread(target=self._run, name="lamina-frontends", daemon=True)
        self._thread.start()
        engine.after_turn = self._flush

    def join(self, name: str, engine_pid: int) -> FrontendBootstrap:
        """Expect a frontend: what its process has to know."""
        self._members[name] = _Member(name)
        engine = self._engine
        return FrontendBootstrap(
            name,
            *self._addresses,
            engine_pid,
            engine.model_name,
            engine.max_model_len,
            engine.default_max_tokens,
            engine.vocab_size,
        )

    def leave(self, name: str) -> None:
        """A frontend's process has ended: cancel its requests."""
        member = self._members.pop(name)
        member.lost = "its process has ended"
        for number in list(member.running):
            self._engine.abort(member.request_id(number))

    def ready(self, name: str) -> bool:
        """Whether a frontend accepts connections."""
        return self._members[name].ready

    def heard(self, name: str) -> int:
        """How many messages have come from a frontend: one every ``ALIVE_S`` at least, while its event loop runs."""
        return self._members[name].heard

    def lost(self, name: str) -> str | None:
        """Why a frontend can no longer be answered, if so."""
        return self._members[name].lost

    def close(self) -> None:
        """Close the sockets. The engine must have stopped, or have no requests of frontends."""
        self._engine.after_turn = _nothing
        self._closed.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        with self._lock:
            self._context.destroy(linger=0)

    # -- the thread that reads -------------------------------------------------------------------------------------

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromFrontend)
        while not self._closed.is_set():
            if self._requests.poll(0 if self._submissions else POLL_MS):
                self._receive(decoder)
            if self._submissions:
                # In turns: a message with one prompt must not wait for one with thousands.
                submission = self._submissions.popleft()
                if not self._submit(submission):
                    self._submissions.append(submission)

    def _receive(self, decoder: msgspec.msgpack.Decoder[FromFrontend]) -> None:
        identity, payload = self._requests.recv_multipart()
        member = self._members.get(identity.decode())
        if member is None:
            return  # it has left
        member.heard += 1
        try:
            self._take(member, decoder.decode(payload))
        except msgspec.DecodeError as error:
            member.lost = f"it sent an invalid message: {error}"

    def _take(self, member: _Member, message: FromFrontend) -> None:
        if isinstance(message, Submit):
            self._submissions.append(_Submission(member, message))
        elif isinstance(message, Finish):
            self._engine.finish(member.request_id(message.request), message.index)
        elif isinstance(message, Abort):
            for number in message.requests:
                self._abort(member, number)
        elif isinstance(message, GetStats):
            self._send(member, StatsOf(message.number, self._engine.stats()))
        elif isinstance(message, Scale):
            self._scale(member, message)
        elif isinstance(message, Hello):
            self._send(member, Welcome(), connected=False)
        elif isinstance(message, Ready):
            member.ready = True

    def _scale(self, member: _Member, message: Scale) -> None:
        def done(future: Future[list[str]]) -> None:
            error = future.exception()
            if error is None:
                self._send(member, Scaled(message.number, future.result()))
            else:
                self._send(member, Scaled(message.number, [], type(error).__name__, str(error)))

        try:
            future = self._engine.scale(compute=message.compute, memory=message.memory)
        except LaminaError as error:
            self._send(member, Scaled(message.number, [], type(error).__name__, str(error)))
        else:
            future.add_done_callback(done)

    def _submit(self, submission: _Submission) -> bool:
        """Queue the next prompts; True once all are queued, or none because one was refused."""
        member, message = submission.member, submission.message
        begin, end = submission.queued, min(submission.queued + MOST_AT_ONCE, len(message.prompts))
        try:
            for place in range(begin, end):
                number = submission.numbers[place]
                params = message.params[place if len(message.params) > 1 else 0]
                member.running.add(number)
                self._engine.submit_tokens(
                    member.request_id(number),
                    unpacked(message.prompts[place]),
                    params,
                    self._receiver(member, number),
                    message.client,
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
        if member.lost is not None:  # meanwhile
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
        """Send everything new of this turn."""
        for member in list(self._members.values()):
            if member.news:
                news, member.news = member.news, []
                self._send(member, Answers(news))
        if (reason := self._engine.dead) is not None and not self._told_of_death:
            self._told_of_death = True
            for member in list(self._members.values()):
                self._send(member, Stopped(reason))

    # -- both ------------------------------------------------------------------------------------------------------

    def _send(self, member: _Member, message: msgspec.Struct, connected: bool = True) -> None:
        """Send if the frontend takes messages, else note that it is lost. ``connected``: it must be connected."""
        if member.lost is not None:
            return
        try:
            with self._lock:
                self._answers.send_multipart([member.name.encode(), self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            member.lost = f"it has not taken {MOST_UNSENT} messages"
        except zmq.ZMQError as error:
            if connected:
                member.lost = f"it cannot be reached: {error}"


def _nothing() -> None:
    """Nobody is left to be told."""
