"""Draws next tokens from logits, on the compute worker that computed them.

The order of operations is vLLM's: penalties, minimum length, temperature, min-p, top-k, top-p. The last three keep
tokens whose score is at least a threshold, so that one threshold per row represents them. A draw depends only on
(seed, completion, position) and the logits, not on the rest of the batch, and rarely on rounding errors (``draw``).
Shapes: R rows, V vocabulary.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lamina import _native
from lamina.compute.constraints import Constraint, forbid
from lamina.control.packed_logprobs import pack, pack_rows
from lamina.core.errors import LogitsError
from lamina.core.outputs import Logprob
from lamina.core.sampling import SamplingParams
from lamina.kernels.gpu.specialize import draw_program
from lamina.lowering.expert_operators import ELEMENTS
from lamina.lowering.native_operators import ELEMENT_TYPES, PATH, largest

_CANDIDATES = 1024  # most likely tokens tried for top-p before a whole row is sorted
_SERIAL = (1 << 15) - 1  # most elements of which an operation of torch on a CPU runs in one thread
_MIN_TEMPERATURE = 1e-6  # below it float32 cannot tell the distribution from its mode


class Draw(NamedTuple):
    """The token drawn for one sequence. ``logprobs``: packed by ``packed_logprobs``; empty if none are wanted."""

    sequence: int
    token: int
    logprobs: bytes = b""


@dataclass(slots=True)
class Row:
    """A sequence as the sampler sees it: how to draw its next token from one row of logits.

    Attributes:
        sequence: number of the sequence, returned in the draw.
        params: sampling parameters; with ``n`` > 1, the row belongs to one of the completions.
        seed: seed of the request; the engine chooses one for requests without a seed.
        completion: index of this completion within its request.
        generated: number of tokens drawn before, which is the index of the token to draw.
        eos_token_ids: tokens not drawn before ``min_tokens``, like ``params.stop_token_ids``.
        prompt: token ids, read only if ``repetition_penalty`` is on.
        output: token ids drawn so far, read only if a penalty is on or there are bad sequences.
        constraint: the state of the grammar that the sequence must match, after its last token.
        special: whether more than temperature, min-p, top-k and top-p decides what is drawn and reported.
        random: whether the token is drawn at random.
    """

    sequence: int
    params: SamplingParams
    seed: int = 0
    completion: int = 0
    generated: int = 0
    eos_token_ids: Sequence[int] = ()
    prompt: Sequence[int] = ()
    output: list[int] = field(default_factory=list)
    constraint: Constraint | None = None
    special: bool = field(init=False)
    random: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self.random = not params.greedy
        self.special = params.use_beam_search or params.logprobs is not None or self.constraint is not None
        self.special |= params.reads_history or params.min_tokens > 0 or bool(params.forced_token_ids)
        self.special |= params.logit_bias is not None or params.allowed_token_ids is not None


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Draw]:
    """Draw one token per row of ``logits`` [R, V], any float dtype, which are not changed.

    ``logprobs`` of a beam's row are the ``n`` most likely tokens, and the ``n`` most likely tokens that do not end it.

    Raises LogitsError, without drawing, that names every row with a NaN, an infinity or no allowed token.
    Raises ValueError for logits of another shape.
    """
    if logits.ndim != 2 or len(logits) != len(rows):
        raise ValueError(f"logits have shape {list(logits.shape)}; {len(rows)} rows need [{len(rows)}, vocabulary]")
    special = [r for r, row in enumerate(rows) if row.special]
    scores = _constrain(logits, rows, special)
    highest, tokens = largest(scores)
    broken = [r for r, value in enumerate(highest.tolist()) if not math.isfinite(value)]
    if broken:
        raise LogitsError(broken, ruled_out=bool(largest(logits[broken])[0].isfinite().all()))
    random = [r for r, row in enumerate(rows) if row.random]
    if random:
        chosen, places = [rows[r] for r in random], torch.tensor(random, device=scores.device)
        peaks, temperature = highest[places], _temperatures(chosen, scores.device)
        least = _least(scores, places, peaks, temperature, chosen)
        keys = torch.tensor([_key(row) for row in chosen], device=scores.device)
        drawn = tokens[places]
        draw(scores, places, peaks, least, temperature, keys, drawn)
        tokens[places] = drawn
    ids = tokens.tolist()
    for r in special:
        if rows[r].generated < len(rows[r].params.forced_token_ids):
            ids[r] = rows[r].params.forced_token_ids[rows[r].generated]
    logprobs = _logprobs(logits, ids, rows, special) | _continuations(logits, rows, special)
    return [
        Draw(row.sequence, token, logprobs.get(r, b"")) for r, (row, token) in enumerate(zip(rows, ids, strict=True))
    ]


def _constrain(logits: Tensor, rows: Sequence[Row], special: Sequence[int]) -> Tensor:
    """Return scores [R, V]: a copy with penalties, minimum length, biases and grammars; ``logits`` if no row has any.

    ``special``: the rows that may have any.
    """
    penalized = [r for r in special if rows[r].params.penalizes]
    too_short = [r for r in special if rows[r].generated < rows[r].params.min_tokens]
    grammars = {r: constraint for r in special if (constraint := rows[r].constraint) is not None}
    biased = [r for r in special if rows[r].params.logit_bias or rows[r].params.allowed_token_ids]
    worded = [r for r in special if rows[r].params.bad_token_ids]
    scores = logits
    if penalized or too_short or biased or worded:
        scores = _float32(logits)
    if penalized:
        _penalize(scores, rows, penalized)
    vocabulary = scores.shape[1]
    for r in too_short:
        ends = {*rows[r].eos_token_ids, *rows[r].params.stop_token_ids}
        scores[r, [token for token in ends if token < vocabulary]] = -math.inf
    for r in biased:
        _bias(scores[r], rows[r].params)
    for r in worded:
        scores[r, _bad_tokens(rows[r], vocabulary)] = -math.inf
    if grammars:
        scores = forbid(scores, [*grammars], [*grammars.values()])
    return scores


def _float32(logits: Tensor) -> Tensor:
    """Return a float32 copy. On a CPU, this thread alone copies it: other threads would spin until all are done."""
    if logits.device.type != "cpu":
        return logits.to(torch.float32, copy=True)
    copy, rows = torch.empty(logits.shape, dtype=torch.float32), max(1, _SERIAL // logits.shape[1])
    for part, given in zip(torch.split(copy, rows), torch.split(logits, rows), strict=True):
        part.copy_(given)
    return copy


def _bias(scores: Tensor, params: SamplingParams) -> None:
    vocabulary = len(scores)
    bias = {token: value for token, value in (params.logit_bias or {}).items() if token < vocabulary}
    if bias:
        scores[[*bias]] += scores.new_tensor([*bias.values()])
    if params.allowed_token_ids is not None:
        allowed = [token for token in params.allowed_token_ids if token < vocabulary]
        kept = scores[allowed]
        scores.fill_(-math.inf)
        scores[allowed] = kept


def _bad_tokens(row: Row, vocabulary: int) -> list[int]:
    """Return the tokens that would complete a bad sequence after those drawn so far."""
    drawn = list(_drawn(row))
    found = set[int]()
    for *before, last in row.params.bad_token_ids:
        if last < vocabulary and (not before or drawn[-len(before) :] == before):
            found.add(last)
    return [*found]


def _drawn(row: Row) -> Sequence[int]:
    """Return the tokens drawn so far, without those that were forced."""
    return row.output[len(row.params.forced_token_ids) :]


def _penalize(scores: Tensor, rows: Sequence[Row], penalized: list[int]) -> None:
    """Lower the scores [R, V] of tokens seen before, in place; only those entries are touched."""
    vocabulary = scores.shape[1]
    flat = scores.view(-1)

    def entries(histories: list[Sequence[int]]) -> tuple[Tensor, list[Row], Tensor]:
        """Return, for each distinct (row, token): index in ``flat``, row, number of occurrences."""
        keys = [np.asarray(tokens, np.int64) + r * vocabulary for r, tokens in zip(penalized, histories, strict=True)]
        positions, counts = np.unique(np.concatenate(keys), return_counts=True)
        owners = [rows[r] for r in (positions // vocabulary).tolist()]
        return torch.from_numpy(positions).to(flat.device), owners, torch.from_numpy(counts).to(flat.device)

    # The repetition penalty counts prompt and output, the other two penalties count output only, as in vLLM.
    seen, owners, _ = entries([[*rows[r].prompt, *rows[r].output] for r in penalized])
    penalty = flat.new_tensor([row.params.repetition_penalty for row in owners])
    score = flat[seen]
    flat[seen] = torch.where(score < 0, score * penalty, score / penalty)

    drawn, owners, counts = entries([_drawn(rows[r]) for r in penalized])
    frequency = flat.new_tensor([row.params.frequency_penalty for row in owners])
    presence = flat.new_tensor([row.params.presence_penalty for row in owners])
    flat[drawn] -= frequency * counts + presence


def _temperatures(rows: Sequence[Row], device: torch.device) -> Tensor:
    return torch.tensor([max(row.params.temperature, _MIN_TEMPERATURE) for row in rows], device=device)


def _least(scores: Tensor, places: Tensor, highest: Tensor, temperature: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return the lowest score that min-p, top-k and top-p keep, float32 [R], for rows ``places`` [R] of ``scores``.

    Tokens with equal scores are all kept or all cut. ``highest`` and ``temperature`` [R] belong to these rows.
    """
    least, shares = torch.full_like(highest, -math.inf), [row.params.min_p for row in rows]
    if any(shares):  # the logarithm of 0 is -inf: everything is kept
        least = highest + temperature * highest.new_tensor(shares).log()
    cut = [r for r, row in enumerate(rows) if 0 < row.params.top_k < scores.shape[1]]
    if cut:
        k = torch.tensor([rows[r].params.top_k for r in cut], device=scores.device)
        top = scores[places[cut]].topk(int(k.max())).values
        least[cut] = least[cut].maximum(top.gather(1, k[:, None] - 1)[:, 0].float())
    cut = [r for r, row in enumerate(rows) if row.params.top_p < 1]
    if cut:
        top_p = highest.new_tensor([rows[r].params.top_p for r in cut])
        least[cut] = _nucleus(scores[places[cut]].float(), highest[cut], least[cut], temperature[cut], top_p)
    return least


