"""A model whose tokens prove what its attentions saw, and a plain function that computes the same tokens.

Every token has a state of 64 bits, which is its context between slices. Before attention ``layer``, the values of a
token are small whole numbers, a hash of its state, the layer, the KV head and the dimension; queries are zero. So the
result of the real attention kernels is the mean of the values of the tokens that a query sees. Times their number, it
is a sum of whole numbers, which rounding makes exact whatever the segments and the order of merges were. The sum goes
into the state after the attention. A token that is missing, counted twice, out of date or of another position, head or
layer changes the state, and by it all later tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lamina.compute.device.base import Device, Rows, Runner, Sums
from lamina.compute.device.cpu import NativeRunner, padded
from lamina.compute.sampler import Row, sample
from lamina.compute.step import context_nbytes_per_token
from lamina.control.messages import ComputeSetup, ModelLoaded
from lamina.control.packed_logprobs import unpack
from lamina.control.sockets import ControlClient
from lamina.core.heads import HeadShards
from lamina.core.sampling import SamplingParams
from lamina.core.types import AttentionSpec, DType
from lamina.schedule.beam_search import BeamSearch
from lamina.splitter import Crossing, SliceOutput

VOCABULARY = 257
POISON = 256  # a token that is never drawn, and that compute workers die of
LAYERS = 3
WINDOW = 24  # of all layers but the first: several, since layers with one window share rows of KV
QUERY_HEADS, KV_HEADS, SIZE = 4, 2, 8
VALUES = 64  # of a dimension: sums over a thousand tokens are exact in float32
PEAK = 0  # the first value of every head; 0: a hash like the others. With 127 and VALUES of 128, int8 codes are exact
ATTENTIONS = tuple(
    AttentionSpec(layer, QUERY_HEADS, KV_HEADS, SIZE, SIZE, 1.0, window=WINDOW if layer else 0)
    for layer in range(LAYERS)
)
_CONTEXT = (Crossing("state", (1,), torch.int64),)

Words = npt.NDArray[np.uint64]
_PLACES = np.arange(KV_HEADS * SIZE, dtype=np.uint64)
_WEIGHTS = np.arange(1, 2 * QUERY_HEADS * SIZE, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_TOKENS = np.arange(VOCABULARY, dtype=np.uint64)


def mixed(words: Words) -> Words:
    """Return a hash of each word (splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def first_states(ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Words:
    """Return the state of each token before the first attention."""
    return mixed(ids.astype(np.uint64) * np.uint64(1 << 32) + positions.astype(np.uint64) + np.uint64(1))


def values(states: Words, layer: int) -> npt.NDArray[np.float32]:
    """Return the values [T, KV heads, size] of tokens before attention ``layer``."""
    words = mixed(states[:, None] + mixed(_PLACES + np.uint64(1000 * (layer + 1))))
    found = (words % np.uint64(VALUES)).astype(np.float32).reshape(-1, KV_HEADS, SIZE)
    if PEAK:
        found[:, :, 0] = PEAK
    return found


def states_after(states: Words, sums: npt.NDArray[np.float64], layer: int) -> Words:
    """Return the states after attention ``layer`` that gave these sums [T, query heads, size]."""
    flat = np.rint(sums).astype(np.int64).astype(np.uint64).reshape(len(states), -1)
    return mixed(states + (flat * _WEIGHTS).sum(1, dtype=np.uint64) + np.uint64(layer + 1))


def seen(positions: npt.NDArray[np.int64], layer: int) -> npt.NDArray[np.int64]:
    """Return how many tokens a query at each position sees."""
    window = ATTENTIONS[layer].window
    return np.minimum(positions + 1, window) if window else positions + 1


def logits(states: Words) -> torch.Tensor:
    """Return logits [T, vocabulary] of states after the last attention."""
    words = mixed(states[:, None] + mixed(_TOKENS + np.uint64(1 << 40)))
    scores = torch.from_numpy((words >> np.uint64(40)).astype(np.float32) / np.float32(1 << 22))
    scores[:, POISON] = -np.inf
    return scores


class HashRunner(NativeRunner):
    """Runs the slices of one rank of the model, with its heads; the sums of all heads meet in ``sums``.

    Args:
        slices: The slices of its stage.
        sums: Adds tensors up with the other ranks.
        on_slice: Called before each slice, with the tokens of its rows.
    """

    contexts: tuple[tuple[Crossing, ...], ...] = (_CONTEXT,) * LAYERS
    sinks: Sequence[npt.NDArray[np.float32] | None] = (None,) * LAYERS

    def __init__(self, slices: range, sums: Sums, on_slice: Callable[[torch.Tensor], None]) -> None:
        super().__init__(DType.FLOAT32)
        self.slices = slices
        self._sums, self._on_slice = sums, on_slice
        rank, groups = sums.rank, min(sums.rank.count, KV_HEADS)
        self._queries = _part(QUERY_HEADS, rank.number, rank.count)
        self._heads = _part(KV_HEADS, rank.number * groups // rank.count, groups)
        own = len(range(QUERY_HEADS)[self._queries]), len(range(KV_HEADS)[self._heads])
        self.attentions = tuple(dataclasses.replace(spec, query_heads=own[0], kv_heads=own[1]) for spec in ATTENTIONS)

    def reserve(self, rows: int, draws: int, shards: int) -> None:
        """Nothing is reserved."""

    def padded(self, rows: int) -> int:
        return padded(rows)

    def recorded_steps(self, memory: Any) -> None:
        """Nothing is recorded."""

    def run(
        self,
        index: int,
        rows: Rows,
        attention: torch.Tensor | None,
        context: tuple[torch.Tensor, ...],
    ) -> SliceOutput:
        self._on_slice(rows.ids)
        q = torch.zeros(len(rows.ids), self.attentions[index].query_heads, SIZE)
        states = self._states(index, rows, attention, context)
        v = torch.from_numpy(np.ascontiguousarray(values(states, index)[:, self._heads]))
        return SliceOutput((q, v * 0.125, v, torch.from_numpy(states.view(np.int64).reshape(-1, 1).copy())))

    def logits(
        self, rows: Rows, attention: torch.Tensor, context: tuple[torch.Tensor, ...], chosen: torch.Tensor
    ) -> torch.Tensor:
        self._on_slice(rows.ids)
        return logits(self._states(LAYERS, rows, attention, context)[chosen.numpy()])

    def _states(
        self, index: int, rows: Rows, attention: torch.Tensor | None, context: tuple[torch.Tensor, ...]
    ) -> Words:
        positions = rows.positions.numpy()
        if attention is None:
            return first_states(rows.ids.numpy(), positions)
        own = attention.numpy().astype(np.float64) * seen(positions, index - 1)[:, None, None]
        if self._sums.rank.count == 1:
            return states_after(context[0].numpy().reshape(-1).view(np.uint64), own, index - 1)
        sums = torch.zeros(len(positions), QUERY_HEADS, SIZE)
        sums[:, self._queries] = torch.from_numpy(np.rint(own).astype(np.float32))
        total = self._sums.reduce(sums).numpy().astype(np.float64)
        return states_after(context[0].numpy().reshape(-1).view(np.uint64), total, index - 1)


def _part(count: int, number: int, parts: int) -> slice:
    """Return the places of one of so many equal parts of ``count`` heads."""
    return slice(count * number // parts, count * (number + 1) // parts)


def load(
    control: ControlClient, setup: ComputeSetup, device: Device, ranks: Sums, on_slice: Callable[[torch.Tensor], None]
) -> tuple[Runner, HeadShards]:
    """Do what ``compute.loading.load`` does, for this model."""
    starts = tuple(stage * (LAYERS + 1) // setup.stages for stage in range(setup.stages))
    runner = HashRunner(range(starts[setup.stage], (*starts, LAYERS + 1)[setup.stage + 1]), ranks, on_slice)
    context = runner.padded(setup.rows) * context_nbytes_per_token(runner.attentions, runner.contexts, setup.local)
    control.send(ModelLoaded(list(ATTENTIONS), DType.FLOAT32, 1, VOCABULARY, context, "hash", starts))
    return runner, HeadShards.for_model(ATTENTIONS, setup.head_workers, *setup.degrees)


class Text:
    """A sequence of tokens and the states of the model after them, computed without a runtime."""

    def __init__(self, longest: int) -> None:
        self._length = 0
        # By layer: the sums of the values of all tokens before each position.
        self._totals = [np.zeros((longest + 1, KV_HEADS, SIZE)) for _ in range(LAYERS)]

    def append(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append tokens. Returns the logits [1, vocabulary] after the last one."""
        at = np.arange(self._length, self._length + len(tokens))
        states = first_states(np.array(tokens), at)
        for layer, total in enumerate(self._totals):
            total[at + 1] = total[self._length] + np.cumsum(values(states, layer), axis=0, dtype=np.float64)
            sums = total[at + 1] - total[at + 1 - seen(at, layer)]
            states = states_after(states, np.repeat(sums, QUERY_HEADS // KV_HEADS, axis=1), layer)
        self._length += len(tokens)
        return logits(states[-1:])


def expected(prompt: Sequence[int], params: SamplingParams, seed: int) -> list[list[int]]:
    """Return the tokens of all completions, computed without a runtime.

    Each has at most ``params.max_tokens`` tokens, and ends at a stop token.
    """
    if params.use_beam_search:
        return _best(prompt, params)
    return [_drawn(prompt, params, seed, completion) for completion in range(params.n)]


def _drawn(prompt: Sequence[int], params: SamplingParams, seed: int, completion: int) -> list[int]:
    text, drawn, last = Text(len(prompt) + (params.max_tokens or 0)), list[int](), list(prompt)
    while True:
        row = Row(0, params, seed, completion, len(drawn), (), prompt, drawn)
        last = [sample(text.append(last), [row])[0].token]
        drawn += last
        if drawn[-1] in params.stop_token_ids or len(drawn) == params.max_tokens:
            return drawn


def _best(prompt: Sequence[int], params: SamplingParams) -> list[list[int]]:
    """Return the hypotheses that the product's own search finds, which its tests compare with another one, if each beam
    is computed from its beginning at each step."""
    longest = params.max_tokens or 0
    search, beams = BeamSearch(params, longest, params.stop_token_ids), [list[int]()]
    while True:
        rows = [Row(0, params, generated=len(beam)) for beam in beams]
        scores = [Text(len(prompt) + longest).append([*prompt, *beam]) for beam in beams]
        found = [unpack(sample(each, [row])[0].logprobs) for each, row in zip(scores, rows, strict=True)]
        choice = search.advance(found)
        if choice is None:
            return [one.token_ids for one in search.hypotheses]
        parents = beams * (params.n if len(beams) == 1 else 1)
        beams = [[*parents[parent], token] for parent, token in choice]
