"""A minute of the fuzzer (``python -m tests.fuzz``) over all layouts, and a check that it detects wrong outputs."""

import secrets
from dataclasses import replace

import pytest

from lamina.core.outputs import CompletionOutput, FinishReason, Logprob
from tests import fuzz

SECONDS = 60.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_requests_beside_aborts_get_what_each_gets_alone() -> None:
    assert not fuzz.fuzz(secrets.randbits(31), SECONDS, [*fuzz.LAYOUTS])


EXPECTED = CompletionOutput(0, "abc", [5, 6, 7], [[Logprob(5, -0.5, 1)]] * 3, FinishReason.LENGTH)
ABORTED = replace(EXPECTED, text="ab", token_ids=[5, 6], finish_reason=FinishReason.ABORT)


@pytest.mark.parametrize(
    ("got", "fault"),
    [
        ([EXPECTED], ""),
        ([replace(EXPECTED, logprobs=[[Logprob(5, -0.5001, 1)]] * 3)], ""),
        ([ABORTED], ""),
        ([], "0 completions, not 1"),
        ([replace(EXPECTED, text="abd")], "instead of"),
        ([replace(EXPECTED, finish_reason=FinishReason.STOP)], "instead of"),
        ([replace(EXPECTED, token_ids=[5, 6])], "instead of"),
        ([replace(EXPECTED, logprobs=[[Logprob(5, -0.6, 1)]] * 3)], "log-probabilities"),
        ([replace(EXPECTED, logprobs=None)], "0 log-probabilities instead of 3"),
        ([replace(ABORTED, token_ids=[5, 8])], "does not begin"),
    ],
)
def test_a_wrong_output_is_detected(got: list[CompletionOutput], fault: str) -> None:
    found = fuzz.difference(got, [EXPECTED])
    assert fault in found
    assert bool(fault) == bool(found)
