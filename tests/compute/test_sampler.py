"""The sampler against Hugging Face's logits processors, chi-square, and its promise of reproducible draws."""

import hashlib
import math
import struct
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lamina.compute import sampler
from lamina.compute.sampler import Row, sample
from lamina.control.packed_logprobs import unpack
from lamina.core.errors import LogitsError
from lamina.core.sampling import SamplingParams
from tests.compute.noise import gumbel

VOCABULARY = 60


def random_logits(rows: int, vocabulary: int = VOCABULARY, *, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def distribution(logits: Tensor, rows: list[Row]) -> Tensor:
    """The probabilities that ``sample`` draws from, by what it passes to ``draw``. No row may be greedy."""
    with mock.patch.object(sampler, "draw") as draw:
        sample(logits, rows)
    scores, places, highest, least, temperature, *_ = draw.call_args.args
    kept = scores[places].float()
    kept[kept < least[:, None]] = -math.inf
    return ((kept - highest[:, None]) / temperature[:, None]).softmax(-1)


def hugging_face(scores: Tensor, row: Row) -> Tensor:
    """The distribution of one row [V] by transformers, in vLLM's order; it has no presence or frequency penalty."""
    history = torch.tensor([[*row.prompt, *row.output]])
    params = row.params
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    return processors(cast(torch.LongTensor, history), scores[None].clone())[0].softmax(-1)


@st.composite
def random_rows(draw: st.DrawFn) -> Row:
    tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, -1, 1, 5, VOCABULARY, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7])),
    )
    return Row(0, params, prompt=draw(tokens), output=draw(tokens))


@given(rows=st.lists(random_rows(), min_size=1, max_size=6), seed=st.integers(0, 1000))
@settings(max_examples=50, derandomize=True)  # else one run in thousands meets a rounding edge
def test_distribution_equals_hugging_face_in_any_mix_of_rows(rows: list[Row], seed: int) -> None:
    logits = random_logits(len(rows), seed=seed)
    expected = torch.stack([hugging_face(scores, row) for scores, row in zip(logits, rows, strict=True)])
    torch.testing.assert_close(distribution(logits, rows), expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("spread", [0.01, 3.0])  # a nucleus of most of the vocabulary, and one of few tokens
def test_nucleus_of_a_large_vocabulary(spread: float) -> None:
    logits = random_logits(4, 5000, spread=spread)
    rows = [Row(r, SamplingParams(top_p=p), prompt=[0]) for r, p in enumerate([0.1, 0.5, 0.9, 0.999])]
    expected = torch.stack([hugging_face(scores, row) for scores, row in zip(logits, rows, strict=True)])
    kept = (distribution(logits, rows) > 0).sum(-1) - (expected > 0).sum(-1)
    assert kept.abs().max() <= 1, "beyond the rounding of a sum of 5000 numbers"
    torch.testing.assert_close(distribution(logits, rows), expected, rtol=1e-3, atol=3e-4)


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = random_logits(1)
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=0.4)
    expected = logits.clone()
    expected[0, 3] -= 0.7 + 3 * 0.4
    expected[0, 9] -= 0.7 + 0.4
    actual = distribution(logits, [Row(0, params, prompt=[1, 1, 3], output=[3, 9, 3, 3])])
    torch.testing.assert_close(actual, expected.softmax(-1))


def test_penalties_before_the_first_token() -> None:
    logits = random_logits(1)
    params = SamplingParams(presence_penalty=1.0, repetition_penalty=1.5)
    torch.testing.assert_close(distribution(logits, [Row(0, params)]), logits.softmax(-1))


def test_tokens_as_likely_as_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0]])
    assert (distribution(logits, [Row(0, SamplingParams(top_k=3))]) > 0).all()
    assert (distribution(logits, [Row(0, SamplingParams(top_p=0.92))]) > 0).all()
    assert (distribution(logits, [Row(0, SamplingParams(top_k=2))]) > 0).tolist() == [[False, True, False, True, False]]


@pytest.mark.parametrize("temperature", [1e-60, 1e-10, 1e-3, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = random_logits(1)
    probabilities = distribution(logits, [Row(0, SamplingParams(temperature=temperature))])
    assert probabilities.sum().item() == pytest.approx(1)
    assert probabilities.argmax() == logits.argmax()


def assert_chi_square(observed: np.ndarray, expected: np.ndarray, freedom: int) -> None:
    """Counts agree with those expected, all positive."""
    chi_square = ((observed - expected) ** 2 / expected).sum()
    # Wilson-Hilferty: the cube root of chi-square over its mean is normal; 4 sigma is one in 30,000.
    sigma = math.sqrt(2 / (9 * freedom))
    assert abs((chi_square / freedom) ** (1 / 3) - (1 - sigma**2)) < 4 * sigma


def varied_row(row: Row, name: str, value: int) -> Row:
    change: dict[str, Any] = {name: value}
    return replace(row, **change)


@pytest.mark.parametrize("varied", ["generated", "completion", "seed"])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=1.5, top_k=12, min_p=0.01), SamplingParams(top_p=0.9)],
    ids=["plain", "top_k and min_p", "top_p"],
)
def test_draws_follow_the_distribution(params: SamplingParams, varied: str) -> None:
    draws = 20_000
    logits = random_logits(1, 30, spread=1.0)
    rows = [varied_row(Row(0, params, seed=7), varied, i) for i in range(draws)]
    drawn = np.array([draw.token for draw in sample(logits.expand(draws, -1), rows)])
    expected = hugging_face(logits[0], Row(0, params, prompt=[0])).double().numpy() * draws
    observed = np.bincount(drawn, minlength=30)
    kept = expected > 0
    assert (observed[~kept] == 0).all(), "a token that was cut has been drawn"
    assert_chi_square(observed[kept], expected[kept], int(kept.sum()) - 1)


