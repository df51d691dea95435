"""Tokens that attention appends as it reads them are kept and seen as those that are stored before."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.core.types import AttentionSpec, Overlap

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from tests.support.store_steps import SEQUENCES, opened, plan, serve

PLAIN = AttentionSpec(0, 4, 2, 16, 16, 0.25)
SLOPES = AttentionSpec(1, 4, 2, 16, 16, 0.25, alibi_slopes=(0.5, 0.25, 0.125, 0.0625))


Steps = list[tuple[set[int], int]]


def test_decoded_tokens_are_appended_while_they_are_attended_to() -> None:
    check([PLAIN], Overlap(), 1, "auto", [({1, 2}, 0), ({2}, 3)], 0)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    specs=st.sampled_from([[PLAIN], [PLAIN, SLOPES]]),
    overlap=st.sampled_from([Overlap(), Overlap(), Overlap(2)]),
    shards=st.sampled_from([1, 2]),
    kv=st.sampled_from(["auto", "int8"]),
    steps=st.lists(
        st.tuples(st.sets(st.integers(1, SEQUENCES - 1)), st.sampled_from([0, 0, 1, 5])).filter(any),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 99),
)
def test_a_store_on_a_gpu_answers_as_one_on_a_cpu(
    specs: list[AttentionSpec], overlap: Overlap, shards: int, kv: Any, steps: Steps, seed: int
) -> None:
    """To steps that decode, with prompt chunks or without."""
    check(specs, overlap, shards, kv, steps, seed)


def check(specs: list[AttentionSpec], overlap: Overlap, shards: int, kv: Any, steps: Steps, seed: int) -> None:
    answers = []
    for device in ("cpu", "emulated"):
        store, rng = opened(device, specs, overlap, kv, shards), np.random.default_rng(seed)
        at = dict.fromkeys(range(SEQUENCES), 0)
        got = []
        for number, (decoding, chunk) in enumerate(steps):
            (step,) = store.apply(plan(number, at, sorted(decoding), (0, chunk) if chunk else None))
            by_shard = shards > 1 and SLOPES in specs
            decodes = len(decoding) > 0 or chunk == 1  # the last token of a prompt is sent as one that decodes
            assert step.appends == (decodes and not by_shard and len(step.pieces) == 1)
            got += serve(store, step, rng)
        answers.append(got)
    for one, other in zip(*answers, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-2 if kv == "int8" else 1e-5)
