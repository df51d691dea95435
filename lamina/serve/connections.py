"""Limits on HTTP connections: their number, the time to send a request, and what happens when files run out.

uvicorn and asyncio have no such limits: a client that sends nothing, or half a header, keeps its connection for ever,
and when file descriptors run out asyncio retries accepting as fast as it can, logging a line each time.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import resource
import socket
import ssl
import sys
import uuid
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from lamina.core.errors import ConfigError
from lamina.serve.http_errors import APIError
from lamina.serve.request_log import REQUEST_ID

logger = logging.getLogger(__name__)

HEADER_S = 10.0
"""Time to receive a whole header, from the start of a connection or the first byte of a request."""

DRAIN_S = 5.0
"""How long the rest of a body is read and discarded after its request has been answered."""

LEFT_S = 0.1
"""How often to check whether a client that has ended its side of a connection has left."""

MOST_CONNECTIONS = 4096
RESERVED_FILES = 64
"""File descriptors reserved for the workers' channels, logs and anything else opened while serving."""

LEAST_CONNECTIONS = 16
WAIT_S = 0.05

CONNECTION = "lamina.connection"
"""ASGI extension: the ``Connection``, if parts of an answer may be written to it directly."""

_OUT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def raise_file_limit() -> None:
    """Raise the soft limit on open files to the hard one, for this process and those it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it; the soft limit then stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit() -> int:
    """Return how many connections may be open at once, from the file descriptors that this process has left.

    Raises:
        ConfigError: fewer than ``LEAST_CONNECTIONS`` would be possible.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    used = len(os.listdir("/proc/self/fd"))
    left = soft - used - RESERVED_FILES
    if left < LEAST_CONNECTIONS:
        raise ConfigError(
            f"too few file descriptors for connections ({left}): the limit is {soft}, {used} are open and "
            f"{RESERVED_FILES} are reserved. Raise the limit: ulimit -n {used + RESERVED_FILES + MOST_CONNECTIONS}"
        )
    return min(left, MOST_CONNECTIONS)


class Connections:
    """The open connections, and which of them wait for a request, oldest first. For the event loop's thread only."""

    def __init__(self) -> None:
        self.open: set[Connection] = set()
        self._silent: dict[Connection, None] = {}  # waiting for their first request
        self._idle: dict[Connection, None] = {}  # waiting for another request

    def mark_waiting(self, connection: "Connection", *, answered: bool) -> None:
        """Record that a connection waits for a request; ``answered``: it has had one answered."""
        (self._idle if answered else self._silent)[connection] = None

    def mark_busy(self, connection: "Connection") -> None:
        """Record that a connection no longer waits for a request."""
        self._silent.pop(connection, None)
        self._idle.pop(connection, None)

    def close_one(self) -> bool:
        """Close the connection that has waited longest, one without any request first. Returns False if none waits."""
        for waiting in (self._silent, self._idle):
            for connection in waiting:
                self.mark_busy(connection)
                connection.transport.abort()
                return True
        return False


class StrictParser(h11.Connection):
    """Refuses requests whose end a proxy may see elsewhere than h11: what follows would be smuggled past the proxy."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Parse the next event. Raises RemoteProtocolError for a request that is malformed or ambiguous."""
        before = self.trailing_data[0]
        event = super().next_event()
        if isinstance(event, h11.Request | h11.EndOfMessage):
            framing = before[: len(before) - len(self.trailing_data[0])]
            if (fault := _ambiguity(event, framing)) is not None:
                raise h11.RemoteProtocolError(*fault)
        return event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        """Encode an event. Closes the connection after an answer to a client that still waits to send its body: it may
        send the next request instead."""
        if isinstance(event, h11.Response) and self.they_are_waiting_for_100_continue:
            headers = [*event.headers.raw_items(), (b"Connection", b"close")]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        return super().send(event)


def _ambiguity(event: h11.Request | h11.EndOfMessage, framing: bytes) -> tuple[str, int] | None:
    """Return why a header or trailer is refused, with the status, or None. ``framing``: its bytes (RFC 9112)."""
    if framing.count(b"\n") != framing.count(b"\r\n"):
        return "a line ends in LF without CR", 400
    if re.search(rb"\r\n[ \t]", framing):
        return "a header field is folded over several lines", 400
    return _ambiguous_length(event, framing) if isinstance(event, h11.Request) else None


def _ambiguous_length(event: h11.Request, framing: bytes) -> tuple[str, int] | None:
    names = [name for name, _ in event.headers]
    if event.http_version[:2] != b"1.":
        return f"HTTP/{event.http_version.decode()} is not supported; use HTTP/1.1", 505
    if b"transfer-encoding" in names and (b"content-length" in names or event.http_version == b"1.0"):
        return "Transfer-Encoding is not allowed with Content-Length, nor in HTTP/1.0", 400
    lengths = re.findall(rb"\r\ncontent-length:([^\r]*)", framing, re.IGNORECASE)  # h11 joins those that are equal
    if len(lengths) > 1 or b"," in b"".join(lengths):
        return "Content-Length is given more than once", 400
    return None


