"""Traces drawn from published lengths have the published means."""

import sys
from pathlib import Path

import numpy as np
import pytest

from bench.cost import traces
from lamina.plan.workload import read_trace


def test_answers_cut_off_at_the_published_budgets_have_the_published_means() -> None:
    drawn = traces.outputs(200_000, np.random.default_rng(3))
    for budget, mean in zip(traces.BUDGETS[1:], traces.CUT_MEANS[1:], strict=True):
        assert np.minimum(drawn, budget).mean() == pytest.approx(mean, rel=0.01)


def test_a_written_trace_is_read_and_bursts_are_long_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bursts.jsonl"
    monkeypatch.setattr(sys, "argv", ["traces", "bursts", "--out", str(file), "--requests", "2000", "--rate", "2"])
    traces.main()
    read = read_trace(file)
    long = [one for one in read if one.prompt == traces.BURST_CONTEXT]
    assert len(read) - len(long) == 2000 and 50 < len(long) < 200  # 30 s of every 600
    begun = min(one.arrival_s for one in long)
    assert all((one.arrival_s - begun) % traces.PERIOD_S < traces.BURST_S + 1 for one in long)
