"""Defines the engine's interface for callers (``Runtime``), and iterators over the updates of their requests."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, Self

from lamina.control.timeline import Span
from lamina.core.errors import EngineDeadError, OverloadedError
from lamina.core.sampling import SamplingParams
from lamina.core.types import Client
from lamina.engine.lives import Life
from lamina.engine.stats import EngineStats
from lamina.engine.updates import OnUpdate, RequestUpdate
from lamina.models.directory import Defaults
from lamina.text.prompts import Prompt
from lamina.text.tokenizer import Tokenizer


class Submission(NamedTuple):
    """A request to queue. ``on_update`` is called with every update."""

    request_id: str
    prompt: str | list[int]
    params: SamplingParams
    on_update: OnUpdate


class Runtime(Protocol):
    """Interface of an engine: ``engine.Engine`` in the same process, ``remote_engine.RemoteEngine`` in a frontend.

    Attributes:
        model_name: The model's name for clients.
        model_aliases: Further names that clients may use.
        vocab_size: Token ids of prompts must be below it.
    """

    model_name: str
    model_aliases: tuple[str, ...]
    vocab_size: int
    tokenizer: Tokenizer
    max_model_len: int
    sampling_defaults: Defaults

    @property
    def dead(self) -> str | None:
        """Why the engine has stopped; None while it runs."""
        ...

    def submit_all(self, submissions: Sequence[Submission], client: Client) -> None:
        """Queue all requests or none. May block. Raises RequestError, OverloadedError, EngineDeadError."""
        ...

    def abort(self, request_id: str) -> None:
        """Cancel a request, which keeps the tokens it has. Does nothing if it is unknown or has ended."""
        ...

    def stats(self) -> EngineStats:
        """Return current statistics. May block."""
        ...

    def timeline(self) -> dict[str, list[Span]]:
        """Return workers' recent spans by name; see ``engine.Engine.timeline``. May block."""
        ...

    def lives(self) -> list[Life]:
        """Return what has happened to the newest requests; see ``engine.Engine.lives``. May block."""
        ...

    def scale(self, *, compute: int | str = 0, memory: int | str = 0, prefill: int | str = 0) -> Future[list[str]]:
        """Add workers to the pools, or remove some; see ``engine.Engine.scale``."""
        ...

    def close(self) -> None:
        """End all requests with an error."""
        ...


Update = tuple[int, RequestUpdate]
"""(index of the prompt, its update)."""

WATCH_S = 10.0
"""A reader without updates for this long checks that the engine is alive."""


class _Requests:
    """Requests submitted together, with the unread updates of each.

    ``notify`` is called on the engine's thread after every update. Without ``client``, the requests count as one client
    of their own. If more than ``most_unread`` tokens are unread, the requests are cancelled and ``pop_unread`` raises.
    """

    def __init__(
        self,
        engine: Runtime,
        request_id: str,
        notify: Callable[[], None],
        client: Client | None = None,
        most_unread: int | None = None,
    ) -> None:
        self._engine = engine
        self._request_id = request_id
        self._client = client or Client(request_id, request_id)
        self._notify = notify
        self._lock = threading.Lock()
        self._most_unread = most_unread
        self._unread: dict[int, RequestUpdate] = {}
        self._unread_tokens = 0
        self._overrun: str | None = None
        self._running: set[int] = set()  # submitted, without a final update that was read
        self._aborted = False

    def submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        """Submit all requests; if one is rejected, raise and submit none."""
        submissions = [
            Submission(self._name(index), prompt, chosen, self._receiver(index))
            for index, (prompt, chosen) in enumerate(zip(prompts, params, strict=True))
        ]
        with self._lock:
            if self._aborted:
                return
            self._running.update(range(len(submissions)))
        try:
            self._engine.submit_all(submissions, self._client)
        except BaseException:
            self._running.clear()
            raise
        if self._aborted:  # abort() was called during the submission
            self.abort()

    def pop_unread(self) -> list[Update]:
        """Remove and return the unread updates, in prompt order. Raises OverloadedError if there were too many."""
        with self._lock:
            if self._overrun is not None:
                raise OverloadedError(self._overrun)
            return self._pop()

    def pop_middle(self, most: int) -> list[Update]:
        """Remove and return the unread updates if none ends its request and they have at most ``most`` positions."""
        with self._lock:
            unread = self._unread.values()
            ends = self._overrun is not None or any([one.finished or one.error is not None for one in unread])
            return [] if ends or sum([one.positions for one in unread]) > most else self._pop()

    def _pop(self) -> list[Update]:
        """Remove and return the unread updates, in prompt order. The caller holds the lock."""
        unread, self._unread, self._unread_tokens = self._unread, {}, 0
        for index, update in unread.items():
            if update.finished:
                self._running.discard(index)
        return sorted(unread.items(), key=lambda item: item[0])

    @property
    def done(self) -> bool:
        """Whether every final update has been read."""
        return not self._running

    def abort(self) -> None:
        """Cancel the requests that have not ended. Idempotent, thread-safe."""
        with self._lock:
            self._aborted = True
            running = sorted(self._running)
        for index in running:
            self._engine.abort(self._name(index))

    def check_alive(self) -> None:
        """Raise EngineDeadError if the engine has stopped."""
        reason = self._engine.dead
        if reason is not None:
            raise EngineDeadError(reason)

    def _name(self, index: int) -> str:
        return f"{self._request_id}-{index}"

    def _receiver(self, index: int) -> Callable[[RequestUpdate], None]:
        def receive(update: RequestUpdate) -> None:
            with self._lock:
                if self._overrun is not None:
                    return
                if index in self._unread:
                    self._unread[index].extend(update)
                else:
                    self._unread[index] = update
                self._unread_tokens += update.tokens
                if self._most_unread is not None and self._unread_tokens > self._most_unread:
                    self._overrun = (
                        f"the answer was read too slowly: {self._unread_tokens} tokens of it were waiting, and at most "
                        f"{self._most_unread} are kept. Read faster, or request less at once"
                    )
                    self._unread.clear()
            if self._overrun is not None:
                self.abort()
            self._notify()

        return receive