def _scaled(scores: Tensor, highest: Tensor, least: Tensor, temperature: Tensor) -> Tensor:
    """Return (score - highest) / temperature, float32 [R, N]; -inf for scores below ``least``."""
    # The maximum is subtracted first: then no temperature can overflow.
    scaled = (scores.float() - highest[:, None]).div_(temperature[:, None])
    return scaled.masked_fill_(scores < least[:, None], -math.inf)


def _nucleus(
    scores: Tensor, highest: Tensor, least: Tensor, temperature: Tensor, top_p: Tensor, candidates: int = _CANDIDATES
) -> Tensor:
    """Return the lowest score in the smallest set of tokens with mass ``top_p`` [R], among scores >= ``least`` [R]."""
    left = int((scores >= least[:, None]).sum(-1).max())
    candidates = min(candidates, left)
    top = scores.topk(candidates).values
    masses = _scaled(top, highest, least, temperature).exp_()
    every = masses if candidates == left else _scaled(scores, highest, least, temperature).exp_()
    mass_before = masses.cumsum(-1) - masses
    kept = (mass_before < (top_p * every.sum(-1))[:, None]).sum(-1).clamp_(min=1)  # also when top_p rounds to 0
    result = top.gather(1, kept[:, None] - 1)[:, 0].maximum(least)
    beyond = (kept == candidates).nonzero().flatten()
    if candidates < left and len(beyond):
        result[beyond] = _nucleus(
            scores[beyond], highest[beyond], least[beyond], temperature[beyond], top_p[beyond], left
        )
    return result


