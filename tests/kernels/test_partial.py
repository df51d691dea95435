"""Partial attention on every path of this machine against the float64 oracle."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lamina import _native
from lamina.kernels import attention
from lamina.kernels.attention import Array, Path, merge
from tests.support import reference_attention
from tests.support.kernel_cases import (
    KV_TYPES,
    PAIRS,
    Case,
    Pair,
    check,
    decode,
    encode,
    make_case,
    make_spec,
    problem_pairs,
    specs,
)

PATHS = _native.attention_paths()
paths = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name.lower())
# Query heads per KV head and head sizes: those of a kernel for any task, of one row in AVX-512, of one row in tiles.
groups = pytest.mark.parametrize(("group", "dim"), [(1, 16), (2, 64), (5, 32)])


def run(case: Case, path: Path, threads: int = 1) -> tuple[attention.FloatArray, attention.FloatArray]:
    return attention.partial(case.q, case.k, case.v, case.segments, case.spec, threads, path=path)


@paths
@given(
    pairs=problem_pairs(),
    spec=specs,
    kv_type=st.sampled_from(KV_TYPES),
    wide_query=st.booleans(),
    alibi=st.booleans(),
    threads=st.integers(1, 3),
)
@example(
    pairs=[Pair(5, start, tokens, kv_start=0) for start, tokens in ((173, 65), (199, 15), (173, 65))],
    spec=make_spec(kv_heads=2, group=2, qk_dim=48, v_dim=8),
    kv_type="float16",
    wide_query=True,
    alibi=True,
    threads=2,
)
def test_equals_oracle(pairs, spec, kv_type, wide_query, alibi, threads, path):
    if alibi:
        spec = replace(spec, alibi_slopes=tuple(0.5**i for i in range(1, spec.query_heads + 1)))
    case = make_case(pairs, spec, kv_type, wide_query=wide_query)
    check(case, *run(case, path, threads), path)


@paths
@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("qk_dim", [64, 80, 128])
def test_decode_batch(group, qk_dim, kv_type, path):
    spec = make_spec(kv_heads=2, group=group, qk_dim=qk_dim)
    case = make_case([decode(tokens) for tokens in (1, 63, 64, 65, 130)], spec, kv_type)
    check(case, *run(case, path), path)


@paths
@pytest.mark.parametrize("threads", [2, 3])
def test_long_segment_among_short_ones_is_split(path, threads):
    spec = make_spec(kv_heads=2, group=2, qk_dim=32)
    case = make_case([decode(20), decode(5000), decode(70)], spec, "float32")
    check(case, *run(case, path, threads), path)


@paths
def test_prompt_chunk_over_cached_prefix(path):
    spec = make_spec(kv_heads=2, group=4, qk_dim=64, v_dim=32, window=300)
    case = make_case([Pair(rows=130, query_start=400, tokens=530)], spec, "bfloat16")
    check(case, *run(case, path, threads=2), path)


@paths
def test_rows_that_see_nothing(path):
    spec = make_spec(kv_heads=1, group=2, qk_dim=16)
    ahead_of_query = Pair(rows=2, query_start=3, tokens=10, kv_start=4)  # its second row sees one token
    case = make_case([Pair(rows=1, query_start=0, tokens=0), ahead_of_query], spec, "float32")
    out, lse = run(case, path)
    assert (out[:2] == 0).all() and (lse[:2] == -np.inf).all()
    check(case, out, lse, path)


@paths
@pytest.mark.parametrize(
    ("kv_type", "rows", "growth"), [("float32", 1, 60), ("float32", 9, 20), ("bfloat16", 1, 20), ("bfloat16", 9, 20)]
)
@groups
def test_scores_far_apart_between_tiles(group, dim, rows, kv_type, growth, path):
    """The running reference has to follow scores that grow from tile to tile, and one that shrinks again."""
    spec = make_spec(kv_heads=1, group=group, qk_dim=dim)
    case = make_case([Pair(rows, query_start=400 - rows, tokens=400)], spec, "float32")
    slots = case.segments.slots
    case.k[slots] *= np.interp(np.arange(400), [0, 350, 400], [0.1, growth, 0.1])[:, None, None].astype(np.float32)
    case = replace(case, q=encode(case.q, kv_type), k=encode(case.k, kv_type), v=encode(case.v, kv_type))
    check(case, *run(case, path), path)


@paths
@pytest.mark.parametrize(("kv_type", "rows"), [("float32", 1), ("bfloat16", 1), ("bfloat16", 9)])
@groups
def test_scores_far_below_zero(group, dim, rows, kv_type, path):
    """Exponentials of scores near -160 are 0 in float32, unless they are relative to the largest one."""
    spec = make_spec(kv_heads=2, group=group, qk_dim=dim)
    case = make_case([Pair(rows, query_start=150 - rows, tokens=150)], spec, "float32")
    case = replace(case, q=np.full_like(case.q, 16 * dim**-0.5), k=case.k / 8 - 10)
    case = replace(case, q=encode(case.q, kv_type), k=encode(case.k, kv_type), v=encode(case.v, kv_type))
    out, lse = run(case, path)
    assert (lse < -120).all()
    check(case, out, lse, path)


@paths
@pytest.mark.parametrize("kv_type", ["float32", "bfloat16"])
@groups
def test_nan_is_not_hidden(group, dim, path, kv_type):
    """A NaN in q reaches the results of its own query head alone."""
    spec = make_spec(kv_heads=2, group=group, qk_dim=dim)
    case = make_case([decode(100), decode(30)], spec, kv_type, wide_query=True)
    case.q[0, 1, 5] = np.nan
    out, lse = run(case, path)
    assert np.isnan(out[0, 1]).all() and np.isnan(lse[0, 1])
    assert np.isfinite(out[0, 0]).all() and np.isfinite(out[1]).all() and np.isfinite(lse[1]).all()


@paths
@pytest.mark.parametrize("kv_type", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 13])
def test_unused_slots_do_not_matter(path, kv_type, dim):
    """Poison beside every token's row: kernels read whole rows, not what follows them."""
    case = make_case([decode(77)], make_spec(kv_heads=2, group=4, qk_dim=dim), kv_type)
    capacity = 2 * 77 + 1
    case = replace(
        case,
        k=np.resize(case.k, (capacity, *case.k.shape[1:])),
        v=np.resize(case.v, (capacity, *case.v.shape[1:])),
        segments=replace(case.segments, slots=np.arange(1, capacity, 2, dtype=np.int32)),
    )
    wanted = run(case, path)
    unused = np.setdiff1d(np.arange(len(case.k)), case.segments.slots)
    poison = 0x7FC0 if kv_type == "bfloat16" else np.nan
    case.k[unused] = case.v[unused] = poison
    for got, expected in zip(run(case, path), wanted, strict=True):
        np.testing.assert_array_equal(got, expected)


