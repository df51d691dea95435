"""K and V as int8 and fp8 codes with scales: rounding against torch, attention against the oracle over what is kept."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lamina import _native
from lamina.core.types import KvElement
from lamina.kernels import attention
from lamina.kernels.attention import Array, FloatArray, Path, Scales, append
from lamina.kernels.segments import STORAGE, SegmentTable
from tests.support import reference_attention
from tests.support.kernel_cases import PAIRS, Case, Pair, decode, encode, make_case, make_spec, problem_pairs, specs
from tests.support.kernel_codes import LARGEST, dequantize, quantize

PATHS = _native.attention_paths()
paths = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name.lower())
elements = pytest.mark.parametrize("element", LARGEST, ids=lambda element: element.value)
MESSAGE_TYPES = ("float32", "float16", "bfloat16")


def slab_of(k: Array, v: Array, element: KvElement) -> tuple[Array, Array, Scales]:
    """K and V [slots, Hkv, D] as kept by ``append``."""
    codes = [np.zeros(each.shape, STORAGE[element]) for each in (k, v)]
    scales = np.zeros(k.shape[:2], np.float32), np.zeros(v.shape[:2], np.float32)
    append(codes[0], codes[1], k, v, np.arange(len(k), dtype=np.int32), scales=scales)
    return codes[0], codes[1], scales


def run(case: Case, slab: tuple[Array, Array, Scales], path: Path, threads: int = 1) -> tuple[FloatArray, FloatArray]:
    k, v, scales = slab
    return attention.partial(case.q, k, v, case.segments, case.spec, threads, scales=scales, path=path)


def check(case: Case, slab: tuple[Array, Array, Scales], out: FloatArray, lse: FloatArray, path: Path) -> None:
    """Codes are read, and queries multiplied, as they are. Products of bfloat16 pairs round probabilities to 8 bits."""
    k, v, scales = slab
    atol = 2**-7 if path in PAIRS and case.q.dtype == np.uint16 else 4e-6
    wanted_out, wanted_lse = reference_attention.partial(
        case.q, k, v, case.segments, case.spec, threads=1, scales=scales
    )
    largest = np.abs(reference_attention.widen(v, scales[1])).max(initial=1.0)
    np.testing.assert_allclose(out, wanted_out, rtol=0, atol=largest * atol)
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=3e-5)


rows = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=3, max_dims=3, max_side=9),
    elements=st.one_of(
        st.floats(-4, 4, width=32),
        st.sampled_from([0.0, -0.0, 1.0, 0.5, 127.0, 448.0, 2**-6, 2**-9, 2**-10, 3 * 2**-10, 17.5, 18.5, 27.0]),
        st.floats(-(2.0**40), 2.0**40, width=32),
    ),
)


@elements
@given(values=rows, message_type=st.sampled_from(MESSAGE_TYPES))
def test_append_rounds_like_torch(values, message_type, element):
    """Ties, subnormal codes, rows of zeros and rows with one large element included."""
    values = np.where(np.abs(values) < 1e-30, 0, values).astype(np.float32)
    given_rows = encode(values.clip(-60000, 60000), message_type)
    k, v, (k_scales, v_scales) = slab_of(given_rows, given_rows, element)
    codes, scales = quantize(reference_attention.widen(given_rows).astype(np.float32), element)
    for kept, kept_scales in ((k, k_scales), (v, v_scales)):
        np.testing.assert_array_equal(kept_scales, scales)
        np.testing.assert_array_equal(dequantize(kept, kept_scales, element), dequantize(codes, scales, element))


@elements
def test_append_writes_its_slots_alone(element):
    rng = np.random.default_rng(0)
    slots = rng.permutation(400)[:300].astype(np.int32)
    k, v = rng.standard_normal((300, 2, 70)).astype(np.float32), rng.standard_normal((300, 2, 33)).astype(np.float32)
    slabs = [np.full((400, 2, size), 7, STORAGE[element]) for size in (70, 33)]
    scales = np.full((400, 2), 7, np.float32), np.full((400, 2), 7, np.float32)
    append(slabs[0], slabs[1], k, v, slots, 3, scales)
    for slab, scale, values in zip(slabs, scales, (k, v), strict=True):
        codes, wanted = quantize(values, element)
        np.testing.assert_array_equal(slab[slots], codes)
        np.testing.assert_array_equal(scale[slots], wanted)
        assert (np.delete(slab, slots, axis=0) == 7).all() and (np.delete(scale, slots, axis=0) == 7).all()


@elements
@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-36, 3e38])
def test_rows_at_the_ends_of_the_range_stay_close(element, magnitude):
    """The inverse of a scale would overflow for rows of subnormal numbers."""
    values = np.array([[[magnitude, -magnitude / 2, 0, magnitude / 8]]], np.float32)
    k, _, (scales, _) = slab_of(values, values, element)
    assert np.abs(reference_attention.widen(k, scales) - values).max() <= max(magnitude / 100, 2e-36)


@paths
@elements
@pytest.mark.parametrize("query_type", ["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "dim"), [(1, 32), (1, 64), (4, 96), (8, 96)])
def test_every_code_is_read_exactly(group, dim, query_type, element, path):
    """One token's value comes back as it is: subnormals, the largest and both zeros included."""
    codes = np.arange(256, dtype=np.uint8).view(STORAGE[element])
    kept = np.isfinite(reference_attention.widen(codes)) & (
        np.abs(reference_attention.widen(codes)) <= LARGEST[element]
    )
    codes = np.resize(codes[kept], (8, 1, dim))
    case = make_case([Pair(rows=1, query_start=0, tokens=1)] * 8, make_spec(1, group, dim), "float32")
    case = replace(case, q=encode(case.q, query_type))
    slots = case.segments.slots
    k, v, (k_scales, v_scales) = slab_of(case.k, case.v, element)
    v[slots] = codes
    out, _ = run(case, (k, v, (k_scales, v_scales)), path)
    wanted = np.repeat(reference_attention.widen(codes, v_scales[slots]), group, axis=1)
    # a weight of 1 times the scale of values is rounded to bfloat16 on the way to products of pairs
    rounds = path in PAIRS and query_type == "bfloat16"
    np.testing.assert_allclose(out, wanted, rtol=2**-8 if rounds else 2**-22)


