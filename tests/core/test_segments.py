"""Segments of a sequence after moves of some of its heads, compared with a table of all heads and tokens."""

from hypothesis import given
from hypothesis import strategies as st

from lamina.core.segments import moved
from lamina.core.types import Segment

HEADS, TOKENS = 4, 12  # the last segment of each head has no end; tokens up to here are looked at


def owners(segments: list[Segment]) -> dict[tuple[int, int], str]:
    """Return the worker of each head of each token."""
    found: dict[tuple[int, int], str] = {}
    for segment in segments:
        start, stop = segment.tokens
        for head in range(*segment.heads):
            for token in range(start, TOKENS if stop is None else min(stop, TOKENS)):
                assert found.setdefault((head, token), segment.worker) == segment.worker, "held twice"
    return found


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.tuples(st.integers(0, HEADS - 1), st.integers(1, HEADS)).filter(lambda one: one[0] < one[1]),
            st.tuples(st.integers(0, TOKENS - 1), st.integers(1, TOKENS - 1)).filter(lambda one: one[0] < one[1]),
        ),
        max_size=6,
    )
)
def test_a_move_of_some_heads_leaves_the_others_where_they_are(
    moves: list[tuple[str, tuple[int, int], tuple[int, int]]],
) -> None:
    segments = [Segment(0, "a", (0, 2), (0, None)), Segment(0, "b", (2, HEADS), (0, None))]
    expected = owners(segments)
    for worker, heads, tokens in moves:
        new = Segment(0, worker, heads, tokens)
        alone = {name: moved([one for one in segments if one.worker == name], new) for name in "abc"}
        segments = moved(segments, new)
        expected |= {(head, token): worker for head in range(*heads) for token in range(*tokens)}
        assert owners(segments) == expected
        for name, own in alone.items():  # as a worker sees it, which knows only its own segments
            there = {place for place, owner in expected.items() if owner == name}
            assert owners([one for one in own if one.worker == name]).keys() == there
