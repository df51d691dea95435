"""A reference runtime: runs slices with a slow, simple attention in float64."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig

from lamina.core.types import AttentionSpec
from lamina.splitter import SliceOutput, SplitModel, split
from tests.support.random_models import (
    VOCABULARY,
    random_model,
)


def attend(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, start: int, sinks: Tensor | None) -> Tensor:
    """Causal attention of q [T, Hq, D], at positions from ``start`` on, to k [S, Hkv, D] and v [S, Hkv, Dv], from 0 on.

    Returns [T, Hq, Dv].
    """
    group = spec.query_heads // spec.kv_heads
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q.double(), keys) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    p = torch.arange(start, start + len(q))[:, None]
    j = torch.arange(len(k))[None, :]
    if spec.alibi_slopes:
        scores = scores + torch.tensor(spec.alibi_slopes, dtype=torch.float64)[:, None, None] * (j - p)
    visible = j <= p
    if spec.window:
        visible = visible & (p - j < spec.window)
    if spec.chunk:
        visible = visible & (p // spec.chunk == j // spec.chunk)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(q), 1)
        probabilities = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return torch.einsum("hts,shd->thd", probabilities, values).to(q.dtype)


class Runner:
    """Runs a split model over several sequences and keeps their K and V: the runtime in its simplest form."""

    def __init__(self, model: SplitModel, weights: Mapping[str, Tensor]) -> None:
        self.model = model
        self.weights = {**weights, **model.constants}
        self.cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def step(self, batch: Mapping[int, Tensor], last_rows_only: bool = False) -> Tensor:
        """Append tokens to sequences (sequence -> [t] ids); returns logits of all rows, or of each sequence's last."""
        lengths = [len(tokens) for tokens in batch.values()]
        past = [len(self.cache[sequence, 0][0]) if (sequence, 0) in self.cache else 0 for sequence in batch]
        ids = torch.cat(list(batch.values()))
        positions = torch.cat([torch.arange(p, p + n) for p, n in zip(past, lengths, strict=True)])
        attention: Tensor | None = None
        context: tuple[Tensor, ...] = ()
        for part in self.model.slices[:-1]:
            out = self.run(part.index, ids, positions, attention, context)
            assert len(out.results) >= 3
            rows = zip(batch, past, *(t.split(lengths) for t in (out.q, out.k, out.v)), strict=True)
            attention = torch.cat([self._attend(part.index, *row) for row in rows])
            context = out.context
        assert attention is not None
        if last_rows_only:
            chosen = torch.tensor(lengths).cumsum(0) - 1
            ids, positions, attention = ids[chosen], positions[chosen], attention[chosen]
            context = tuple(tensor[chosen] for tensor in context)
        (logits,) = self.run(len(self.model.slices) - 1, ids, positions, attention, context).results
        return logits

    def run(
        self, index: int, ids: Tensor, positions: Tensor, attention: Tensor | None, context: tuple[Tensor, ...]
    ) -> SliceOutput:
        """Compute one slice."""
        return self.model.slices[index].run(ids, positions, attention, context, self.weights)

    def _attend(self, layer: int, sequence: int, past: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if past:
            old = self.cache[sequence, layer]
            k, v = torch.cat([old[0], k]), torch.cat([old[1], v])
        self.cache[sequence, layer] = (k, v)
        sinks = self.model.sinks[layer]
        return attend(self.model.attentions[layer], q, k, v, past, self.weights[sinks] if sinks else None)


# Sequence -> where its steps end: ragged prefill in two chunks (one sequence decodes at once), then decode.
STEPS = {0: (4, 6, 7, 8), 1: (9, 12, 13, 14), 2: (1, 8, 9, 10)}


def assert_same_logits(
    config: PretrainedConfig,
    make_runner: Callable[[SplitModel, Mapping[str, Tensor]], Runner] = Runner,
    tolerance: float = 1e-5,
) -> None:
    """Compare a runner with transformers, to ``tolerance`` of the largest logit.

    Ragged prefill, then decode, several sequences to a step; the last rows alone in every second step.
    """
    model = random_model(config)
    runner = make_runner(split(config), model.state_dict())
    sequences = {name: torch.randint(3, VOCABULARY, (ends[-1],)) for name, ends in STEPS.items()}
    with torch.no_grad():
        expected = {name: model(input_ids=ids[None]).logits[0] for name, ids in sequences.items()}
        done = dict.fromkeys(STEPS, 0)
        for step in range(4):
            until = {name: ends[step] for name, ends in STEPS.items()}
            last_rows_only = step % 2 == 1
            batch = {name: ids[done[name] : until[name]] for name, ids in sequences.items()}
            logits = runner.step(batch, last_rows_only)
            first = {name: until[name] - 1 if last_rows_only else done[name] for name in STEPS}
            wanted = torch.cat([expected[name][first[name] : until[name]] for name in STEPS])
            assert (logits - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max().item())
            done = until
