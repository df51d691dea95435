"""The TCP transport between machines. Implements ``transport.base.Endpoint``.

Frames, streams and the wait are native (``native/transport/tcp.cpp``). This file makes and authenticates connections
(``transport.listener``), and reconnects when a connection is lost while the peer still runs.

The owner's thread receives, inside ``wait`` and whenever ``post`` finds the send window full; after
``receive_always``, another thread does so at all other times. The listener's thread accepts peers. ``post`` returns
once the kernel has the whole message.
"""

import enum
import hashlib
import hmac
import logging
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Unpack

from lamina._native import Connection, TcpSender, tls_obstacle
from lamina._native import TcpEndpoint as NativeEndpoint
from lamina.core.errors import PeerLostError, RefusedError, TransportError
from lamina.transport import listener
from lamina.transport.arena import OwnArena
from lamina.transport.base import Fetch, Part, Peer, Target, deadline_error
from lamina.transport.endpoint import ListeningEndpoint, ListeningOwn, Options
from lamina.transport.listener import HANDSHAKE_S, LOOPBACK, RETRY_S, Admit, SocketDescriptor

logger = logging.getLogger(__name__)

ATTEMPT_S = 1.0  # most time of one attempt to reconnect
MIN_ATTEMPT_S = 0.1  # least time of an attempt, even if a wait has none left

_REQUEST = struct.Struct("<QQB?")  # stream, identity of the sender, purpose, whether TLS follows
_ANSWER = struct.Struct("<Q")  # position in the stream of the next byte that the receiver needs


class _Purpose(enum.IntEnum):
    RESUMED_STREAM = 0
    STREAM = 1
    FETCHES = 2


class TcpPeer:
    """A connected remote arena."""

    def __init__(self, where: SocketDescriptor, stream: int, sender: TcpSender) -> None:
        self.name = where.name
        self.nbytes = where.nbytes
        self.doorbells = where.doorbells
        self.where = where
        self.stream = stream
        self.sender = sender
        self.broken_since: float | None = None
        self.lost = ""  # the reason; empty while the peer is connected


@dataclass(frozen=True)
class _Own(ListeningOwn):
    streams: NativeEndpoint

    def refuse(self, reason: str) -> None:
        """Count a stream that was closed for an invalid frame."""
        self.listener.refusals.record("FRAME", reason)