def draw(
    logits: Tensor, places: Tensor, highest: Tensor, least: Tensor, temperature: Tensor, keys: Tensor, tokens: Tensor
) -> None:
    """Draw one token from each of rows ``places`` [R], int64, of ``logits`` [*, V], any float dtype, on one device.

    By the Gumbel-max trick: the token with the largest logit / temperature + noise has the probabilities of the
    softmax. The noise is a hash of the row's key and the token id. So a rounding error in the logits changes a draw
    only if the two best tokens are as close as the error; drawing from cumulative probabilities would be less robust.

    Args:
        highest: The largest logit of each row, float32 [R]; finite.
        least: Tokens with a lower logit are not drawn, float32 [R]; at most ``highest``.
        temperature: Positive, float32 [R].
        keys: Seed of each row's noise, int64 [R].
        tokens: The first token with the largest logit, int64 [R], contiguous; replaced by the token drawn.
    """
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    rows, width, stride = len(places), logits.shape[1], logits.stride(0)
    if logits.device.type == "cpu":
        _native.draw(
            ELEMENT_TYPES[logits.dtype],
            logits.data_ptr(),
            stride,
            places.data_ptr(),
            highest.data_ptr(),
            least.data_ptr(),
            temperature.data_ptr(),
            keys.data_ptr(),
            tokens.data_ptr(),
            rows,
            width,
            torch.get_num_threads(),
            PATH,
        )
        return
    from lamina.kernels.gpu import triton_rows  # needs Triton

    program = draw_program(ELEMENTS[logits.dtype])
    arrays = (places, highest, least, temperature, keys, tokens)
    triton_rows.draw[(rows,)](logits, stride, *arrays, width, **dict(program.constants), num_warps=program.warps)


