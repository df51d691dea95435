"""The memory worker's loop over shared memory: what it serves between the cuts of a long chunk's attention."""

import collections
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lamina.compute.links import LaneLinks, lane_links
from lamina.config import Overlap
from lamina.errors import DeadlineError
from lamina.kernels.attention import partial
from lamina.kernels.segments import SegmentTable
from lamina.memory import cuts, store, worker
from lamina.memory.pulls import MOST_IN_A_ROW
from lamina.memory.worker import MemoryWorker
from lamina.protocol.channel import Layout
from lamina.protocol.choice import Transport
from lamina.protocol.links import Links
from lamina.protocol.messages import Connect, Link, Linked, MemorySetup, Register, Registered, Step, Working
from lamina.protocol.wire import keys_values, read_reply, reply_nbytes, reply_number, request_nbytes, request_number
from lamina.types import (
    Admission,
    AttentionSpec,
    DecodeRows,
    DType,
    SamplingParams,
    Segment,
    SequenceStep,
    StepPlan,
)

SPEC = AttentionSpec(layer=0, query_heads=2, kv_heads=2, qk_dim=8, v_dim=8, scale=0.5)
NOBODY = DecodeRows([], [], [])
DECODES, PROMPTS = 0, 1  # lanes, and the sequences in them
PREFIX, ROWS = 1000, 40
PER_TOKEN = SPEC.kv_bytes_per_token(DType.FLOAT32)
TIMEOUT_S = 20.0


class Control:
    """A worker's end of the control plane, in one process with the test."""

    name, local_address, data_secret = "memory0", "127.0.0.1", b"a secret of 16 bytes or more"

    def __init__(self) -> None:
        self.inbox: collections.deque[Any] = collections.deque()
        self.sent: list[Any] = []
        self.changed = threading.Condition()

    def tell(self, message: Any) -> None:
        with self.changed:
            self.inbox.append(message)
            self.changed.notify_all()

    def hear(self, kind: type) -> Any:
        with self.changed:
            assert self.changed.wait_for(lambda: any(isinstance(each, kind) for each in self.sent), TIMEOUT_S)
            return next(each for each in self.sent if isinstance(each, kind))

    def send(self, message: Any) -> None:
        with self.changed:
            self.sent.append(message)
            self.changed.notify_all()

    def receive(self, timeout_s: float) -> Any:
        with self.changed:
            if not self.changed.wait_for(lambda: self.inbox, timeout_s):
                raise DeadlineError("no message")
            return self.inbox.popleft()

    def poll(self) -> Any:
        return self.inbox.popleft() if self.inbox else None


