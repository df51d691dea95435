"""Triton's partial attention against the float64 oracle, over the cases of the native kernel."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from lamina.core.types import KvElement
from lamina.kernels.gpu.attention import Attention, KvSlab, StepCapacity, append, pair_table
from lamina.kernels.gpu.tilings import Choices
from tests.support import reference_attention
from tests.support.gpu_device import BACKEND, attend, check, give, slab_of, sweep_on_device, take
from tests.support.kernel_cases import Pair, decode, encode, make_case, make_spec, problem_pairs, specs
from tests.support.kernel_codes import dequantize, quantize

KV_TYPES = {
    KvElement.FLOAT32: "float32",
    KvElement.FLOAT16: "float16",
    KvElement.BFLOAT16: "bfloat16",
    KvElement.INT8: "float32",
    KvElement.FP8: "float32",
}
NAMED = {element.name.lower(): element for element in KvElement}
elements = pytest.mark.parametrize("element", KvElement, ids=NAMED)


def some_elements(*ordinary):
    """Every element type, of which the tests below share out the ordinary suite's."""
    return pytest.mark.parametrize("element", sweep_on_device(NAMED, ordinary))


def run(pairs, spec, element, wide_query=False, seed=0):
    case = make_case(pairs, spec, KV_TYPES[element], seed, wide_query)
    if element.scaled and not wide_query:
        case = replace(case, q=encode(case.q, "bfloat16"))
    slab, k, v = slab_of(case.k, case.v, element)
    check(case, element, *attend(case, slab), k, v)


problems = given(
    pairs=problem_pairs(),
    spec=specs,
    wide_query=st.booleans(),
    alibi=st.booleans(),
)


def solve(pairs, spec, element, wide_query, alibi):
    if alibi:
        spec = replace(spec, alibi_slopes=tuple(0.5**i for i in range(1, spec.query_heads + 1)))
    run(pairs, spec, element, wide_query)


@some_elements("float32", "fp8")
@settings(max_examples=4, deadline=None, derandomize=True)
@problems
def test_equals_oracle(pairs, spec, element, wide_query, alibi):
    solve(pairs, spec, element, wide_query, alibi)


@pytest.mark.slow
@elements
@settings(max_examples=60, deadline=None)
@problems
def test_equals_oracle_widely(pairs, spec, element, wide_query, alibi):
    solve(pairs, spec, element, wide_query, alibi)


DECODES = {
    f"{group}-{qk_dim}-{name}": (group, qk_dim, element)
    for group, qk_dim in ((1, 64), (4, 80), (8, 128), (16, 64))
    for name, element in NAMED.items()
}


@pytest.mark.parametrize("case", sweep_on_device(DECODES, ["4-80-bfloat16", "8-128-fp8", "16-64-float16"]))
def test_decode_batch(case):
    group, qk_dim, element = case
    run([decode(tokens) for tokens in (1, 63, 64, 65, 130)], make_spec(2, group, qk_dim), element)


@some_elements("int8")
def test_long_segment_among_short_ones_is_split(element):
    run([decode(20), decode(2500), decode(70)], make_spec(1, 2, 32), element)


@some_elements("bfloat16")
def test_prompt_chunk_over_cached_prefix(element):
    run([Pair(rows=40, query_start=600, tokens=600), decode(300)], make_spec(1, 4, 64, 32, window=500), element)


def test_multi_query_heads_beyond_a_tile():
    run([decode(300), Pair(rows=3, query_start=60, tokens=64)], make_spec(1, 96, 32, 16), KvElement.BFLOAT16)


def test_nan_in_a_key_is_not_hidden():
    case = make_case([decode(300), decode(40)], make_spec(1, 2, 16), "float32")
    case.k[case.segments.slots[7]] = np.nan
    out, lse = attend(case, KvSlab(KvElement.FLOAT32, give(case.k), give(case.v)))
    assert np.isnan(out[0]).all() and np.isnan(lse[0]).all()
    assert np.isfinite(out[1]).all() and np.isfinite(lse[1]).all()


def test_one_attention_serves_steps_of_many_shapes():
    """As a captured graph does: nothing of an earlier, larger step is seen in a later one."""
    attention = Attention(BACKEND, StepCapacity(4, 50), Choices(""))
    spec = make_spec(2, 4, 16)
    for pairs in ([decode(900), decode(20), decode(5)], [decode(30)], [Pair(40, 10, 50), decode(1)], [decode(0)]):
        case = make_case(pairs, spec, "float32")
        slab, k, v = slab_of(case.k, case.v, KvElement.FLOAT32)
        check(case, KvElement.FLOAT32, *attend(case, slab, attention), k, v)


