"""The conformance suite of ``transport.base.Endpoint``, run against every implementation."""

import contextlib
import gc
import math
import os
import subprocess
import threading
import time

import numpy as np
import pytest

from lamina.core.errors import DeadlineError, PeerLostError, TransportError
from lamina.transport.base import Fetch
from tests.support.sweep import sweep
from tests.transport.conftest import DOORBELLS, NBYTES, ORDINARY, PAIRS, Pair, open_pair
from tests.transport.far import IMPLEMENTATIONS, stamped, whole

TIMEOUT_S = 30.0


def test_each_side_knows_the_other(pair: Pair) -> None:
    assert (pair.peer.name, pair.peer.nbytes, pair.peer.doorbells) == ("far", NBYTES, DOORBELLS)
    assert (pair.arena.nbytes, pair.arena.doorbells) == (NBYTES, DOORBELLS)


def test_what_was_written_before_a_ring_is_there_after_the_wait(pair: Pair) -> None:
    pair.near.write(pair.peer, 5, b"to the far side")
    pair.near.ring(pair.peer, 3, 1)
    assert pair.far.call("wait", [(3, 1)], TIMEOUT_S) == 0
    assert pair.far.call("read", 5, 15) == b"to the far side"
    pair.far.call("write", NBYTES - 4, b"back")
    pair.far.call("ring", DOORBELLS - 1, 7)
    assert pair.near.wait([(DOORBELLS - 1, 7)], TIMEOUT_S) == 0
    assert bytes(pair.arena.view(NBYTES - 4, 4)) == b"back"


@pytest.mark.parametrize(
    "data",
    [
        b"bytes",
        bytearray(b"bytearray"),
        memoryview(b"memoryview"),
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array(7, np.uint16),
        np.zeros((0, 4), np.float16),
        np.arange(8)[2:5],
    ],
    ids=lambda data: f"{type(data).__name__}-{getattr(data, 'shape', len(data) if not hasattr(data, 'shape') else '')}",
)
def test_any_contiguous_buffer_arrives_as_its_bytes(pair: Pair, data: bytes) -> None:
    expected = np.asarray(data).tobytes() if isinstance(data, np.ndarray) else bytes(data)
    pair.near.post(pair.peer, 64, len(expected) + 2, [data, b"<>"], 0, 1)
    pair.far.call("wait", [(0, 1)], TIMEOUT_S)
    assert pair.far.call("read", 64, len(expected) + 2) == expected + b"<>"
    pair.near.write(pair.peer, 0, data)
    pair.near.ring(pair.peer, 0, 2)
    pair.far.call("wait", [(0, 2)], TIMEOUT_S)
    assert pair.far.call("read", 0, len(expected)) == expected


@pytest.mark.parametrize("data", [np.zeros((4, 4))[:, 1], memoryview(b"abcdef")[::2]], ids=["array", "memoryview"])
def test_a_strided_buffer_is_refused(pair: Pair, data: memoryview) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        pair.near.write(pair.peer, 0, data)
    with pytest.raises(ValueError, match="contiguous"):
        pair.near.post(pair.peer, 0, 100, [b"first", data], 0, 1)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (NBYTES - 3, 4), (NBYTES + 1, 0), (2**62, 4), (-(2**62), 4)])
def test_nothing_reaches_outside_an_arena(pair: Pair, offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match=str(NBYTES)):
        pair.near.write(pair.peer, offset, bytes(nbytes))
    with pytest.raises(ValueError, match=str(NBYTES)):
        pair.near.post(pair.peer, offset, nbytes, [bytes(nbytes)], 0, 1)
    with pytest.raises(ValueError, match=str(NBYTES)):
        pair.arena.view(offset, nbytes)


@pytest.mark.parametrize("doorbell", [-1, DOORBELLS])
def test_a_doorbell_that_is_not_there_is_refused(pair: Pair, doorbell: int) -> None:
    with pytest.raises(ValueError, match=f"doorbell {doorbell} .* {DOORBELLS}"):
        pair.near.ring(pair.peer, doorbell, 1)
    with pytest.raises(ValueError, match=f"doorbell {doorbell} .* {DOORBELLS}"):
        pair.near.post(pair.peer, 0, 1, [b"x"], doorbell, 1)
    with pytest.raises(ValueError, match=f"doorbell {doorbell} .* {DOORBELLS}"):
        pair.near.wait([(0, 1), (doorbell, 1)], 0.0)
    assert pair.far.call("read", 0, 1) == b"\0"