class TcpEndpoint(ListeningEndpoint[_Own, TcpPeer]):
    """One worker's end of the data plane over TCP. Without a host, it listens on the loopback address only.

    Bytes lost with a connection are sent again while this endpoint waits, or sends to the same peer. With ``tls``, all
    bytes after the handshake are encrypted with a key derived from the cluster secret, and peers without TLS are
    rejected.
    """

    transport = "tcp"

    def __init__(self, name: str, *, tls: bool = False, **options: Unpack[Options]) -> None:
        super().__init__(name, **options)
        self._opener = _Opener(hmac.digest(options["secret"], b"tls", hashlib.sha256) if tls else None)

    def connect(self, descriptor: bytes, timeout_s: float) -> TcpPeer:
        own = self._registered()
        where = listener.decode(descriptor, "tcp", SocketDescriptor)
        stream = secrets.randbits(64)
        request = _REQUEST.pack(stream, own.arena.identity, _Purpose.STREAM, self._opener.encrypts)
        opened = self._connect(where, request, timeout_s)
        peer = TcpPeer(where, stream, own.streams.connect(opened, where.identity, where.nbytes, where.doorbells))
        self._peers[id(peer)] = peer
        return peer

    def _connect(self, where: SocketDescriptor, request: bytes, timeout_s: float) -> Connection:
        deadline = time.monotonic() + timeout_s
        left_s = timeout_s
        while True:
            connection, _ = listener.connect(self.name, where, self._secret, request, left_s, self._silence_s)
            try:
                return self._opener.open(connection, listens=False, timeout_s=min(left_s, HANDSHAKE_S))
            except TransportError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(RETRY_S)
            left_s = max(deadline - time.monotonic(), 0.0)

    def disconnect(self, peer: Peer) -> None:
        known = self._connected(peer)
        self._registered().streams.disconnect(known.sender)
        del self._peers[id(known)]

    def disconnect_for_good(self, peer: Peer) -> None:
        known = self._connected(peer)
        self._registered().streams.cut(known.sender)  # drops bytes of its streams that have not been read
        del self._peers[id(known)]

    def write(self, peer: Peer, offset: int, data: Part) -> None:
        self._send(peer, self._registered().streams.write, offset, data)

    def ring(self, peer: Peer, doorbell: int, sequence: int) -> None:
        self._send(peer, self._registered().streams.ring, doorbell, sequence)

    def post(self, peer: Peer, offset: int, nbytes: int, parts: Sequence[Part], doorbell: int, sequence: int) -> None:
        self._send(peer, self._registered().streams.post, offset, nbytes, parts, doorbell, sequence)

    def _send(self, peer: Peer, call: Callable[..., None], *what: object) -> None:
        known = self._connected(peer)
        try:
            call(known.sender, *what, self._stall_s, self._reconnect)
        except TimeoutError:
            self._lose(known, f"it has accepted no bytes for {self._stall_s:g} s")
            raise PeerLostError(known.name, known.lost) from None

    def fetch(self, peer: Peer, fetch: Fetch) -> None:
        known = self._connected(peer)
        if known.lost:
            raise PeerLostError(known.name, known.lost)
        own = self._registered().streams
        own.fetch(known.sender, fetch.offset, fetch.nbytes, fetch.to, fetch.doorbell, fetch.sequence)

    def wait(self, targets: Sequence[Target], timeout_s: float) -> int:
        own = self._registered()
        try:
            return own.streams.wait(targets, timeout_s, self.spin_s, self._reconnect, own.refuse)
        except TimeoutError:
            reached = [own.arena.native.sequence(doorbell) for doorbell, _ in targets]
            raise deadline_error(self.name, targets, reached, timeout_s) from None

    def receive_always(self) -> None:
        """Receive in a thread too, whenever the owner's thread neither waits nor sends: it may wait for a device."""
        self._registered().streams.receive_always()

    def _open(self, arena: OwnArena) -> _Own:
        self._opener.require_tls()
        streams = NativeEndpoint(arena.native)
        try:
            admit = _admit_to(streams, self._opener)
            return _Own(arena, self._listen(arena, self._host or LOOPBACK, admit), streams)
        except TransportError:
            streams.close()
            raise

    def _leave(self, own: _Own) -> None:
        own.listener.close()
        own.streams.close()

    def _reconnect(self, sender: TcpSender, seconds: float) -> None:
        """Try once to make a missing connection. Raises PeerLostError once the peer counts as lost."""
        peer = next(peer for peer in self._peers.values() if peer.sender is sender)
        if peer.lost:
            raise PeerLostError(peer.name, peer.lost)
        if sender.is_lost:
            return self._lose(peer, "a message to it was cut short")
        now = time.monotonic()
        if peer.broken_since is None:
            peer.broken_since = now
            if sender.is_broken:
                logger.info("%s lost its connection to %s; trying again", self.name, peer.name)
        deadline = peer.broken_since + self._silence_s
        timeout_s = min(max(seconds, MIN_ATTEMPT_S), ATTEMPT_S, max(deadline - now, MIN_ATTEMPT_S))
        try:
            purpose = _Purpose.RESUMED_STREAM if sender.is_broken else _Purpose.FETCHES
            identity = self._registered().arena.identity
            request = _REQUEST.pack(peer.stream, identity, purpose, self._opener.encrypts)
            connection, answer = listener.attempt(peer.where, self._secret, request, timeout_s, self._silence_s)
            (position,) = _ANSWER.unpack(answer)
            opened = self._opener.open(connection, listens=False, timeout_s=timeout_s)
            if purpose is _Purpose.FETCHES:
                sender.reopen_fetches(opened)
            else:
                sender.reopen(opened, position)
                logger.warning("%s resumed its connection to %s", self.name, peer.name)
        except ConnectionRefusedError:
            return self._lose(peer, f"nothing listens on {peer.where.host} port {peer.where.port} any more")
        except (RefusedError, ValueError) as error:
            return self._lose(peer, f"its connection was lost and cannot be resumed: {error}")
        except (OSError, TransportError) as error:
            if time.monotonic() >= deadline:
                return self._lose(peer, f"no connection for {self._silence_s:g} s: {error}")
            time.sleep(max(0.0, min(RETRY_S, seconds)))
            return None
        peer.broken_since = None
        return None

    def _lose(self, peer: TcpPeer, reason: str) -> None:
        """Mark a peer as lost. Native code first delivers what the peer has sent, then calls ``_reconnect`` again."""
        peer.lost = reason
        peer.sender.lose()


class _Opener:
    """Converts connected sockets to native connections, with TLS if there is a key."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key

    @property
    def encrypts(self) -> bool:
        return self._key is not None

    def require_tls(self) -> None:
        """Raise TransportError if TLS is requested but unavailable here."""
        if self.encrypts and (obstacle := tls_obstacle()):
            raise TransportError(f"TLS is not available for tcp here: {obstacle}")

    def open(self, connection: socket.socket, *, listens: bool, timeout_s: float) -> Connection:
        """Take over a socket. Raises TransportError if the TLS handshake fails or takes too long."""
        if self._key is None:
            return Connection(connection.detach())
        try:
            return Connection.tls(connection.detach(), self._key, listens, timeout_s)
        except RuntimeError as error:
            raise TransportError(str(error)) from error


def _admit_to(streams: NativeEndpoint, opener: _Opener) -> Admit:
    """Return the listener's ``admit``: peers open streams, resume them, and read the arena."""

    def open_(accepted: socket.socket) -> Connection:
        return opener.open(accepted, listens=True, timeout_s=HANDSHAKE_S)

    def admit(request: bytes) -> tuple[bytes, Callable[[socket.socket], None]]:
        if len(request) != _REQUEST.size:
            raise TransportError(f"a request has {_REQUEST.size} bytes, this one has {len(request)}")
        stream, identity, purpose, encrypts = _REQUEST.unpack(request)
        if encrypts != opener.encrypts:
            wanted, own = ("TLS", "plain TCP") if encrypts else ("plain TCP", "TLS")
            raise TransportError(f"it wants {wanted}, this endpoint uses {own}; start all workers with --tls or none")
        if purpose == _Purpose.FETCHES:
            return _ANSWER.pack(0), lambda accepted: streams.serve(open_(accepted))
        expected = streams.expect(stream, identity, purpose == _Purpose.STREAM)
        if expected is None:
            raise TransportError("this stream does not exist: it sent an invalid frame, or was forgotten")
        position, number = expected
        return _ANSWER.pack(position), lambda accepted: streams.accept(stream, number, open_(accepted))

    return admit
