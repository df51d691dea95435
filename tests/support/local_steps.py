"""Steps of a compute worker over its own memory, planned by a test: as whole recordings, and slice by slice."""

import functools
import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor

from lamina.compute.device.gpu import Gpu
from lamina.compute.device.kit import Kit
from lamina.compute.exchange import StepExchange
from lamina.compute.local_memory import LocalShare
from lamina.compute.step import Replica, StepRun
from lamina.control.messages import MemorySetup
from lamina.control.timeline import Timeline
from lamina.core.pipeline import Pipeline
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, SequenceStep, StepPlan
from lamina.core.types import DType, Overlap, Segment
from lamina.lowering import LoweredModel, Target, Workspace, lower
from lamina.memory.device import gpu
from lamina.memory.store import KvStore
from lamina.splitter import split
from tests.support.random_models import VOCABULARY, random_model, variant

OWN = "compute0"


@functools.cache
def _model(family: str) -> tuple[LoweredModel, dict[str, Tensor]]:
    return lower(split(variant(family)), Target.GPU), random_model(variant(family)).state_dict()


class LocalWorker:
    """Runs plans on one GPU, with KV in its own memory.

    Attributes:
        whole: number of steps that one recording ran.
    """

    def __init__(
        self, family: str, kit: Kit, device: str, capacity: int, memory: gpu.Gpu | None = None, records: bool = True
    ) -> None:
        """``memory``: in place of memory of ``device``. ``records``: False to run every step slice by slice."""
        lowered, state = _model(family)
        self.runner = Gpu(kit).runner(lowered, {name: state[name].to(kit.place) for name in lowered.weights})
        setup = MemorySetup(list(lowered.attentions), DType.FLOAT32, capacity, 1, Overlap(), False)
        self.store = KvStore(OWN, setup, device)
        if memory is not None:
            self.store.device = memory
        self.steps = self.runner.recorded_steps(self.store.device) if records else None
        pipeline = Pipeline(1, 1)
        self._replica = Replica(0, (OWN,), {}, pipeline, self.runner, Timeline(), Mock())
        self._partials: dict[Any, Any] = {}
        self._segments: dict[int, list[Segment]] = {}
        self.whole = 0

    def run(self, plan: StepPlan) -> Tensor:
        """Return logits [sequences that draw, vocab] of a step."""
        for admission in plan.admitted:
            self._segments[admission.sequence] = admission.segments
        (tables,) = self.store.apply(plan)
        share = LocalShare(self.store, tables, self._partials)
        rows = self.runner.padded(sum(len(step.tokens) for step in plan.sequences))
        exchange = StepExchange(plan, self._segments, Mock(), Overlap(), self.runner, rows, share=share)
        run = StepRun(plan, self._replica, exchange, Mock(), Workspace(rows), whole=self.steps)
        slices = 0
        while run.index >= 0:
            logits = run.run_slice({})
            slices += 1
        assert logits is not None
        self.whole += slices == 1
        run.record_launched()
        return logits.cpu().clone()


def plans(seed: int, steps: int, most: int, longest: int, heads: int) -> Iterator[StepPlan]:
    """Yield plans of steps in which prompts begin, all sequences that have begun decode, and some of them end.

    Args:
        most: Sequences at a time.
        longest: Tokens of a prompt.
        heads: KV heads of a segment.
    """
    draw = random.Random(seed)
    at: dict[int, int] = {}
    begun = turn = 0
    released: list[int] = []
    for number in range(steps):
        admitted, chunks = [], []
        if not at or (len(at) < most and draw.random() < 0.3):
            count = draw.randint(1, longest)
            segment = Segment(begun, OWN, (0, heads), (0, None))
            admitted = [Admission(begun, 1, count, [segment], SamplingParams(), 0)]
            tokens = [draw.randrange(3, VOCABULARY) for _ in range(count)]
            chunks = [SequenceStep(begun, 0, tokens, [begun])]
        rows = list(at)
        tokens = [draw.randrange(3, VOCABULARY) for _ in rows]
        yield StepPlan(number, 0, turn, [], released, admitted, chunks, DecodeRows(rows, list(at.values()), tokens))
        turn += 8
        for sequence in rows:
            at[sequence] += 1
        for chunk in chunks:
            at[chunk.sequence] = len(chunk.tokens)
            begun += 1
        released = [sequence for sequence in at if draw.random() < 0.05]
        for sequence in released:
            del at[sequence]


def recorded_and_usual(family: str, kit: Kit, device: str, capacity: int) -> tuple[LocalWorker, LocalWorker]:
    """Return two workers with the same model: one that records whole steps, and one that runs every step by slices."""
    recorded = LocalWorker(family, kit, device, capacity)
    return recorded, LocalWorker(family, kit, device, capacity, records=False)


def assert_same_logits(
    recorded: LocalWorker,
    usual: LocalWorker,
    seed: int,
    steps: int,
    most: int,
    longest: int,
    tolerance: float = 1e-5,
    reserved: int = 0,
) -> None:
    """Assert that a worker that records whole steps gives the logits of one that does not, step by step.

    Both run what ``plans`` yields for ``seed``, ``steps``, ``most`` and ``longest``.

    Args:
        tolerance: Largest error of a logit, absolute and relative.
        reserved: Record steps of up to so many rows before the first step runs.
    """
    if reserved:
        assert recorded.steps is not None
        recorded.steps.reserve(reserved)
    decoded = 0
    for plan in plans(seed, steps, most, longest, recorded.store.shards.heads):
        wanted, found = usual.run(plan), recorded.run(plan)
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
        decoded += not plan.chunks
    assert usual.whole == 0
    assert recorded.whole >= decoded > steps // 4