@pytest.mark.parametrize("varied", ["generated", "completion", "seed"])
def test_the_next_position_completion_or_seed_draws_independently(varied: str) -> None:
    count, draws = 8, 20_000
    logits = random_logits(1, count, spread=1.0)
    rows = [varied_row(Row(0, SamplingParams(), seed=-3), varied, i) for i in range(draws + 1)]
    drawn = np.array([draw.token for draw in sample(logits.expand(draws + 1, -1), rows)])
    share = hugging_face(logits[0], Row(0, SamplingParams(), prompt=[0])).double().numpy()
    observed = np.bincount(drawn[:-1] * count + drawn[1:], minlength=count**2)
    assert_chi_square(observed, np.outer(share, share).ravel() * draws, count**2 - 1)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_rounding_changes_a_draw_only_if_the_two_best_are_that_close(temperature: float) -> None:
    vocabulary, error = 3000, 0.05
    params = SamplingParams(temperature=temperature)
    rows = [Row(0, params, seed=5, generated=i) for i in range(400)]
    exact = random_logits(len(rows), vocabulary)
    rounded = exact + error * (torch.rand(exact.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1)
    before = [draw.token for draw in sample(exact, rows)]
    after = [draw.token for draw in sample(rounded, rows)]
    assert before != after, "an error that nothing shows"
    draws = [struct.pack("<qqq", row.seed, row.completion, row.generated) for row in rows]
    keys = [hashlib.blake2b(draw, digest_size=8).digest() for draw in draws]
    noise = gumbel(np.frombuffer(b"".join(keys), np.uint64), vocabulary)
    for scores, first, second in zip(exact.double().numpy() / temperature + noise, before, after, strict=True):
        assert scores[first] == scores.max()
        assert scores[first] - scores[second] <= 2.001 * error / temperature


@given(st.data())
def test_a_draw_does_not_depend_on_the_batch(data: st.DataObject) -> None:
    rows = [replace(data.draw(random_rows()), sequence=r, seed=r) for r in range(6)]
    rows[2] = replace(rows[2], params=replace(rows[2].params, temperature=0.0))
    logits = random_logits(len(rows))
    alone = [sample(logits[r : r + 1], [row])[0] for r, row in enumerate(rows)]
    order = data.draw(st.permutations(range(6)))[: data.draw(st.integers(1, 6))]
    assert sample(logits[order], [rows[r] for r in order]) == [alone[r] for r in order]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_the_first_of_the_most_likely(dtype: torch.dtype) -> None:
    logits = random_logits(5).to(dtype)
    logits[2, [7, 30]] = 50.0
    before = logits.clone()
    draws = sample(logits, [Row(r + 100, SamplingParams(temperature=0)) for r in range(5)])
    assert [draw.sequence for draw in draws] == [100, 101, 102, 103, 104]
    assert [draw.token for draw in draws] == [int(np.argmax(row)) for row in logits.float().numpy()]
    assert draws[2].token == 7
    assert torch.equal(logits, before)


@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_low_precision_logits_are_processed_in_float32(penalty: float) -> None:
    logits = random_logits(3).bfloat16()
    params = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=penalty)
    rows = [Row(r, params, output=[1]) for r in range(3)]
    assert torch.equal(distribution(logits, rows), distribution(logits.float(), rows))


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(3)
    logits[:, 11] = 20.0
    before = logits.clone()
    params = SamplingParams(temperature=3.0, top_k=5, presence_penalty=2.0, min_tokens=5, logprobs=4)
    rows = [
        Row(0, params, output=[11], eos_token_ids=[11]),
        Row(1, SamplingParams()),
        Row(2, SamplingParams(temperature=0, logprobs=0)),
    ]
    first, second, third = sample(logits, rows)
    assert torch.equal(logits, before)
    expected = torch.log_softmax(logits.double(), -1)
    ranking = expected[0].argsort(descending=True).tolist()
    entries = unpack(first.logprobs)
    drawn, *top = entries
    assert drawn.token_id == first.token != 11
    assert drawn.rank == ranking.index(first.token) + 1
    assert [entry.token_id for entry in top] == ranking[:4]
    assert [entry.rank for entry in top] == [1, 2, 3, 4]
    for entry in entries:
        assert entry.logprob == pytest.approx(expected[0, entry.token_id].item(), abs=1e-5)
    assert second.logprobs == b""
    assert [(entry.token_id, entry.rank) for entry in unpack(third.logprobs)] == [(11, 1)]


