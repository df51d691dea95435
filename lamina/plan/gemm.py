"""Predicts the time of a matrix product from its shape: tiles, waves and a smooth roofline.

A library computes ``[M, K] x [K, N]`` by a kernel that assigns every tile of the output to one processor. For each of a
few tile shapes this module adds up the time of such a kernel, also with K split into parts where there are fewer tiles
than processors. The result is a mean over the kernels that favours fast ones, because the library's choice is good but
not always the best.

The same parameters, ``GemmFit``, serve every device: only the catalogue entry differs. ``docs/cost-model.md`` derives
the formulas.
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
"""Rows x columns of the output that one processor computes at a time, as in kernels of cuBLAS and CUTLASS."""

CUTS = (1, 2, 3)
"""Parts of K that different processors compute (split-K); more than one only if every part gets its own processor."""

_KERNELS = np.array([(*tile, cuts) for tile in TILES for cuts in CUTS], dtype=np.float64).T
"""Rows, columns and cuts of every kernel."""

DEPTH = 32
"""A tile advances along K in steps of this many elements."""

PARTIAL_BYTES = 4
"""Bytes per element of a partial sum, in float32."""


@dataclass(frozen=True, kw_only=True)
class GemmFit:
    """Parameters that ``lamina.profiling.fit`` fits to measured matrix products. Shares are of the catalogue's peak.

    Attributes:
        share: reached share of a processor's FLOP/s while it works on a tile.
        memory_share: reached share of the memory bandwidth.
        activation_weight: bytes moved per byte of the two activation matrices.
        overlap: exponent that combines compute and memory time; 1 adds them, infinity takes the larger.
        quantisation: 1 if a partial last wave costs a whole one, 0 if it costs in proportion.
        choice: exponent, above 1, of the mean over kernels; infinity takes the fastest.
        launch_s: fixed time per kernel. tile_s: fixed time per wave of tiles.
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
    fit: GemmFit,
    hardware: Hardware,
    rows: ArrayLike,
    columns: ArrayLike,
    depth: ArrayLike,
    dtype: DType,
    fp8: bool = False,
    weight_itemsize: float | None = None,
) -> Floats:
    """Seconds of the product of ``[rows, depth]`` activations and ``[depth, columns]`` weights, element by element.

    Args:
        rows, columns, depth: M, N and K; arrays that broadcast together.
        weight_itemsize: bytes of a weight; None: those of ``dtype``, or 1 with ``fp8``.
        fp8: weights take a byte, and so do the activations where the hardware multiplies 8-bit floats; elsewhere
            weights are converted on the way to its processors. Outputs have ``dtype``.
    """
    m, n, k = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (rows, columns, depth)))
    stored = weight_itemsize or (1 if fp8 else dtype.itemsize)
    times = _kernel_seconds(fit, hardware, m, n, k, dtype, fp8, stored)
    fastest = times.min(axis=0)
    ratios = fastest / times
    return np.asarray(fastest * (ratios ** (fit.choice - 1)).sum(axis=0) / (ratios**fit.choice).sum(axis=0))


def _kernel_seconds(
    fit: GemmFit, hardware: Hardware, m: Floats, n: Floats, k: Floats, dtype: DType, fp8: bool, weight: float
) -> Floats:
    """Seconds of every kernel, ``[len(TILES) * len(CUTS), *m.shape]``; infinite where the library would not split K."""
    processors = hardware.processors
    rows, columns, cuts = (size.reshape(-1, *[1] * m.ndim) for size in _KERNELS)
    tiles = np.ceil(m / rows) * np.ceil(n / columns) * cuts
    waves = np.where(
        tiles <= processors,
        1.0,
        fit.quantisation * np.ceil(tiles / processors) + (1 - fit.quantisation) * tiles / processors,
    )
    products = rows * columns * np.ceil(k / cuts / DEPTH) * DEPTH
    native = fp8 and hardware.fp8_flops > 0
    peak = hardware.fp8_flops if native else hardware.flops[dtype]
    entry = 1 if native else dtype.itemsize
    compute = waves * (2 * products / (peak / processors * fit.share) + fit.tile_s)
    moved = n * k * weight + fit.activation_weight * (m * k * entry + m * n * dtype.itemsize)
    partials = np.where(cuts > 1, 2 * PARTIAL_BYTES * cuts * m * n, 0.0)  # written and read again
    memory = (moved + partials) / (hardware.memory_bytes_s * fit.memory_share)
    seconds = _joined(fit.overlap, compute, memory) + fit.launch_s
    return np.where((tiles <= processors) | (cuts == 1), seconds, np.inf)


def _joined(exponent: float, *seconds: Floats) -> Floats:
    """The smooth maximum ``(a^p + b^p + ...)^(1/p)``, scaled so that it neither overflows nor vanishes."""
    largest = np.maximum.reduce(seconds)
    return np.asarray(largest * sum((part / largest) ** exponent for part in seconds) ** (1 / exponent))