class Connection(H11Protocol):
    """A client's connection: uvicorn's, plus a deadline for sending a header, strict parsing, clients that end their
    side before the answer, and errors in OpenAI's form."""

    def __init__(self, connections: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StrictParser(h11.SERVER)
        self._app, self.app = self.app, self._answer
        self._connections = connections
        self._half_closed = False
        self._refused = False
        self._deadline: asyncio.TimerHandle | None = None
        self._phase: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline for the first request."""
        super().connection_made(transport)
        self._connections.open.add(self)
        self._connections.mark_waiting(self, answered=False)
        self._enter("header")

    def data_received(self, data: bytes) -> None:
        """Process received bytes. Those after the last request of a connection are ignored."""
        if self._refused or self.conn.their_state is h11.MUST_CLOSE:
            return
        super().data_received(data)
        self._update_phase()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open if an answer is due that has not begun: the client has ended its side, or has left.

        "100 Continue" tells which: a client that has left replies with a reset.
        """
        tls = self.scheme == "https"  # which has no half-closed connections
        if tls or self._refused or self.cycle is None or self.cycle.response_started or self.cycle.more_body:
            return False
        self._half_closed = True
        if self.conn.their_http_version != b"1.0":
            event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(event) or b"")
        self._enter("half-closed")
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._enter(None)
        self._connections.mark_busy(self)
        self._connections.open.discard(self)
        super().connection_lost(exc)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_if_there(message: Any) -> None:
            if self.transport.is_closing():
                await asyncio.sleep(0)  # uvicorn hears that the client has left, and drops the message
            await send(message)

        chunked = scope["method"] != "HEAD" and self.conn.their_http_version == b"1.1"
        scope["extensions"] = {CONNECTION: self} if chunked else {}
        await self._app(scope, receive, send_if_there)

    @property
    def may_write(self) -> bool:
        """Whether the client is there, and reads fast enough."""
        here = self.cycle is not None and not self.cycle.disconnected and not self.transport.is_closing()
        return here and not self.flow.write_paused

    def write_chunk(self, data: bytes) -> None:
        """Write a part, not empty, of an answer without Content-Length that has begun, past middleware and h11."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def on_response_complete(self) -> None:
        """After an answer: wait for the next request, or discard the rest of the body."""
        super().on_response_complete()
        self._update_phase()
        if self.conn.their_state is h11.IDLE and self._half_closed:
            self.transport.close()
        elif self.conn.their_state is h11.IDLE and self._phase is None:
            self._connections.mark_waiting(self, answered=True)

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed header, described by the exception being handled, and close."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(
                status,
                f"this is not an HTTP request: {error}" if status != 431 else f"the header is too large: {error}",
            )
        else:
            self.transport.close()

    def _update_phase(self) -> None:
        """Set the deadline for what the client must send next, from the state of the HTTP exchange."""
        if self._refused:
            return
        theirs = self.conn.their_state
        if theirs is h11.IDLE:
            # In "drain", uvicorn's own timer no longer runs.
            begun = bool(self.conn.trailing_data[0]) or self._phase == "drain"
            if self._phase != "header":
                self._enter("header" if begun else None)
        elif theirs is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete:
            if self._phase != "drain":
                self._enter("drain")
        else:
            self._connections.mark_busy(self)
            self._enter("half-closed" if self._half_closed else None)

    def _enter(self, phase: str | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._phase = phase
        if phase is not None:
            self._deadline = self.loop.call_later(_phase_s(phase), self._too_late)

    def _too_late(self) -> None:
        if self.transport.is_closing():
            return
        if self._phase == "half-closed":
            if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.transport.abort()
            else:
                self._enter("half-closed")
        elif self._phase == "header" and self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
            self._refuse(408, f"no complete header within {HEADER_S:.0f} s; send it faster")
        else:
            self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps(APIError(status, message).body()).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((REQUEST_ID, uuid.uuid4().hex.encode()))
        headers.append((b"content-length", str(len(body)).encode()))
        response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._refused = True
        if self.cycle is not None:
            self.cycle.disconnected = True  # the request whose body is malformed gets no other answer
            self.cycle.message_event.set()
        self._enter("drain")  # closing with unread bytes would reset the connection, and the answer would be lost
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()


def _phase_s(phase: str) -> float:
    """Return how long a phase may last; "half-closed" is checked and entered again."""
    return {"header": HEADER_S, "drain": DRAIN_S}.get(phase, LEFT_S)


async def accept(
    listener: socket.socket,
    make: Callable[[], Connection],
    connections: Connections,
    most: int,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Accept connections until cancelled. ``tls``: the context of the server's certificate, if it has one.

    At ``most`` connections, the one that has waited longest for a request is closed to make room; while all are busy,
    new ones wait in the kernel's queue.
    """
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    handshakes: set[asyncio.Task[None]] = set()
    while True:
        try:
            accepted, _ = await loop.sock_accept(listener)
        except OSError as error:
            if error.errno in _OUT_OF_FILES:
                logger.warning("cannot accept a connection: %s; closing idle ones to make room", error.strerror)
                connections.close_one()
                await asyncio.sleep(WAIT_S)
            continue  # otherwise the client left before it was accepted
        while len(connections.open) + len(handshakes) >= most:
            if connections.close_one():
                await asyncio.sleep(0)  # connection_lost runs in the next iteration of the event loop
            else:
                logger.warning("all %d connections are busy; new ones wait", most)
                await asyncio.sleep(WAIT_S)
        if tls is None:
            await _connect(accepted, make, None)
        else:  # clients take as long for a handshake as they like
            task = asyncio.create_task(_connect(accepted, make, tls))
            handshakes.add(task)
            task.add_done_callback(handshakes.discard)


async def _connect(accepted: socket.socket, make: Callable[[], Connection], tls: ssl.SSLContext | None) -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(
            make, accepted, ssl=tls, ssl_handshake_timeout=None if tls is None else HEADER_S
        )
    except (OSError, TimeoutError):  # also of the handshake
        accepted.close()  # its client has left
