"""Attention problems for tests: seeded arrays of every KV type, segment tables, and comparison with the oracle."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from lamina.core.types import AttentionSpec
from lamina.kernels.attention import Array, FloatArray, Path
from lamina.kernels.segments import SegmentTable
from tests.support import reference_attention

KV_TYPES = ("float32", "float16", "bfloat16")


def encode(values: Array, kv_type: str) -> Array:
    """float32 values as an array of a KV type; bfloat16 as uint16 bits, rounded to nearest even."""
    if kv_type != "bfloat16":
        return values.astype(kv_type)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Case:
    """One call: its arrays, its table and its spec."""

    q: Array
    k: Array
    v: Array
    segments: SegmentTable
    spec: AttentionSpec


@dataclass(frozen=True)
class Pair:
    """Query rows from ``query_start`` on against ``tokens`` tokens from ``kv_start`` on."""

    rows: int
    query_start: int
    tokens: int
    kv_start: int = 0


def decode(tokens: int) -> Pair:
    """The last token of a sequence attends to all of it."""
    return Pair(rows=1, query_start=tokens - 1, tokens=tokens)


def table(pairs: list[Pair], slots: Array) -> SegmentTable:
    """The table of these pairs, which take their slots one after another from ``slots``."""
    kv_offsets = np.cumsum([0] + [pair.tokens for pair in pairs])
    return SegmentTable(
        query_offsets=np.cumsum([0] + [pair.rows for pair in pairs]).astype(np.int32),
        query_start=np.array([pair.query_start for pair in pairs], np.int32),
        kv_offsets=kv_offsets.astype(np.int64),
        kv_start=np.array([pair.kv_start for pair in pairs], np.int32),
        slots=slots[: kv_offsets[-1]].astype(np.int32),
    )


def make_case(pairs: list[Pair], spec: AttentionSpec, kv_type: str, seed: int = 0, wide_query: bool = False) -> Case:
    """Normal q, k and v; a slab with spare slots, assigned at random. ``wide_query``: q is float32 whatever KV is."""
    rng = np.random.default_rng(seed)
    rows, tokens = sum(pair.rows for pair in pairs), sum(pair.tokens for pair in pairs)
    capacity = tokens + 7

    def draw(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    q = draw(rows, spec.query_heads, spec.qk_dim) * 2
    return Case(
        q=q if wide_query else encode(q, kv_type),
        k=encode(draw(capacity, spec.kv_heads, spec.qk_dim), kv_type),
        v=encode(draw(capacity, spec.kv_heads, spec.v_dim), kv_type),
        segments=table(pairs, rng.permutation(capacity)),
        spec=spec,
    )


def make_spec(kv_heads: int, group: int, qk_dim: int, v_dim: int | None = None, **options: Any) -> AttentionSpec:
    """A spec with the usual scale; v_dim defaults to qk_dim."""
    return AttentionSpec(
        layer=0,
        query_heads=kv_heads * group,
        kv_heads=kv_heads,
        qk_dim=qk_dim,
        v_dim=v_dim or qk_dim,
        scale=qk_dim**-0.5,
        **options,
    )


# Paths that multiply bfloat16 in pairs.
PAIRS = (Path.AVX512_BF16, Path.AMX)


def check(case: Case, out: FloatArray, lse: FloatArray, path: Path) -> None:
    """Compares with the oracle. Products of bfloat16 pairs round q (if float32) and probabilities to 8 bits."""
    rounds = path in PAIRS and case.k.dtype == np.uint16
    wanted_out, wanted_lse = reference_attention.partial(case.q, case.k, case.v, case.segments, case.spec, threads=1)
    largest = np.abs(reference_attention.widen(case.v)).max(initial=1.0)
    # A score in float32 is rounded by its own size: with ALiBi, over a distance of 200 tokens, that is the larger part.
    scores = np.abs(wanted_lse[np.isfinite(wanted_lse)]).max(initial=0.0)
    atol = 2**-7 if rounds else max(4e-6, scores * 2**-23)
    np.testing.assert_allclose(out, wanted_out, rtol=0, atol=largest * atol)
    rounds_query = rounds and case.q.dtype == np.float32
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=0.1 if rounds_query else max(3e-5, scores * 2**-21))


specs = st.builds(
    make_spec,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7, 8]),
    qk_dim=st.sampled_from([8, 13, 32, 48, 64, 80, 128, 192, 256]),
    v_dim=st.sampled_from([None, 8, 17, 64, 128]),
    window=st.sampled_from([0, 0, 1, 40]),
    chunk=st.sampled_from([0, 0, 1, 37]),
    softcap=st.sampled_from([0.0, 0.0, 2.0, 30.0]),
)


@st.composite
def problem_pairs(draw: st.DrawFn) -> list[Pair]:
    """A few pairs: decode rows, prompt chunks, empty ones, segments before, around or after their queries."""
    return draw(
        st.lists(
            st.builds(
                Pair,
                rows=st.sampled_from([0, 1, 1, 2, 5, 33]),
                query_start=st.integers(0, 200),
                tokens=st.sampled_from([0, 1, 15, 64, 65, 150]),
                kv_start=st.sampled_from([0, 0, 3, 100]),
            ),
            min_size=1,
            max_size=4,
        )
    )
