"""Sequences in any number of segments against attention over the whole history in float64.

Segments end and begin at any token, several may be on one worker, forks share any prefix, and epochs end. Every worker
holds the tokens of its segments and no others, so that nothing here passes because a worker has more than its share.
"""

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, SequenceStep, StepPlan
from lamina.core.types import Overlap, Segment
from lamina.memory.cuts import MOST_PRODUCTS
from lamina.memory.device import cpu
from tests.support.attended_sequences import HEADS, NAMES, NOBODY, Sequences, drive
from tests.support.attention_clusters import connected, overlaps


def segment(sequence: int, worker: str, first: int, last: int | None = None) -> Segment:
    return Segment(sequence, worker, HEADS, (first, last))


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    overlap=overlaps,
    most_products=st.sampled_from([1, MOST_PRODUCTS]),
    seed=st.integers(0, 9),
)
def test_any_splits_forks_and_growth_equal_whole_attention(
    data: st.DataObject, overlap: Overlap, most_products: int, seed: int
) -> None:
    with mock.patch.object(cpu, "MOST_PRODUCTS", most_products), connected(NAMES, overlap) as cluster:
        drive(data, Sequences(cluster, overlap, seed))


@pytest.mark.parametrize("overlap", [Overlap(), Overlap(mini_batches=2)])
def test_rows_of_several_segments_on_one_worker_travel_once(overlap: Overlap) -> None:
    split = [
        segment(0, NAMES[place], first, last) for place, first, last in [(0, 0, 3), (1, 3, 5), (0, 5, 8), (0, 8, 9)]
    ]
    with connected(NAMES, overlap) as cluster:
        under_test = Sequences(cluster, overlap, 0)
        admission = Admission(0, 1, 0, [*split, segment(0, NAMES[1], 9)], SamplingParams(), 0)
        under_test.run({0: 9}, admitted=[admission])
        under_test.run({0: 4})
        plan = StepPlan(9, 0, 0, [], [], [], [SequenceStep(0, 13, [0], [])], NOBODY)
        shares = {name: memory.store.apply(plan)[0].rows for name, memory in cluster.memories.items()}
        assert {name: len(rows.queries) for name, rows in shares.items()} == {"memory0": 1, "memory1": 1, "memory2": 0}
        assert [each.kv_start for _, each in shares["memory0"].further] == [5, 8]
