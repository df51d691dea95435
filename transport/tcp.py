"""TCP between machines. Implements ``transport.base.Endpoint``.

Frames, streams and the wait are native (``native/transport/tcp.cpp``); this file makes connections: it proves both
sides to each other (``transport.handshake``), and makes them again when they are lost while the peer lives on.

The owner's thread receives, inside ``wait`` and whenever a ``post`` finds no room; a thread of the listener lets peers
in meanwhile. A message is handed to the kernel before ``post`` returns.
"""

import logging
import os
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from lamina._native import Arena as NativeArena
from lamina._native import TcpEndpoint as NativeEndpoint
from lamina._native import TcpSender
from lamina.errors import PeerLostError, RefusedError, TransportError
from lamina.transport import listener
from lamina.transport.arena import MappedArena, create
from lamina.transport.base import Part, Peer, deadline_error
from lamina.transport.handshake import PROTOCOL, check_secret
from lamina.transport.listener import RETRY_S, Admit, Descriptor, Listener

logger = logging.getLogger(__name__)

SPIN_S = 20e-6  # as long as it takes to be woken: at most twice the time of the better choice
SILENCE_S = 10.0
STALL_S = 60.0
ATTEMPT_S = 1.0  # for one connection to be made again
MIN_ATTEMPT_S = 0.1  # also when a wait has no time left: to know whether the peer is gone

_REQUEST = struct.Struct("<QQ?")  # stream, identity of the sender, whether the stream is new
_ANSWER = struct.Struct("<Q")  # the byte of the stream that the receiver wants next


class TcpPeer:
    """A connected remote arena."""

    def __init__(self, where: Descriptor, stream: int, sender: TcpSender) -> None:
        self.name = where.name
        self.nbytes = where.nbytes
        self.doorbells = where.doorbells
        self.where = where
        self.stream = stream
        self.sender = sender
        self.broken_since: float | None = None
        self.lost = ""  # why; empty while it is not


@dataclass(frozen=True)
class _Own:
    """What an endpoint has from register() to close()."""

    identity: int
    native: NativeArena
    streams: NativeEndpoint
    listener: Listener


