"""Slots of what an earlier engine's requests have kept: reserved until they come again, then cached or free."""

import itertools

from lamina.control.messages import Computed
from lamina.core.heads import HeadShards
from lamina.core.sampling import SamplingParams
from lamina.core.types import Request, Segment
from lamina.kv.placement import Placement
from lamina.kv.prefix_cache import PrefixCache
from lamina.kv.stripes import StripedPlacement
from lamina.schedule.recall import Recall

HALVES = [Segment(7, "memory0", (0, 2), (0, None)), Segment(7, "memory1", (2, 4), (0, None))]


def recall(placement: Placement, windowed: bool = False) -> tuple[Recall, PrefixCache]:
    prefixes = PrefixCache(placement, itertools.count(8))
    return Recall(placement, prefixes, windowed), prefixes


def kept(tokens: int, *segments: Segment) -> Computed:
    return Computed("request", 0, 7, tokens, list(segments))


def test_a_request_that_comes_again_finds_its_tokens_and_the_slots_are_not_reserved_any_more() -> None:
    placement = Placement({"memory0": 100})
    under_test, prefixes = recall(placement)
    assert not under_test
    under_test.keep([kept(40, Segment(7, "memory0", (0, 4), (0, None)))])
    assert under_test and placement.reserved == {"memory0": 40}
    request = Request("request", None, [*range(30)], SamplingParams(), 0)
    under_test.claim(request, {0: [*range(30, 38)]})  # two more have been computed than anybody was told of
    assert under_test, "it has not been settled"
    under_test.settle()
    assert not under_test
    assert placement.reserved == {"memory0": 0} and placement.idle == {"memory0": 38}
    (fork,), released = prefixes.changes()
    assert (fork.parent, fork.tokens, released) == (7, 38, [7])


def test_kept_sequences_that_begin_alike_are_cached_once_and_evicted_where_slots_are_needed() -> None:
    placement = Placement({"memory0": 200})
    under_test, prefixes = recall(placement)
    for sequence, prompt in ((5, [*range(40)]), (6, [*range(30), *range(100, 110)])):
        name = str(sequence)
        under_test.keep([Computed(name, 0, sequence, 40, [Segment(sequence, "memory0", (0, 4), (0, None))])])
        under_test.claim(Request(name, None, prompt, SamplingParams(), 0), None)
    under_test.settle()
    assert placement.reserved == {"memory0": 0} and placement.idle == {"memory0": 50}
    placement.reserve_on("memory0", 200)
    prefixes.changes()
    assert placement.idle == {"memory0": 0}


def test_what_nobody_comes_for_or_has_no_place_is_released() -> None:
    for segments, tokens in (([HALVES[0]], 40), (HALVES, 120), (HALVES, 40)):  # half of it, too much, and right
        placement = StripedPlacement({"memory0": 50, "memory1": 50}, HeadShards(4, 2))
        under_test, prefixes = recall(placement)
        under_test.keep([kept(tokens, *segments)])
        assert sum(placement.reserved.values()) == (40 if (segments, tokens) == (HALVES, 40) else 0)
        under_test.drop()
        assert not any(placement.reserved.values()) and prefixes.changes() == ([], [7])


def test_nothing_is_kept_of_layers_that_may_have_forgotten_its_last_window() -> None:
    placement = Placement({"memory0": 100})
    under_test, prefixes = recall(placement, windowed=True)
    under_test.keep([kept(40, Segment(7, "memory0", (0, 4), (0, None)))])
    assert not under_test and not any(placement.reserved.values()) and prefixes.changes() == ([], [7])
