"""What travels for a token, counted by hand and against the paper's formula."""

import numpy as np
import pytest

from lamina.core.errors import PlacementError
from lamina.core.heads import HeadShards
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, SequenceStep, StepPlan
from lamina.core.types import AttentionSpec, DType, Segment
from lamina.dataplane.wire import (
    check_placements,
    check_segments,
    message_rows,
    nbytes_per_token,
    paper_nbytes_per_token,
)


@pytest.mark.parametrize(
    ("layers", "query_heads", "kv_heads", "dim", "paper", "ours"),
    [
        # LLaMA-7B: 4 e d L = 4 x 2 x 4096 x 32. Here q, k, v in bf16; out and one lse per head in float32.
        (32, 32, 32, 128, 1048576, 32 * (3 * 4096 * 2 + 4096 * 4 + 32 * 4)),
        # Llama-3-70B, 8 query heads per KV head: (2 + 2/8) x 2 x 8192 x 80.
        (80, 64, 8, 128, 2949120, 80 * ((8192 + 2 * 1024) * 2 + 8192 * 4 + 64 * 4)),
    ],
)
def test_bytes_per_token(layers: int, query_heads: int, kv_heads: int, dim: int, paper: int, ours: int) -> None:
    spec = AttentionSpec(layer=0, query_heads=query_heads, kv_heads=kv_heads, qk_dim=dim, v_dim=dim, scale=dim**-0.5)
    assert paper_nbytes_per_token([spec] * layers, DType.BFLOAT16) == paper
    assert nbytes_per_token([spec] * layers, DType.BFLOAT16) == ours


ALL, WHOLE = (0, 8), (0, None)


@pytest.mark.parametrize(
    "placed",
    [
        [Segment(3, "memory0", ALL, WHOLE)],
        [Segment(3, "memory0", ALL, (0, 7)), Segment(3, "memory1", ALL, (7, None))],
        [Segment(3, "memory1", ALL, (7, None)), Segment(3, "memory0", ALL, (0, 7))],
        [Segment(3, "memory0", ALL, (0, 7)), Segment(3, "memory0", ALL, (7, None))],
    ],
)
def test_whole_sequences_and_ranges_on_any_workers_are_served(placed: list[Segment]) -> None:
    check_segments(3, placed, HeadShards(8))


REFUSED = {
    "another sequence": [Segment(4, "memory0", ALL, WHOLE)],
    "all heads": [Segment(3, "memory0", (0, 4), WHOLE), Segment(3, "memory1", (4, 8), WHOLE)],
    "from 0 on": [Segment(3, "memory0", ALL, (1, None))],
    "follow one another": [Segment(3, "memory0", ALL, (0, 7)), Segment(3, "memory1", ALL, (6, None))],
    "no end": [Segment(3, "memory0", ALL, (0, 7))],
    "must follow": [Segment(3, "memory0", ALL, (0, 0)), Segment(3, "memory1", ALL, (0, None))],
    "no worker": [],
}


@pytest.mark.parametrize(("why", "placed"), REFUSED.items(), ids=REFUSED)
def test_what_would_be_served_wrongly_is_refused(why: str, placed: list[Segment]) -> None:
    with pytest.raises(PlacementError, match=f"sequence 3 .*{why}"):
        check_segments(3, placed, HeadShards(8))
    plan = StepPlan(0, 0, 0, [], [], [Admission(3, 1, 5, placed, SamplingParams(), 0)], [], DecodeRows([], [], []))
    with pytest.raises(PlacementError):
        check_placements(plan, HeadShards(8))


@pytest.mark.parametrize("count", [2, 4])
def test_the_messages_of_all_ranks_hold_what_that_of_one_would(count: int) -> None:
    """Ranks number their own shards; sequence 4 has some of its heads elsewhere, and sequence 5 runs a chunk."""
    shards, ranks = HeadShards(8, count), 2
    segments = {
        3: [Segment(3, "memory0", ALL, (0, 7)), Segment(3, "memory0", ALL, (7, None))],
        4: [Segment(4, "memory0", (0, 4), WHOLE), Segment(4, "memory1", (4, 8), WHOLE)],
        5: [Segment(5, "memory0", ALL, WHOLE)],
    }
    steps = [SequenceStep(5, 6, [1, 2, 3], [])]
    plan = StepPlan(0, 0, 0, [], [], [], steps, DecodeRows([3, 4], [9, 5], [1, 1]))
    together = message_rows(plan, segments, "memory0", shards)
    apart = [message_rows(plan, segments, "memory0", shards, rank, ranks) for rank in range(ranks)]
    own = count // ranks
    for field in ("queries", "appends"):
        moved = [
            getattr(rows, field) // own * count + getattr(rows, field) % own + rank * own
            for rank, rows in enumerate(apart)
        ]
        assert np.concatenate(moved).tolist() == getattr(together, field).tolist() != []
    for field in ("attends", "kept", "pulled"):
        assert sum((getattr(rows, field) for rows in apart), ()) == getattr(together, field) != ()
    assert sum(len(rows.further) for rows in apart) == len(together.further) > 0