class TcpEndpoint:
    """One worker's end of the data plane over TCP.

    Args:
        name: how peers call this endpoint in their errors.
        secret: what only the workers of one cluster know, at least 16 bytes.
        host: address of this machine that peers can reach; the port is the system's choice.
        spin_s: seconds a wait looks at its connections before it sleeps. Spin longer only if a core is free for it.
        silence_s: seconds without a sign of life after which a connection counts as lost, and as long again to make
            another one before the peer counts as lost.
        stall_s: seconds that a living peer may take in nothing of a message that is being sent to it.
    """

    def __init__(
        self,
        name: str,
        *,
        secret: bytes,
        host: str = "127.0.0.1",
        spin_s: float = SPIN_S,
        silence_s: float = SILENCE_S,
        stall_s: float = STALL_S,
    ) -> None:
        check_secret(secret)
        self.name = name
        self._secret = secret
        self._host = host
        self._spin_s = spin_s
        self._silence_s = silence_s
        self._stall_s = stall_s
        self._own: _Own | None = None
        self._peers: list[TcpPeer] = []
        self._refused_streams = 0

    def register(self, nbytes: int, doorbells: int) -> MappedArena:
        """Allocate the arena (once per endpoint), all doorbells 0, and let peers in from now on."""
        if self._own is not None:
            raise TransportError(f"endpoint {self.name} has an arena of {self._own.native.nbytes} bytes already")
        identity = secrets.randbits(64)
        fd, native = create(self.name, nbytes, doorbells, identity)
        os.close(fd)
        streams = NativeEndpoint(native)
        try:
            listening = Listener(self.name, self._host, self._secret, identity, self._silence_s, _admit_to(streams))
        except OSError as error:
            streams.close()
            raise TransportError(
                f"{self.name} cannot listen on {self._host}: {error}; give it an address of this machine"
            ) from error
        self._own = _Own(identity, native, streams, listening)
        return MappedArena(native)

    def descriptor(self) -> bytes:
        """What a peer needs to connect to this endpoint's arena. Raises TransportError before ``register``."""
        own = self._registered()
        where = (self._host, own.listener.port, own.identity, own.native.nbytes, own.native.doorbells)
        return msgspec.msgpack.encode(Descriptor("tcp", PROTOCOL, self.name, *where))

    @property
    def refused(self) -> Counter[str]:
        """What was turned away so far, by kind: connections, and streams with a frame that cannot be."""
        own = self._registered()
        return own.listener.refused + Counter(FRAME=self._refused_streams)

    def connect(self, descriptor: bytes, timeout_s: float) -> TcpPeer:
        """Open a peer's arena for writing. Raises TransportError, PeerLostError, RefusedError."""
        own = self._registered()
        where = listener.decode(descriptor, "tcp")
        stream = secrets.randbits(64)
        request = _REQUEST.pack(stream, own.identity, True)
        connection, _ = listener.connect(self.name, where, self._secret, request, timeout_s, self._silence_s)
        peer = TcpPeer(
            where, stream, own.streams.connect(connection.detach(), where.identity, where.nbytes, where.doorbells)
        )
        self._peers.append(peer)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer; its death no longer ends waits."""
        known = self._connected(peer)
        self._registered().streams.disconnect(known.sender)
        self._peers.remove(known)

    def write(self, peer: Peer, offset: int, data: Part) -> None:
        """Copy ``data`` into the peer's arena at ``offset``. Raises ValueError outside the arena, PeerLostError."""
        known = self._connected(peer)
        try:
            self._registered().streams.write(known.sender, offset, data, self._stall_s, self._mend)
        except TimeoutError:
            raise self._stalled(known) from None

    def ring(self, peer: Peer, doorbell: int, sequence: int) -> None:
        """Set the peer's doorbell to ``sequence`` after all earlier writes to that peer, and wake its waiter."""
        known = self._connected(peer)
        try:
            self._registered().streams.ring(known.sender, doorbell, sequence, self._stall_s, self._mend)
        except TimeoutError:
            raise self._stalled(known) from None

    def post(self, peer: Peer, offset: int, nbytes: int, parts: Sequence[Part], doorbell: int, sequence: int) -> None:
        """Write the parts one after another into the peer's [offset, offset + nbytes), then ring."""
        known = self._connected(peer)
        try:
            self._registered().streams.post(
                known.sender, offset, nbytes, parts, doorbell, sequence, self._stall_s, self._mend
            )
        except TimeoutError:
            raise self._stalled(known) from None

    def wait(self, targets: Sequence[tuple[int, int]], timeout_s: float) -> int:
        """Wait until any own doorbell of ``targets`` = (doorbell, sequence) has reached its sequence."""
        own = self._registered()
        try:
            return own.streams.wait(targets, timeout_s, self._spin_s, self._mend, self._note_refusal)
        except TimeoutError:
            reached = [own.native.sequence(doorbell) for doorbell, _ in targets]
            raise deadline_error(self.name, targets, reached, timeout_s) from None

    def close(self) -> None:
        """Leave, then give back all memory and handles. Idempotent. Views keep their memory."""
        if self._own is None:
            return
        self._own.listener.close()
        self._own.streams.close()
        self._peers.clear()
        self._own = None

    def _registered(self) -> _Own:
        if self._own is None:
            raise TransportError(f"endpoint {self.name} has no arena: register() comes first, close() last")
        return self._own

    def _connected(self, peer: Peer) -> TcpPeer:
        if not isinstance(peer, TcpPeer) or peer not in self._peers:
            raise TransportError(f"endpoint {self.name} is not connected to {peer.name}")
        return peer

    def _mend(self, sender: TcpSender, seconds: float) -> None:
        """Try once to replace a lost connection. Raises PeerLostError once that is hopeless."""
        peer = next(peer for peer in self._peers if peer.sender is sender)
        if peer.lost:
            raise PeerLostError(peer.name, peer.lost)
        if sender.is_lost:
            return self._lose(peer, "a message to it was cut short")
        now = time.monotonic()
        if peer.broken_since is None:
            peer.broken_since = now
            logger.info("%s lost its connection to %s; trying again", self.name, peer.name)
        deadline = peer.broken_since + self._silence_s
        timeout_s = min(max(seconds, MIN_ATTEMPT_S), ATTEMPT_S, max(deadline - now, MIN_ATTEMPT_S))
        try:
            request = _REQUEST.pack(peer.stream, self._registered().identity, False)
            connection, answer = listener.attempt(peer.where, self._secret, request, timeout_s, self._silence_s)
            with connection:
                (position,) = _ANSWER.unpack(answer)
                sender.reopen(connection.fileno(), position)
                connection.detach()
        except ConnectionRefusedError:
            return self._lose(peer, f"nobody listens on {peer.where.host} port {peer.where.port} any more")
        except (RefusedError, ValueError) as error:
            return self._lose(peer, f"its connection was lost and cannot be resumed: {error}")
        except OSError as error:
            if time.monotonic() >= deadline:
                return self._lose(peer, f"no connection for {self._silence_s:g} s: {error}")
            time.sleep(max(0.0, min(RETRY_S, seconds)))
            return None
        logger.warning("%s resumed its connection to %s", self.name, peer.name)
        peer.broken_since = None
        return None

    def _lose(self, peer: TcpPeer, reason: str) -> None:
        """What it sent before still counts: native code goes on until that is taken in, and calls ``_mend`` again."""
        peer.lost = reason
        peer.sender.lose()

    def _stalled(self, peer: TcpPeer) -> PeerLostError:
        self._lose(peer, f"it has taken in nothing of a message for {self._stall_s:g} s")
        return PeerLostError(peer.name, peer.lost)

    def _note_refusal(self, reason: str) -> None:
        self._refused_streams += 1
        if self._refused_streams == 1:
            logger.warning("%s closed a stream: %s (more of this kind are counted only)", self.name, reason)


def _admit_to(streams: NativeEndpoint) -> Admit:
    """Lets peers open streams, and resume them."""

    def admit(request: bytes) -> tuple[bytes, Callable[[socket.socket], None]]:
        if len(request) != _REQUEST.size:
            raise TransportError(f"a request has {_REQUEST.size} bytes, this one {len(request)}")
        stream, identity, is_new = _REQUEST.unpack(request)
        expected = streams.expect(stream, identity, is_new)
        if expected is None:
            raise TransportError("this stream was refused for one of its frames, or has been forgotten")
        position, connection = expected
        return _ANSWER.pack(position), lambda accepted: streams.accept(stream, connection, accepted.detach())

    return admit
