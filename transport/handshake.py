"""Mutual authentication at the start of a connection, and the count of rejected ones."""

import enum
import hashlib
import hmac
import logging
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Generator

from lamina.core.errors import RefusedError, TransportError

logger = logging.getLogger(__name__)


class Refusals:
    """Rejected connections of one listener. Only one thread may add to a kind; any thread may read ``by_kind``."""

    def __init__(self, name: str) -> None:
        self.by_kind: Counter[str] = Counter()
        self._name = name

    def record(self, kind: str, reason: str) -> None:
        """Count a rejected connection."""
        self.by_kind[kind] += 1
        if self.by_kind[kind] == 1:
            logger.warning("%s rejected a connection: %s (more of this kind are only counted)", self._name, reason)


PROTOCOL = 1
MAGIC = b"lamina"
MAX_NBYTES = 4096  # of a request or an answer
MIN_SECRET_NBYTES = 16

_PROOF_NBYTES = 32
_NONCE_NBYTES = 32
_VERSION = struct.Struct("<6sH")
_HELLO = struct.Struct(f"<Q{_NONCE_NBYTES}sH")
_CHALLENGE = struct.Struct(f"<B{_NONCE_NBYTES}s")
_ANSWER = struct.Struct("<BH")

Step = tuple[bytes, int]


class Verdict(enum.IntEnum):
    """The listening side's reply to a connection."""

    ACCEPTED = 0
    GARBAGE = 1
    PROTOCOL = 2
    ENDPOINT = 3
    SECRET = 4
    REQUEST = 5


_REASONS = {
    Verdict.GARBAGE: "it does not speak this protocol",
    Verdict.PROTOCOL: f"it speaks another version of the protocol, this process {PROTOCOL}; "
    "run the same release of lamina in all workers",
    Verdict.ENDPOINT: "another endpoint now listens on its port",
    Verdict.SECRET: "it has another cluster secret; give all workers of a cluster the same",
    Verdict.REQUEST: "it cannot grant the request",
}


def check_secret(secret: bytes) -> None:
    """Raise ValueError for a secret short enough to be guessed."""
    if len(secret) < MIN_SECRET_NBYTES:
        raise ValueError(f"a cluster secret has at least {MIN_SECRET_NBYTES} bytes; this one has {len(secret)}")


def connecting(secret: bytes, identity: int, request: bytes) -> Generator[Step, bytes, bytes]:
    """Run the connecting side of a handshake; returns the answer. Raises RefusedError if either side rejects the
    other."""
    if len(request) > MAX_NBYTES:
        raise ValueError(f"a request has at most {MAX_NBYTES} bytes; this one has {len(request)}")
    nonce = secrets.token_bytes(_NONCE_NBYTES)
    hello = _VERSION.pack(MAGIC, PROTOCOL) + _HELLO.pack(identity, nonce, len(request)) + request
    challenge = yield hello, _CHALLENGE.size
    _check_verdict(challenge[0])
    transcript = hello + challenge
    answer_head = yield _proof(secret, b"connect", transcript), _ANSWER.size
    verdict, nbytes = _ANSWER.unpack(answer_head)
    _check_verdict(verdict)
    if nbytes > MAX_NBYTES:
        raise RefusedError(Verdict.GARBAGE.name, _REASONS[Verdict.GARBAGE])
    answer = yield b"", nbytes
    proof = yield b"", _PROOF_NBYTES
    if not hmac.compare_digest(proof, _proof(secret, b"answer", transcript + answer_head + answer)):
        raise RefusedError(Verdict.SECRET.name, "it does not know the cluster's secret")
    return answer


def listening(secret: bytes, identity: int, grant: Callable[[bytes], bytes]) -> Generator[Step, bytes, None]:
    """Run the listening side of a handshake. ``grant`` makes the answer to the request of an authenticated peer.

    Raises RefusedError, after yielding the verdict to send, for anything but a valid request. ``grant`` raises
    TransportError for a request that cannot be granted.
    """
    version = yield b"", _VERSION.size
    magic, protocol = _VERSION.unpack(version)
    if magic != MAGIC:
        raise RefusedError(Verdict.GARBAGE.name, "it sent something other than a handshake")
    if protocol != PROTOCOL:
        yield from _refuse(Verdict.PROTOCOL, f"it speaks version {protocol} of the protocol, this process {PROTOCOL}")
    hello = yield b"", _HELLO.size
    wanted, _, nbytes = _HELLO.unpack(hello)
    if nbytes > MAX_NBYTES:
        yield from _refuse(Verdict.REQUEST, f"its request of {nbytes} bytes is larger than {MAX_NBYTES}")
    request = yield b"", nbytes
    if wanted != identity:
        yield from _refuse(Verdict.ENDPOINT, "it wants another endpoint")
    challenge = _CHALLENGE.pack(Verdict.ACCEPTED, secrets.token_bytes(_NONCE_NBYTES))
    transcript = version + hello + request + challenge
    proof = yield challenge, _PROOF_NBYTES
    if not hmac.compare_digest(proof, _proof(secret, b"connect", transcript)):
        yield from _refuse(Verdict.SECRET, "it does not know the cluster's secret", _ANSWER.size)
    try:
        answer = grant(request)
    except TransportError as error:
        yield from _refuse(Verdict.REQUEST, str(error), _ANSWER.size)
    head = _ANSWER.pack(Verdict.ACCEPTED, len(answer))
    yield head + answer + _proof(secret, b"answer", transcript + head + answer), 0


def _proof(secret: bytes, side: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, side + transcript, hashlib.sha256)


def _check_verdict(number: int) -> None:
    if number == Verdict.ACCEPTED:
        return
    known = number in _REASONS
    verdict = Verdict(number) if known else Verdict.GARBAGE
    raise RefusedError(verdict.name, _REASONS[verdict])


def _refuse(verdict: Verdict, reason: str, nbytes: int = _CHALLENGE.size) -> Generator[Step, bytes, None]:
    yield bytes([verdict]).ljust(nbytes, b"\0"), 0
    raise RefusedError(verdict.name, reason)
