"""The handshake accepts only peers that know the secret, whatever bytes arrive and however they are cut."""

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.errors import RefusedError, TransportError
from lamina.transport.listener import MAX_NBYTES, PROTOCOL, Step, check_secret, connecting, listening

SECRET = b"0123456789abcdef"
IDENTITY = 2**64 - 1


class Side:
    """One side: takes bytes as they come, as a connection would bring them."""

    def __init__(self, steps: Generator[Step, bytes, bytes | None]) -> None:
        self.steps = steps
        self.said = b""
        self.result: bytes | None = None
        self.finished = False
        self._received = b""
        self._step(None)

    def hear(self, data: bytes) -> None:
        self._received += data
        while not self.finished and len(self._received) >= self.wanted:
            now, self._received = self._received[: self.wanted], self._received[self.wanted :]
            self._step(now)

    def speak(self) -> bytes:
        said, self.said = self.said, b""
        return said

    def _step(self, data: bytes | None) -> None:
        try:
            output, self.wanted = next(self.steps) if data is None else self.steps.send(data)
            self.said += output
        except StopIteration as end:
            self.result, self.finished = end.value, True


def echo(request: bytes) -> bytes:
    return b"granted " + request


def talk(near: Side, far: Side) -> list[bytes]:
    """Exchange messages until neither side sends one; returns all messages, near's first."""
    said = []
    while heard := near.speak():
        said.append(heard)
        far.hear(heard)
        answer = far.speak()
        said.append(answer)
        near.hear(answer)
    return said


def test_both_know_the_secret() -> None:
    near, far = Side(connecting(SECRET, IDENTITY, b"request")), Side(listening(SECRET, IDENTITY, echo))
    talk(near, far)
    assert near.result == b"granted request"
    assert far.finished


def test_a_wrong_secret_is_refused_by_either_side_and_nothing_is_granted() -> None:
    granted: list[bytes] = []

    def grant(request: bytes) -> bytes:
        granted.append(request)
        return request

    near, far = Side(connecting(SECRET, 1, b"request")), Side(listening(b"x" * 16, 1, grant))
    with pytest.raises(RefusedError, match="does not know the cluster's secret"):
        talk(near, far)
    with pytest.raises(RefusedError, match="give all workers of a cluster the same"):
        near.hear(far.speak())
    assert granted == []


def test_a_listener_without_the_secret_is_noticed() -> None:
    """It can send a verdict of ACCEPTED, but no valid proof."""
    near = Side(connecting(SECRET, 1, b"request"))
    near.hear(bytes(33))
    near.speak()
    with pytest.raises(RefusedError, match="does not know the cluster's secret"):
        near.hear(bytes([0]) + (4).to_bytes(2, "little") + b"sure" + bytes(32))


def test_a_recorded_handshake_is_worth_nothing_later() -> None:
    near, far = Side(connecting(SECRET, 1, b"request")), Side(listening(SECRET, 1, echo))
    said = talk(near, far)
    again = Side(listening(SECRET, 1, echo))
    again.hear(said[0])
    with pytest.raises(RefusedError, match="secret"):
        again.hear(said[2])
    victim = Side(connecting(SECRET, 1, b"request"))
    victim.hear(said[1])
    with pytest.raises(RefusedError, match="secret"):
        victim.hear(said[3])


def test_a_proof_cannot_be_had_from_the_other_side() -> None:
    """The two sides' proofs differ, so neither can be used as an oracle for the other (reflection)."""
    near = Side(connecting(SECRET, 1, b""))
    mirror = Side(connecting(SECRET, 1, b""))
    hello = near.speak()
    mirror.speak()
    near.hear(bytes([0]) + bytes(32))
    mirror.hear(bytes([0]) + bytes(32))
    assert near.speak() != mirror.speak()
    assert len(hello) == 50


@pytest.mark.parametrize(
    ("change", "verdict", "told"),
    [
        ({"identity": 2}, "ENDPOINT", "another endpoint now listens on its port"),
        ({"protocol": PROTOCOL + 1}, "PROTOCOL", "run the same release"),
        ({"magic": b"GET / "}, "GARBAGE", None),
        ({"length": MAX_NBYTES + 1}, "REQUEST", "cannot grant"),
    ],
    ids=["endpoint", "protocol", "garbage", "length"],
)
def test_what_is_not_meant_for_it_is_refused(change: dict[str, Any], verdict: str, told: str | None) -> None:
    near, far = Side(connecting(SECRET, 1, b"")), Side(listening(SECRET, 1, echo))
    hello = near.speak()
    fields: dict[str, Any] = {"magic": hello[:6], "protocol": PROTOCOL, "identity": 1, "length": 0, **change}
    with pytest.raises(RefusedError) as refused:
        far.hear(
            fields["magic"]
            + fields["protocol"].to_bytes(2, "little")
            + fields["identity"].to_bytes(8, "little")
            + hello[16:48]
            + fields["length"].to_bytes(2, "little")
        )
    assert refused.value.verdict == verdict
    answer = far.speak()
    assert (answer == b"") == (told is None)
    if told:
        with pytest.raises(RefusedError, match=told):
            near.hear(answer)


def test_a_request_that_cannot_be_granted_is_refused() -> None:
    def refuse(request: bytes) -> bytes:
        raise TransportError("no such stream")

    near, far = Side(connecting(SECRET, 1, b"request")), Side(listening(SECRET, 1, refuse))
    with pytest.raises(RefusedError, match="no such stream"):
        talk(near, far)
    with pytest.raises(RefusedError, match="cannot grant the request"):
        near.hear(far.speak())


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_no_bytes_but_a_proof_let_anybody_in(pieces: list[bytes]) -> None:
    granted: list[bytes] = []

    def grant(request: bytes) -> bytes:
        granted.append(request)
        return request

    far = Side(listening(SECRET, 1, grant))
    try:
        for piece in pieces:
            far.hear(piece)
    except RefusedError:
        pass
    assert granted == []
    assert not far.finished


@given(st.data())
def test_one_changed_byte_anywhere_ends_the_handshake(data: st.DataObject) -> None:
    near, far = Side(connecting(SECRET, 1, b"request")), Side(listening(SECRET, 1, echo))
    changed = data.draw(st.integers(0, 3), label="message")
    with pytest.raises(RefusedError):
        for message in range(4):
            speaker, hearer = (near, far) if message % 2 == 0 else (far, near)
            said = bytearray(speaker.speak())
            if message == changed:
                said[data.draw(st.integers(0, len(said) - 1), label="place")] ^= data.draw(st.integers(1, 255))
            hearer.hear(bytes(said))
            if near.finished and changed == 3:
                break
        else:
            # A longer length is still being waited for: cut short by the deadline of a real connection.
            assert not near.finished or not far.finished
            raise RefusedError("LATE", "")


@given(st.lists(st.integers(1, 60), min_size=1))
def test_pieces_do_not_matter(sizes: list[int]) -> None:
    near, far = Side(connecting(SECRET, 1, b"request")), Side(listening(SECRET, 1, echo))
    while said := near.speak():
        for turn, hearer in enumerate((far, near)):
            said = far.speak() if turn else said
            at, step = 0, 0
            while at < len(said):
                hearer.hear(said[at : at + sizes[step % len(sizes)]])
                at, step = at + sizes[step % len(sizes)], step + 1
    assert near.result == b"granted request"


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes; this one has 3"):
        check_secret(b"abc")
    with pytest.raises(ValueError, match="at most 4096 bytes"):
        next(connecting(SECRET, 1, bytes(MAX_NBYTES + 1)))
