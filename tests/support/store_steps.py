"""Steps that a memory worker's KV store serves, with random requests."""

from typing import Any

import numpy as np

from lamina.control.messages import MemorySetup
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, SequenceStep, StepPlan
from lamina.core.types import AttentionSpec, DType, Overlap, Segment
from lamina.dataplane.wire import body_nbytes
from lamina.memory.store import KvStore, StepTables

ROWS, SEQUENCES, CAPACITY = 12, 4, 400


def plan(number: int, at: dict[int, int], decoding: list[int], chunk: tuple[int, int] | None) -> StepPlan:
    """A step that decodes some sequences, and runs (sequence, rows) of a prompt."""
    rows = DecodeRows(decoding, [at[each] for each in decoding], [])
    chunks = [] if chunk is None else [SequenceStep(chunk[0], at[chunk[0]], [0] * chunk[1], [])]
    for sequence, count in [(each, 1) for each in decoding] + ([] if chunk is None else [chunk]):
        at[sequence] += count
    return StepPlan(number, 0, number, [], [], [], chunks, rows)


def serve(store: KvStore, step: StepTables, rng: np.random.Generator) -> list[np.ndarray]:
    """What a store answers, layer by layer, to random requests in float32."""
    answers = []
    for layer, spec in enumerate(store.attentions):
        nbytes = body_nbytes(spec, store.dtype, step.rows)
        body = rng.standard_normal(nbytes // 4).astype(np.float32)
        content = rng.standard_normal(len(step.pulled_slots) * spec.kv_bytes_per_token(store.dtype) // 4)
        out, lse = store.device.results(len(step.rows.queries), spec)
        for number in range(len(step.pieces)):
            for _ in store.serve(layer, step, number, memoryview(body.tobytes()), out, lse):
                pass
        if len(content):
            store.keep(layer, step.pulled_slots, memoryview(content.astype(np.float32).tobytes()))
        answers += [out, lse]
    return answers


def opened(device: str, specs: list[AttentionSpec], overlap: Overlap, kv: Any, shards: int) -> KvStore:
    """A store with empty sequences."""
    store = KvStore("memory0", MemorySetup(specs, DType.FLOAT32, CAPACITY, 1, overlap, False, kv, shards), device)
    heads = 0, specs[0].kv_heads
    segments = [Segment(each, "memory0", heads, (0, None)) for each in range(SEQUENCES)]
    admitted = [Admission(each, 1, 1, [segments[each]], SamplingParams(), 0) for each in range(SEQUENCES)]
    store.apply(StepPlan(0, 0, 0, [], [], admitted, [], DecodeRows([], [], [])))
    return store