def test_no_end_before_min_tokens() -> None:
    logits = random_logits(3)
    logits[:, [4, 5]] = torch.tensor([60.0, 50.0])
    short = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[5, VOCABULARY + 7])
    rows = [Row(r, short, generated=generated, eos_token_ids=[4]) for r, generated in enumerate([0, 2, 3])]
    tokens = [draw.token for draw in sample(logits, rows)]
    rest = logits.clone()
    rest[:, [4, 5]] = -math.inf
    assert tokens == [int(rest[0].argmax()), int(rest[1].argmax()), 4]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_name_their_rows(value: float, temperature: float) -> None:
    logits = random_logits(4)
    logits[1, 5] = logits[3, 0] = value
    rows = [Row(r, SamplingParams(temperature=temperature)) for r in range(4)]
    with pytest.raises(LogitsError, match=r"rows \[1, 3\]") as error:
        sample(logits, rows)
    assert error.value.rows == [1, 3]


def test_masked_tokens_are_no_error_but_an_empty_choice_is() -> None:
    logits = random_logits(2)
    logits[0, 3] = -math.inf
    rows = [Row(r, SamplingParams()) for r in range(2)]
    assert len(sample(logits, rows)) == 2
    logits[1] = -math.inf
    with pytest.raises(LogitsError, match=r"rows \[1\]"):
        sample(logits, rows)


def test_a_request_that_rules_out_every_token_is_told_from_a_broken_model() -> None:
    logits = random_logits(2)
    nothing = SamplingParams(allowed_token_ids=[10**6])
    with pytest.raises(LogitsError, match=r"rule out every token") as error:
        sample(logits, [Row(0, SamplingParams()), Row(1, nothing)])
    assert error.value.rows == [1]
    logits[0, 3] = math.nan
    with pytest.raises(LogitsError, match="NaN or infinite"):
        sample(logits, [Row(0, SamplingParams()), Row(1, nothing)])


def test_rows_must_match_logits() -> None:
    with pytest.raises(ValueError, match=r"shape \[2, 60\]; 1 rows need \[1, vocabulary\]"):
        sample(random_logits(2), [Row(0, SamplingParams())])


def test_biases_and_allowed_tokens_change_what_is_drawn() -> None:
    logits = random_logits(3)
    token = int(logits[0].argmin())
    params = [
        SamplingParams(temperature=0.0, logit_bias={token: 100.0, VOCABULARY + 5: 100.0}, logprobs=0),
        SamplingParams(temperature=0.0, allowed_token_ids=[token, 3, VOCABULARY + 5]),
        SamplingParams(temperature=0.0),
    ]
    before = logits.clone()
    draws = sample(logits, [Row(number, each) for number, each in enumerate(params)])
    best = max((token, 3), key=lambda one: float(logits[1, one]))
    assert [draw.token for draw in draws] == [token, best, int(logits[2].argmax())]
    assert torch.equal(logits, before)
    ((reported,),) = [unpack(draws[0].logprobs)]
    assert reported.logprob == pytest.approx(float(logits[0].log_softmax(-1)[token]), abs=1e-5)  # without the bias


def test_the_last_token_of_a_bad_sequence_is_not_drawn_after_the_others() -> None:
    logits = random_logits(1).repeat(5, 1)
    first, second = logits[0].topk(2).indices.tolist()
    params = SamplingParams(temperature=0.0, bad_token_ids=[[7, 8, first], [VOCABULARY + 5]])
    forced = SamplingParams(temperature=0.0, bad_token_ids=[[8, first]], forced_token_ids=[7, 8])
    rows = [
        Row(0, params, generated=3, output=[4, 7, 8]),
        Row(1, params, generated=1, output=[8]),
        Row(2, params, generated=3, output=[7, 8, 4]),
        Row(3, forced, generated=2, output=[7, 8]),
        Row(4, SamplingParams(temperature=0.0, bad_token_ids=[[first]])),
    ]
    assert [draw.token for draw in sample(logits, rows)] == [second, first, first, first, second]


def test_forced_tokens_are_drawn_first() -> None:
    logits = random_logits(2)
    params = SamplingParams(temperature=0.0, forced_token_ids=[4, 5], logprobs=0)
    draws = sample(logits, [Row(0, params, generated=1), Row(1, params, generated=2)])
    assert [draw.token for draw in draws] == [5, int(logits[1].argmax())]
    ((reported,),) = [unpack(draws[0].logprobs)]
    assert reported.token_id == 5
    assert reported.logprob == pytest.approx(float(logits[0].log_softmax(-1)[5]), abs=1e-5)
