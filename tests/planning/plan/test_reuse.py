"""What caches of every size find: the curve of a trace against caches played one by one, and sessions."""

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from bench.cost import traces
from lamina.core.errors import ConfigError
from lamina.planning.plan import workload
from lamina.planning.plan.workload import FromTrace, Sessions


def played(trace: list[workload.TracedRequest], size: float) -> float:
    """Tokens found of a prompt on average, by a cache of single runs."""
    kept: OrderedDict[tuple[tuple[int, int], ...], int] = OrderedDict()
    found = 0
    for one in trace:
        whole = (*one.content, (one.answer, one.output)) if one.answer is not None else one.content
        hit = True
        for end in range(1, len(one.content) + 1):
            hit = hit and whole[:end] in kept
            found += whole[end - 1][1] if hit else 0
        for end in range(len(whole), 0, -1):
            kept.pop(whole[:end], None)
            kept[whole[:end]] = whole[end - 1][1]
        while sum(kept.values()) > size:
            kept.popitem(last=False)
    return found / len(trace)


def test_the_curve_of_a_trace() -> None:
    trace = traces.documents(200, 5.0, seed=1)
    reuse = FromTrace.from_requests([(one.content, one.answer, one.output) for one in trace])
    assert reuse is not None
    for size, tokens in zip(reuse.sizes, reuse.tokens, strict=True):
        assert tokens == pytest.approx(played(trace, size))
    assert list(reuse.tokens) == sorted(reuse.tokens) and reuse.tokens[0] == 0
    assert reuse.most > 0.5 * np.mean([one.prompt for one in trace])  # three of four questions are not the first
    assert FromTrace.from_requests([((), None, 5)]) is None
    lengths = np.array([one.prompt for one in trace], np.float64)
    for found in (0.0, 0.3 * reuse.most, reuse.most):
        each = reuse.each(found, lengths)
        assert each.mean() == pytest.approx(found, abs=1) and (each < lengths).all()
    assert reuse.each(reuse.most, lengths).min() == 0 < np.median(each)  # first questions find nothing


def test_idle_sessions_are_found_as_far_as_there_is_room() -> None:
    reuse = Sessions(shared=100, resumed=1000, idle=0.8)
    # Four sessions wait for each that decodes.
    rooms = np.array([-1.0, 100.0, 100 + 4000.0, 100 + 8000.0, 1e9])
    assert reuse.found_tokens(rooms, np.full(5, 2.0)) == pytest.approx([0, 100, 100 + 500, 1100, 1100])
    with pytest.raises(ConfigError, match="leave nothing new in a prompt of 1000"):
        workload.of_lengths(1000, 10, reuse)


def test_what_prompts_share_is_read_from_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows: list[dict[str, object]] = [
        {"timestamp": 0, "input_length": 1000, "output_length": 10, "hash_ids": [5, 6]},
        {"timestamp": 9, "input_length": 30, "output_length": 10, "content": [[1, 10], [2, 20]], "answer": 3},
        {"timestamp": 9, "input_length": 30, "output_length": 10},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    first, second, third = workload.read_trace(file)
    assert first.content == ((5, 512), (6, 488)) and first.answer is None
    assert second.content == ((1, 10), (2, 20)) and second.answer == 3 and third.content == ()
    wrong: list[dict[str, object]] = [
        {"hash_ids": [5]},
        {"content": [[1, 999]]},
        {"content": [[-1, 1000]]},
        {"hash_ids": [5, "x"]},
    ]
    for broken in wrong:
        file.write_text(json.dumps({**rows[0], "hash_ids": [5, 6], **broken}))
        with pytest.raises(ConfigError, match="is not a trace"):
            workload.read_trace(file)
