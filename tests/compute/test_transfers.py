"""Rows gathered for messages and partials merged on an emulated card, against plain loops in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lamina.compute.device.base import ExchangedRows
from lamina.compute.device.emulated import Emulated
from lamina.compute.device.kit import ROWS
from lamina.compute.device.transfers import GpuTransfers, Lines
from tests.support.lane_transfers import SPEC, check_lanes, draw_exchanged_rows, reply


@given(
    total=st.integers(1, 9),
    padding=st.integers(0, 3),
    shards=st.sampled_from([1, 2]),
    workers=st.integers(0, 3),
    is_recorded=st.booleans(),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_lanes_that_take_turns_move_their_own_rows(
    total: int, padding: int, shards: int, workers: int, is_recorded: bool, has_sinks: bool, seed: int
) -> None:
    check_lanes(Emulated(), total, padding, shards, workers, is_recorded, has_sinks, seed)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_reply_in_the_same_slot_is_read_again(shards: int) -> None:
    rng = np.random.default_rng(0)
    everything = np.arange(3 * shards)
    exchanged = ExchangedRows(3, 4, shards, [everything], [everything], [np.zeros_like(everything)], [], [])
    transfer = GpuTransfers(Lines(Emulated(), ROWS[-1]), exchanged, torch.float32)
    _, _, body = reply(rng, len(everything), shards)
    for _ in range(2):
        out, _, fresh = reply(rng, len(everything), shards)
        body[:] = fresh
        merged = transfer.merged(SPEC, [], [(1, body)], None).numpy()
        np.testing.assert_array_equal(merged[:3], out.reshape(3, SPEC.query_heads, SPEC.v_dim))
        assert not merged[3:].any()


def test_what_a_step_moves_is_planned_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers leave their results in the same tensors, by which what was planned is found again."""
    lines, rng = Lines(Emulated(), ROWS[-1]), np.random.default_rng(0)
    step = GpuTransfers(lines, draw_exchanged_rows(rng, 5, 8, 1, 2), torch.float32)
    planned: list[Any] = []
    plan = step._plan_collecting

    def count(*each: Any) -> Any:
        planned.append(each)
        return plan(*each)

    monkeypatch.setattr(step, "_plan_collecting", count)
    for _ in range(3):
        shapes = (SPEC.query_heads, SPEC.qk_dim), (SPEC.kv_heads, SPEC.qk_dim), (SPEC.kv_heads, SPEC.v_dim)
        q, k, v = (lines.fixed_rows(f"out {place}", 8, shape, torch.float32) for place, shape in enumerate(shapes))
        q.normal_()
        queries, *_ = step.fill_messages(q, k, v)
        for shards, rows in zip(step._exchanged.queries, queries, strict=True):
            np.testing.assert_array_equal(rows, q.numpy()[shards])
    assert len(planned) == 1
