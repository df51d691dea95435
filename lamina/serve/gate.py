"""Decides which requests reach the application: by key, limits of a client, time, and the size of bodies."""

import asyncio
import contextlib
import hashlib
import hmac
import math
import ssl
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lamina.config.environment import environment
from lamina.config.server_config import ServerConfig
from lamina.core.errors import ConfigError
from lamina.serve.http_errors import RETRY_AFTER_S, APIError
from lamina.serve.json_fields import IGNORED_HEADER
from lamina.serve.messages_api import in_form_of
from lamina.serve.monitoring import EVENTS_PATH, FILES, LANES_PATH, STATE_PATH

OPEN = frozenset(("/health", "/ping", "/version", *FILES))
"""Paths that need no key: load balancers ask them, and pages hold nothing secret."""
MONITORING = frozenset(("/metrics", "/placement", "/load", STATE_PATH, LANES_PATH, EVENTS_PATH))
"""Paths that need ``LAMINA_METRICS_KEY`` if that is set, and no key otherwise."""
ADMIN = "/admin/"
"""Paths that check ``LAMINA_ADMIN_KEY`` themselves."""
GENERATING = "/v1/"
"""Limits and the timeout concern POST requests to paths that begin so."""

WINDOW_S = 60.0
MOST_CLIENTS = 10_000
"""Clients whose rate is remembered; beyond them, clients without a request in the last minute are forgotten."""


def api_keys(config: ServerConfig) -> list[str]:
    """Return the keys of clients, from the settings, their file and ``LAMINA_API_KEY``. Raises ConfigError."""
    keys = [*(config.api_key or "").split(","), *environment().api_key.split(",")]
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(
                f"cannot read api_key_file '{config.api_key_file}': {why}; give a file with a key on each line"
            ) from None
        keys += [line for line in lines if not line.startswith("#")]
    found = list(dict.fromkeys(stripped for key in keys if (stripped := key.strip())))
    if not found and (config.api_key is not None or config.api_key_file is not None):
        raise ConfigError("api_key and api_key_file hold no key; give one, or leave them out")
    return found


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the context of the server's certificate; None without one. Raises ConfigError if it cannot be used."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        files = f"ssl_certfile '{config.ssl_certfile}'"
        files += f" and ssl_keyfile '{config.ssl_keyfile}'" if config.ssl_keyfile is not None else ""
        raise ConfigError(
            f"{files} cannot be used: {error.strerror or error}; give a certificate and its key in PEM format"
        ) from None
    return context


def install(app: FastAPI, config: ServerConfig) -> None:
    """Add the gate to ``app`` and, outside it, answers to browsers that ask for the allowed origins, without a key."""
    app.add_middleware(Gate, config=config)
    if config.allowed_origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.strip() for origin in config.allowed_origins.split(",")],
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", IGNORED_HEADER, "Retry-After"],
        )


class Keys:
    """Checks clients' keys in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, key: bytes) -> bool:
        """Return whether ``key`` is one of the keys."""
        digest = hashlib.sha256(key).digest()
        return any([hmac.compare_digest(digest, each) for each in self._digests])  # a list: all are compared


class RateLimit:
    """Lets ``most`` requests of each client pass in a minute: at once, or spread over it. Pure: time is an argument."""

    def __init__(self, most: int) -> None:
        self._interval_s = WINDOW_S / most
        self._due: dict[str, float] = {}  # by client: when its requests so far no longer count

    def wait_s(self, client: str, now: float) -> float:
        """Count a request of ``client`` and return 0, or return for how long it must wait."""
        due = max(self._due.get(client, now), now)
        wait_s = due + self._interval_s - WINDOW_S - now
        if wait_s > 1e-9:
            return wait_s
        if len(self._due) >= MOST_CLIENTS:
            self._due = {name: at for name, at in self._due.items() if at > now}
        self._due[client] = due + self._interval_s
        return 0.0


class Gate:
    """ASGI middleware: answers requests without a key (401), beyond a client's limits (429) or its time (504)."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._root = config.root_path
        self._keys = Keys(api_keys(config))
        self._monitoring_keys = Keys([key] if (key := environment().metrics_key) else [])
        self._rate = RateLimit(config.requests_per_minute) if config.requests_per_minute else None
        self._most = config.concurrent_requests
        self._timeout_s = config.request_timeout
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"].removeprefix(self._root)
        scope["root_path"] = self._root  # by which the application finds its routes
        key = _key_of(scope)
        try:
            self._authorize(path, key)
            if scope["method"] != "POST" or not path.startswith(GENERATING):
                await self._app(scope, receive, send)
                return
            client = self._client(scope, key)
            with self._admitted(client):
                await self._in_time(path, scope, receive, send)
        except APIError as error:
            await in_form_of(path, error).response()(scope, receive, send)

    def _authorize(self, path: str, key: bytes) -> None:
        if path in OPEN or path.startswith(ADMIN):
            return
        keys, name = (self._monitoring_keys, "LAMINA_METRICS_KEY") if path in MONITORING else (self._keys, "API key")
        if keys and not keys.accepts(key):
            raise APIError(
                401,
                f"the key is missing or wrong; send the server's {name} as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _client(self, scope: Scope, key: bytes) -> str:
        host, _ = scope.get("client") or ("", 0)
        return hashlib.sha256(key).hexdigest() if self._keys else host

    @contextlib.contextmanager
    def _admitted(self, client: str) -> Iterator[None]:
        """Count a request of ``client`` while it runs. Raises APIError beyond a limit."""
        if self._most is not None and self._open[client] >= self._most:
            raise _too_many(f"{self._most} requests of this client are open, the most at once", RETRY_AFTER_S)
        if self._rate is not None:
            wait_s = self._rate.wait_s(client, asyncio.get_running_loop().time())
            if wait_s:
                raise _too_many("this client has sent its most requests in a minute", wait_s)
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]

    async def _in_time(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; after the timeout, cancel it and end its answer with an error."""
        begun: Message | None = None

        async def note(message: Message) -> None:
            nonlocal begun
            begun = message if message["type"] == "http.response.start" else begun
            await send(message)

        try:
            async with asyncio.timeout(self._timeout_s):
                await self._app(scope, receive, note)
        except TimeoutError:
            error = APIError(
                504, f"the request has taken {self._timeout_s} s, the most on this server", code="request_timeout"
            )
            if begun is None:
                raise error from None
            last = b""
            if b"event-stream" in _type_of(begun):
                last = scope["state"]["generation"].fail(error)
            await send({"type": "http.response.body", "body": last, "more_body": False})


def _too_many(why: str, wait_s: float) -> APIError:
    seconds = max(1, math.ceil(wait_s))
    return APIError(
        429, f"{why}; try again in {seconds} s", code="rate_limit_exceeded", headers={"Retry-After": str(seconds)}
    )


def _key_of(scope: Scope) -> bytes:
    """Return the key of a request: a bearer token, or Anthropic's ``x-api-key``."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    given = headers.get(b"authorization", b"")
    return given[7:] if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")


def _type_of(start: Message) -> bytes:
    return next((value for name, value in start.get("headers", ()) if name.lower() == b"content-type"), b"")


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

    A body counts until its request is answered, since the prompt occupies memory until then: ``LARGEST_AT_ONCE`` of the
    largest bodies fit, and any number of small ones. A body is rejected before it is read, or as soon as a chunked body
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
