"""Divisions of slices among stages, against all divisions that there are."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.errors import ConfigError
from lamina.core.stages import divide

slices = st.lists(
    st.dictionaries(st.sampled_from("abcdefgh"), st.just(0), min_size=1, max_size=3), min_size=1, max_size=8
)


def stages_of(held: list[dict[str, int]], starts: tuple[int, ...]) -> list[int]:
    """Bytes of each stage, whose weights count once."""
    bounds = itertools.pairwise((*starts, len(held)))
    return [
        sum({name: size for each in held[first:stop] for name, size in each.items()}.values()) for first, stop in bounds
    ]


@given(slices, st.lists(st.integers(1, 9), min_size=8, max_size=8), st.data())
def test_the_largest_stage_is_as_small_as_possible_and_then_all_are_as_even(
    needed: list[dict[str, int]], sizes: list[int], data: st.DataObject
) -> None:
    held = [{name: sizes["abcdefgh".index(name)] for name in each} for each in needed]
    count = data.draw(st.integers(1, len(held)))
    starts = divide(held, count)
    assert starts[0] == 0 and list(starts) == sorted({*starts}) and len(starts) == count

    def cost(starts: tuple[int, ...]) -> tuple[int, int]:
        own = stages_of(held, starts)
        return max(own), sum(size * size for size in own)

    others = itertools.combinations(range(1, len(held)), count - 1)
    assert cost(starts) == min(cost((0, *each)) for each in others)


def test_an_embedding_tied_to_the_head_counts_at_both_ends() -> None:
    layers = [{f"layer {number}": 10} for number in range(7)]
    tied = [{"embedding": 20} | layers[0], *layers[1:-1], layers[-1] | {"embedding": 20}]
    assert divide(tied, 1) == (0,)
    assert stages_of(tied, (0,)) == [90], "once in one stage"
    assert sorted(stages_of(tied, divide(tied, 3))) == [30, 40, 40]
    assert divide(tied, 7) == tuple(range(7))


def test_more_stages_than_slices_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="pipeline_parallel is 4, and the model has 3 slices to divide; give at most 3"
    ):
        divide([{"a": 1}, {"b": 1}, {"c": 1}], 4)
