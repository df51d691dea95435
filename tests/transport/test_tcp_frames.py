"""Frames of TCP streams: truncated, resumed in the middle, invalid, and arbitrary bytes."""

import itertools
import logging
import os
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lamina._native import Connection
from lamina._native import TcpEndpoint as NativeEndpoint
from lamina.core.errors import DeadlineError, RefusedError
from lamina.transport import arena
from tests.transport.tcp_tools import (
    DOORBELLS,
    FRAME,
    MAGIC,
    NBYTES,
    NO_DOORBELL,
    TIMEOUT_S,
    MakeTcp,
    frame,
    raw_stream,
    reset,
)


@pytest.mark.parametrize("linger", [False, True], ids=["closed", "reset"])
def test_a_message_cut_short_anywhere_is_never_announced(make_tcp: MakeTcp, linger: bool) -> None:
    near = make_tcp("near")
    body = os.urandom(24)
    whole = frame(8, len(body), 2, 1) + body
    for cut in range(len(whole) + 1):
        near.close()
        near.register(NBYTES, DOORBELLS)
        view = memoryview(near._own.arena.native)  # type: ignore[union-attr]
        connection, position = raw_stream(near)
        assert position == 0
        connection.sendall(whole[:cut])
        reset(connection) if linger else connection.close()
        if cut < len(whole):
            with pytest.raises(DeadlineError, match="2 is at 0 of 1"):
                near.wait([(2, 1)], 0.002)
        else:
            assert near.wait([(2, 1)], TIMEOUT_S) == 0
            assert view[8 : 8 + len(body)] == body


def test_a_stream_resumes_in_the_middle_of_a_message(make_tcp: MakeTcp) -> None:
    near = make_tcp("near")
    view = memoryview(near._own.arena.native)  # type: ignore[union-attr]
    body = os.urandom(5000)
    whole = frame(0, len(body), 0, 1) + body + frame(6000, 4) + b"next" + frame(0, 0, 1, 9)
    sent = 0
    for step in (3, 40, 4000, 5040, len(whole)):
        connection, position = raw_stream(near, is_new=sent == 0)
        assert position <= sent
        connection.sendall(whole[position:step])
        sent = step
        with pytest.raises(DeadlineError):
            near.wait([(0, 99)], 0.05)
        connection.close()
    assert near.wait([(1, 9)], TIMEOUT_S) == 0
    assert near.wait([(0, 1)], 0) == 0
    assert view[:5000] == body
    assert bytes(view[6000:6004]) == b"next"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (frame(NBYTES - 3, 4), f"4 bytes at offset {NBYTES - 3} lies outside the arena of {NBYTES} bytes"),
        (frame(NBYTES + 1, 0), "lies outside"),
        (frame(2**64 - 8, 16), "lies outside"),
        (frame(0, 2**64 - 1), "lies outside"),
        (frame(0, 0, DOORBELLS), f"rings doorbell {DOORBELLS} of {DOORBELLS}"),
        (frame(0, 4, magic=1), "are not a frame"),
        (b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n", "are not a frame"),
    ],
)
def test_a_bad_frame_closes_its_stream_alone(
    make_tcp: MakeTcp, caplog: pytest.LogCaptureFixture, bad: bytes, reason: str
) -> None:
    near = make_tcp("near")
    view = memoryview(near._own.arena.native)  # type: ignore[union-attr]
    good, _ = raw_stream(near, 1)
    with caplog.at_level(logging.WARNING):
        for stream in (2, 3):
            connection, _ = raw_stream(near, stream)
            connection.sendall(frame(0, 4) + b"fine" + bad + b"never" + frame(0, 5) + b"never")
            with pytest.raises(DeadlineError):
                near.wait([(0, 1)], 0.05)
            connection.settimeout(TIMEOUT_S)
            with pytest.raises(ConnectionResetError):  # bytes behind the bad frame were not read
                assert connection.recv(1) == b""
                raise ConnectionResetError
            connection.close()
            with pytest.raises(RefusedError):
                raw_stream(near, stream, is_new=False)
    assert near.refused["FRAME"] == 2
    assert sum(reason in record.message for record in caplog.records) == 1
    assert bytes(view) == b"fine".ljust(NBYTES, b"\0")
    good.sendall(frame(0, 0, 0, 1))
    assert near.wait([(0, 1)], TIMEOUT_S) == 0
    good.close()


def decoded(stream: bytes, nbytes: int, doorbells: int) -> tuple[bytes, list[int], bool]:
    """A model of the receiver: arena, doorbells, and whether the stream was rejected. Written for clarity."""
    memory, rung, at = bytearray(nbytes), [0] * doorbells, 0
    while at + FRAME.size <= len(stream):
        offset, length, sequence, doorbell, magic = FRAME.unpack_from(stream, at)
        at += FRAME.size
        if magic != MAGIC or offset + length > nbytes or (doorbell != NO_DOORBELL and doorbell >= doorbells):
            return bytes(memory), rung, True
        body = stream[at : at + length]
        memory[offset : offset + len(body)] = body
        at += len(body)
        if len(body) == length and doorbell != NO_DOORBELL:
            rung[doorbell] = sequence
    return bytes(memory), rung, False


frames = st.builds(
    lambda offset, body, doorbell, sequence: frame(offset, len(body), doorbell, sequence) + body,
    st.integers(0, 300),
    st.binary(max_size=100),
    st.sampled_from([NO_DOORBELL, 0, 1, 2, 3, 4]),
    st.integers(0, 2**64 - 2),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    pieces=st.lists(st.one_of(frames, frames, frames, st.binary(max_size=80)), max_size=12),
    cuts=st.lists(st.integers(1, 200), min_size=1, max_size=10),
)
def test_any_bytes_are_decoded_as_the_model_does(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces)
    own = arena.allocate("fuzz", 300, 4)
    native = own.native
    endpoint = NativeEndpoint(native)
    sender, receiver = socket.socketpair()
    expected = endpoint.expect(1, 1, True)
    assert expected == (0, 1)
    endpoint.accept(1, 1, Connection(receiver.detach()))
    refusals: list[str] = []
    at = 0
    for step in itertools.cycle(cuts):
        if at >= len(stream):
            break
        try:
            sender.sendall(stream[at : at + step])
        except BrokenPipeError:
            break
        at += step
        with pytest.raises(TimeoutError):
            endpoint.wait([(0, 2**64 - 1)], 0.0, 0.0, lambda *_: pytest.fail("reconnected"), refusals.append)
    memory, rung, refused = decoded(stream, 300, 4)
    assert bytes(memoryview(native)) == memory
    assert [native.sequence(doorbell) for doorbell in range(4)] == rung
    assert bool(refusals) == refused
    sender.close()
    endpoint.close()
    own.close()
