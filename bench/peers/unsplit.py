"""Lamina without the split: one process, the same slices and kernels, no workers and no transport.

The difference to Lamina is the overhead of disaggregation. ``offline.py`` says what is measured.
"""

import importlib.metadata
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from bench.peers.offline import STEP_TOKENS, Cell, Generate, run
from lamina.compute.device.base import Floats, Rows, pad
from lamina.compute.device.cpu import SliceRunner, padded
from lamina.core.types import AttentionSpec, DType
from lamina.kernels.attention import append, merge, partial
from lamina.kernels.host_memory import allocate
from lamina.kernels.segments import SegmentTable
from lamina.lowering import lower
from lamina.memory.slab import Slab
from lamina.models import directory, pretrained
from lamina.models.pretrained import load_config
from lamina.splitter import as_numpy, split


@dataclass(frozen=True)
class Chunk:
    """The next tokens of one sequence, the first at position ``start``."""

    sequence: int
    start: int
    tokens: list[int]


class Kv:
    """K and V of all layers as a memory worker keeps them: bfloat16 bits [capacity, Hkv, D] by slot, on huge pages."""

    def __init__(self, attentions: Sequence[AttentionSpec], capacity: int, threads: int) -> None:
        self.slab = Slab[int](capacity)
        self.threads = threads
        self.k = {spec.layer: _rows(capacity, spec.kv_heads, spec.qk_dim) for spec in attentions}
        self.v = {spec.layer: _rows(capacity, spec.kv_heads, spec.v_dim) for spec in attentions}


def _rows(*shape: int) -> npt.NDArray[np.uint16]:
    return allocate(2 * math.prod(shape)).view(np.uint16).reshape(shape)


class LocalAttention:
    """Attention of one step in this process: appends to the slab and attends over it."""

    def __init__(self, kv: Kv, chunks: Sequence[Chunk]) -> None:
        counts = [len(chunk.tokens) for chunk in chunks]
        self._kv = kv
        self._count = sum(counts)
        self.rows = padded(self._count)
        sequences = [chunk.sequence for chunk in chunks]
        self._slots = kv.slab.extend(sequences, counts)
        tables = [kv.slab.slots(sequence) for sequence in sequences]
        self._segments = SegmentTable(
            query_offsets=np.cumsum([0, *counts], dtype=np.int32),
            query_start=np.array([chunk.start for chunk in chunks], np.int32),
            kv_offsets=np.cumsum([0, *map(len, tables)], dtype=np.int32),
            kv_start=np.zeros(len(chunks), np.int32),
            slots=np.concatenate(tables),
        )

    def attend(
        self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Floats | None
    ) -> torch.Tensor:
        """Attention out [rows, Hq, Dv] in q's dtype; rows beyond the step's tokens are padding."""
        k_slab, v_slab = self._kv.k[spec.layer], self._kv.v[spec.layer]
        rows, threads = slice(0, self._count), self._kv.threads
        append(k_slab, v_slab, as_numpy(k)[rows], as_numpy(v)[rows], self._slots, threads)
        out = np.zeros((self.rows, spec.query_heads, spec.v_dim), np.float32)
        out[rows], lse = partial(as_numpy(q)[rows], k_slab, v_slab, self._segments, spec, threads)
        if sinks is not None:
            out[rows] = merge([out[rows]], [lse], sinks, threads=threads)
        return torch.from_numpy(out).to(q.dtype)


class Unsplit:
    """Slices and KV in one process."""

    def __init__(self, cell: Cell) -> None:
        torch.set_num_threads(cell.threads)
        place = directory.find(cell.model)
        config = load_config(place)
        model = split(config, DType.BFLOAT16)
        tensors = pretrained.load(place, sorted(model.weights), config, DType.BFLOAT16)
        self._runner = SliceRunner(lower(model), tensors)
        self.kv = Kv(model.attentions, cell.batch * cell.longest, cell.threads)

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk]) -> list[int]:
        """The most likely next token of every chunk's sequence."""
        local = LocalAttention(self.kv, chunks)
        ids = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        positions = torch.cat([torch.arange(chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks])
        rows = Rows(pad(ids, local.rows), pad(positions, local.rows))
        attention: torch.Tensor | None = None  # output of the previous one
        context: tuple[torch.Tensor, ...] = ()
        for index, (spec, sinks) in enumerate(zip(self._runner.attentions, self._runner.sinks, strict=True)):
            output = self._runner.run(index, rows, attention, context)
            assert (
                output.q is not None and output.k is not None and output.v is not None
            )  # all but the last slice have them
            attention = local.attend(spec, output.q, output.k, output.v, sinks)
            context = output.context
        assert attention is not None
        last = torch.tensor(np.cumsum([len(chunk.tokens) for chunk in chunks]) - 1)
        tokens: list[int] = self._runner.logits(rows, attention, context, last).argmax(-1).tolist()
        return tokens


def packed(prompts: Sequence[Sequence[int]]) -> Iterator[list[Chunk]]:
    """The prompts in order, cut into chunks for steps of at most ``STEP_TOKENS`` tokens."""
    step: list[Chunk] = []
    room = STEP_TOKENS
    for sequence, prompt in enumerate(prompts):
        start = 0
        while start < len(prompt):
            tokens = list(prompt[start : start + room])
            step.append(Chunk(sequence, start, tokens))
            start, room = start + len(tokens), room - len(tokens)
            if room == 0:
                yield step
                step, room = [], STEP_TOKENS
    if step:
        yield step


@contextmanager
def load(cell: Cell) -> Iterator[Generate]:
    """Load the model; gives a function that runs all prompts, then decodes all requests together."""
    model = Unsplit(cell)

    def generate(prompts: list[list[int]], tokens: int) -> list[list[float]]:
        arrivals: list[list[float]] = [[] for _ in prompts]
        newest: dict[int, int] = {}
        for sequence in range(len(prompts)):
            model.kv.slab.open(sequence)
        for chunks in packed(prompts):
            drawn = model.step(chunks)
            now = time.monotonic()
            for chunk, token in zip(chunks, drawn, strict=True):
                if chunk.start + len(chunk.tokens) == len(prompts[chunk.sequence]):
                    newest[chunk.sequence] = token
                    arrivals[chunk.sequence].append(now)
        for index in range(tokens - 1):
            chunks = [Chunk(sequence, len(prompts[sequence]) + index, [newest[sequence]]) for sequence in newest]
            newest = dict(zip(newest, model.step(chunks), strict=True))
            now = time.monotonic()
            for times in arrivals:
                times.append(now)
        for sequence in range(len(prompts)):
            model.kv.slab.free(sequence)
        return arrivals

    yield generate


def about(_: Cell) -> dict[str, str]:
    return {"lamina": importlib.metadata.version("lamina"), "torch": torch.__version__}


if __name__ == "__main__":
    run(load, about)
