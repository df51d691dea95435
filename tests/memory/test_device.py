"""Each device keeps, attends and moves KV as the others do: against attention in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.errors import ConfigError
from lamina.kernels import reference
from lamina.memory.device.select import make
from lamina.types import AttentionSpec, KvElement
from tests.kernels.cases import Pair, decode, make_case

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

DEVICES = ("cpu", "emulated")
SPECS = [
    AttentionSpec(0, 4, 2, 16, 16, 0.25),
    AttentionSpec(1, 6, 2, 24, 16, 0.2, window=9, softcap=5.0),
    AttentionSpec(2, 4, 4, 16, 16, 0.25, alibi_slopes=(0.5, 0.25, 0.125, 0.0625)),
]


@pytest.mark.parametrize("name", DEVICES)
@settings(max_examples=8, deadline=None)
@given(
    pairs=st.lists(
        st.one_of(
            st.integers(1, 70).map(decode),
            st.tuples(st.integers(2, 20), st.integers(0, 40)).map(lambda pair: Pair(pair[0], pair[1], pair[1])),
        ),
        min_size=1,
        max_size=4,
    ),
    layer=st.integers(0, len(SPECS) - 1),
    seed=st.integers(0, 99),
)
def test_what_is_kept_is_attended_to(name: str, pairs: list[Pair], layer: int, seed: int) -> None:
    case = make_case(pairs, SPECS[layer], "float32", seed)
    device = make(name, SPECS, KvElement.FLOAT32, len(case.k), threads=1)
    order = np.random.default_rng(seed).permutation(len(case.k)).astype(np.int32)
    for part in np.array_split(order, 3):
        device.keep(layer, case.k[part], case.v[part], part)
    out = np.full((len(case.q), case.spec.query_heads, case.spec.v_dim), np.nan, np.float32)
    lse = np.full(out.shape[:2], np.nan, np.float32)
    for _ in device.attend(layer, case.segments, case.q, out, lse):
        pass
    wanted_out, wanted_lse = reference.partial(case.q, case.k, case.v, case.segments, case.spec, threads=1)
    np.testing.assert_allclose(out, wanted_out, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("source", DEVICES)
@pytest.mark.parametrize("target", DEVICES)
@pytest.mark.parametrize("element", [KvElement.BFLOAT16, KvElement.INT8])
def test_what_one_device_reads_another_restores(source: str, target: str, element: KvElement) -> None:
    spec, tokens = SPECS[1], 11
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((tokens, spec.kv_heads, size)).astype(np.float32) for size in (spec.qk_dim, spec.v_dim))
    here, there = (make(name, SPECS, element, 32, threads=1) for name in (source, target))
    slots, others = (rng.permutation(32)[:tokens].astype(np.int32) for _ in range(2))
    here.keep(1, k, v, slots)
    sent, back = (bytearray(tokens * spec.slab_bytes_per_token(element)) for _ in range(2))
    here.read(1, slots, memoryview(sent))
    there.restore(1, others, memoryview(sent))
    there.read(1, others, memoryview(back))
    assert back == sent and any(sent)


def test_an_unusable_device_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"cuda device 7 cannot be used; found .*use a CPU"):
        make("cuda:7", SPECS, KvElement.FLOAT32, 8, threads=1)
    with pytest.raises(ConfigError, match=r"unknown device 'tpu'"):
        make("tpu", SPECS, KvElement.FLOAT32, 8, threads=1)
