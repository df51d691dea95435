"""Runs steps of every size on zeros before the first request, to warm up a GPU.

Afterwards, slices and transfers of decode steps are recorded for every number of rows, libraries are loaded, and
torch's allocator has reserved the memory of the largest step.
"""

import numpy as np
import torch
from torch import Tensor

from lamina.compute.device.base import Runner
from lamina.compute.device.exchanged_rows import ExchangedRows
from lamina.compute.device.kit import ROWS
from lamina.compute.rows import Rows
from lamina.compute.sampler import Row, sample
from lamina.core.sampling import SamplingParams
from lamina.kernels.segments import SegmentTable

COSTLIEST = SamplingParams(top_p=0.5, top_k=0, min_p=1e-9, repetition_penalty=1.1, logprobs=20)
"""What needs most memory to draw from."""


def rehearse(runner: Runner, rows: int, draws: int, shards: int) -> None:
    """Run steps of up to ``rows`` rows; up to ``draws`` of a step's rows sample a token.

    ``shards``: head shards per row. Raises torch.OutOfMemoryError.
    """
    most = runner.padded(rows)
    for count in sorted({most, *(each for each in ROWS if each < most)}, reverse=True):  # the smaller fit in after that
        _run(runner, count, min(count, draws), shards, rows if count == most else 0)


def _run(runner: Runner, count: int, draws: int, shards: int, chunk: int) -> None:
    """Run a step of ``count`` decode rows on one memory worker; the first ``chunk`` rows are also a prompt chunk.

    Tokens are drawn with the costliest sampling parameters.
    """
    step = Rows(torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64))
    every = np.arange(count * shards)
    transfers = runner.transfers(ExchangedRows(count, count, shards, [every], [every], [np.zeros_like(every)], [], []))
    attention, context = None, _context_before(runner, count)
    for index in runner.slices:
        if index:
            spec = runner.attentions[index - 1]
            reply = memoryview(bytearray(4 * count * spec.query_heads * (spec.v_dim + 1)))
            attention = transfers.merged(spec, [], [(-1, reply)], runner.sinks[index - 1])
        if attention is not None and index == len(runner.attentions):
            logits = runner.logits(step, attention, context, torch.arange(draws))
            if chunk:
                for params in (COSTLIEST, SamplingParams()):  # the second draws from the model's type
                    sample(torch.zeros_like(logits), [Row(0, params, prompt=[0], output=[0])] * draws)
            break
        spec = runner.attentions[index]
        output = runner.run(index, step, attention, context)
        transfers.fill_messages(output.q, output.k, output.v)
        if chunk:
            bounds, start = np.array([0, chunk], np.int32), np.zeros(1, np.int32)
            table = SegmentTable(bounds, start, bounds, start, np.arange(chunk, dtype=np.int32))
            runner.attend(output, np.arange(chunk), table, spec)
        context = output.context


def _context_before(runner: Runner, count: int) -> tuple[Tensor, ...]:
    """Return zeros for the context that the first slice receives from the stage before."""
    first = runner.slices.start
    crossings = runner.contexts[first - 1] if first else ()
    return tuple(torch.zeros((count, *one.shape), dtype=one.dtype) for one in crossings)
