"""The memory worker's loop over shared memory: what it serves between the cuts of a long chunk's attention."""

from collections.abc import Iterator

import numpy as np
import pytest

from lamina.control.messages import Forget, Working
from lamina.dataplane.fetching import FetchPiece
from lamina.dataplane.leases import LANDINGS
from lamina.kernels.attention import partial
from lamina.kernels.segments import SegmentTable
from lamina.memory import cuts, worker
from lamina.memory.device import cpu
from lamina.memory.pulls import MOST_IN_A_ROW
from tests.support.memory_worker import PREFIX, ROWS, SPEC, Pair
from tests.support.reference_attention import read_reply

DECODES, PROMPTS = 0, 1  # lanes, and the sequences in them


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(cpu, "MOST_PRODUCTS", 1)
    monkeypatch.setattr(cuts, "_FEWEST_TOKENS", 64)
    monkeypatch.setattr(worker, "IDLE_SLICE_S", 0.0)
    made = Pair()
    yield made
    made.links.close()
    made.resources.close()


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def begin(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """A short prompt in one lane, a long one in the other: its k and v."""
    pair.plan(DECODES, admitted=1, chunk=(0, 2))
    pair.send(DECODES, bulk=[normal(2, 2, 8), normal(2, 2, 8)])
    pair.serve_until_answered(DECODES)
    k, v = normal(PREFIX, 2, 8), normal(PREFIX, 2, 8) + 1
    bulk = [part[first : first + 100] for first in range(0, PREFIX, 100) for part in (k, v)]
    pair.plan(PROMPTS, admitted=PREFIX + ROWS, chunk=(0, PREFIX))
    pair.send(PROMPTS, bulk=bulk)
    pair.serve_until_answered(PROMPTS)
    return k, v


def test_decode_messages_of_other_lanes_are_answered_between_cuts(pair: Pair) -> None:
    k, v = begin(pair)
    q = normal(ROWS, 2, 8)
    pair.plan(PROMPTS, chunk=(PREFIX, PREFIX + ROWS))
    pair.send(PROMPTS, q, bulk=[normal(ROWS, 2, 8)] * 2)
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
    got = read_reply(memoryview(pair.reply), SPEC, ROWS)
    for ours, whole in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=2e-6, atol=4e-6)


def test_a_long_attention_is_reported_as_work_while_it_lasts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "REPORT_S", 0.0)
    begin(pair)
    pair.control.sent.clear()
    pair.plan(PROMPTS, chunk=(PREFIX, PREFIX + ROWS))
    pair.send(PROMPTS, normal(ROWS, 2, 8), bulk=[normal(ROWS, 2, 8)] * 2)
    pair.serve_until_answered(PROMPTS)
    reports = [message.lanes for message in pair.control.sent if isinstance(message, Working)]
    cuts_made = SPEC.kv_heads * -(-PREFIX // 64)
    assert reports == [[PROMPTS]] * (cuts_made - 2), "after all cuts but the first, and the last, which is answered"


def test_what_a_worker_that_has_ended_never_sent_occupies_no_landing_slot(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    puller = pair.worker._puller
    with monkeypatch.context() as patched:
        patched.setattr(puller, "_fetch", lambda *_: None)  # from a peer that leaves without an answer
        for place in range(LANDINGS):
            puller.add_piece(FetchPiece("compute1", place, 1, lambda content: None))
            puller.start_next()
    pair.control.tell(Forget(["compute1"]))
    begin(pair)  # fetches K and V of prompts