def test_a_message_that_does_not_fit_leaves_no_trace(pair: Pair) -> None:
    with pytest.raises(ValueError, match="11 bytes does not fit into 10"):
        pair.near.post(pair.peer, 0, 10, [b"12345", b"678901"], 0, 1)
    assert pair.far.call("read", 0, 10) == bytes(10)
    with pytest.raises((DeadlineError, RuntimeError), match="doorbell 0 is at 0 of 1"):
        pair.far.call("wait", [(0, 1)], 0.0)


def test_wait_returns_the_index_of_the_target_that_is_ready(pair: Pair) -> None:
    pair.far.call("ring", 5, 2)
    assert pair.near.wait([(4, 1), (5, 3), (5, 2)], TIMEOUT_S) == 2
    assert pair.near.wait([(5, 1), (5, 2)], 0.0) == 0  # higher numbers include lower ones


@pytest.mark.parametrize("timeout_s", [0.05, 0.0, -1.0])
def test_a_wait_ends_at_its_deadline_and_says_where_it_stood(pair: Pair, timeout_s: float) -> None:
    pair.far.call("ring", 2, 4)
    pair.near.wait([(2, 4)], TIMEOUT_S)  # between machines a ring takes its time
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"near waited .* 2 is at 4 of 5, 0 is at 0 of 1"):
        pair.near.wait([(2, 5), (0, 1)], timeout_s)
    assert time.monotonic() - start >= timeout_s


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf])
def test_a_wait_needs_a_deadline(pair: Pair, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        pair.near.wait([(0, 1)], timeout_s)


def test_a_wait_for_nothing_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="at least one doorbell"):
        pair.near.wait([], TIMEOUT_S)


def test_every_one_of_many_doorbells_is_heard(pair: Pair) -> None:
    rounds = 100
    rung = pair.far.submit("ring_many", DOORBELLS, rounds)
    for round_ in range(1, rounds + 1):
        missing = set(range(DOORBELLS))
        while missing:
            targets = [(doorbell, round_) for doorbell in missing]
            missing.remove(targets[pair.near.wait(targets, TIMEOUT_S)][0])
        pair.near.ring(pair.peer, 0, round_)
    rung.result(TIMEOUT_S)


