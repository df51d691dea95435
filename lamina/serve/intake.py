"""Receives request bodies within limits on size, time and memory, and decodes them off the event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lamina.serve.http_errors import RETRY_AFTER_S, APIError

SMALL = 16 * 1024
"""Bodies up to this many bytes never wait for larger ones and do not count towards the bytes in progress."""

LEAST_LIMIT = 4 * 1024 * 1024
BYTES_PER_TOKEN = 16
LARGEST_AT_ONCE = 16

BODY_S = 30.0
LEAST_BYTES_PER_S = 16 * 1024


def body_limit(max_model_len: int) -> int:
    """Return the largest body in bytes: twice the longest prompt, as text (about 4 bytes a token) or token ids (7)."""
    return max(LEAST_LIMIT, BYTES_PER_TOKEN * max_model_len)


class BoundedBodies:
    """ASGI middleware: rejects bodies that are too large (413), arrive too slowly (408), or are too many at once (429).

    A body counts until its request is answered, because the prompt is kept until then: ``LARGEST_AT_ONCE`` of the
    largest fit, and any number of small ones. A body is rejected before it is read, or as soon as a chunked one
    exceeds the limit.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self.limit = limit
        self.most = LARGEST_AT_ONCE * limit
        self.in_progress = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(self, receive, dict(scope["headers"]).get(b"content-length"))
        try:
            await self._app(scope, body.receive, send)
        finally:
            self.in_progress -= body.counted


class _Body:
    def __init__(self, bounds: BoundedBodies, receive: Receive, announced: bytes | None) -> None:
        self._bounds = bounds
        self._receive = receive
        self._announced = int(announced or 0)
        self._size = 0
        self._complete = False
        self._begun = asyncio.get_running_loop().time()
        self.counted = 0

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        self._require_fit(self._announced)
        due = self._begun + BODY_S + self._size / LEAST_BYTES_PER_S
        try:
            async with asyncio.timeout_at(due):
                message = await self._receive()
        except TimeoutError:
            raise APIError(
                408,
                f"only {self._size} bytes of the body arrived within {due - self._begun:.0f} s; send at least "
                f"{LEAST_BYTES_PER_S} bytes per second, or a smaller body",
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None
        self._size += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        self._require_fit(self._size)
        self._count()
        return message

    def _require_fit(self, size: int) -> None:
        if size > self._bounds.limit:
            raise APIError(
                413,
                f"the body has at least {size} bytes; this server accepts at most {self._bounds.limit}. Send fewer or "
                f"shorter prompts",
                code="body_too_large",
            )

    def _count(self) -> None:
        """Count received bytes as in progress; bytes that are only announced may never come."""
        more = self._size - self.counted if self._size > SMALL else 0
        if self._bounds.in_progress + more > self._bounds.most:
            raise APIError(
                429,
                f"requests in progress have bodies of {self._bounds.in_progress} bytes together; the limit is "
                f"{self._bounds.most}. Try again later",
                code="overloaded",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self._bounds.in_progress += more
        self.counted += more


T = TypeVar("T")


class Intake:
    """Threads that decode bodies and tokenise prompts.

    A single thread takes the large bodies, one after another, so that they need the memory and the GIL of only one;
    other threads take small ones, which therefore never wait behind a large one.
    """

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(2, thread_name_prefix="lamina-small")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="lamina-large")

    async def decode_in_thread(self, request: Request, function: Callable[[bytes], T]) -> T:
        """Apply ``function`` to the body in a thread. Raises ClientDisconnect as soon as the client leaves."""
        if not _is_json(request.headers.get("content-type", "")):
            raise APIError(400, "the body must be a JSON object, sent with Content-Type: application/json")
        body = await request.body()
        executor = self._small if len(body) <= SMALL else self._large
        work = asyncio.get_running_loop().run_in_executor(executor, function, body)
        del body
        return await unless_disconnected(request, work)


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
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
