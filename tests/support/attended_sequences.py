"""Sequences that begin, run, fork, grow and end on three memory workers, each step compared with whole attention."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from lamina.compute.exchange import StepExchange
from lamina.core.sampling import SamplingParams
from lamina.core.segments import by_sequence, by_worker, forked, grown, holding
from lamina.core.steps import Admission, DecodeRows, Fork, SequenceStep, StepPlan
from lamina.core.types import Overlap, Segment
from tests.support.attention_clusters import NATIVE, ROWS, TIMEOUT_S, Connected, attend, expected

NAMES = ("memory0", "memory1", "memory2")
HEADS = (0, 4)
NOBODY = DecodeRows([], [], [])
Heads = tuple[int, int]
places = st.sampled_from(NAMES)
all_heads = st.just([HEADS])


class Sequences:
    """What the engine, the compute worker and an oracle know of sequences that run on three memory workers."""

    def __init__(self, cluster: Connected, overlap: Overlap, seed: int) -> None:
        self.cluster, self.overlap = cluster, overlap
        self.random = np.random.default_rng(seed)
        self.specs = cluster.specs
        self.sinks = self.random.standard_normal(self.specs[0].query_heads).astype(np.float32)
        self.segments: dict[int, list[Segment]] = {}
        # By sequence and layer: k and v of every token. Forks share the rows themselves: their identities tell which
        # tokens have a slot in common.
        self.history: dict[int, list[list[tuple[np.ndarray, np.ndarray]]]] = {}
        self.steps = self.turn = 0

    def length(self, sequence: int) -> int:
        return len(self.history[sequence][0])

    def run(self, counts: dict[int, int], **deltas: list) -> None:
        """One step; ``deltas`` as in a plan."""
        for fork in deltas.get("forks", []):
            self.segments[fork.child] = forked(self.segments[fork.parent], fork.child, fork.tokens)
            self.history[fork.child] = [rows[: fork.tokens] for rows in self.history[fork.parent]]
        for sequence in deltas.get("released", []):
            del self.segments[sequence], self.history[sequence]
        for admission in deltas.get("admitted", []):
            self.segments |= by_sequence(admission.segments)
            self.history[admission.sequence] = [[] for _ in self.specs]
        for new in deltas.get("grown", []):
            self.segments[new.sequence] = grown(self.segments[new.sequence], new)
        nothing: dict[str, Any] = {"forks": [], "released": [], "admitted": [], "grown": []}
        steps = [SequenceStep(s, self.length(s), [0] * count, []) for s, count in counts.items() if count]
        plan = StepPlan(self.steps, 0, self.turn, chunks=steps, decoding=NOBODY, **(nothing | deltas))
        threads = [memory.serve(plan) for memory in self.cluster.memories.values()]
        if steps:
            self.attend(plan, steps)
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        self.steps += 1
        self.turn += len(self.specs) if steps else 0
        self.check_slots()

    def attend(self, plan: StepPlan, steps: list[SequenceStep]) -> None:
        rows = sum(len(step.tokens) for step in steps)
        exchange = StepExchange(
            plan, self.segments, self.cluster.mail, self.overlap, NATIVE, rows, shards=self.cluster.shards
        )
        for layer, spec in enumerate(self.specs):
            shapes = (spec.query_heads, spec.qk_dim), (spec.kv_heads, spec.qk_dim), (spec.kv_heads, spec.v_dim)
            q, k, v = (self.random.standard_normal((rows, *shape)).astype(np.float32) for shape in shapes)
            got = attend(self.cluster, exchange, layer, (q, k, v), self.sinks if spec.sinks else None)
            row = 0
            for step in steps:
                part = slice(row, row + len(step.tokens))
                row = part.stop
                history = self.history[step.sequence]
                history[layer] = [*history[layer], *((k[i].copy(), v[i].copy()) for i in range(part.start, part.stop))]
                keys, values = (np.stack(rows) for rows in zip(*history[layer], strict=True))
                out, lse = expected(spec, q[part], keys, values, step.start)
                if spec.sinks:
                    out = out / (1 + np.exp(self.sinks - lse))[..., None]
                np.testing.assert_allclose(got[part], out, atol=1e-5)

    def truncate(self, kept: dict[int, int]) -> None:
        """An epoch ends: these sequences keep so many tokens, others are forgotten."""
        for memory in self.cluster.memories.values():
            memory.store.truncate(kept)
        self.segments = {sequence: self.segments[sequence] for sequence in kept}
        self.history = {one: [rows[: kept[one]] for rows in self.history[one]] for one in kept}
        self.check_slots()

    def check_slots(self) -> None:
        """Every token has one slot, on the worker that its position says, shared by those that share the token."""
        held: dict[str, set[int]] = {name: set() for name in NAMES}
        for sequence, (rows, *_) in self.history.items():
            for position, (k, _) in enumerate(rows):
                held[holding(self.segments[sequence], position).worker].add(id(k))
        assert {name: memory.store.slab.used for name, memory in self.cluster.memories.items()} == {
            name: len(tokens) for name, tokens in held.items()
        }
        for sequence, segments in self.segments.items():
            tokens = self.length(sequence)
            assert sum(by_worker(segments, 0, tokens).values()) == tokens


def drive(data: st.DataObject, under_test: Sequences, bands: st.SearchStrategy[list[Heads]] = all_heads) -> None:
    """Sequences begin, run, fork, grow and end, and epochs end; ``bands``: head ranges that together are all heads."""
    for sequence in range(2):
        split = []
        for heads in data.draw(bands, f"heads of {sequence}"):
            ends = data.draw(st.lists(st.integers(1, 14), max_size=4, unique=True).map(sorted), f"ends of {sequence}")
            bounds = zip([0, *ends], [*ends, None], strict=True)
            split += [Segment(sequence, data.draw(places), heads, tokens) for tokens in bounds]
        admission = Admission(sequence, 1, 0, split, SamplingParams(), 0)
        under_test.run({}, admitted=[admission])
    for _ in range(data.draw(st.integers(1, 7), "steps")):
        live = sorted(under_test.segments)
        lengths = {sequence: under_test.length(sequence) for sequence in live}
        event = data.draw(st.sampled_from(["none", "none", "fork", "end", "epoch"]), "event")
        deltas: dict[str, list] = {}
        child = max(live) + 1
        parent = data.draw(st.sampled_from(live))
        if event == "fork" and lengths[parent] and len(live) < 4:
            firsts = {one.tokens[0] for one in under_test.segments[parent]}
            cuts = [first for first in sorted(firsts) if 0 < first <= lengths[parent]] or [1]
            tokens = data.draw(st.sampled_from(cuts) | st.integers(1, lengths[parent]), "shared")
            deltas["forks"] = [Fork(parent, child, tokens)]
            live, lengths = [*live, child], {**lengths, child: tokens}
        elif event == "end" and len(live) > 1:
            deltas["released"] = [parent]
            live = [sequence for sequence in live if sequence != parent]
        elif event == "epoch":
            under_test.truncate({sequence: data.draw(st.integers(0, lengths[sequence])) for sequence in live})
            lengths = {sequence: under_test.length(sequence) for sequence in live}
        growing = [one for one in data.draw(st.lists(st.sampled_from(live), max_size=3, unique=True)) if lengths[one]]
        deltas["grown"] = [
            Segment(one, data.draw(places), heads, (lengths[one], None))
            for one in growing
            for heads in data.draw(bands, f"heads of {one}")
        ]
        most = ROWS // len(live)
        counts = {one: data.draw(st.sampled_from([0, 1, 1, 1, 2, most]), "tokens") for one in live}
        under_test.run(counts, **deltas)
    under_test.run({}, released=sorted(under_test.segments))
    memories = under_test.cluster.memories.values()
    assert all(memory.store.slab.used == memory.store.sequences == 0 for memory in memories)
