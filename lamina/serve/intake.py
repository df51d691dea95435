"""What comes in: bodies within bounds of size, time and memory, and prompts in tokens, off the event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lamina.serve.errors import RETRY_AFTER_S, APIError

SMALL = 16 * 1024
"""Bodies up to so many bytes never wait for larger ones, nor count among the bytes under way."""

LEAST_LIMIT = 4 * 1024 * 1024
BYTES_PER_TOKEN = 16
LARGEST_AT_ONCE = 16

BODY_S = 30.0
LEAST_BYTES_PER_S = 16 * 1024


def body_limit(max_model_len: int) -> int:
    """Bytes that a body may have: the longest prompt fits, as text (about 4 bytes a token) or token ids (7), twice."""
    return max(LEAST_LIMIT, BYTES_PER_TOKEN * max_model_len)


class BoundedBodies:
    """ASGI middleware: refuses bodies that are too large (413), come too slowly (408), or are too many at once (429).

    A request counts until it is answered, because its prompt is kept so long: ``LARGEST_AT_ONCE`` of the largest fit,
    and any number of small ones. A body is refused before it is read, or as soon as a chunked one has grown too far.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self.limit = limit
        self.most = LARGEST_AT_ONCE * limit
        self.under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with a bounded ``receive``."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(self, receive, dict(scope["headers"]).get(b"content-length"))
        try:
            await self._app(scope, body.receive, send)
        finally:
            self.under_way -= body.counted


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
                f"{self._size} bytes of the body came within {due - self._begun:.0f} s; send at least "
                f"{LEAST_BYTES_PER_S} bytes a second, or a smaller body",
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
                f"the body has {size} bytes or more; this server takes at most {self._bounds.limit}. Send fewer or "
                f"shorter prompts",
                code="body_too_large",
            )

    def _count(self) -> None:
        """Count what has come as under way; what is only announced may never come."""
        more = self._size - self.counted if self._size > SMALL else 0
        if self._bounds.under_way + more > self._bounds.most:
            raise APIError(
                429,
                f"requests under way have bodies of {self._bounds.under_way} bytes together, the most is "
                f"{self._bounds.most}; try again later",
                code="overloaded",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self._bounds.under_way += more
        self.counted += more


T = TypeVar("T")


class Intake:
    """Threads that decode bodies and tokenise: one for large ones in turn, so that what this takes of memory and of
    Python's lock stays that of one, and others for small ones, which never wait behind a large one."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(2, thread_name_prefix="lamina-small")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="lamina-large")

    async def take(self, request: Request, function: Callable[[bytes], T]) -> T:
        """``function`` of the body, in a thread. Raises ClientDisconnect as soon as the client leaves."""
        if not _is_json(request.headers.get("content-type", "")):
            raise APIError(400, "the body must be a JSON object, sent with Content-Type: application/json")
        body = await request.body()
        executor = self._small if len(body) <= SMALL else self._large
        work = asyncio.get_running_loop().run_in_executor(executor, function, body)
        del body
        return await unless_gone(request, work)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What ``work`` gives; if the client leaves first, it is cancelled and ClientDisconnect is raised."""
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
