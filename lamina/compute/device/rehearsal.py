"""Runs the steps that a GPU may be given, on zeros, before requests come.

Afterwards every slice is recorded for every number of rows, libraries have loaded, and torch holds the memory that the
largest step needs: torch keeps what it has once allocated.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lamina.compute.device.base import Runner
from lamina.compute.device.kit import ROWS
from lamina.compute.rows import Rows
from lamina.compute.sampler import Row, sample
from lamina.kernels.segments import SegmentTable
from lamina.types import SamplingParams

COSTLIEST = SamplingParams(top_p=0.5, top_k=0, min_p=1e-9, repetition_penalty=1.1, logprobs=20)
"""What needs most memory to draw from."""


def rehearse(runner: Runner, rows: int, draws: int, queries_first: bool) -> None:
    """Run steps of up to ``rows`` rows, of which up to ``draws`` draw a token, on a device whose memory torch manages.

    ``queries_first``: q of steps that decode is asked for before k and v. Raises torch.OutOfMemoryError.
    """
    most = runner.padded(rows)
    for count in sorted({most, *(each for each in ROWS if each < most)}, reverse=True):  # the smaller fit in after that
        for on_query in (None, _ignore) if queries_first else (None,):
            _run(runner, count, min(count, draws), on_query, rows if count == most else 0)


def _run(runner: Runner, count: int, draws: int, on_query: Callable[[Tensor], None] | None, chunk: int) -> None:
    """One step of ``count`` rows; ``chunk`` of them are a prompt's, and then tokens are drawn at the greatest cost."""
    step = Rows(torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64))
    attention, context = None, tuple[Tensor, ...]()
    for index, spec in enumerate(runner.attentions):
        output = runner.run(index, step, attention, context, on_query)
        if chunk:
            bounds, start = np.array([0, chunk], np.int32), np.zeros(1, np.int32)
            table = SegmentTable(bounds, start, bounds, start, np.arange(chunk, dtype=np.int32))
            runner.attend(output, np.arange(chunk), table, spec)
        attention, context = output.q.new_zeros(count, spec.query_heads, spec.v_dim), output.context
    if attention is not None:
        logits = runner.logits(step, attention, context, torch.arange(draws))
        if chunk:
            sample(torch.zeros_like(logits), [Row(0, COSTLIEST, prompt=[0], output=[0])] * draws)


def _ignore(query: Tensor) -> None:
    """What happens with q in a rehearsal."""