@paths
@elements
def test_keys_of_a_vector_and_a_half(element, path):
    case = make_case([decode(tokens) for tokens in (1, 17, 33, 90)], make_spec(2, 5, 96), "float32")
    case = replace(case, q=encode(case.q, "bfloat16"))
    slab = slab_of(case.k, case.v, element)
    check(case, slab, *run(case, slab, path), path)


@paths
@elements
@given(
    pairs=problem_pairs(),
    spec=specs,
    query_type=st.sampled_from(MESSAGE_TYPES),
    alibi=st.booleans(),
    threads=st.integers(1, 3),
)
def test_equals_oracle_over_what_is_kept(pairs, spec, query_type, alibi, threads, element, path):
    if alibi:
        spec = replace(spec, alibi_slopes=tuple(0.5**i for i in range(1, spec.query_heads + 1)))
    case = make_case(pairs, spec, "float32")
    case = replace(case, q=encode(case.q, query_type))
    slab = slab_of(case.k, case.v, element)
    check(case, slab, *run(case, slab, path, threads), path)


@paths
@elements
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("group", [1, 4, 5, 8, 16])
@pytest.mark.parametrize("qk_dim", [32, 64, 80, 96, 128])
def test_decode_batch(group, qk_dim, kv_heads, element, path):
    case = make_case(
        [decode(tokens) for tokens in (1, 63, 64, 65, 130)], make_spec(kv_heads, group, qk_dim), "bfloat16"
    )
    slab = slab_of(case.k, case.v, element)
    check(case, slab, *run(case, slab, path), path)


@paths
@elements
def test_tasks_of_a_chunk_add_up(element, path):
    """As long chunks are served: some rows and heads at a time, over some tokens at a time."""
    spec = make_spec(kv_heads=2, group=4, qk_dim=64, v_dim=32, window=300)
    case = make_case([Pair(rows=130, query_start=400, tokens=530)], spec, "bfloat16")
    k, v, scales = slab_of(case.k, case.v, element)
    out, lse = np.empty((130, 8, 32), np.float32), np.empty((130, 8), np.float32)
    count = attention.count_tasks(case.segments.query_offsets, spec)
    for start, stop in ((0, 200), (200, 530)):
        tokens = SegmentTable(
            case.segments.query_offsets,
            case.segments.query_start,
            np.array([0, stop - start], np.int64),
            np.array([start], np.int32),
            case.segments.slots[start:stop],
        )
        for task in range(count):
            attention.partial_tasks(
                case.q, k, v, tokens, spec, 1, out, lse, (task, task + 1), adds=start > 0, scales=scales, path=path
            )
    check(case, (k, v, scales), out, lse, path)


