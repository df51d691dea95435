"""Traces drawn from published lengths have the published means."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.cost import traces
from lamina.core.errors import ConfigError
from lamina.planning.plan import workload
from lamina.planning.plan.workload import TracedRequest, read_trace


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


def test_agents_have_the_published_means_and_find_half_of_their_prompts() -> None:
    served = workload.of_requests("agents", traces.agents(20_000, 1.0))
    assert served.prompt == pytest.approx(traces.AGENT_PROMPT, rel=0.02)
    assert served.output == pytest.approx(traces.AGENT_OUTPUT, rel=0.02)
    assert served.reuse.most == pytest.approx(served.prompt / 2, rel=0.02)


def test_questions_repeat_their_document_and_what_was_said_before(tmp_path: Path) -> None:
    made = traces.documents(40, 1.0)
    by_document: dict[int, list[TracedRequest]] = {}
    for one in made:
        by_document.setdefault(one.content[0][0], []).append(one)
    for asked in by_document.values():
        assert traces.SHORTEST <= asked[0].content[0][1] <= traces.LONGEST
        for before, after in itertools.pairwise(asked):
            assert after.content[: len(before.content) + 1] == (*before.content, (before.answer, before.output))
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps(traces.row(one)) + "\n" for one in made))
    assert [one.content for one in read_trace(file)] == [one.content for one in made]


def test_a_file_without_a_trace_s_columns_is_refused_by_their_names(tmp_path: Path) -> None:
    """Also if it has nothing but one line, so that no row lacks anything."""
    file = tmp_path / "notes.csv"
    for text in ("hello\n", "", "TIMESTAMP,ContextTokens\n1,2\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"it has no column .*GeneratedTokens"):
            read_trace(file)
