"""Chooses between plain slices and slices fused by torch.compile, by measurement.

Both are recorded and timed once for each number of rows and kind of GPU. The result is cached, so that later starts
compile only the slices that they use.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lamina.compute.device.kit import Kit, Replay
from lamina.core.errors import is_out_of_memory
from lamina.kernels import tuning_cache
from lamina.lowering.gpu_slices import Main, PlacedSlice

logger = logging.getLogger(__name__)

Record = Callable[[Main], Replay]


@dataclass(frozen=True)
class Seconds:
    """Measured seconds of a recorded slice, plain and fused."""

    plain: float
    fused: float


class Fusion:
    """Chooses for the slices of one model."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._path = tuning_cache.file_for("slices", kit.name, f"torch-{torch.__version__}")
        self._known = tuning_cache.load(self._path, dict[str, Seconds]) or {}
        self._fused: dict[Main, Main | None] = {}
        self._failed = set[Main]()

    def record(self, piece: PlacedSlice, rows: int, record: Record) -> Replay:
        """Return the faster recording, plain or fused, of a slice for ``rows`` rows; measure both the first time."""
        graph = piece.graph
        key = f"{piece.digest}/{rows}"
        known = self._known.get(key)
        if graph in self._failed or (known is not None and known.plain <= known.fused):
            return record(graph)
        for tensor in piece.fixed:  # only the number of rows is dynamic
            torch._dynamo.mark_static(tensor)
        try:
            main = self._compiled(graph)
            fused = None if main is None else record(main)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            logger.warning("a slice runs operator by operator, as torch.compile cannot fuse it: %s", error)
            self._failed.add(graph)
            return record(graph)
        if fused is None:
            return record(graph)
        if known is not None:
            return fused
        plain = record(graph)
        found = Seconds(self._kit.time_replay(plain), self._kit.time_replay(fused))
        logger.info("a slice of %d rows: %.1f us, fused %.1f", rows, 1e6 * found.plain, 1e6 * found.fused)
        self._known[key] = found
        tuning_cache.save(self._path, (tuning_cache.load(self._path, dict[str, Seconds]) or {}) | self._known)
        return plain if found.plain <= found.fused else fused

    def _compiled(self, graph: Main) -> Main | None:
        if graph not in self._fused:
            fused = self._kit.compiled(graph)
            if fused is not None and not self._fused:
                logger.warning("fusing the operators of slices for this %s, which takes a minute once", self._kit.name)
            self._fused[graph] = fused
        return self._fused[graph]