class Pair:
    """A memory worker, whose turns the test counts, and its peer."""

    def __init__(self) -> None:
        layout = Layout(
            lanes=2,
            memories=1,
            request_nbytes=request_nbytes([SPEC], DType.FLOAT32, ROWS),
            reply_nbytes=reply_nbytes([SPEC], ROWS),
            bulk_nbytes=PREFIX * PER_TOKEN,
            landing_nbytes=100 * PER_TOKEN,
        )
        names, connect = ["compute0", "memory0"], Connect(["compute0"], ["memory0"], layout)
        self.control = Control()
        self.worker = MemoryWorker(self.control)  # type: ignore[arg-type]
        setting_up = threading.Thread(target=self.worker._set_up)
        setting_up.start()
        self.control.tell(MemorySetup([SPEC], DType.FLOAT32, 3000, 1, Overlap(), trace=False))
        self.control.tell(Register(*layout.memory_arena, names, [Transport.SHM], 0.0))
        offer = self.control.hear(Registered).offer
        self.links = Links("compute0", self.control.data_secret, "127.0.0.1")
        arena, own = self.links.register(Register(*layout.compute_arena, names, [Transport.SHM], 0.0))
        self.control.tell(Link(1, {"compute0": (Transport.SHM, own.descriptors[Transport.SHM])}))
        self.links.link(Link(1, {"memory0": (Transport.SHM, offer.descriptors[Transport.SHM])}))
        assert not self.control.hear(Linked).failures
        self.control.tell(connect)
        setting_up.join(TIMEOUT_S)
        self.wait = self.links.settle()
        self.lanes: list[LaneLinks] = lane_links("compute0", self.links, arena, connect)
        self.turns = [0, 0]

    def plan(self, lane: int, admitted: int = 0, chunk: tuple[int, int] = (0, 0), decode_at: int = -1) -> None:
        """Sequence ``lane`` is admitted, runs tokens ``chunk`` of its prompt, or decodes."""
        start, stop = chunk
        segment = Segment(lane, "memory0", (0, 2), (0, None))
        admissions = [Admission(lane, 1, admitted, [segment], SamplingParams(), 0)] if admitted else []
        chunks = [SequenceStep(lane, start, [0] * (stop - start), [])] if stop else []
        decoding = NOBODY if decode_at < 0 else DecodeRows([lane], [decode_at], [])
        self.control.tell(Step(StepPlan(0, lane, self.turns[lane], [], [], admissions, chunks, decoding)))

    def send(self, lane: int, *parts: np.ndarray) -> None:
        self.lanes[lane].requests["memory0"].send(list(parts), request_number(self.turns[lane], 0))

    def answered(self, lane: int) -> bool:
        try:
            self.wait([(self.lanes[lane].replies["memory0"].doorbell, reply_number(self.turns[lane]))], 0.0)
        except DeadlineError:
            return False
        self.turns[lane] += 1
        return True

    def serve_until_answered(self, lane: int) -> int:
        """How many turns of the worker that took."""
        for turn in range(1, 5000):
            self.worker._serve_once()
            if self.answered(lane):
                return turn
        raise AssertionError(f"lane {lane} is not answered")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(store, "MOST_PRODUCTS", 1)
    monkeypatch.setattr(cuts, "_FEWEST_TOKENS", 64)
    monkeypatch.setattr(worker, "IDLE_SLICE_S", 0.0)
    made = Pair()
    yield made
    made.links.close()
    made.worker.close()


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def begin(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """A short prompt in one lane, a long one in the other: its k and v."""
    pair.plan(DECODES, admitted=1, chunk=(0, 2))
    pair.send(DECODES)
    pair.serve_until_answered(DECODES)
    k, v = normal(PREFIX, 2, 8), normal(PREFIX, 2, 8) + 1
    for first in range(0, PREFIX, 100):
        target = keys_values(pair.lanes[PROMPTS].bulk[0], SPEC, DType.FLOAT32, first * PER_TOKEN, 100)
        target[0][:], target[1][:] = k[first : first + 100], v[first : first + 100]
    pair.plan(PROMPTS, admitted=PREFIX + ROWS, chunk=(0, PREFIX))
    pair.send(PROMPTS)
    pair.serve_until_answered(PROMPTS)
    return k, v


def test_decode_messages_of_other_lanes_are_answered_between_cuts(pair: Pair) -> None:
    k, v = begin(pair)
    q = normal(ROWS, 2, 8)
    pair.plan(PROMPTS, chunk=(PREFIX, PREFIX + ROWS))
    pair.send(PROMPTS, q)
    pair.worker._serve_once()  # its first cut
    token = normal(1, 2, 8)
    decoded = 0
    while not pair.answered(PROMPTS):
        pair.plan(DECODES, decode_at=2 + decoded)
        pair.send(DECODES, token, token, token)
        assert pair.serve_until_answered(DECODES) <= 2, "it waited for more than a cut"
        decoded += 1
    cut = decoded // MOST_IN_A_ROW
    assert cut >= PREFIX / 64, "every so many messages the chunk has gone on, and it was cut"
    table = SegmentTable(
        np.array([0, ROWS], np.int32),
        np.array([PREFIX], np.int32),
        np.array([0, PREFIX], np.int64),
        np.zeros(1, np.int32),
        np.arange(PREFIX, dtype=np.int32),
    )
    wanted = partial(q, k, v, table, SPEC, 1)
    got = read_reply(pair.lanes[PROMPTS].replies["memory0"].view, SPEC, ROWS)
    for ours, whole in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=2e-6, atol=4e-6)


def test_a_long_attention_is_reported_as_work_while_it_lasts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "REPORT_S", 0.0)
    begin(pair)
    pair.control.sent.clear()
    pair.plan(PROMPTS, chunk=(PREFIX, PREFIX + ROWS))
    pair.send(PROMPTS, normal(ROWS, 2, 8))
    pair.serve_until_answered(PROMPTS)
    reports = [message.lanes for message in pair.control.sent if isinstance(message, Working)]
    cuts_made = SPEC.kv_heads * -(-PREFIX // 64)
    assert reports == [[PROMPTS]] * (cuts_made - 2), "after all cuts but the first, and the last, which is answered"
