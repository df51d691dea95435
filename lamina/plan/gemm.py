"""Time of a matrix product from its shape: tiles, waves and a smooth roofline. ``docs/cost-model.md`` derives it.

A library computes ``[M, K] x [K, N]`` by a kernel that gives every tile of the output to one processor. For each of a
few tile shapes this module adds up what such a kernel needs, also with K cut into parts where tiles are too few for the
processors; the time of the product is a mean over the kernels that favours the fast ones, because the library's choice
is good but not always the best.

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
)
"""Rows x columns of the output that one processor computes at a time: the shapes of cuBLAS's and CUTLASS's kernels."""

CUTS = (1, 2, 3)
"""Parts of K that different processors may walk; more than one only if all of them have a processor of their own."""

DEPTH = 32
"""Tiles walk K in steps of this many elements."""


PARTIAL_BYTES = 4
"""Of an element of a partial sum, in float32."""


@dataclass(frozen=True, kw_only=True)
class GemmFit:
    """What ``lamina.profiling.fit`` fits to measured matrix products. Shares are of the catalogue's peak.

    Attributes:
        share: of a processor's FLOP/s while it works on a tile.
        memory_share: of the memory bandwidth.
        activation_weight: bytes moved for each byte of the two activation matrices.
        overlap: exponent that joins compute and memory time; 1 adds them, infinity takes the larger.
        quantisation: 1 if a last partial wave costs a whole one, 0 if its part.
        choice: exponent, above 1, of the mean over kernels; infinity takes the fastest.
        launch_s: of a kernel. tile_s: of each tile in a row on one processor.
    """

    share: float
    memory_share: float
    activation_weight: float
    overlap: float
    quantisation: float
    choice: float
    launch_s: float
    tile_s: float


def gemm_seconds(
    fit: GemmFit, hardware: Hardware, rows: ArrayLike, columns: ArrayLike, depth: ArrayLike, dtype: DType
) -> Floats:
    """Seconds of the product of ``[rows, depth]`` activations and ``[depth, columns]`` weights, element by element.

    Args:
        rows, columns, depth: M, N and K; arrays that broadcast together.
    """
    m, n, k = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (rows, columns, depth)))
    times = np.stack([_kernel_seconds(fit, hardware, m, n, k, dtype, tile, cuts) for tile in TILES for cuts in CUTS])
    fastest = times.min(axis=0)
    ratios = fastest / times
    return np.asarray(fastest * (ratios ** (fit.choice - 1)).sum(axis=0) / (ratios**fit.choice).sum(axis=0))


def _kernel_seconds(
    fit: GemmFit, hardware: Hardware, m: Floats, n: Floats, k: Floats, dtype: DType, tile: tuple[int, int], cuts: int
) -> Floats:
    """Seconds on a kernel of this tile that cuts K into parts; infinite where it would not."""
    processors = hardware.processors
    tiles = np.ceil(m / tile[0]) * np.ceil(n / tile[1]) * cuts
    waves = np.where(
        tiles <= processors,
        1.0,
        fit.quantisation * np.ceil(tiles / processors) + (1 - fit.quantisation) * tiles / processors,
    )
    products = tile[0] * tile[1] * np.ceil(k / cuts / DEPTH) * DEPTH
    compute = waves * (2 * products / (hardware.flops[dtype] / processors * fit.share) + fit.tile_s)
    moved = (n * k + fit.activation_weight * (m * k + m * n)) * dtype.itemsize
    moved += 2 * PARTIAL_BYTES * cuts * m * n if cuts > 1 else 0.0  # written, and read to be added up
    memory = moved / (hardware.memory_bytes_s * fit.memory_share)
    seconds = _joined(fit.overlap, compute, memory) + fit.launch_s
    return np.where((tiles <= processors) | (cuts == 1), seconds, np.inf)


def _joined(exponent: float, *seconds: Floats) -> Floats:
    """The smooth maximum ``(a^p + b^p + ...)^(1/p)``, scaled so that it neither overflows nor vanishes."""
    largest = np.maximum.reduce(seconds)
    return np.asarray(largest * sum((part / largest) ** exponent for part in seconds) ** (1 / exponent))
