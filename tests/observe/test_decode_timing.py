"""When tokens came, from an engine that is told when to give them; windows against counts made by hand."""

import re
from typing import Any, cast

import pytest

from lamina.core.errors import DeadlineError, LaminaError
from lamina.core.sampling import SamplingParams
from lamina.core.types import Request
from lamina.engine.engine import Engine
from lamina.engine.updates import CompletionUpdate, OnUpdate, RequestUpdate
from lamina.observe.timing import decode_batch, decode_window


class FakeEngine:
    """Calls back at once, with these numbers of tokens one after another; the last ends the request."""

    def __init__(self, counts: dict[str, list[int]], error: str | None = None) -> None:
        self.counts, self.error = counts, error
        self.asked: list[tuple[list[int], SamplingParams]] = []

    def submit(self, name: str, prompt: list[int], params: SamplingParams, tell: OnUpdate) -> None:
        self.asked.append((prompt, params))
        for number, count in enumerate(self.counts[name]):
            last = number == len(self.counts[name]) - 1
            news = CompletionUpdate(0, [7] * count, ["x"] * count)
            tell(RequestUpdate(Request(name, None, prompt, params), [news], last, self.error if last else None))


def decode(engine: FakeEngine, timeout_s: float = 0.01) -> list[list[int]]:
    prompts = [[number] for number in range(len(engine.counts))]
    return decode_batch(cast(Engine, engine), prompts, 3, timeout_s)


def test_every_token_has_its_time_even_if_several_came_at_once() -> None:
    engine = FakeEngine({"0": [1, 2], "1": [1, 1, 0, 1]})
    arrivals = decode(engine)
    assert [len(times) for times in arrivals] == [3, 3]
    assert arrivals[0][1] == arrivals[0][2] and all(times == sorted(times) for times in arrivals)
    assert [prompt for prompt, _ in engine.asked] == [[0], [1]]
    assert {(params.max_tokens, params.ignore_eos, params.greedy) for _, params in engine.asked} == {(3, True, True)}


@pytest.mark.parametrize(
    ("engine", "error", "said"),
    [
        (FakeEngine({"0": [3], "1": []}), DeadlineError, "1 of 2 requests did not end within"),
        (FakeEngine({"0": [1]}, "memory0 is gone"), LaminaError, "memory0 is gone"),
    ],
)
def test_what_does_not_end_well_is_an_error(engine: FakeEngine, error: Any, said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        decode(engine)


def test_a_window_is_when_all_decode() -> None:
    second = 10**9
    window = decode_window([[1 * second, 3 * second, 5 * second], [2 * second, 4 * second, 9 * second]])
    assert (window.begin_ns, window.end_ns, window.drawn) == (2 * second, 5 * second, 3)  # at 3, 4 and 5
    assert (window.seconds, window.tokens_per_s) == (3.0, 1.0)
    with pytest.raises(LaminaError, match="more tokens or a smaller batch"):
        decode_window([[1, 2], [2, 3]])