class Outputs(Iterator[Update]):
    """Iterator over the updates of several prompts. It ends when all requests have; closing it cancels the rest.

    Raises:
        RequestError: A prompt cannot be served; no request is left running.
        EngineDeadError: The engine has stopped.
    """

    def __init__(
        self, engine: Runtime, request_id: str, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> None:
        self._arrived = threading.Event()
        self._ready: list[Update] = []
        self._requests = _Requests(engine, request_id, self._arrived.set)
        self._requests.submit(prompts, params)

    def __next__(self) -> Update:
        while not self._ready:
            if self._requests.done:
                raise StopIteration
            if not self._arrived.wait(WATCH_S):
                self._requests.check_alive()
            self._arrived.clear()
            self._ready = self._requests.pop_unread()[::-1]
        return self._ready.pop()

    def close(self) -> None:
        """Cancel every request that has not ended. Idempotent."""
        self._requests.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncOutputs(AsyncIterator[Update]):
    """Asynchronous iterator over updates, made by ``await AsyncOutputs.submit(...)`` and read in that event loop.

    Attributes:
        push: Called in the event loop when there are unread updates, while a reader waits for them. It may handle what
            ``pop_middle`` returns; if it returns False, the reader gets the updates.

    Raises:
        OverloadedError: More than ``most_unread`` tokens were unread; the requests are cancelled.
    """

    def __init__(
        self, engine: Runtime, request_id: str, client: Client | None = None, most_unread: int | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._arrived = asyncio.Event()
        self._timer = self._loop.call_later(WATCH_S, self._watch)
        self._ready: list[Update] = []
        self.push: Callable[[], bool] = lambda: False
        self._waits = False
        self._failure: Exception | None = None  # what ``push`` raised
        self._requests = _Requests(engine, request_id, self._wake, client, most_unread)
        self.pop_middle = self._requests.pop_middle

    @classmethod
    async def submit(
        cls,
        engine: Runtime,
        request_id: str,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        client: Client | None = None,
        most_unread: int | None = None,
    ) -> Self:
        """Submit all prompts in a thread, since tokenizing a long text takes time."""
        outputs = cls(engine, request_id, client, most_unread)
        try:
            await asyncio.to_thread(outputs._requests.submit, prompts, params)
        except BaseException:  # cancellation too
            outputs.close()
            raise
        return outputs

    async def __anext__(self) -> Update:
        while not self._ready:
            if self._requests.done:
                raise StopAsyncIteration
            if self._arrived.is_set():
                await asyncio.sleep(0)  # a stream that never waits must let others run
            self._waits = True
            try:
                await self._arrived.wait()
            finally:
                self._waits = False
            self._arrived.clear()
            if self._failure is not None:
                raise self._failure
            self._ready = self._requests.pop_unread()[::-1]
            if not self._ready:
                self._requests.check_alive()
        return self._ready.pop()

    def close(self) -> None:
        """Cancel every request that has not ended. Idempotent."""
        self._timer.cancel()
        self._requests.abort()

    def _watch(self) -> None:
        """Wake the reader periodically, so that it notices a stopped engine."""
        self._arrived.set()
        self._timer = self._loop.call_later(WATCH_S, self._watch)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        if threading.get_ident() == self._thread:
            if not self._waits or not self._pushed():
                self._arrived.set()
            return
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:  # the loop is closed: there is no reader
            self._requests.abort()

    def _pushed(self) -> bool:
        try:
            return self.push()
        except Exception as error:  # the reader raises it
            self._failure = error
            return False
