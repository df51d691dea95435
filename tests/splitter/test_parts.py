"""Parts of tensors against numpy, which holds the whole."""

import random

import numpy as np
import pytest

from lamina.splitter.parts import MixesError, block, positions, reshaped, runs, union


def factors(size: int, generator: random.Random) -> list[int]:
    """A shape of so many elements."""
    shape = []
    while size > 1:
        divisor = generator.choice([each for each in range(2, size + 1) if size % each == 0])
        shape.append(divisor)
        size //= divisor
    for _ in range(generator.randrange(2)):
        shape.insert(generator.randrange(len(shape) + 1), 1)
    return shape


@pytest.mark.parametrize("seed", range(60))
def test_views_of_parts_are_the_same_elements_in_the_same_order(seed: int) -> None:
    generator = random.Random(seed)
    size = generator.choice([12, 24, 36, 64])
    old, new = factors(size, generator), factors(size, generator)
    part = {}
    for dim, length in enumerate(old):
        if length > 1 and generator.random() < 0.6:
            part[dim] = np.array(sorted(generator.sample(range(length), generator.randrange(1, length))))
    whole = np.arange(size)
    held = whole.reshape(old)[np.ix_(*(part.get(dim, np.arange(length)) for dim, length in enumerate(old)))].ravel()
    try:
        found = reshaped(part, old, new)
    except MixesError:
        places = np.unravel_index(held, new)
        assert np.prod([len(np.unique(place)) for place in places]) > len(held)
        return
    seen = whole.reshape(new)[np.ix_(*(found.get(dim, np.arange(length)) for dim, length in enumerate(new)))].ravel()
    assert np.array_equal(seen, held)


def test_sizes_that_are_symbols_stay_whole() -> None:
    heads = {2: np.array([1])}
    assert reshaped(heads, [1, "T", 2, 8], [1, "T", 16]).keys() == {2}
    assert reshaped(heads, [1, "T", 2, 8], ["T", 16])[1].tolist() == list(range(8, 16))
    with pytest.raises(MixesError):
        reshaped(heads, [1, "T", 2, 8], [1, "T*16"])


def test_index_sets() -> None:
    assert [block(7, rank, 3).tolist() for rank in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert runs(np.array([2, 3, 4, 8, 9])) == ((2, 5), (8, 10)) and runs(np.array([], np.int64)) == ()
    assert union([{0: np.array([1, 2])}, {0: np.array([0])}], [4])[0].tolist() == [0, 1, 2]
    assert union([{0: np.array([1, 2])}, {0: np.array([0])}], [3]) == union([{0: np.array([1])}, {}], [3]) == {}
    assert positions(np.array([3, 5, 9]), np.array([5, 9])).tolist() == [1, 2]