def _key(row: Row) -> int:
    """Return the seed of the draw's noise: a hash of (seed, completion, position), an int64."""
    drawn = row.generated - len(row.params.forced_token_ids)
    counter = struct.pack("<qqq", row.seed, row.completion, drawn)
    return int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little", signed=True)


def _logprobs(logits: Tensor, tokens: list[int], rows: Sequence[Row], special: Sequence[int]) -> dict[int, bytes]:
    """Return packed logprobs by row that requests them: the drawn token, then the most likely ones, unconstrained."""
    by_count: dict[int, list[int]] = {}
    for r in special:
        if (count := rows[r].params.logprobs) is not None:
            by_count.setdefault(min(count, logits.shape[1]), []).append(r)
    result: dict[int, bytes] = {}
    for count, asking in by_count.items():
        # Without indices where all rows ask: indexing copies R x V values.
        logprobs = (logits if len(asking) == len(rows) else logits[asking]).float().log_softmax(-1)
        ids = torch.tensor([[tokens[r]] for r in asking], device=logits.device)
        drawn = logprobs.gather(1, ids)
        ranks = (logprobs > drawn).sum(-1) + 1
        top = logprobs.topk(count)
        ids, values = torch.cat([ids, top.indices], 1), torch.cat([drawn, top.values], 1)
        packed = pack_rows(ranks.cpu().numpy(), ids.cpu().numpy(), values.cpu().numpy())
        result.update(zip(asking, packed, strict=True))
    return result


def _continuations(logits: Tensor, rows: Sequence[Row], special: Sequence[int]) -> dict[int, bytes]:
    """Return packed candidates by row of a beam, from which ``lamina.schedule.beam_search`` chooses."""
    beams = [r for r in special if rows[r].params.use_beam_search]
    if not beams:
        return {}
    logprobs = logits[beams].float().log_softmax(-1)
    found = {}
    for place, r in enumerate(beams):
        row, own = rows[r], logprobs[place]
        eos = [] if row.params.ignore_eos else row.eos_token_ids
        ends = [token for token in {*eos, *row.params.stop_token_ids} if token < len(own)]
        most = min(row.params.n, len(own))
        unended = own.clone()
        unended[ends] = -math.inf
        best = unended.topk(min(most, len(own) - len(ends)))
        likely = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        if row.generated >= row.params.min_tokens:
            best = own.topk(most)
            likely |= zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found[r] = pack([Logprob(token, value, 0) for token, value in likely.items()])
    return found
