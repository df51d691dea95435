"""The noise of draws by its definition, on numpy in float64."""

import numpy as np
import numpy.typing as npt

GOLDEN, FIRST, SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def splitmix64(seeds: npt.NDArray[np.uint64], count: int) -> npt.NDArray[np.uint64]:
    """The first ``count`` outputs of the generator for each seed [R]: [R, count]."""
    z = seeds[:, None] + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN
    z = (z ^ (z >> np.uint64(30))) * FIRST
    z = (z ^ (z >> np.uint64(27))) * SECOND
    return z ^ (z >> np.uint64(31))


def gumbel(keys: npt.NDArray[np.uint64], vocabulary: int) -> npt.NDArray[np.float64]:
    """The Gumbel noise of every token for draws with these keys [R]: [R, vocabulary]."""
    u = ((splitmix64(keys, vocabulary) >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32
    return -np.log(-np.log1p(-u))
