"""Gives each request an id, logs one line per request at level INFO, and limits log lines that clients can trigger."""

import logging
import re
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

REPEAT_S = 10.0

REQUEST_ID = b"x-request-id"
request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""The id of the request that the current task answers."""


class RequestLog:
    """ASGI middleware: returns ``X-Request-Id``, the client's or a new one, and logs each request.

    The line has method, path, status, time, the id and, for a generation, tokens and finish reasons. It is written when
    the answer has been sent or the client has left, if ``always``, or LAMINA_LOG_LEVEL is INFO.
    """

    def __init__(self, app: ASGIApp, always: bool = False) -> None:
        self._app = app
        if always:
            logger.setLevel(logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        given = dict(scope["headers"]).get(REQUEST_ID, b"")
        own = given if re.fullmatch(rb"[!-~]{1,128}", given) else uuid.uuid4().hex.encode()
        request_id.set(own.decode())
        status = 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (REQUEST_ID, own)]}
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            if logger.isEnabledFor(logging.INFO):
                _log(scope, status, time.perf_counter() - begun)


def _log(scope: Scope, status: int, seconds: float) -> None:
    generation = scope.get("state", {}).get("generation")
    host, port = scope.get("client") or ("-", 0)
    path = scope["raw_path"].decode("ascii", "backslashreplace")
    said = "" if generation is None else generation.usage.figures()
    fields = {
        "client": f"{host}:{port}",
        "method": scope["method"],
        "path": path,
        "status": status,
        "seconds": round(seconds, 6),
        "figures": said,
        "request_id": request_id.get(),
    }
    logger.info(
        "%s:%d %s %s %s in %.3f s%s [%s]",
        host,
        port,
        scope["method"],
        path,
        status or "unanswered",
        seconds,
        f": {said}" if said else "",
        request_id.get(),
        extra={"fields": fields},
    )


class OncePer(logging.Filter):
    """Passes one line of each kind (format string) per ``seconds``, with the number suppressed before it."""

    def __init__(self, seconds: float = REPEAT_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._clock = clock
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a line that follows another of its kind too soon."""
        kind, now = str(record.msg), self._clock()
        if now - self._last.get(kind, -self._seconds) < self._seconds:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._last[kind] = now
        if count := self._left_out.pop(kind, 0):
            record.msg, record.args = f"{record.getMessage()} ({count} more such lines suppressed)", ()
        return True
