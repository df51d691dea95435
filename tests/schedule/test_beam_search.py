"""Beam search against Hugging Face's, on the same log-probabilities."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lamina.compute.sampler import Row, sample
from lamina.control.packed_logprobs import unpack
from lamina.core.outputs import Logprob
from lamina.core.sampling import SamplingParams
from lamina.schedule.beam_search import BeamSearch, continued
from tests.support.random_models import SERVED_VOCABULARY, best_beams, random_model, served
from tests.support.sweep import sweep

PROMPT = [5, 9, 31]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model(served("llama", layers=1))


@torch.inference_mode()
def continuations(
    model: PreTrainedModel, beams: list[list[int]], params: SamplingParams, ends: list[int]
) -> list[list[Logprob]]:
    """What the sampler says of every beam."""
    logits = model(torch.tensor([PROMPT + beam for beam in beams])).logits[:, -1]
    rows = [Row(place, params, generated=len(beam), eos_token_ids=ends) for place, beam in enumerate(beams)]
    return [unpack(draw.logprobs) for draw in sample(logits, rows)]


CASES = {
    f"{n} beams, penalty {penalty}, early stopping {early}, {ends} ends from {least} on": (
        n,
        penalty,
        early,
        ends,
        least,
    )
    for n in (2, 3, 5, 8)
    for penalty in (-1.0, 0.0, 0.5, 1.0, 2.0)
    for early in (False, True, "never")
    for ends in (0, 1, 12, 40)
    for least in (0, 4)
}


@pytest.mark.parametrize("case", sweep(CASES, random.Random(1).sample(sorted(CASES), 30)))
def test_hypotheses_are_those_of_best_beams(model: PreTrainedModel, case: tuple[int, float, Any, int, int]) -> None:
    n, penalty, early, ends, least = case
    ending = random.Random(ends).sample(range(3, SERVED_VOCABULARY), ends)
    params = SamplingParams(
        n=n,
        max_tokens=12,
        min_tokens=least,
        use_beam_search=True,
        length_penalty=penalty,
        early_stopping=early,
    )
    search = BeamSearch(params, 12, ending)
    beams: list[list[int]] = [[]]
    while (choice := search.advance(continuations(model, beams, params, ending))) is not None:
        alike = [list(beams[0]) for _ in choice] if len(beams) == 1 else beams
        kept = [place for place, (parent, _) in enumerate(choice) if parent == place]
        assert kept or len(beams) == 1
        assert {parent for parent, _ in choice} == set(kept)  # a beam that goes on does so at its own place
        beams = continued(alike, choice)
    expected = best_beams(model, PROMPT, params, ending)
    assert [one.token_ids for one in search.hypotheses] == [tokens for tokens, _ in expected]
    assert [one.score for one in search.hypotheses] == pytest.approx([score for _, score in expected], rel=1e-5)
    assert [one.ended for one in search.hypotheses] == [tokens[-1] in ending for tokens, _ in expected]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"n": 1}, "n is 1, the number of beams; give at least 2"),
        ({"temperature": 0.7}, "temperature is 0.7; beam search does not use it"),
        ({"top_k": 5}, "top_k is 5"),
        ({"stop": ["a"]}, "stop is"),
        ({"logprobs": 0}, "logprobs is 0"),
        ({"length_penalty": 11.0}, "length_penalty is 11.0; give a number from -10.0 to 10.0"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'; give true, false or \"never\""),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty is 2.0, but use_beam_search is false"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping is True, but use_beam_search is false"),
        ({"use_beam_search": 1}, "use_beam_search is 1; give true or false"),
    ],
)
def test_parameters_that_beam_search_cannot_use_are_refused(wrong: dict[str, Any], says: str) -> None:
    right = SamplingParams(n=3, use_beam_search=True, temperature=0.0, top_k=-1)
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(right, **wrong)
