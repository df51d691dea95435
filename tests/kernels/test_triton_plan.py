"""Triton's planning, merging and table kernels, each against its definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from lamina.kernels.gpu.attention import PAIR_WORDS, merge, pair_table, write_words
from lamina.kernels.gpu.specialize import WRITTEN_ELEMENTS, plan_numbers, plan_program, write_rows_program
from lamina.kernels.gpu.tilings import Tiling
from tests.kernels.test_merge import definition, partials
from tests.support.gpu_device import BACKEND, give, sweep_on_device, take
from tests.support.kernel_cases import Pair, decode, make_spec, problem_pairs, table
from tests.support.reference_attention import visible


def plan(pairs, spec, wanted, block_m=16, rows=(1, 2**30), least_tokens=32):
    """(items [n, 16], splits [pairs, 3]) as the device plans them, with one unused pair."""
    segments = table(pairs, np.zeros(sum(pair.tokens for pair in pairs), np.int32))
    words = np.zeros((len(pairs) + 1, PAIR_WORDS), np.int32)
    words[:-1] = pair_table(segments)
    tiles = sum(-(-pair.rows * spec.query_heads // spec.kv_heads // block_m) for pair in pairs)
    bound = max(wanted, tiles + wanted // 2)
    items, splits = give(np.full((bound + 1, 16), -1, np.int32)), BACKEND.empty((3 * len(words) + 1,), np.int32)
    numbers = plan_numbers(spec, Tiling(16, 4, 1, 1, 1, least_tokens), block_m, rows, wanted)
    BACKEND.launch(plan_program(len(words)), (len(words),), [give(words), items, splits, len(words), *numbers])
    items, splits = take(items), take(splits)
    assert splits[-1] <= bound, "a captured graph has no programs for these items"
    assert (items[splits[-1] :] == -1).all()
    return items[: splits[-1]], splits[:-1].reshape(-1, 3)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    pairs=problem_pairs(),
    group=st.sampled_from([1, 4, 7]),
    wanted=st.integers(1, 9),
    window=st.sampled_from([0, 1, 40]),
    chunk=st.sampled_from([0, 1, 37]),
)
def test_items_cover_what_each_tile_sees_once(pairs, group, wanted, window, chunk):
    spec = make_spec(1, group, 16, window=window, chunk=chunk)
    items, splits = plan(pairs, spec, wanted)
    words = pair_table(table(pairs, np.zeros(sum(pair.tokens for pair in pairs), np.int32)))
    assert len(items) == sum(
        -(-pair.rows * group // 16) * parts for pair, (_, parts, _) in zip(pairs, splits[:-1], strict=True)
    )
    for number, pair in enumerate(pairs):
        tiles = -(-pair.rows * group // 16)
        begin, parts, first_row = splits[number]
        assert first_row == words[number, 0] and (parts > 0) == (tiles > 0)
        mine = items[begin : begin + tiles * parts]
        assert (mine[:, :7] == words[number, :7]).all() and (mine[:, 10] == parts).all()
        keys = pair.kv_start + np.arange(pair.tokens)
        for tile in range(tiles):
            part = mine[tile * parts : (tile + 1) * parts, 7:10]
            assert (part[:, 0] == tile).all()
            assert (part[1:, 1] == part[:-1, 2]).all() or parts == 1
            assert (part[:, 1] < part[:, 2]).all() or parts == 1
            for row in range(tile * 16 // group, min(pair.rows, -(-(tile + 1) * 16 // group))):
                seen = np.flatnonzero(visible(pair.query_start + row, keys, spec))
                if len(seen):
                    assert part[0, 1] <= seen[0] and seen[-1] < part[-1, 2]


def test_one_long_segment_among_short_ones_is_cut_into_equal_parts():
    items, splits = plan([decode(30), decode(50_000), decode(100)], make_spec(1, 1, 16), wanted=20)
    sizes = items[:, 9] - items[:, 8]
    assert splits[:3, 1].tolist() == [1, 18, 1]
    assert sizes.sum() == 50_130 and sizes.max() <= 50_000 / 18 + 16
    assert (np.diff(sizes[:17]) == 0).all() and sizes[-2:].tolist() == [100, 30], "what is short is started last"


WAVES = {
    "long": ([32768] * 8, 66, [8] * 8),  # as many as run at once and no few more, which would run alone
    "shorter": ([4096] * 16, 66, [4] * 16),
    "as many as run at once": ([1024] * 64, 66, [1] * 64),
    "more than run at once": ([1024] * 100, 66, [1] * 100),
    "one long among many": ([500_000] + [1024] * 99, 66, [34] + [1] * 99),  # the long one is cut still
    "more than run at once on a small GPU": ([1024] * 30, 20, [1] * 30),
    "one long among many on a small GPU": ([500_000] + [1024] * 29, 20, [11] + [1] * 29),
}
ON_A_SMALL_GPU = [name for name in WAVES if "small GPU" in name]  # planned in a tenth of the time


@pytest.mark.parametrize("wave", sweep_on_device(WAVES, ["long", "shorter", *ON_A_SMALL_GPU]))
def test_a_step_is_one_wave_of_equal_parts(wave):
    lengths, wanted, parts = wave
    _, splits = plan([decode(tokens) for tokens in lengths], make_spec(1, 1, 16), wanted, least_tokens=256)
    assert splits[:-1, 1].tolist() == parts


def test_classes_of_pairs_share_no_item():
    pairs = [decode(100), Pair(rows=5, query_start=90, tokens=80)]
    few, _ = plan(pairs, make_spec(1, 4, 16), wanted=2, rows=(1, 4))
    many, splits = plan(pairs, make_spec(1, 4, 16), wanted=2, rows=(5, 100))
    assert set(few[:, 1].tolist()) == {1} and set(many[:, 1].tolist()) == {5}
    assert splits[0, 1] == 0


def run_merge(outs, lses, sinks=None):
    outs, lses = np.array(outs), np.array(lses)
    out, lse = BACKEND.empty(outs.shape[1:], np.float32), BACKEND.empty(lses.shape[1:], np.float32)
    merge(BACKEND, give(outs), give(lses), out, lse, None if sinks is None else give(sinks))
    return take(out), take(lse)


@pytest.mark.parametrize("count", [1, 2, 5, 37])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_merge_equals_definition(count, with_sinks):
    outs, lses = partials(count, rows=2)
    sinks = np.array([0.5, -2, 3, 0], np.float32) if with_sinks else None
    out, lse = run_merge(outs, lses, sinks)
    wanted_out, wanted_lse = definition(outs, lses, sinks)
    np.testing.assert_allclose(out, wanted_out, atol=2e-6)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-6)


def test_merge_of_nothing_seen_and_far_apart_and_nan():
    outs, lses = partials(4, rows=4)
    lses[1][:], outs[1][:] = -np.inf, np.nan  # neutral, whatever it holds
    lses[0][1] += 500
    for part in lses:
        part[2] = -np.inf
    lses[3][3, 0] = np.nan
    out, lse = run_merge(outs, lses)
    kept = [0, 2, 3]
    wanted, wanted_lse = definition([outs[i][:1] for i in kept], [lses[i][:1] for i in kept])
    np.testing.assert_allclose(out[:1], wanted, atol=2e-6)
    np.testing.assert_allclose(lse[:1], wanted_lse, atol=2e-6)
    np.testing.assert_allclose(out[1], outs[0][1], atol=2e-6)
    assert (out[2] == 0).all() and (lse[2] == -np.inf).all()
    assert np.isnan(out[3, 0]).all() and np.isfinite(out[3, 1:]).all()
    sinks = np.array([0.5, -2, 3, 0], np.float32)
    out, lse = run_merge(outs, lses, sinks)
    assert (out[2] == 0).all()
    np.testing.assert_allclose(lse[2], sinks, rtol=1e-6)


def test_merge_refuses_partials_of_other_shapes():
    outs, lses = partials(2)
    with pytest.raises(ValueError, match=r"lses \(2, 3, 3\).* are not partials of one shape"):
        run_merge(outs, [part[:, :3] for part in lses])


@pytest.mark.parametrize("count", [0, 1, 300])
def test_changed_words_are_written_and_no_other(count):
    rng = np.random.default_rng(0)
    words = rng.integers(0, 100, 1000).astype(np.int32)
    changes = np.stack([rng.permutation(1000)[:count], np.arange(count)]).astype(np.int32)
    there = give(words)
    write_words(BACKEND, there, changes)
    words[changes[0]] = changes[1]
    np.testing.assert_array_equal(take(there), words)


@pytest.mark.parametrize("unit", [5, 24, WRITTEN_ELEMENTS + 8])  # not aligned; aligned; of several programs
@pytest.mark.parametrize("element", [np.float32, np.uint16])
def test_rows_are_written_where_messages_have_them(unit, element):
    random, lead, rows = np.random.default_rng(0), 16, 3
    source = random.integers(1, 1000, (7, unit)).astype(element)
    before, counts = [2, 0], [rows, 1]  # rows of another kind in front, and rows of this one, by message
    messages = [give(np.zeros(2 * lead + rows * unit, element)) for _ in before]
    table = np.array([[4, 0, 6, 2, 0], [0, 0, 1, 0, -1], [0, 1, 0, 2, 0], [2, 2, 0, 2, 0]], np.int32)
    addresses = np.array([at.ctypes.data if isinstance(at, np.ndarray) else at.data.ptr for at in messages], np.int64)
    program = write_rows_program(element, unit, lead)
    grid = table.shape[1], -(-unit // WRITTEN_ELEMENTS)
    BACKEND.launch(program, grid, [give(source), give(table), give(addresses), table.shape[1]])
    for message, (front, count, taken) in enumerate(zip(before, counts, ([4, 0, 2], [6]), strict=True)):
        expected = np.zeros_like(take(messages[message]))
        expected[front * lead : front * lead + count * unit] = source[taken].ravel()
        np.testing.assert_array_equal(take(messages[message]), expected)
