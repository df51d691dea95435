"""The simulator's native bookkeeping against plain Python."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina._native import DecodeShares, TokenTimes


@given(st.lists(st.lists(st.integers(0, 5), unique=True), max_size=40))
def test_token_times_are_a_plain_account_of_them(steps: list[list[int]]) -> None:
    asked = [1, 2, 3, 5, 8, 100]
    times, came = TokenTimes(asked), [list[float]() for _ in asked]
    for now, step in enumerate(steps):
        drawing = [request for request in step if len(came[request]) < asked[request]]
        for request in drawing:
            came[request].append(float(now))
        ended = [place for place, request in enumerate(drawing) if len(came[request]) == asked[request]]
        assert times.draw(float(now), np.array(drawing, np.int64)) == ended
    gaps = [[float(gap) for gap in np.diff(own)] for own in came]
    assert times.drawn().tolist() == [len(own) for own in came]
    assert np.array_equal(times.first_s(), [own[0] if own else np.nan for own in came], equal_nan=True)
    assert np.array_equal(times.longest_gap_s(), [max(own, default=np.nan) for own in gaps], equal_nan=True)
    values, counts = times.gaps()
    assert sorted(np.repeat(values, counts).tolist()) == sorted(itertools.chain.from_iterable(gaps))


def test_token_times_refuse_what_cannot_be() -> None:
    times = TokenTimes([1, 2])
    assert times.draw(1.0, np.array([0, 1])) == [0]
    with pytest.raises(ValueError, match="request 0 has all of its 1 tokens"):
        times.draw(2.0, np.array([0]))
    with pytest.raises(IndexError):
        times.draw(2.0, np.array([2]))


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 10_000)), max_size=30),
    st.lists(st.tuples(st.integers(0, 6), *[st.integers(0, 8)] * 3), max_size=4),
)
def test_shares_of_a_decode_step(rows: list[tuple[int, int]], more: list[tuple[int, int, int, int]]) -> None:
    """Against sums over the rows of each worker; no state carries over from one call to the next."""
    attend = [0.0, *np.linspace(1.0, 2.0, 40).tolist()]
    shares = DecodeShares(7, 0.25, 0.125, 0.5, attend)
    expected = {}
    for worker in {home for home, _ in rows} | {home for home, *_ in more}:
        tokens = [tokens + 1 for home, tokens in rows if home == worker]
        seconds = np.array([0.25 * len(tokens), attend[len(tokens)] + 0.5 * sum(tokens), 0.125 * len(tokens)])
        expected[worker] = seconds + np.sum([added for home, *added in more if home == worker], axis=0)
    homes, tokens = np.array([home for home, _ in rows], np.int64), [tokens for _, tokens in rows]
    for _ in range(2):
        tuples = shares.of(homes, tokens, more).tuples()
        assert len(tuples) == len(expected)
        for worker, *got in tuples:
            assert got == pytest.approx(expected[worker], rel=1e-12)
    for wrong in (7, -1):
        with pytest.raises(IndexError, match="does not exist"):
            shares.of(np.array([0, wrong]), [1, 1], [])
    with pytest.raises(IndexError, match="does not exist"):
        shares.of(np.array([0]), [1], [(7, 1.0, 1.0, 1.0)])
    with pytest.raises(ValueError, match="differ in length"):
        shares.of(np.array([0]), [], [])
    assert shares.of(np.zeros(0, np.int64), [], []).tuples() == []


def test_only_the_rows_of_one_worker_are_bounded_and_a_rejected_step_leaves_nothing() -> None:
    """A sequence that is split has a row on each of its workers."""
    shares = DecodeShares(2, 0.0, 0.0, 0.0, [0.0, 3.0, 5.0])
    with pytest.raises(IndexError, match="a worker has more rows than attend_s has times for"):
        shares.of(np.array([0, 0, 0]), [1, 1, 1], [])
    both = shares.of(np.array([0, 1, 1, 0]), [1, 1, 1, 1], []).tuples()
    assert sorted(both) == [(0, 0.0, 5.0, 0.0), (1, 0.0, 5.0, 0.0)]
    assert shares.of(np.array([1]), [1], []).tuples() == [(1, 0.0, 3.0, 0.0)]
