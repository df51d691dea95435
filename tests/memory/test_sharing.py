"""Which tokens of a step's sequences are read once for several: against a search among all sets of pairs."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.memory import shared_prefixes
from lamina.memory.device.base import Pairs
from lamina.memory.shared_prefixes import Shared, SharedPrefixes, rest_of, shared_of
from lamina.memory.slab import Slab


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "FEWEST_TOKENS", 3)


def grown(forks: Sequence[tuple[int, int, int]]) -> Slab[int]:
    """Segments 0, 1, ..., each a fork of one before, of so many tokens of it, and then tokens of its own."""
    slab = Slab[int](1000)
    for segment, (number, shared, own) in enumerate(forks):
        if segment:
            parent = number % segment
            slab.fork(parent, segment, min(shared, len(slab.slots(parent))))
        else:
            slab.open(segment)
        slab.append(segment, own)
    return slab


def step(slab: Slab[int]) -> Pairs:
    """All segments decode."""
    lengths = [len(slab.slots(each)) for each in slab.segments]
    count, last = len(lengths), [length - 1 for length in lengths]
    return Pairs([1] * count, last, [0] * count, list(slab.segments), [0] * count, lengths, list(range(count)))


def common(slab: Slab[int], segments: Sequence[int]) -> int:
    columns = zip(*(slab.slots(each).tolist() for each in segments), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


forks = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(1, 6)), min_size=2, max_size=7)


@given(forks)
def test_sets_are_apart_and_save_at_least_what_any_one_set_saves(forks: list[tuple[int, int, int]]) -> None:
    slab = grown(forks)
    found = SharedPrefixes(least=0).find(step(slab), slab.slots)
    members = [pair for one in found for pair in one.pairs]
    assert len(members) == len(set(members))
    for one in found:
        assert len(one.pairs) > 1 and 3 <= one.tokens <= common(slab, one.pairs)
    sets = [some for size in range(2, len(forks) + 1) for some in itertools.combinations(range(len(forks)), size)]
    savings = ((len(some) - 1) * tokens for some in sets if (tokens := common(slab, some)) >= 3)
    assert sum(one.saved for one in found) >= max(savings, default=0)


@given(forks)
def test_every_row_sees_each_token_once(forks: list[tuple[int, int, int]]) -> None:
    slab = grown(forks)
    pairs = step(slab)
    found = SharedPrefixes(least=0).find(pairs, slab.slots)
    if not found:
        return
    rest, (together, order) = rest_of(pairs, found), shared_of(pairs, found)
    assert rest.new == pairs.new and rest.kv_start == rest.first

    def tokens(pairs: Pairs, pair: int) -> list[int]:
        key = pair if pairs is rest else found[pair].pairs[0]
        slots: list[int] = slab.slots(key)[pairs.first[pair] : pairs.stop[pair]].tolist()
        return slots

    seen = [tokens(rest, pair) for pair in range(len(forks))]
    rows = iter(order.tolist())
    for pair, count in enumerate(together.rows):
        assert together.query_start[pair] == together.stop[pair] - 1, "no token is hidden"
        for row in itertools.islice(rows, count):
            seen[row] = tokens(together, pair) + seen[row]
    assert seen == [slab.slots(each).tolist() for each in slab.segments]


def test_a_system_prompt_and_samples_of_long_prompts() -> None:
    """Samples share their whole prompt, and the others the beginning of all."""
    slab = grown([(0, 0, 40), (0, 10, 2), (0, 10, 3), (0, 10, 4), (0, 38, 5)])
    found = SharedPrefixes(least=0).find(step(slab), slab.slots)
    assert set(found) == {Shared((0, 4), 38), Shared((1, 2, 3), 10)}


def test_little_is_left_alone_and_what_segments_lose_is_looked_for_again() -> None:
    slab = grown([(0, 0, 20), (0, 20, 1), (0, 20, 1)])
    assert SharedPrefixes(least=41).find(step(slab), slab.slots) == []
    prefixes = SharedPrefixes(least=1)
    assert prefixes.find(step(slab), slab.slots) == [Shared((0, 1, 2), 20)]
    slab.append(1, 5)
    assert prefixes.find(step(slab), slab.slots) == [Shared((0, 1, 2), 20)]
    slab.rearrange([2], {2: [(2, 20, 21)]})
    slab.append(2, 30)
    prefixes.forget(slab.take_shortened())
    assert prefixes.find(step(slab), slab.slots) == [Shared((0, 1), 20)]


def test_prefixes_of_prefixes_of_many_sequences() -> None:
    """Each goes on where another one ends, hundreds of times."""
    slab = grown([(0, 0, 4), *((each - 1, 1000, 1) for each in range(1, 900))])
    found = SharedPrefixes(least=0).find(step(slab), slab.slots)
    members = [pair for one in found for pair in one.pairs]
    assert len(members) == len(set(members)) and sum(one.saved for one in found) > 0


def test_chunks_of_prompts_and_tokens_after_the_query_are_not_shared() -> None:
    slab = grown([(0, 0, 20), (0, 20, 1), (0, 20, 1)])
    lengths = [20, 21, 21]
    pairs = Pairs([2, 1, 1], [18, 11, 20], [0] * 3, [0, 1, 2], [0] * 3, lengths)
    assert SharedPrefixes(least=1).find(pairs, slab.slots) == [Shared((1, 2), 12)]
    apart = Pairs([1] * 3, [30, 31, 41], [0, 0, 10], [0, 1, 2], [0] * 3, lengths)  # positions differ, not only slots
    assert SharedPrefixes(least=1).find(apart, slab.slots) == [Shared((0, 1), 20)]
