"""From the engine's callbacks to iterators: the requests of one caller, submitted and cancelled together.

A reader always gets the newest output of each request. Outputs are cumulative, so a slow reader skips states and
never makes the engine wait or memory grow.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Self

from lamina.engine.engine import Engine
from lamina.engine.prompts import Prompt
from lamina.errors import EngineDeadError
from lamina.types import Client, RequestOutput, SamplingParams

Update = tuple[int, RequestOutput]
"""(index of the prompt, its newest output)."""

WATCH_S = 10.0
"""A reader that has heard nothing for so long asks whether the engine is still alive."""


class _Requests:
    """Requests submitted together, with the newest unread output of each. ``notify`` runs on the engine's thread.

    Those of one call are one client's, unless it is said whose they are.
    """

    def __init__(
        self, engine: Engine, request_id: str, notify: Callable[[], None], client: Client | None = None
    ) -> None:
        self._engine = engine
        self._request_id = request_id
        self._client = client or Client(request_id, request_id)
        self._notify = notify
        self._lock = threading.Lock()
        self._unread: dict[int, RequestOutput] = {}
        self._running: set[int] = set()  # submitted, and not known to have ended
        self._aborted = False

    def submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
        """Submit all of them, or raise and leave none behind."""
        try:
            for index, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
                with self._lock:
                    if self._aborted:
                        return
                    self._running.add(index)
                try:
                    self._engine.submit(self._name(index), prompt, chosen, self._receiver(index), self._client)
                except BaseException:
                    self._running.discard(index)
                    raise
                if self._aborted:  # while it was being submitted: abort() may have come too early for this one
                    self._engine.abort(self._name(index))
        except BaseException:
            self.abort()
            raise

    def take(self) -> list[Update]:
        """The newest unread outputs, in prompt order; they count as read."""
        with self._lock:
            unread, self._unread = self._unread, {}
            self._running.difference_update(index for index, output in unread.items() if output.finished)
        return sorted(unread.items())

    @property
    def done(self) -> bool:
        """True once every final output has been read."""
        return not self._running

    def abort(self) -> None:
        """Cancel what has not ended. Idempotent, thread-safe."""
        with self._lock:
            self._aborted = True
            running = sorted(self._running)
        for index in running:
            self._engine.abort(self._name(index))

    def check_alive(self) -> None:
        """Raise EngineDeadError if no more outputs can come."""
        reason = self._engine.stats().dead
        if reason is not None:
            raise EngineDeadError(reason)

    def _name(self, index: int) -> str:
        return f"{self._request_id}-{index}"

    def _receiver(self, index: int) -> Callable[[RequestOutput], None]:
        def receive(output: RequestOutput) -> None:
            with self._lock:
                self._unread[index] = output
            self._notify()

        return receive


class Outputs(Iterator[Update]):
    """Iterator over the updates of several prompts; ends when all have ended. Closing it cancels the rest.

    Raises:
        RequestError: a prompt cannot be served; none is left running.
        EngineDeadError: the engine has stopped.
    """

    def __init__(
        self, engine: Engine, request_id: str, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
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
            self._ready = self._requests.take()[::-1]
        return self._ready.pop()

    def close(self) -> None:
        """Cancel every request that has not ended. Idempotent."""
        self._requests.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncOutputs(AsyncIterator[Update]):
    """The same for an event loop; made by ``await AsyncOutputs.submit(...)``, read in the loop that made it."""

    def __init__(self, engine: Engine, request_id: str, client: Client | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._ready: list[Update] = []
        self._requests = _Requests(engine, request_id, self._wake, client)

    @classmethod
    async def submit(
        cls,
        engine: Engine,
        request_id: str,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        client: Client | None = None,
    ) -> Self:
        """Submit all prompts, off the event loop because a long text takes its time to tokenise."""
        outputs = cls(engine, request_id, client)
        try:
            await asyncio.to_thread(outputs._requests.submit, prompts, params)
        except asyncio.CancelledError:
            outputs.close()
            raise
        return outputs

    async def __anext__(self) -> Update:
        while not self._ready:
            if self._requests.done:
                raise StopAsyncIteration
            try:
                async with asyncio.timeout(WATCH_S):  # wait_for of Python 3.11 can swallow a cancellation
                    await self._arrived.wait()
            except TimeoutError:
                self._requests.check_alive()
            self._arrived.clear()
            self._ready = self._requests.take()[::-1]
        return self._ready.pop()

    def close(self) -> None:
        """Cancel every request that has not ended. Idempotent."""
        self._requests.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:  # the loop is closed: nobody is left to read
            self._requests.abort()
