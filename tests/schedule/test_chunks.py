"""How prompts share steps: the shortest are soon done, and the oldest always gets on."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lamina.core.requests import Completion, Group
from lamina.core.sampling import SamplingParams
from lamina.core.types import Request
from lamina.schedule.batches import SMALLEST, PromptBatch

NUMBERS = itertools.count()


def group(prompt: int) -> Group:
    number = next(NUMBERS)
    return Group(Request(str(number), None, [0] * prompt, SamplingParams()), 1, [Completion(number, 0)])


def run(arrivals: dict[int, list[Group]], budget: int) -> dict[Group, int]:
    """The step in which each prompt ends, if those of a step arrive before it; checks every step."""
    batch, under_way, ends = PromptBatch(), dict[Group, None](), dict[Group, int]()
    for step in itertools.count(1):
        for one in arrivals.get(step, ()):
            batch.add(one, one.completions[0])
            under_way[one] = None
        left = {one: one.completions[0].left for one in under_way}
        pieces = {one: tokens for (one, _), tokens in batch.share(budget).items()}
        assert sum(pieces.values()) == min(budget, sum(left.values()))
        for one, tokens in pieces.items():
            assert 0 < tokens == left[one] - one.completions[0].left
        if left:
            oldest = next(iter(left))
            assert pieces[oldest] >= min(left[oldest], budget / 2)
            unfinished = [one for one in pieces if one.completions[0].left]
            assert len(unfinished) <= 2
            assert all(pieces[one] >= min(SMALLEST, budget // 2) for one in unfinished if one is not oldest) or (
                not oldest.completions[0].left
            )
        for one in pieces:
            if not one.completions[0].left:
                ends[one] = step
                del under_way[one]
        if not under_way and step > max(arrivals, default=0):
            break
    return ends


@given(
    st.dictionaries(st.integers(1, 20), st.lists(st.integers(1, 300), min_size=1, max_size=6), max_size=6),
    st.integers(10, 300),
)
def test_no_prompt_takes_longer_than_twice_its_turn_in_a_line(prompts: dict[int, list[int]], budget: int) -> None:
    arrivals = {step: [group(prompt) for prompt in of_step] for step, of_step in prompts.items()}
    ends = run(arrivals, budget)
    before = 0
    for step in sorted(arrivals):
        for one in arrivals[step]:
            before += -(-2 * one.prompt_length // budget) + 1
            assert ends[one] <= max(arrivals) + before


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    long, chat = group(100_000), group(50)
    ends = run({1: [long], 2: [chat]}, 2048)
    assert ends[chat] == 2 and ends[long] == 49


def test_equal_prompts_run_one_after_another() -> None:
    ends = run({1: [group(2048) for _ in range(16)]}, 2048)
    assert sorted(ends.values()) == list(range(1, 17))


def test_what_is_left_for_a_piece_too_small_goes_to_the_oldest() -> None:
    batch, oldest, short, other = PromptBatch(), group(1000), group(90), group(500)
    for one in (oldest, short, other):
        batch.add(one, one.completions[0])
    assert [*batch.share(200).values()] == [110, 90]
    batch.discard(oldest.completions[0])
    assert batch.share(200) == {(other, other.completions[0]): 200}


def test_the_shortest_prompts_come_first_after_many_chunks_in_other_lanes() -> None:
    batch, prompts = PromptBatch(), [group(prompt) for prompt in (100_000, 500, 300, 400)]
    for one in prompts:
        batch.add(one, one.completions[0])
    for _ in range(100):
        batch.lend(prompts[0].completions[0], 1)
    shared = {one: tokens for (one, _), tokens in batch.share(2000).items()}
    assert [shared[one] for one in prompts] == [1000, 300, 300, 400]