def appending(spec, lengths, element, kv_type, appends):
    """A decode step whose last tokens come with the message, and the slab's state before them."""
    case = make_case([decode(tokens) for tokens in lengths], spec, "float32", wide_query=True)
    last = case.segments.slots[case.segments.kv_offsets[1:] - 1]
    new = encode(case.k[last], kv_type), encode(case.v[last], kv_type)
    k, v = case.k.copy(), case.v.copy()
    k[last], v[last] = 55.0, 55.0
    slab, _, _ = slab_of(encode(k, KV_TYPES[element]), encode(v, KV_TYPES[element]), element)
    order = np.random.default_rng(3).permutation(len(lengths))  # the message need not have the pairs' order
    table = pair_table(case.segments, new_rows=np.where(appends, np.argsort(order), -1))
    return case, slab, last, tuple(rows[order] for rows in new), order, table


def held(slab):
    """float32 values of a slab on the device."""
    if slab.element.scaled:
        codes = (slab.k, slab.k_scales), (slab.v, slab.v_scales)
        return [dequantize(take(kept), take(scales), slab.element) for kept, scales in codes]
    return [reference_attention.widen(take(kept)).astype(np.float32) for kept in (slab.k, slab.v)]


APPENDS = {
    f"{kv_type}-{name}": (element, kv_type) for kv_type in ("float32", "bfloat16") for name, element in NAMED.items()
}


@pytest.mark.parametrize(
    "case",
    sweep_on_device(APPENDS, ["float32-float32", "bfloat16-int8"]),
)
def test_appends_while_it_attends(case):
    """Kept as the definition rounds, where it should be, and seen by its query as if it had been there before."""
    element, kv_type = case
    spec = make_spec(2, 3, 24, 40, softcap=20.0)
    appends = np.array([True, True, False, True])
    case, slab, last, new, order, table = appending(spec, (700, 1, 65, 40), element, kv_type, appends)
    before = held(slab)
    attention = Attention(BACKEND, StepCapacity(4, 4), Choices(""))
    attention.upload_pairs(table)
    out, lse = (BACKEND.empty(shape, np.float32) for shape in ((4, 6, 40), (4, 6)))
    device_new = give(new[0]), give(new[1])
    attention.partial(give(case.q), slab, give(case.segments.slots), spec, out, lse, device_new)

    after = held(slab)
    for kept, old, rows in zip(after, before, new, strict=True):
        untouched = np.delete(np.arange(len(kept)), last[appends])
        np.testing.assert_array_equal(kept[untouched], old[untouched])
        wanted = reference_attention.widen(rows[np.argsort(order)][appends]).astype(np.float32)
        if element.scaled:
            wanted = dequantize(*quantize(wanted, element), element)
        else:
            wanted = reference_attention.widen(encode(wanted, KV_TYPES[element])).astype(np.float32)
        np.testing.assert_allclose(kept[last[appends]], wanted, rtol=1e-6)
    check(case, element, take(out), take(lse), *after)


@elements
def test_append_rounds_as_defined_and_leaves_out_what_is_not_ours(element):
    rng = np.random.default_rng(0)
    k = (rng.standard_normal((6, 2, 24)) * 10.0 ** rng.integers(-6, 5, (6, 2, 1))).astype(np.float32)
    v = rng.standard_normal((6, 2, 40)).astype(np.float32)
    k[0, 0] = 0.0
    slots = np.array([4, -1, 0, 9, 7, -1], np.int32)
    empty_k, empty_v = (encode(np.zeros((10, 2, dim), np.float32), KV_TYPES[element]) for dim in (24, 40))
    slab, _, _ = slab_of(empty_k, empty_v, element)
    append(BACKEND, slab, give(k), give(v), give(slots))
    for kept, rows in zip(held(slab), (k, v), strict=True):
        wanted = np.zeros((10, *rows.shape[1:]), np.float32)
        values = (
            dequantize(*quantize(rows, element), element)
            if element.scaled
            else reference_attention.widen(encode(rows, KV_TYPES[element]))
        )
        wanted[slots[slots >= 0]] = values[slots >= 0]
        np.testing.assert_allclose(kept, wanted, rtol=2e-6)


