"""Checkpoints of cached prefixes: the rows that they need, against sets of tokens, and which requests find them."""

import random

import pytest

from lamina.core.requests import ids_of
from lamina.core.sampling import SamplingParams
from lamina.core.types import Request, Segment
from lamina.kv.prefix_tree import Node, PrefixTree
from lamina.schedule.limits import Limits
from lamina.schedule.scheduler import Scheduler
from tests.support.schedules import plan_of, scheduler

WINDOW = 5


def needed(tree: PrefixTree) -> set[bytes]:
    """The tokens, known by all up to them, in the windows before checkpoints."""
    ends = [node.whole()[1] for node in tree.ends() if node in tree.checkpoints]
    return {ids[: place + 1].tobytes() for ids in ends for place in range(len(ids))[-WINDOW:]}


def test_rows_suffice_for_all_windows_and_those_used_least_recently_are_given_up() -> None:
    for seed in range(40):
        draw, most = random.Random(seed), 20
        tree, used = PrefixTree(WINDOW, most), list[Node]()
        for number in range(60):
            ids = ids_of(draw.choices(range(2), k=draw.randint(1, 14)))
            node, found = tree.find("", ids)
            if node is not None and found < min(node.stop, len(ids)):
                node = tree.split(node, found)
            if found < len(ids):
                here = [Segment(number, "memory0", (0, 1), (0, None))]
                node, superseded = tree.insert_leaf(node, "", ids[found:], number, here)
                assert superseded is None
            elif node is not None and node.sequence is None:
                tree.give_sequence(node, number)
            assert node is not None
            tree.checkpoints.use(node)
            used = [*(one for one in used if one is not node), node]
            assert len(needed(tree)) <= tree.checkpoints.rows
            while (oldest := tree.checkpoints.oldest([node])) is not None:
                assert oldest is next(one for one in used if one in tree.checkpoints and one is not node)
                if oldest.children:
                    tree.take_sequence(oldest)
                else:
                    tree.remove_leaf(oldest)
                assert len(needed(tree)) <= tree.checkpoints.rows
            assert tree.checkpoints.rows <= max(most, WINDOW)


def serve(under_test: Scheduler, name: str, prompt: list[int]) -> int | None:
    """Serve a request to its end; returns how many of its tokens were found."""
    group = under_test.submit(Request(name, None, prompt, SamplingParams(max_tokens=3)))
    while group.alive:
        plan_of(under_test)
        for _, completion in under_test.complete(0).values():
            completion.generated.append(7)
            if len(completion.generated) == 3:
                under_test.end_completion(group, completion)
    if under_test.plan(0) is not None:  # what it releases
        under_test.complete(0)
    return group.cached_tokens


def test_requests_go_on_from_ends_of_prompts_and_answers_and_where_another_has_left_the_prefix() -> None:
    under_test = scheduler({"memory0": 1000}, limits=Limits(4, 16, 200), prefix_cache=True, window=WINDOW)
    system, first = list(range(40)), [*range(40), *range(100, 130)]
    assert serve(under_test, "a", first) == 0
    assert serve(under_test, "a again", first) == 69
    assert serve(under_test, "the next turn", [*first, 7, 7, 50, 51]) == 72
    assert serve(under_test, "another", [*system, *range(200, 220)]) == 0, "it computes the first 40 again"
    assert serve(under_test, "a third", [*system, *range(300, 320)]) == 40
    assert serve(under_test, "a fourth", [*system, *range(300, 310), 60]) == 40, "what it leaves is too short"


def test_prefixes_without_rows_for_their_windows_are_given_up_oldest_first() -> None:
    """A layer with a window has 100 rows. A prompt needs 20 of them, and its answer three more."""
    under_test = scheduler({"memory0": 400}, limits=Limits(4, 64, 200), prefix_cache=True, window=20)
    prompts = [[*range(first, first + 30)] for first in range(0, 500, 100)]
    for number, prompt in enumerate(prompts):
        assert serve(under_test, str(number), prompt) == 0
    assert [serve(under_test, f"{number} again", prompts[number]) for number in (4, 0)] == [29, 0]


def test_a_request_goes_on_from_a_sequence_that_ends_with_the_prefix() -> None:
    """Longer sequences have dropped the window before the prefix's end."""
    under_test = scheduler({"memory0": 1000}, limits=Limits(4, 16, 200), prefix_cache=True, window=WINDOW)
    for name in range(2):
        serve(under_test, f"{name} leaves a prefix", [*range(40), *range(100 + name, 120 + name)])
    cached = under_test.prefixes.sequences("memory0")
    group = under_test.submit(Request("next", None, [*range(40), *range(200, 220)], SamplingParams(max_tokens=3)))
    (fork,) = [one for one in plan_of(under_test).forks if one.child == group.completions[0].sequence]
    assert (fork.tokens, cached[fork.parent]) == (40, 40)


@pytest.mark.parametrize(("steps", "found"), [(1, 39), (2, 39), (3, 0), (8, 0)])
def test_a_prompt_is_no_checkpoint_once_its_request_has_run_on(
    steps: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have dropped the window before its end by then, also if the request has several completions."""
    under_test = scheduler({"memory0": 1000}, limits=Limits(4, 64, 200), prefix_cache=True, window=WINDOW)
    group = under_test.submit(Request("one", None, [*range(40)], SamplingParams(max_tokens=20, n=2)))
    with monkeypatch.context() as patched:
        patched.setattr(under_test.prefixes, "keep_computed", lambda *given: None)  # as if another request had added it
        for _ in range(steps):
            plan_of(under_test)
            for _, completion in under_test.complete(0).values():
                completion.generated.append(7)
    under_test.prefixes.keep_computed(0, [group], lambda one: 40)
    again = under_test.submit(Request("again", None, [*range(40)], SamplingParams(max_tokens=1)))
    plan_of(under_test)
    assert again.cached_tokens == found
