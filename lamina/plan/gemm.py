"""Time of a matrix product from its shape: tiles, waves and a smooth roofline. ``docs/cost-model.md`` derives it.

A library computes ``[M, K] x [K, N]`` by a kernel that gives every tile of the output to one processor. For each of a
few tile shapes (and splits of K) this module adds up what such a kernel needs; the time of the product is a mean over
the kernels that favours the fast ones, because the library's choice is good but not always the best.

The same numbers, ``GemmFit``, serve every device: only the catalogue entry differs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lamina.plan.hardware import Hardware
from lamina.types import DType

Floats = NDArray[np.float64]

TILES = (
    (256, 128),
    (128, 256),
    (128, 128),
    (256, 64),
    (64, 256),
    (128, 64),
    (64, 128),
    (64, 64),
    (32, 128),
    (32, 64),
)
"""Rows x columns of the output that one processor computes at a time: the shapes of cuBLAS's and CUTLASS's kernels."""

SPLITS = (1, 2, 4)
"""Into how many parts a kernel may cut K, to keep more processors busy."""

MOST_WAVES_SPLIT = 2
"""K is cut only while the parts still fit this many waves."""

DEPTH = 32
"""Tiles walk K in steps of this many elements."""

CACHE_BYTES_PER_CLOCK = 64
"""What one processor can read from the last-level cache in a clock."""


@dataclass(frozen=True, kw_only=True)
class GemmFit:
    """What ``lamina.plan.fit`` fits to measured matrix products. Shares are of the catalogue's peak.

    Attributes:
        share_AxB: of a processor's FLOP/s while it works on a tile of A rows and B columns (``TILES``).
        sustained_share: of the device's FLOP/s that its power allows for long.
        sustained_after_s: products much longer than this run at the sustained rate.
        memory_share: of the memory bandwidth. reach: the processors' part of it, in even shares, that one can use.
        activation_weight: bytes moved for each byte of the two activation matrices.
        cache_share: of CACHE_BYTES_PER_CLOCK.
        overlap: exponent that joins compute, memory and cache time; 1 adds them, infinity takes the largest.
        quantisation: 1 if a last partial wave costs a whole one, 0 if its part.
        choice: exponent, above 1, of the mean over kernels; infinity takes the fastest.
        launch_s: of a kernel. tile_s: of each tile in a row on one processor. split_s: of adding up the parts of K.
        split_traffic: float32 passes over the output for every part of K.
    """

    share_256x128: float
    share_128x256: float
    share_128x128: float
    share_256x64: float
    share_64x256: float
    share_128x64: float
    share_64x128: float
    share_64x64: float
    share_32x128: float
    share_32x64: float
    sustained_share: float
    sustained_after_s: float
    memory_share: float
    reach: float
    activation_weight: float
    cache_share: float
    overlap: float
    quantisation: float
    choice: float
    launch_s: float
    tile_s: float
    split_s: float
    split_traffic: float


def gemm_seconds(
    fit: GemmFit, hardware: Hardware, rows: ArrayLike, columns: ArrayLike, depth: ArrayLike, dtype: DType
) -> Floats:
    """Seconds of the product of ``[rows, depth]`` activations and ``[depth, columns]`` weights, element by element.

    Args:
        rows, columns, depth: M, N and K; arrays that broadcast together.
    """
    m, n, k = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (rows, columns, depth)))
    times = np.stack([_kernel_seconds(fit, hardware, m, n, k, dtype, tile, parts) for tile, parts in KERNELS])
    fastest = times.min(axis=0)
    ratios = fastest / times  # 0 for a kernel that would not be chosen
    return np.asarray(fastest * (ratios ** (fit.choice - 1)).sum(axis=0) / (ratios**fit.choice).sum(axis=0))


KERNELS = tuple((tile, parts) for tile in TILES for parts in SPLITS)


def _kernel_seconds(
    fit: GemmFit, hardware: Hardware, m: Floats, n: Floats, k: Floats, dtype: DType, tile: tuple[int, int], parts: int
) -> Floats:
    """Seconds on a kernel of this tile that cuts K into ``parts``; infinite where it would not be chosen."""
    processors = hardware.processors
    tiles = np.ceil(m / tile[0]) * np.ceil(n / tile[1]) * parts
    waves = np.where(
        tiles <= processors,
        1.0,
        fit.quantisation * np.ceil(tiles / processors) + (1 - fit.quantisation) * tiles / processors,
    )
    steps = np.ceil(k / parts / DEPTH) * DEPTH
    tile_share: float = getattr(fit, f"share_{tile[0]}x{tile[1]}")
    flops_s = hardware.flops[dtype] / processors * tile_share
    compute = waves * (2 * tile[0] * tile[1] * steps / flops_s + fit.tile_s)
    moved = (n * k + fit.activation_weight * (m * k + m * n)) * dtype.itemsize
    share = np.minimum(1, np.minimum(tiles, processors) / processors * fit.reach)
    memory = moved / (hardware.memory_bytes_s * fit.memory_share * share)
    cache_bytes_s = CACHE_BYTES_PER_CLOCK * hardware.clock_hz * fit.cache_share
    cache = waves * (tile[0] + tile[1]) * steps * dtype.itemsize / cache_bytes_s
    busy = _joined(fit.overlap, compute, memory, cache)
    seconds = _joined(_POWER, busy, _power_limit(fit, hardware, m * n * k, dtype)) + fit.launch_s
    if parts == 1:
        return seconds
    seconds = seconds + fit.split_s + fit.split_traffic * parts * m * n * 4 / hardware.memory_bytes_s
    return np.where(tiles <= MOST_WAVES_SPLIT * processors, seconds, np.inf)


_POWER = 10.0
"""Exponent that takes nearly the larger of a product's time and what power allows, without a corner."""


def _power_limit(fit: GemmFit, hardware: Hardware, products: Floats, dtype: DType) -> Floats:
    """The least seconds that the device's power allows, fading out for products that end before it is felt."""
    seconds = 2 * products / (hardware.flops[dtype] * fit.sustained_share)
    long = (seconds / fit.sustained_after_s) ** 2
    return np.asarray(seconds * long / (1 + long))


def _joined(exponent: float, *seconds: Floats) -> Floats:
    """The smooth maximum ``(a^p + b^p + ...)^(1/p)``, scaled so that it neither overflows nor vanishes."""
    largest = np.maximum.reduce(seconds)
    return np.asarray(largest * sum((part / largest) ** exponent for part in seconds) ** (1 / exponent))
