"""Decode steps over a GPU's own memory, each run by one recording: slices, appends, attention and logits of all layers.

Slice by slice, the host starts a recording and several kernels for every layer, which takes longer than they run.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lamina.compute.device.base import Floats, Rows
from lamina.compute.device.kit import ROWS, Kit, Replay, padded_rows
from lamina.compute.device.transfers import Lines, merge_partials
from lamina.core.types import AttentionSpec
from lamina.memory.device.gpu import FixedTable, GpuTable

logger = logging.getLogger(__name__)

Arrays = tuple[Any, Any, Any]


class Slices(Protocol):
    """A runner of all slices of a model on one card.

    Attributes:
        attentions: Attentions of the model.
        sinks: Sink logits float32 [Hq] of each attention, or None.
        lines: Fixed memory of the card.
    """

    attentions: tuple[AttentionSpec, ...]
    sinks: list[Floats | None]
    lines: Lines

    def place_rows(self, rows: Rows) -> None:
        """Put the ids and positions of a step, and what slices derive from them, into fixed memory."""

    def launch(self, index: int, count: int, arrived: Sequence[Tensor]) -> Sequence[Tensor]:
        """Launch slice ``index`` for the ``count`` rows that are placed. Can be recorded.

        Args:
            arrived: Attention (not for slice 0), then the context of the slice before.

        Returns (q, k, v, *context) or (logits,); all but context in fixed memory.
        """


@dataclass(frozen=True)
class _Recording:
    """A step that runs by replaying; ``logits`` is where it leaves its result."""

    replay: Replay
    logits: Tensor


class RecordedSteps:
    """Records whole steps, for each number of rows that slices are recorded for.

    Attention reads its tables from fixed memory, and its programs are as many as the largest step needs: those without
    work end at once. So a recording serves steps of any lengths, with any number of rows up to its own; padding rows
    have no entries in the tables, and append nothing.
    """

    def __init__(self, slices: Slices, kit: Kit, make_table: Callable[[int], FixedTable]) -> None:
        """``make_table``: makes tables for up to so many rows, see ``lamina.memory.device.gpu.Gpu.fixed_table``."""
        self._slices, self._kit, self._make_table = slices, kit, make_table
        self._tables: dict[int, FixedTable] = {}
        self._recordings: dict[tuple[int, Any], _Recording] = {}  # by rows and ``FixedTable.reads``
        self._lent: dict[tuple[int, ...], Any] = {}
        self._fails = False
        place = kit.place
        self._sinks = [None if each is None else torch.from_numpy(each).to(place) for each in slices.sinks]

    def reserve(self, rows: int) -> None:
        """Record steps of up to ``rows`` rows, with nothing to attend to."""
        most = min(padded_rows(rows), ROWS[-1])
        for count in (each for each in ROWS if each <= most):
            zeros = torch.zeros(count, dtype=torch.int64)
            self._slices.place_rows(Rows(zeros, zeros))
            self._recording(count)

    def run_step(self, rows: Rows, table: Any) -> Tensor | None:
        """Return logits [rows, vocab] of a step whose rows attend to ``table``, a ``GpuTable``; None if it has to run
        slice by slice. The next step overwrites them."""
        count = len(rows.ids)
        if self._fails or count > ROWS[-1] or not isinstance(table, GpuTable) or not self._table(count).load(table):
            return None
        self._slices.place_rows(rows)
        recording = self._recording(count)
        if recording is None:
            return None
        recording.replay()
        return recording.logits

    def has_ended(self) -> bool:
        return self._kit.has_ended()

    def _table(self, count: int) -> FixedTable:
        if count not in self._tables:
            self._tables[count] = self._make_table(count)
        return self._tables[count]

    def _recording(self, count: int) -> _Recording | None:
        """Return the recording that serves the step in the table for ``count`` rows; None if it cannot be made."""
        table = self._table(count)
        key = count, table.reads
        if key not in self._recordings and not self._fails:
            stale = [each for each in self._recordings if each[1][0] is not table.reads[0]]
            for each in stale:  # page tables have moved to a larger array
                del self._recordings[each]
            try:
                self._recordings[key] = self._record(count, table)
            except Exception as error:  # whatever it is, steps can still run slice by slice
                self._fails = True
                logger.warning(
                    "decode steps run slice by slice, which takes longer: %d rows are not recorded as one step: %s: %s",
                    count,
                    type(error).__name__,
                    error,
                )
        return self._recordings.get(key)

    def _record(self, count: int, table: FixedTable) -> _Recording:
        logits: list[Tensor] = []

        def work() -> None:
            table.divide_work()
            arrived: tuple[Tensor, ...] = ()
            for index, (spec, sinks) in enumerate(zip(self._slices.attentions, self._sinks, strict=True)):
                results = self._slices.launch(index, count, arrived)
                attention = self._attend(index, count, table, results[:3], spec, sinks)
                arrived = attention, *results[3:]
            logits[:] = self._slices.launch(len(self._slices.attentions), count, arrived)

        return _Recording(self._kit.capture(work), logits[0])

    def _attend(
        self,
        index: int,
        count: int,
        table: FixedTable,
        results: Sequence[Tensor],
        spec: AttentionSpec,
        sinks: Tensor | None,
    ) -> Tensor:
        """Launch one attention, and return its result in the model's element type, in fixed memory."""
        fixed, heads = self._slices.lines.fixed_rows, spec.query_heads
        out = fixed("attended", count, (heads, spec.v_dim), torch.float32)
        lse = fixed("attended lse", count, (heads,), torch.float32)
        q, k, v = (self._lend(tensor) for tensor in results)
        table.attend(index, q, k, v, self._lend(out), self._lend(lse), spec)
        merged = fixed("in 0", count, (heads, spec.v_dim), results[0].dtype)
        merged.copy_(merge_partials(out[None], lse[None], sinks))
        return merged

    def _lend(self, tensor: Tensor) -> Any:
        """Return fixed memory as an array of the memory's device; the same array every time."""
        key = tensor.data_ptr(), tensor.element_size(), *tensor.shape
        if key not in self._lent:
            self._lent[key] = self._kit.lent(tensor)
        return self._lent[key]
