"""A reference runtime: runs slices with a slow, simple attention in float64."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lamina.core.types import AttentionSpec
from lamina.splitter import SliceOutput, SplitModel


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
