"""How long a step's slices, attentions and messages take on given workers: the model behind the virtual cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lamina.plan.cost import GEMMS, POINTWISE, CostModel
from lamina.plan.gemm import Floats
from lamina.plan.simulation.arrivals import Ints
from lamina.plan.simulation.deployment import Deployment
from lamina.transport.wire import attends_locally
from lamina.types import SequenceStep

_BEFORE_ATTENTION = ("input_layernorm", "attn_pre_proj", "attn_rope")
"""Operators of a layer that slice k runs before attention k; the others follow it."""


class SliceTimes:
    """Dense seconds of steps by their rows, on ``tensor_parallel`` devices. Asked for often, so kept in tables."""

    def __init__(self, cost: CostModel, tensor_parallel: int, most_rows: int) -> None:
        rows = np.maximum(np.arange(most_rows + 1), 1)
        before = sum(cost.operator_seconds(name, rows, tensor_parallel) for name in _BEFORE_ATTENTION)
        layer = cost.slice_seconds(rows, tensor_parallel)
        ends = cost.ends_seconds(rows, tensor_parallel)
        self.first: list[float] = np.asarray(before).tolist()
        self.inner: list[float] = layer.tolist()
        self.after: list[float] = np.asarray(layer - before).tolist()
        self.ends: list[float] = ends.tolist()


assert set(_BEFORE_ATTENTION) <= {*GEMMS, *POINTWISE}


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step of ``rows`` rows, as ``VirtualCluster.submit`` takes them."""

    rows: int
    first_s: float
    inner_s: float
    last_s: float
    chunks_s: float
    send_s: float
    receive_s: float
    context_s: float
    workers: Ints
    shares: Floats


class StepModel:
    """Times of steps as the runtime runs them: decode attention and what a prompt's chunks see of earlier ones on the
    memory workers, the rest of a chunk's attention on the replica (``compute/exchange.py``)."""

    def __init__(self, deployment: Deployment) -> None:
        compute, memory, shape = deployment.compute_cost, deployment.memory_cost, deployment.model
        tp = deployment.tensor_parallel
        self._slices = SliceTimes(compute, tp, deployment.max_num_batched_tokens)
        self._compute, self._memory = compute, memory
        self._tp = tp
        self._workers = deployment.memory_workers
        item = shape.dtype.itemsize
        self._kept_bytes = 2 * shape.kv_heads * shape.head_size * item  # k and v of a row
        self._asked_bytes = shape.query_heads * shape.head_size * item  # q of a row, and as much back
        self._context_bytes = shape.hidden * item
        # A device of a group sends and receives its heads' part.
        self._compute_byte_s = float(compute.wire_seconds(1.0)) / tp
        self._memory_byte_s = float(memory.wire_seconds(1.0))
        self.latency_s = float(compute.link_seconds(0.0))

    def times(self, steps: Sequence[SequenceStep], homes: Mapping[int, int]) -> StepTimes:
        """Of one step. ``homes``: the memory worker of each sequence, by number."""
        chunks = [step for step in steps if attends_locally(step)]
        singles = [step for step in steps if not attends_locally(step)] if chunks else steps
        workers = np.fromiter((homes[step.sequence] for step in singles), np.int64, len(singles))
        seen = np.fromiter((step.start for step in singles), np.float64, len(singles))
        asked = np.bincount(workers, minlength=self._workers).astype(np.float64)
        tokens = np.bincount(workers, seen, minlength=self._workers) + asked
        attention = np.where(asked > 0, self._memory.attention_seconds(tokens, asked), 0.0)
        kept = asked.copy()
        rows, draws, chunks_s = len(singles), len(singles), 0.0
        for chunk in chunks:
            length, home = len(chunk.tokens), homes[chunk.sequence]
            rows += length
            draws += bool(chunk.draws)
            kept[home] += length
            chunks_s += float(self._compute.chunk_attention_seconds(length, 0, self._tp))
            if chunk.start:
                asked[home] += length
                attention[home] += self._prefix_seconds(length, chunk.start)
        return self._assembled(rows, draws, chunks_s, kept, asked, attention)

    def _prefix_seconds(self, chunk: int, prefix: int) -> float:
        """A memory worker's attention of ``chunk`` rows to ``prefix`` tokens: arithmetic or memory bounds it."""
        cost = self._memory
        arithmetic = cost.chunk_attention_seconds(chunk, prefix) - cost.chunk_attention_seconds(chunk, 0)
        return max(float(arithmetic), float(cost.attention_seconds(prefix, 1)))

    def _assembled(
        self, rows: int, draws: int, chunks_s: float, kept: Floats, asked: Floats, attention: Floats
    ) -> StepTimes:
        slices = self._slices
        (workers,) = kept.nonzero()
        kept, asked = kept[workers], asked[workers]
        back = asked * self._asked_bytes
        sent = kept * self._kept_bytes + back
        return StepTimes(
            rows=rows,
            first_s=slices.first[rows],
            inner_s=slices.inner[rows],
            last_s=slices.after[rows] + slices.ends[draws],
            chunks_s=chunks_s,
            send_s=float(sent.sum()) * self._compute_byte_s,
            receive_s=float(back.sum()) * self._compute_byte_s,
            context_s=rows * self._context_bytes * self._compute_byte_s,
            workers=workers,
            shares=np.stack((sent * self._memory_byte_s, attention[workers], back * self._memory_byte_s)),
        )