@paths
@given(spec=specs, cuts=st.lists(st.integers(0, 150), max_size=4), kv_type=st.sampled_from(KV_TYPES))
def test_any_split_merges_to_the_whole(spec, cuts, kv_type, path):
    rows, tokens = 3, 150
    whole = make_case([Pair(rows=rows, query_start=tokens - rows, tokens=tokens)], spec, kv_type)
    bounds = [0, *sorted(cuts), tokens]
    partials = [run(part_of(whole, start, stop), path) for start, stop in pairwise(bounds)]
    lse = np.empty_like(partials[0][1])
    out = merge([out for out, _ in partials], [lse for _, lse in partials], lse=lse)
    check(whole, out, lse, path)


def part_of(case: Case, start: int, stop: int) -> Case:
    """The case's only pair, restricted to tokens [start, stop)."""
    return replace(
        case,
        segments=replace(
            case.segments,
            kv_offsets=np.array([0, stop - start], np.int64),
            kv_start=np.array([start], np.int32),
            slots=case.segments.slots[start:stop].copy(),
        ),
    )


@paths
@pytest.mark.parametrize("kv_type", ["float16", "bfloat16"])
def test_every_finite_16_bit_value_is_read_exactly(path, kv_type):
    """One token's value comes back as it is: subnormals, the largest and both zeros included."""
    bits = np.arange(2**16, dtype=np.uint16)
    exponent = 0x7C00 if kv_type == "float16" else 0x7F80
    bits = bits[bits & exponent != exponent]
    if path in PAIRS and kv_type == "bfloat16":
        bits = bits[bits & exponent != 0]  # its multiplication takes subnormals for zeros
    bits = np.resize(bits, (len(bits) // 64 + 1, 1, 64))
    case = make_case([Pair(rows=1, query_start=0, tokens=1)] * len(bits), make_spec(1, 1, 64), kv_type)
    case.v[case.segments.slots] = bits.view(case.v.dtype)
    out, _ = run(case, path)
    np.testing.assert_array_equal(out, reference_attention.widen(bits.view(case.v.dtype)).astype(np.float32))


def test_writes_into_given_arrays():
    case = make_case([decode(9)], make_spec(kv_heads=1, group=2, qk_dim=8), "float32")
    out, lse = np.empty((1, 2, 8), np.float32), np.empty((1, 2), np.float32)
    result = attention.partial(case.q, case.k, case.v, case.segments, case.spec, 1, out, lse)
    assert result[0] is out and result[1] is lse
    check(case, out, lse, PATHS[-1])


def test_int32_offsets_are_accepted():
    case = make_case([decode(9), decode(4)], make_spec(kv_heads=1, group=2, qk_dim=8), "float32")
    case = replace(case, segments=replace(case.segments, kv_offsets=case.segments.kv_offsets.astype(np.int32)))
    check(case, *run(case, PATHS[-1]), PATHS[-1])


def test_concurrent_callers():
    """Loops of several Python threads take turns on the pool."""
    spec = make_spec(kv_heads=2, group=2, qk_dim=32)
    cases = [make_case([decode(2000), decode(50)], spec, "float32", seed=seed) for seed in range(4)]
    wanted = [run(case, PATHS[-1]) for case in cases]
    results: list[list[tuple[attention.FloatArray, attention.FloatArray]]] = [[] for _ in cases]

    def call(index: int) -> None:
        results[index] = [run(cases[index], PATHS[-1], threads=2) for _ in range(10)]

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(cases))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for index, (out, lse) in enumerate(wanted):
        for got_out, got_lse in results[index]:
            np.testing.assert_allclose(got_out, out, atol=1e-5)
            np.testing.assert_allclose(got_lse, lse, atol=1e-5)


def test_releases_the_gil():
    """Another thread counts on while one call is inside the kernel."""
    case = make_case([decode(40_000)], make_spec(kv_heads=4, group=4, qk_dim=128), "float32")
    inside, ticks = threading.Event(), []

    def count() -> None:
        while not inside.is_set():
            ticks.append(time.monotonic())

    counter = threading.Thread(target=count)
    start = time.monotonic()
    counter.start()
    attention.partial(case.q, case.k, case.v, case.segments, case.spec, 1, path=Path.PORTABLE)
    stop = time.monotonic()
    inside.set()
    counter.join()
    # With the GIL held there are ticks at the very start and end only.
    third = (stop - start) / 3
    assert any(start + third < tick < stop - third for tick in ticks)


def broken(field: str, value: Callable[[Array], Array]) -> Case:
    case = make_case([decode(9), decode(4)], make_spec(kv_heads=2, group=2, qk_dim=8), "float32")
    if field in ("q", "k", "v"):
        changed: dict[str, Any] = {field: value(getattr(case, field))}
        return replace(case, **changed)
    return replace(case, segments=replace(case.segments, **{field: value(getattr(case.segments, field))}))


def with_item(index, item):
    def change(array):
        array = array.copy()
        array[index] = item
        return array

    return change


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("slots", with_item(3, 20), r"slots holds 20; the slab has slots 0 to 19"),
        ("slots", with_item(3, -1), r"slots holds -1; the slab has slots 0 to 19"),
        ("slots", lambda a: a.astype(np.int64), "slots must hold int32"),
        ("slots", lambda a: np.repeat(a, 2)[::2], "slots .* not C-contiguous"),
        ("slots", lambda a: a[:-1], "kv_offsets spans 0 to 13; expected 0 to 12"),
        ("kv_offsets", with_item(1, 14), "kv_offsets decreases from 14 to 13 at pair 1"),
        ("kv_offsets", lambda a: a[:-1], r"kv_offsets has shape \[2\]; expected \[3\]"),
        ("query_offsets", with_item(2, 1), "query_offsets spans 0 to 1; expected 0 to 2"),
        ("kv_start", lambda a: a[:1], r"kv_start has shape \[1\]; expected \[2\]"),
        ("q", lambda a: a.astype(np.float64), "q must hold float32, float16 or uint16"),
        ("q", lambda a: a.astype(np.float16), "q must hold float32 elements or the element type of k"),
        ("q", lambda a: a[:, :, ::-1], "q .* not C-contiguous"),
        ("q", lambda a: a[:, :3], r"q, k and v have rows of shapes \(\(3, 8\)"),
        ("v", lambda a: a[:-1], r"v has shape \[19, 2, 8\]; expected \[20, 2, any\]"),
        ("v", lambda a: a.astype(np.float16), "v must hold the element type of k"),
    ],
)
def test_mistakes_are_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        run(broken(field, value), PATHS[-1])


def test_no_threads_is_refused():
    case = broken("q", lambda a: a)
    with pytest.raises(ValueError, match="threads is 0; give at least 1"):
        run(case, PATHS[-1], threads=0)
