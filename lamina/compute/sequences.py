"""What a compute worker keeps of the sequences that it runs: where their KV is, their tokens, and what is drawn."""

import collections
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lamina.compute.constraints import Grammars
from lamina.compute.sampler import Row, sample
from lamina.control.messages import Computed, StepDone
from lamina.core.errors import LogitsError
from lamina.core.segments import by_sequence, for_sequence, forked, grown, moved
from lamina.core.steps import Admission, StepPlan
from lamina.core.types import Segment


@dataclass(frozen=True, slots=True)
class _Completion:
    """What tokens of one completion are drawn from.

    Attributes:
        admission: The request's admission.
        row: The sampler's view of the token drawn last; ``row.output`` are the tokens that steps have run, in order.
    """

    admission: Admission
    row: Row

    def next_row(self, position: int, grammars: Grammars, vocabulary: int) -> Row:
        """Return the sampler's view of the token to draw for ``position``; advance the grammar, if there is one."""
        row = self.row
        row.generated = position - self.admission.prompt_length
        if (wanted := row.params.structured_outputs) is not None:
            if row.constraint is None:
                row.constraint = grammars.begin(wanted, vocabulary)
            row.constraint.advance(row.output)
        return row


class Sequences:
    """The sequences of one epoch, the same on all workers of a replica.

    Attributes:
        segments: Where KV is, by sequence.
        drawn: The token drawn last on this worker, by sequence.
    """

    def __init__(self, grammars: Grammars, eos_token_ids: list[int], agree: Callable[[list[int]], list[int]]) -> None:
        """``agree``: Returns the tokens of rank 0."""
        self.segments: dict[int, list[Segment]] = {}
        self.drawn: dict[int, int] = {}
        self._grammars, self._eos_token_ids, self._agree = grammars, eos_token_ids, agree
        self._completions: dict[int, _Completion] = {}  # by sequence
        self._last: dict[int, StepPlan] = {}  # by lane: the last step that has ended on this worker
        self._stops: dict[int, int] = {}  # by sequence: tokens computed by steps that ended before those in ``_last``

    def __len__(self) -> int:
        return len(self._completions)

    def apply_plan(self, plan: StepPlan) -> None:
        """Apply a plan's deltas."""
        self._switch(plan)
        for fork in plan.forks:
            if fork.child in self._completions:  # else the plan admits the child, or it is a cached prefix
                self.segments[fork.child] = forked(self.segments[fork.parent], fork.child, fork.tokens)
        self.forget(plan.released)
        for admission in plan.admitted:
            self._admit(admission)
        for segment in plan.grown:
            if segment.sequence in self.segments:  # else the step leaves it out; a plan that runs it admits it
                self.segments[segment.sequence] = grown(self.segments[segment.sequence], segment)
        for sequence, tokens in plan.histories.items():
            row = self._completions[sequence].row
            row.output, row.constraint = list(tokens), None

    def apply_part(self, plan: StepPlan) -> None:
        """Apply what a plan that another replica runs moves and releases of this replica's sequences.

        Sequences that grow or are forked there are forgotten: they are admitted again before this replica runs them.
        """
        self._switch(plan)
        forked_there, grown_there = (fork.child for fork in plan.forks), (one.sequence for one in plan.grown)
        self.forget([*plan.released, *forked_there, *grown_there])

    def _switch(self, plan: StepPlan) -> None:
        for segment in (segment for switch in plan.switches for segment in switch.segments):
            if segment.sequence in self.segments:  # else the plan admits the sequence, or it is a cached prefix
                self.segments[segment.sequence] = moved(self.segments[segment.sequence], segment)

    def _admit(self, admission: Admission) -> None:
        placed = by_sequence(admission.segments)
        for place, index in enumerate(admission.indices):
            sequence = admission.sequence + place
            self.segments[sequence] = placed.get(sequence) or for_sequence(sequence, next(iter(placed.values()), ()))
            eos, prompt = self._eos_token_ids, admission.prompt
            row = Row(sequence, admission.params, admission.seed, index, eos_token_ids=eos, prompt=prompt)
            self._completions[sequence] = _Completion(admission, row)

    def forget(self, sequences: Sequence[int]) -> None:
        """Drop sequences that are released."""
        for sequence in sequences:
            for each in (self.segments, self._completions, self._stops, self.drawn):
                each.pop(sequence, None)

    def drop_all(self) -> None:
        """Drop all sequences."""
        for each in (self.segments, self._completions, self._stops, self.drawn, self._last):
            each.clear()

    def append_tokens(self, plan: StepPlan, tokens: Sequence[int]) -> None:
        """Add the generated tokens of a step to its sequences' histories, as every replica does.

        A chunk that recomputes dropped KV may also have prompt tokens, and generated tokens that are known already.
        """
        row = 0
        for part in plan.sequences:
            completion, count = self._completions.get(part.sequence), len(part.tokens)
            if completion is not None:
                known = completion.admission.prompt_length + len(completion.row.output) - part.start
                completion.row.output += tokens[row + max(known, 0) : row + count]
            row += count

    def draw(self, plan: StepPlan, logits: torch.Tensor | None) -> StepDone:
        """Draw one token for every sequence that the step draws for; several may share a prompt's last row."""
        if logits is None:
            return StepDone(plan.step, [])
        known, grammars, vocabulary = self._completions, self._grammars, logits.shape[1]
        rows = [
            known[sequence].next_row(step.stop, grammars, vocabulary)
            for step in plan.sequences
            for sequence in step.draws
        ]
        if len(rows) != len(logits):
            counts = (len(step.draws) for step in plan.sequences if step.draws)
            logits = logits[[number for number, count in enumerate(counts) for _ in range(count)]]
        undrawable, error = set[int](), ""
        try:
            draws = sample(logits, rows)
        except LogitsError as failed:  # these sequences end; the others must not suffer
            undrawable, error = set(failed.rows), str(failed)
            good = [place for place in range(len(rows)) if place not in undrawable]
            draws = sample(logits[good], [rows[place] for place in good]) if good else []
        logprobs = {draw.sequence: draw.logprobs for draw in draws if draw.logprobs}
        without = [rows[place].sequence for place in sorted(undrawable)]
        done = StepDone(plan.step, self._agree([draw.token for draw in draws]), logprobs, without, error)
        self.drawn.update(done.drawn(plan))
        return done

    def on_step_done(self, plan: StepPlan) -> None:
        """Record that the last slice of a step has run on this worker."""
        last = self._last.get(plan.lane)
        if last is not None and last.decoding.sequences != plan.decoding.sequences:
            self._stops.update(pair for pair in _decoded(last) if pair[0] in self._completions)
        self._last[plan.lane] = plan
        self._stops.update((chunk.sequence, chunk.stop) for chunk in plan.chunks)

    def computed(self) -> list[Computed]:
        """Return the sequences of which ended steps have computed tokens."""
        stops = collections.Counter(self._stops)
        stops |= collections.Counter(dict(itertools.chain.from_iterable(map(_decoded, self._last.values()))))
        return [
            Computed(one.admission.request, one.row.completion, sequence, stops[sequence], self.segments[sequence])
            for sequence, one in self._completions.items()
            if stops[sequence]
        ]


def _decoded(plan: StepPlan) -> list[tuple[int, int]]:
    """Return the sequences that a step decodes, and how many tokens of each have KV then."""
    decoding = plan.decoding
    return [(sequence, at + 1) for sequence, at in zip(decoding.sequences, decoding.starts, strict=True)]