@paths
def test_rounding_costs_what_is_expected(path):
    """Normal k and v, against attention over what was given: rounding to 8 bits, or to 3 of fraction, adds noise.

    int8 rounds to multiples of a scale of about 2.5 deviations / 127, an error of 0.6% of a deviation, and fp8 by up
    to 2**-4 of each number, 2.6% on average. Scores of normal q with deviation 2 double it, values add it once.
    """
    case = make_case([decode(700)] * 20, make_spec(2, 2, 64), "float32")
    exact, _ = reference_attention.partial(case.q, case.k, case.v, case.segments, case.spec, threads=1)
    errors = {}
    for element in LARGEST:
        out, _ = run(case, slab_of(case.k, case.v, element), path)
        errors[element] = float(np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2)))
    assert 0.004 < errors[KvElement.INT8] < 0.02 < errors[KvElement.FP8] < 0.08, errors


@paths
@elements
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden(path, element, value):
    case = make_case([decode(100), decode(30)], make_spec(1, 2, 64), "float32")
    case.k[case.segments.slots[3], 0, 5] = value
    slab = slab_of(case.k, case.v, element)
    out, _ = run(case, slab, path)
    assert np.isnan(slab[2][0]).sum() == 1
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


@paths
@elements
def test_unused_slots_do_not_matter(path, element):
    case = make_case([decode(77)], make_spec(2, 4, 13), "float32")
    capacity = 2 * 77 + 1
    case = replace(
        case,
        k=np.resize(case.k, (capacity, *case.k.shape[1:])),
        v=np.resize(case.v, (capacity, *case.v.shape[1:])),
        segments=replace(case.segments, slots=np.arange(1, capacity, 2, dtype=np.int32)),
    )
    k, v, scales = slab_of(case.k, case.v, element)
    wanted = run(case, (k, v, scales), path)
    unused = np.setdiff1d(np.arange(capacity), case.segments.slots)
    k.view(np.uint8)[unused] = v.view(np.uint8)[unused] = 127  # NaN in e4m3
    scales[0][unused] = scales[1][unused] = np.nan
    for got, expected in zip(run(case, (k, v, scales), path), wanted, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_mistakes_are_named():
    case = make_case([decode(9)], make_spec(2, 2, 8), "float32")
    k, v, scales = slab_of(case.k, case.v, KvElement.INT8)

    def partial(k: Array, v: Array, scales: Scales | None, q: Array = case.q) -> None:
        attention.partial(q, k, v, case.segments, case.spec, 1, scales=scales)

    with pytest.raises(ValueError, match=r"k holds codes \(int8, or uint8 for e4m3\); give k_scales"):
        partial(k, v, None)
    with pytest.raises(ValueError, match="k holds no codes; leave out k_scales"):
        partial(case.k, case.v, scales)
    with pytest.raises(ValueError, match=r"v_scales has shape \[15, 2\]; expected \[16, 2\]"):
        partial(k, v, (scales[0], scales[1][1:]))
    with pytest.raises(ValueError, match="k_scales must hold float32"):
        partial(k, v, (scales[0].astype(np.float64), scales[1]))
    with pytest.raises(ValueError, match="v must hold the element type of k"):
        partial(k, v.view(np.uint8), scales)
    with pytest.raises(ValueError, match="q must hold float32, float16 or uint16"):
        partial(k, v, scales, case.q.astype(np.int8))
    slots = np.arange(16, dtype=np.int32)
    kept = k.copy()
    with pytest.raises(ValueError, match=r"the scales of v are missing; codes need float32 of shape \(16, 2\)"):
        append(k, v, case.k, case.v, slots)
    with pytest.raises(ValueError, match=r"the scales of v are float32 of shape \(15, 2\)"):
        append(k, v, case.k, case.v, slots, scales=(scales[0], scales[1][1:]))
    with pytest.raises(ValueError, match=r"v is int8 of shape .* expected float32, float16 or uint16"):
        append(k, v, case.k, v, slots, scales=scales)
    np.testing.assert_array_equal(k, kept)