@pytest.mark.parametrize(
    ("element", "values", "wanted"),
    [
        (KvElement.INT8, [127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5], [127, 0, 2, 2, 0, -2, 126]),
        (KvElement.FP8, [448, 17, 19, -17, 2**-10, 3 * 2**-10, 432], [448, 16, 20, -16, 0, 2**-8, 448]),
        (KvElement.FP8, [-448, 2**-9, 15 * 2**-10, -(2**-6), 416, 0, -0.0], [-448, 2**-9, 2**-6, -(2**-6), 416, 0, 0]),
    ],
)
def test_ties_round_to_even(element, values, wanted):
    """The largest value of the format in the row makes the scale 1."""
    rows = np.zeros((1, 1, 16), np.float32)
    rows[0, 0, :7] = values
    zeros = np.zeros((1, 1, 16), np.float32)
    slab, _, _ = slab_of(zeros, zeros, element)
    device_rows = give(rows)
    append(BACKEND, slab, device_rows, device_rows, give(np.array([0], np.int32)))
    for kept in held(slab):
        assert kept[0, 0, :7].tolist() == wanted


@pytest.mark.parametrize("element", [KvElement.INT8, KvElement.FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_poisoned_as_a_whole(element, value):
    k, v = np.ones((1, 1, 16), np.float32), np.ones((1, 1, 16), np.float32)
    k[0, 0, 5] = value
    slab, _, _ = slab_of(np.zeros((2, 1, 16), np.float32), np.zeros((2, 1, 16), np.float32), element)
    append(BACKEND, slab, give(k), give(v), give(np.array([1], np.int32)))
    kept_k, kept_v = held(slab)
    assert np.isnan(kept_k[1]).all() and (kept_k[0] == 0).all() and np.allclose(kept_v[1], 1)


def test_mistakes_are_named():
    case = make_case([decode(9), decode(4)], make_spec(2, 2, 8), "float32")
    slab, _, _ = slab_of(case.k, case.v, KvElement.FLOAT32)
    small = Attention(BACKEND, StepCapacity(1, 8), Choices(""))
    with pytest.raises(
        ValueError, match="2 pairs and 2 query rows is larger than this attention's capacity of 1 and 8"
    ):
        attend(case, slab, small)
    with pytest.raises(ValueError, match=r"the spec of layer 0 says .* capacity is 5 rows"):
        attend(replace(case, q=case.q[:, :, :4]), slab)
    with pytest.raises(ValueError, match="q is float64"):
        attend(replace(case, q=case.q.astype(np.float64)), slab)
    with pytest.raises(ValueError, match=r"a slab of BFLOAT16 is uint16"):
        attend(case, replace(slab, element=KvElement.BFLOAT16))
    with pytest.raises(ValueError, match=r"pairs \[1\] append a token while they attend"):
        pair_table(replace(case.segments, query_start=np.array([8, 2], np.int32)), new_rows=np.array([0, 1]))
    attention = Attention(BACKEND, StepCapacity(2, 2), Choices(""))
    attention.upload_pairs(pair_table(case.segments, new_rows=np.array([0, 1])))
    out, lse = (BACKEND.empty(shape, np.float32) for shape in ((2, 4, 8), (2, 4)))
    given = give(case.q), slab, give(case.segments.slots), case.spec
    with pytest.raises(ValueError, match="the step has 2 rows and the capacity is 2 rows"):
        attention.partial(given[0][:1], *given[1:], out[:1], lse[:1], (given[0], given[0]))
    with pytest.raises(ValueError, match="pairs have 13 tokens, and slots holds 12"):
        pair_table(replace(case.segments, slots=case.segments.slots[:-1]))
    row, rows = give(case.k[:1]), give(case.k[:2])
    with pytest.raises(ValueError, match=r"append tokens up to row 1 .* give the message's k and v"):
        attention.partial(*given, out, lse)
    with pytest.raises(ValueError, match="append tokens up to row 1"):
        attention.partial(*given, out, lse, (row, row))
    with pytest.raises(ValueError, match="out is float16 and lse float32"):
        attention.partial(*given, BACKEND.empty((2, 4, 8), np.float16), lse, (rows, rows))
    with pytest.raises(ValueError, match=r"new k \(2, 2, 8\) and v \(1, 2, 8\) are not rows of one number"):
        attention.partial(*given, out, lse, (rows, row))
    with pytest.raises(ValueError, match="new k is float32 and v float16"):
        attention.partial(*given, out, lse, (rows, BACKEND.empty(rows.shape, np.float16)))
    with pytest.raises(ValueError, match=r"slots are int32 \(1,\); give one int32 for each of 2 tokens"):
        append(BACKEND, slab, rows, rows, give(np.array([3], np.int32)))
