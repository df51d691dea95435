"""Batches, KV and steps of one copy of the weights, as the closed form of ``serving`` counts them."""

from collections.abc import Mapping

import numpy as np

from lamina.core.pipeline import Shape
from lamina.planning.plan.cost import CostModel
from lamina.planning.plan.hardware import Hardware
from lamina.planning.plan.kernel_times import Floats
from lamina.planning.plan.model_shapes import ModelShape
from lamina.planning.plan.overheads import AS_PUBLISHED, NO_OVERHEAD, Engine
from lamina.planning.plan.planner import MOST_ROWS
from lamina.planning.plan.stages import fewest_stages, kv_tokens, stage_seconds
from lamina.planning.plan.ways import Way, spreads_memory
from lamina.planning.plan.workload import Workload

POINTS = 80
"""Batches to try. Near the SLOs, a fraction of a sequence more counts: batches are means."""

LEAST_LOAD = 0.1
"""Share of what workers could do with prompts at which these are tried: workers that may do less keep no SLO."""

_EVERY_ROW = np.arange(1.0, 2 * MOST_ROWS + 1)

Passes = dict[tuple[str, int, bool], tuple[Floats, Floats]]
"""By kind, ranks and ``CostModel.widens``: seconds of a layer's slice, and of the ends of a step, by rows."""


class Copies:
    """Evaluates copies of the weights for one model and workload."""

    def __init__(
        self,
        shape: ModelShape,
        workload: Workload,
        models: Mapping[str, CostModel],
        engine: Engine,
        passes: Passes | None = None,
    ) -> None:
        """``passes``: a cache, which does not depend on the workload."""
        self.passes: Passes = {} if passes is None else passes
        self._shape, self._workload, self._models, self._engine = shape, workload, models, engine

    def fit(self, kind: Hardware, copy: Shape) -> bool:
        """Return whether the weights of each stage fit its devices."""
        least = fewest_stages(self._shape, self._models[kind.kind].usable_bytes, copy.ranks)
        return least is not None and least <= copy.stages <= self._shape.layers

    def kv_room(self, kind: Hardware, copy: Shape, chunk: int) -> float:
        """Return the tokens of KV that fit beside one copy of the weights, with steps of up to ``chunk`` tokens."""
        usable = self._models[kind.kind].usable_bytes - self._host(self._models[kind.kind]).reserved(chunk)
        return kv_tokens(self._shape, copy.stages, copy.ranks * usable)

    @staticmethod
    def lenders(way: Way) -> int:
        """Return how many copies of the weights that decode hold the KV of one request together."""
        lends = way.has_local and way.shape.stages == 1
        kinds = [kind for kind in (way.prefill, way.compute) if kind is not None]
        return way.replicas if lends and spreads_memory(way.most_ranks, kinds) else 1

    def rows(
        self,
        room: float,
        lanes: int,
        chunk: int,
        replicas: int = 1,
        copies: int = 1,
        ahead: int = 0,
        lenders: int = 1,
    ) -> tuple[Floats, Floats]:
        """Return the decode rows of a batch to try, and the prompt tokens found by a prefix cache in the free KV.

        Args:
            room: Tokens of KV.
            lanes: Batches that share it.
            chunk: Most rows of a step, and most sequences of a replica (``max_num_seqs`` is no larger).
            replicas: Replicas that run the lanes.
            copies: Copies of the prefix that all sequences share.
            ahead: Tokens kept free for each sequence.
            lenders: Number of such rooms that hold the sequences of all together.
        """
        workload, reuse = self._workload, self._workload.reuse
        common = copies * reuse.shared
        each = workload.live - reuse.shared + ahead
        most = min((room - common) / each / lanes, chunk - 1, chunk * replicas / lanes, MOST_ROWS)
        if most * lanes * lenders < 1:
            return np.zeros(0), np.zeros(0)
        full = np.arange(128, most, 128)  # these fill the tiles of matrix products
        fewest = min(most, 0.25, LEAST_LOAD * chunk * workload.output / workload.prompt)
        rows = np.union1d(np.geomspace(fewest, most, POINTS), full)
        left = room - common - rows * lanes * each
        return rows, np.minimum(reuse.found_tokens(left + reuse.shared, rows * lanes), workload.prompt - 1)

    def attention(
        self,
        model: CostModel,
        degree: int,
        rows: Floats,
        other: tuple[CostModel, int] | None = None,
        beyond: Floats | float = 0.0,
    ) -> Floats:
        """Return seconds of one layer's attention of a decode step on a copy of the weights.

        Args:
            model: Cost model of a device of the copy.
            degree: Devices that share a layer.
            rows: Sequences that decode.
            other: Cost model of a device of the copy that attends to KV for which this one has no room, and the devices
                that share a layer there.
            beyond: Sequences whose KV is there.
        """
        here, live = rows - beyond, self._workload.live
        attention = model.attention_seconds(here * live, here, 1 / degree)
        if other is not None:
            holder, ranks = other
            there = holder.attention_seconds(beyond * live, beyond, 1 / ranks)
            messages = holder.fits.runtime.round_trip_s + holder.wire_seconds(holder.exchange_bytes(beyond)) / ranks
            attention = np.maximum(attention, np.where(beyond > 0, there + messages, 0.0))
        return np.asarray(attention)

    def stage_step(
        self, model: CostModel, copy: Shape, rows: Floats, tokens: Floats | float = 0.0, attention: Floats | float = 0.0
    ) -> Floats:
        """Return seconds of a step per stage (``stages.stage_seconds``) of a copy with local memory.

        Args:
            model: Cost model of a device of the copy.
            copy: Ranks and stages of the copy.
            rows: Sequences that decode.
            tokens: Tokens of chunks.
            attention: Seconds of one layer's attention.
        """
        if copy.stages == 1:
            return np.asarray(self.whole_pass(model, copy.ranks, rows + tokens) + self._shape.layers * attention)
        layers, ends = self._tables(model, copy.ranks)
        layer_s = np.interp(rows + tokens, _EVERY_ROW, layers) + attention
        hop_s = self._hop_seconds(model, copy.ranks, rows + tokens)
        return stage_seconds(self._shape, copy.stages, layer_s, np.interp(rows, _EVERY_ROW, ends), hop_s)

    def _hop_seconds(self, model: CostModel, degree: int, rows: Floats) -> Floats:
        """Return seconds from one stage to the next of the context and of the stage's last attention."""
        shape = self._shape
        nbytes = shape.hidden * shape.dtype.itemsize + shape.query_heads * (shape.head_size + 1) * 4 / degree
        return np.asarray(model.fits.runtime.round_trip_s / 2 + model.wire_seconds(rows * nbytes))

    def whole_pass(self, model: CostModel, degree: int, rows: Floats) -> Floats:
        """Return seconds of all slices of a step, with the engine's own time."""
        layers, ends = self._tables(model, degree)
        return np.asarray(np.interp(rows, _EVERY_ROW, self._shape.layers * layers + ends))

    def _host(self, model: CostModel) -> Engine:
        """Return the engine's overheads; none if a profile of the kind includes them."""
        return self._engine if model.fits.runtime is AS_PUBLISHED else NO_OVERHEAD

    def _tables(self, model: CostModel, degree: int) -> tuple[Floats, Floats]:
        key = (model.hardware.kind, degree, model.widens)
        if key not in self.passes:
            host = self._host(model)
            layers, ends = model.decode_parts(_EVERY_ROW, degree)
            self.passes[key] = layers, ends + host.step_s + host.step_row_s * _EVERY_ROW
        return self.passes[key]