@pytest.mark.parametrize("nbytes", [64, 5000, 200_000])
def test_no_message_is_torn_under_load(pair: Pair, nbytes: int) -> None:
    """Data arrives before its doorbell, checked in both directions, with three messages in flight."""
    slots, messages = 3, 1000 if nbytes < 100_000 else 100
    echoed = pair.far.submit("echo", slots, nbytes, messages)
    sent = [stamped(n, nbytes) for n in range(min(messages, 10))]
    for n in range(1, messages + 1):
        slot = n % slots
        if n > slots:
            earlier = n - slots
            pair.near.wait([(slot, earlier)], TIMEOUT_S)
            assert pair.arena.view(slot * nbytes, nbytes) == sent[earlier % len(sent)]
        message = sent[n % len(sent)]
        parts = [message[: nbytes // 3], message[nbytes // 3 :]]
        pair.near.post(pair.peer, slot * nbytes, nbytes, parts, slot, n)
    assert echoed.result(TIMEOUT_S) == 0


def test_what_is_fetched_lies_in_its_place_when_its_doorbell_rings(pair: Pair) -> None:
    pair.far.call("fill", 100, b"of the far side")
    # Nobody waits at the far side.
    pair.near.fetch(pair.peer, Fetch(offset=100, nbytes=15, to=7, doorbell=2, sequence=1))
    assert pair.near.wait([(2, 1)], TIMEOUT_S) == 0
    assert bytes(pair.arena.view(6, 17)) == b"\0of the far side\0"
    pair.far.call("fill", 0, bytes(range(256)) * (NBYTES // 256))
    pair.near.fetch(pair.peer, Fetch(offset=0, nbytes=NBYTES, to=0, doorbell=2, sequence=2))
    pair.near.wait([(2, 2)], TIMEOUT_S)
    assert bytes(pair.arena.view(0, NBYTES)) == bytes(range(256)) * (NBYTES // 256)


def test_fetches_arrive_in_order_beside_messages(pair: Pair) -> None:
    """Blocks are fetched from a buffer that the far side refills, while messages go both ways."""
    nbytes, blocks, half = 50_000, 4, NBYTES // 2
    for round_ in range(1, 21):
        expected = stamped(round_, blocks * nbytes)
        pair.far.call("fill", half, expected)
        echoed = pair.far.submit("echo_one", 5000, round_)
        for block in range(blocks):
            at = half + block * nbytes
            fetch = Fetch(offset=at, nbytes=nbytes, to=at, doorbell=10 + block, sequence=round_)
            pair.near.fetch(pair.peer, fetch)
        pair.near.post(pair.peer, 0, 5000, [stamped(round_, 5000)], 0, round_)
        pair.near.wait([(0, round_)], TIMEOUT_S)
        assert pair.arena.view(0, 5000) == stamped(round_, 5000)
        pair.near.wait([(10 + blocks - 1, round_)], TIMEOUT_S)
        pair.near.wait([(10, round_)], 0.0)  # earlier fetches arrived before
        assert bytes(pair.arena.view(half, blocks * nbytes)) == expected
        echoed.result(TIMEOUT_S)


@pytest.mark.parametrize(("offset", "nbytes", "to"), [(-1, 4, 0), (NBYTES - 3, 4, 0), (0, 4, NBYTES - 3), (0, 4, -1)])
def test_nothing_is_fetched_from_or_to_outside_an_arena(pair: Pair, offset: int, nbytes: int, to: int) -> None:
    with pytest.raises(ValueError, match=str(NBYTES)):
        pair.near.fetch(pair.peer, Fetch(offset=offset, nbytes=nbytes, to=to, doorbell=0, sequence=1))
    with pytest.raises(ValueError, match="0 bytes"):
        pair.near.fetch(pair.peer, Fetch(offset=0, nbytes=0, to=0, doorbell=0, sequence=1))
    with pytest.raises(ValueError, match=f"doorbell {DOORBELLS} .* {DOORBELLS}"):
        pair.near.fetch(pair.peer, Fetch(offset=0, nbytes=1, to=0, doorbell=DOORBELLS, sequence=1))


def test_a_fetch_from_a_dead_peer_ends_the_wait(pair: Pair) -> None:
    pair.far.die()
    with pytest.raises(PeerLostError, match="far"):
        pair.near.wait([(0, 1)], TIMEOUT_S)
    with pytest.raises(PeerLostError, match="far"):
        pair.near.fetch(pair.peer, Fetch(offset=0, nbytes=8, to=0, doorbell=0, sequence=1))


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.03])
def test_a_kill_amid_fetches_leaves_only_whole_ones(process_pair: Pair, after_s: float) -> None:
    pair, nbytes = process_pair, 200_000
    expected = stamped(1, nbytes)
    pair.far.call("fill", 0, expected)
    killer, fetched = threading.Timer(after_s, pair.far.die), 0
    killer.start()
    with pytest.raises(PeerLostError):
        while True:
            pair.arena.view(0, nbytes)[:] = bytes(nbytes)
            pair.near.fetch(pair.peer, Fetch(offset=0, nbytes=nbytes, to=0, doorbell=1, sequence=fetched + 1))
            pair.near.wait([(1, fetched + 1)], TIMEOUT_S)
            fetched += 1
            assert bytes(pair.arena.view(0, nbytes)) == expected
            with contextlib.suppress(DeadlineError):  # in-process fetches succeed whatever the state of the peer
                pair.near.wait([(0, 1)], 0.0)
    killer.join()


def test_a_wait_lets_other_python_threads_run(pair: Pair) -> None:
    """If the wait held the GIL, this thread could not ring before its deadline."""
    waits: list[int] = []
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        waits.append(pair.near.wait([(0, 1)], TIMEOUT_S))

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert begun.wait(TIMEOUT_S)
    pair.far.call("ring", 0, 1)
    waiter.join(TIMEOUT_S)
    assert waits == [0]


@pytest.mark.parametrize("moment", ["before", "between data and doorbell", "after"])
def test_a_dead_peer_ends_the_wait(pair: Pair, moment: str) -> None:
    if moment != "before":
        pair.far.call("write", 0, b"complete")
    if moment == "after":
        pair.far.call("ring", 0, 1)
    pair.far.die()
    if moment == "after":  # what it rang before still counts
        assert pair.near.wait([(0, 1)], TIMEOUT_S) == 0
        assert bytes(pair.arena.view(0, 8)) == b"complete"
    with pytest.raises(PeerLostError, match="far") as lost:
        pair.near.wait([(0, 2)], TIMEOUT_S)
    assert lost.value.peer == "far"
    with pytest.raises(PeerLostError):  # and again, until it is disconnected
        pair.near.wait([(0, 2)], TIMEOUT_S)
    with pytest.raises(PeerLostError):
        pair.near.write(pair.peer, 0, b"x")
    with pytest.raises(PeerLostError):
        pair.near.ring(pair.peer, 0, 1)
    with pytest.raises(PeerLostError):
        pair.near.post(pair.peer, 0, 1, [b"x"], 0, 1)


def test_a_peer_that_dies_while_one_waits_ends_the_wait(pair: Pair) -> None:
    killer = threading.Timer(0.1, pair.far.die)
    killer.start()
    with pytest.raises(PeerLostError):
        pair.near.wait([(0, 1)], TIMEOUT_S)
    killer.join()


def test_a_disconnected_peer_ends_no_wait(pair: Pair) -> None:
    pair.near.disconnect(pair.peer)
    pair.far.die()
    with pytest.raises(DeadlineError):
        pair.near.wait([(0, 1)], 0.1)
    with pytest.raises(TransportError, match="not connected"):
        pair.near.write(pair.peer, 0, b"x")
    with pytest.raises(TransportError, match="not connected"):
        pair.near.disconnect(pair.peer)


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.01, 0.03])
def test_a_kill_in_full_flow_leaves_only_whole_messages(process_pair: Pair, after_s: float) -> None:
    pair, nbytes, received = process_pair, 50_000, 0
    poured = pair.far.submit("pour", 10**6, nbytes)
    pair.near.wait([(0, 1)], TIMEOUT_S)
    killer = threading.Timer(after_s, pair.far.die)
    killer.start()
    with pytest.raises(PeerLostError):
        while True:
            pair.near.wait([(0, received + 1)], TIMEOUT_S)
            received += 1
            assert bytes(pair.arena.view(received % 2 * nbytes, nbytes)) == stamped(received, nbytes)
            pair.near.ring(pair.peer, 0, received)
    killer.join()
    assert received >= 1
    assert poured.exception(TIMEOUT_S) is not None


def test_nothing_that_a_peer_has_sent_arrives_once_it_is_cut(pair: Pair) -> None:
    pair.far.call("write", 0, b"late" * 16)
    pair.far.call("ring", 2, 9)
    pair.near.disconnect_for_good(pair.peer)
    before = bytes(pair.arena.view(0, 64))
    pair.far.die()
    with pytest.raises(DeadlineError):  # no longer interrupted by the peer's end
        pair.near.wait([(3, 1)], 0.3)
    assert bytes(pair.arena.view(0, 64)) == before


def test_closing_tells_the_peer_and_is_idempotent(pair: Pair) -> None:
    waiting = pair.far.submit("wait", [(0, 1)], TIMEOUT_S)
    pair.near.close()
    pair.near.close()
    assert "near" in str(waiting.exception(TIMEOUT_S))
    for use in (
        lambda: pair.near.wait([(0, 1)], TIMEOUT_S),
        lambda: pair.near.write(pair.peer, 0, b"x"),
        lambda: pair.near.ring(pair.peer, 0, 1),
        pair.near.descriptor,
        lambda: pair.near.connect(b"", 1.0),
    ):
        with pytest.raises(TransportError):
            use()


def test_views_outlive_their_endpoint(pair: Pair) -> None:
    pair.far.call("write", 0, b"kept")
    pair.far.call("ring", 0, 1)
    pair.near.wait([(0, 1)], TIMEOUT_S)
    view = pair.arena.view(0, 4)
    pair.close()
    assert bytes(view) == b"kept"


def test_misuse_is_named(pair: Pair) -> None:
    fresh = IMPLEMENTATIONS[pair.kind]("fresh")
    with pytest.raises(TransportError, match=r"call register\(\) first"):
        fresh.descriptor()
    with pytest.raises(ValueError, match="got 0 bytes, 1 doorbells"):
        fresh.register(0, 1)
    with pytest.raises(ValueError, match="64 bytes, -1 doorbells"):
        fresh.register(64, -1)
    with pytest.raises(TransportError, match="has an arena of"):
        pair.near.register(64, 1)
    with pytest.raises(TransportError, match="descriptor"):
        pair.near.connect(b"nonsense", 1.0)
    fresh.register(64, 1)
    descriptor = fresh.descriptor()
    fresh.close()
    with pytest.raises(PeerLostError, match="fresh"):
        pair.near.connect(descriptor, 1.0)
    fresh.register(64, 1)  # a closed endpoint may register again
    fresh.close()


@pytest.mark.parametrize("name", sweep(list(PAIRS), ORDINARY))
def test_nothing_is_left_behind(name: str) -> None:
    def handles() -> tuple[int, int, str]:
        gc.collect()
        # Queue pairs, memory regions and all else that the kernel keeps for RDMA, of this process and the far one.
        kept = subprocess.check_output(["rdma", "resource"], text=True) if "rdma" in name else ""
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd:lamina" in line for line in maps), kept

    def one_life() -> None:
        pair = open_pair(name)
        pair.far.die()
        with pytest.raises(PeerLostError):
            pair.near.wait([(0, 1)], TIMEOUT_S)
        pair.close()

    one_life()  # afterwards, everything that opens files once per process has done so
    before = handles()
    assert ("rdma" in name) == (" qp " in before[2])
    for _ in range(3):
        one_life()
    assert handles() == before


def test_the_stamp_notices_a_torn_message() -> None:
    message = stamped(1, 100)
    assert whole(message)
    assert not whole(stamped(2, 100)[:50] + message[50:])
