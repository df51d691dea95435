"""Which token ends a completion."""

import pytest

from lamina.core.outputs import FinishReason
from lamina.core.sampling import SamplingParams
from lamina.engine.tracking import TokenEnds

EOS = 0


@pytest.mark.parametrize(
    ("params", "reason", "stop_token"),
    [
        (SamplingParams(), FinishReason.STOP, None),
        (SamplingParams(stop_token_ids=[EOS]), FinishReason.STOP, None),
        (SamplingParams(ignore_eos=True), None, None),
        (SamplingParams(ignore_eos=True, stop_token_ids=[EOS]), FinishReason.STOP, EOS),
        (SamplingParams(min_tokens=1), None, None),
        (SamplingParams(max_tokens=1), FinishReason.STOP, None),
        (SamplingParams(max_tokens=1, ignore_eos=True), FinishReason.LENGTH, None),
    ],
)
def test_end_of_sequence(params: SamplingParams, reason: FinishReason | None, stop_token: int | None) -> None:
    ends = TokenEnds(params, params.max_tokens, [EOS, 99])
    assert ends.finish_reason(EOS, 1) is reason
    if reason is FinishReason.STOP:
        assert ends.stop_token(EOS) == stop_token


def test_stop_tokens_end_a_completion_once_it_has_its_fewest_tokens() -> None:
    ends = TokenEnds(SamplingParams(stop_token_ids=[7, 8], min_tokens=1), None, [EOS])
    assert [ends.finish_reason(8, 1), ends.finish_reason(9, 2), ends.finish_reason(8, 2)] == [
        None,
        None,
        FinishReason.STOP,
    ]
    assert ends.stop_token(8) == 8
