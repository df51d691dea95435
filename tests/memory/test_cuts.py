"""Attention in cuts against attention in one piece, and what a cut may cost."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.types import AttentionSpec
from lamina.kernels.attention import BEST_PATH, FloatArray, count_tasks, partial, partial_tasks
from lamina.memory import cuts as module
from lamina.memory.cuts import Cut, cuts
from tests.support.kernel_cases import (
    KV_TYPES,
    Case,
    Pair,
    check,
    decode,
    make_case,
    make_spec,
    problem_pairs,
    specs,
)


def attend(case: Case, made: list[Cut], threads: int) -> tuple[FloatArray, FloatArray]:
    """All cuts in order; what none of them writes is NaN."""
    rows = case.q.shape[0]
    out = np.full((rows, case.spec.query_heads, case.spec.v_dim), np.nan, np.float32)
    lse = np.full(out.shape[:2], np.nan, np.float32)
    for cut in made:
        part = slice(cut.start, cut.stop)
        arrays = case.q[part], case.k, case.v, cut.table, case.spec, threads, out[part], lse[part]
        if cut.tasks is None:
            partial(*arrays)
        else:
            partial_tasks(*arrays, cut.tasks, adds=cut.adds)
    return out, lse


@pytest.fixture(autouse=True)
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEWEST_TOKENS", 64)


@given(
    pairs=problem_pairs(),
    spec=specs,
    kv_type=st.sampled_from(KV_TYPES),
    alibi=st.booleans(),
    threads=st.integers(1, 3),
    most=st.integers(1, 10**6),
)
def test_cuts_of_any_size_equal_the_oracle(
    pairs: list[Pair], spec: AttentionSpec, kv_type: str, alibi: bool, threads: int, most: int
) -> None:
    if alibi:
        spec = replace(spec, alibi_slopes=tuple(0.5**i for i in range(1, spec.query_heads + 1)))
    case = make_case(pairs, spec, kv_type)
    made = list(cuts(case.segments, spec, threads, most))
    check(case, *attend(case, made, threads), BEST_PATH)


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_long_chunk_is_cut_evenly_and_rows_that_decode_stay_whole(window: int, threads: int) -> None:
    spec = make_spec(kv_heads=4, group=4, qk_dim=32, window=window)
    case = make_case([decode(900), Pair(300, 5000, 5000), decode(3000), Pair(2, 10, 10)], spec, "float32")
    most = 10**7  # 610 tokens of one block of 64 rows and one head
    made = list(cuts(case.segments, spec, threads, most))
    assert [(made[0].start, made[0].stop), (made[-1].start, made[-1].stop)] == [(0, 1), (301, 304)]
    assert made[0].tasks is made[-1].tasks is None
    products = [case_products(cut, spec) for cut in made[1:-1]]
    assert max(products) <= 1.3 * most * threads
    assert len(products) <= 2.5 * sum(products) / (most * threads) + 5
    whole = partial(case.q, case.k, case.v, case.segments, spec, threads)
    for got, expected in zip(attend(case, made, threads), whole, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=4e-6)  # as between numbers of threads


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_cuts_of_a_single_task_add_up(threads: int) -> None:
    """So few rows that all their heads are one task, whose tokens the threads share out."""
    spec = make_spec(kv_heads=4, group=4, qk_dim=32)
    case = make_case([Pair(4, 5000, 5000)], spec, "float32")
    made = list(cuts(case.segments, spec, threads, 10**6))
    assert len(made) > 2 and all(cut.tasks == (0, 1) for cut in made) and made[1].adds
    whole = partial(case.q, case.k, case.v, case.segments, spec, threads)
    for got, expected in zip(attend(case, made, threads), whole, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=4e-6)


def case_products(cut: Cut, spec: AttentionSpec) -> float:
    """Multiplications of a cut, by counting."""
    assert cut.tasks is not None
    table, (first, last) = cut.table, cut.tasks
    seen = 0
    for position in range(int(table.query_start[0]), int(table.query_start[0]) + cut.stop - cut.start):
        low = max(int(table.kv_start[0]), position - spec.window + 1 if spec.window else 0)
        seen += max(0, min(int(table.kv_start[0]) + len(table.slots), position + 1) - low)
    tasks = count_tasks(table.query_offsets, spec)
    return seen * spec.query_heads * (spec.qk_dim + spec.v_dim) * (last - first) / tasks


def test_a_short_message_is_one_cut_of_the_table_as_it_is() -> None:
    case = make_case([decode(90), Pair(30, 50, 50)], make_spec(kv_heads=2, group=2, qk_dim=32), "float32")
    (cut,) = cuts(case.segments, case.spec, 2, 10**9)
    assert cut == Cut(0, 31, case.segments)


def test_tasks_that_are_not_of_the_attention_are_refused() -> None:
    spec = make_spec(kv_heads=2, group=2, qk_dim=32)
    case = make_case([Pair(30, 50, 50)], spec, "float32")
    out, lse = np.empty((30, 4, 32), np.float32), np.empty((30, 4), np.float32)
    for tasks in ((0, 3), (-1, 1), (2, 1)):
        with pytest.raises(ValueError, match="among the 2 of this attention"):
            partial_tasks(case.q, case.k, case.v, case.segments, spec, 1, out, lse, tasks, adds=False)
