"""The placement against a plain search, and the lanes with fewest sequences against a plain count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.errors import RequestError
from lamina.core.pipeline import Pipeline
from lamina.core.requests import Completion, Group
from lamina.core.sampling import SamplingParams
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import Request
from lamina.kv.placement import AHEAD, LEAST_SEGMENT, WATERMARK, CachedPrefix, Placement
from lamina.schedule.growth import victims
from lamina.schedule.limits import Limits


@given(
    capacities=st.lists(st.integers(1, 500), min_size=1, max_size=8),
    longest=st.sampled_from([40, 500]),
    calls=st.lists(st.tuples(st.sampled_from("rgx"), st.integers(1, 300), st.integers(1, 3)), max_size=200),
)
def test_a_request_goes_where_most_room_is_left_for_all_to_grow_or_on_several_workers(
    capacities: list[int], longest: int, calls: list[tuple[str, int, int]]
) -> None:
    names = [f"memory{index}" for index in range(len(capacities))]
    placement = Placement(dict(zip(names, capacities, strict=True)), longest)
    held: list[tuple[str, int, int]] = []  # worker, tokens, sequences
    for call, tokens, sequences in calls:
        on = {name: [each for each in held if each[0] == name] for name in names}
        used = {name: sum(each[1] for each in on[name]) for name in names}
        many = {name: sum(each[2] for each in on[name]) for name in names}
        if call == "x" and held:  # one ends
            worker, amount, count = held.pop(tokens % len(held))
            placement.will_release(worker, amount)
            placement.remove_growing(worker, count)
            placement.free_slots(worker, amount)
        elif call == "g" and held:  # all grow by a token, if they can
            grows = all(used[name] + many[name] <= capacity for name, capacity in placement.capacities.items())
            assert placement.grow(many) == grows
            held = [(name, amount + count * grows, count) for name, amount, count in held]
        elif call == "r":
            capacity = placement.capacities
            rooms = [capacity[n] - used[n] - AHEAD * many[n] - int(WATERMARK * capacity[n]) for n in names]
            place = rooms.index(max(rooms))  # the first of several
            empty = [name for name in names if not used[name] and tokens <= capacity[name]]
            spans = placement.reserve(tokens, sequences)
            if tokens > min(max(capacities), longest if len(names) > 1 else 500):
                room, whole = sum(max(room, 0) for room in rooms), sum(capacities)
                fits = room >= tokens + AHEAD * sequences or (whole >= tokens and not any(used.values()))
                assert (spans is not None) == fits
                assert all(amount <= longest for _, amount in spans or ())
            elif rooms[place] >= tokens + AHEAD * sequences:
                assert spans == [(names[place], tokens)]
            else:
                assert spans == ([(empty[0], tokens)] if empty else None)
            if spans is not None:
                assert sum(amount for _, amount in spans) == tokens
                held += [(worker, amount, 0) for worker, amount in spans[:-1]]
                held.append((*spans[-1], sequences))
        for name in names:
            assert placement.reserved[name] == sum(each[1] for each in held if each[0] == name)
            assert 0 <= placement.reserved[name] <= placement.capacities[name]
    assert placement.left_in_all == sum(capacities) - sum(placement.reserved.values())


@given(
    capacities=st.lists(st.integers(50, 500), min_size=2, max_size=6),
    requests=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    data=st.data(),
)
def test_once_speeds_are_known_a_request_goes_where_all_is_read_soonest(
    capacities: list[int], requests: list[int], data: st.DataObject
) -> None:
    names = [f"memory{index}" for index in range(len(capacities))]
    placement = Placement(dict(zip(names, capacities, strict=True)))
    placement.token_s = {name: data.draw(st.sampled_from([1.0, 2.0, 10.0])) for name in names}
    besides = frozenset(names[: data.draw(st.integers(0, 1))])
    for tokens in requests:
        used = dict(placement.reserved)
        rooms = {
            name: capacity - used[name] - AHEAD * placement.sequences[name] - int(WATERMARK * capacity)
            for name, capacity in placement.capacities.items()
        }
        spans = placement.reserve(tokens, 1, besides)
        fitting = [name for name in names if name not in besides and rooms[name] >= tokens + AHEAD]
        if fitting:
            times = {name: (used[name] + tokens) * placement.token_s[name] for name in fitting}
            assert spans is not None and times[spans[0][0]] == min(times.values()) and len(spans) == 1
        elif spans is not None:
            assert not used[spans[0][0]], "an empty worker may be filled"


@pytest.mark.parametrize(("capacity", "wanted"), [(1210, "near"), (1211, "far")])
def test_a_cached_token_counts_as_two_free_slots_of_another_worker(capacity: int, wanted: str) -> None:
    """Where 100 tokens are cached, 950 slots are left beside the watermark; 1150 or 1151 are left on the other."""
    placement = Placement({"little": 1000, "near": 1000, "far": capacity})
    found = {"little": CachedPrefix(10, 10), "near": CachedPrefix(100, 100)}
    assert placement.fitting(200, 1, found=found) == [(wanted, 200)]


def test_a_request_is_divided_over_all_the_room_that_workers_in_use_have() -> None:
    placement = Placement({"memory0": 100, "memory1": 100}, longest=40)
    placement.reserve_on("memory0", 10)
    room = placement.room("memory0") + placement.room("memory1")
    assert placement.fitting(room - AHEAD + 1, 1) is None
    spans = placement.fitting(room - AHEAD, 1)
    assert spans is not None and sum(tokens for _, tokens in spans) == room - AHEAD


def test_a_short_cached_prefix_on_a_slow_worker_is_left_there() -> None:
    placement = Placement({"fast": 100_000, "slow": 1_000_000})
    placement.token_s = {"fast": 1e-9, "slow": 1e-7}
    for cached, wanted in ((16, "fast"), (1990, "slow")):
        assert placement.fitting(2000, 1, found={"slow": CachedPrefix(cached, cached)}) == [(wanted, 2000)]


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 50)), max_size=20, unique_by=lambda one: one[0]), st.data()
)
def test_victims_give_what_is_lacking_and_the_earliest_stays(
    arrivals: list[tuple[int, int]], data: st.DataObject
) -> None:
    lacking = data.draw(st.integers(0, 300))
    request = Request("r", None, [0], SamplingParams())
    holders = {Group(request, 1, [Completion(n, 0)], arrival=n): held for n, held in arrivals}
    chosen = victims(holders, lacking, lambda one: (one.arrival,))
    given_back = sum(holders[one] for one in chosen)
    rest = {one.arrival for one in holders if one not in chosen}
    assert not holders or min(one.arrival for one in holders) in rest
    assert given_back >= lacking or len(rest) <= 1
    assert not chosen or given_back - holders[chosen[-1]] < lacking  # none for nothing
    assert [one.arrival for one in chosen] == sorted((n for n, _ in arrivals), reverse=True)[: len(chosen)]


def test_what_was_promised_before_a_loss_counts_until_the_successor_has_come() -> None:
    placement = Placement({"memory0": 100, "memory1": 100})
    limits = Limits(8, 64, 500)
    free, fixed = SamplingParams(max_tokens=None), SamplingParams(max_tokens=31)
    most = limits.most_tokens(120, free, placement)
    placement.promised = placement.possible
    placement.apply_topology(Topology(FIRST, (Member("memory0", "memory", "cpu", "", 100),), Pipeline(1, 1)))
    assert placement.total == 100
    limits.validate_request(120, fixed, placement)
    assert limits.most_tokens(120, free, placement) == most == 81
    placement.promised = 0
    with pytest.raises(RequestError, match="may need 150 KV tokens; memory holds 100 in all"):
        limits.validate_request(120, fixed, placement)


def test_what_is_left_in_all_follows_the_members() -> None:
    placement = Placement({"memory0": 100})
    placement.reserve_on("memory0", 30)
    computes = [Member("compute0", "compute", "cpu", "")]
    memories = [Member("memory0", "memory", "cpu", "", 100), Member("memory1", "memory", "cpu", "", 50)]
    placement.apply_topology(Topology(FIRST, (*computes, *memories), Pipeline(1, 1)))
    assert placement.left_in_all == 100 - 30 + 50


@pytest.mark.parametrize("capacity", [200, 100_000])
def test_a_sequence_continues_where_a_segment_fits_or_on_a_small_worker_its_watermark(capacity: int) -> None:
    least = min(LEAST_SEGMENT, int(WATERMARK * capacity)) + AHEAD
    for spare, found in ((least, "memory1"), (least - 1, None)):
        placement = Placement({"memory0": 500, "memory1": capacity})
        placement.reserve_on("memory1", capacity - spare)
        assert placement.next_worker("memory0", 0) == found


@pytest.mark.parametrize(("lends", "parts"), [(False, [300] * 3), (True, [225] * 4)])
def test_tokens_are_divided_evenly_among_memory_workers_and_the_local_memory_that_a_lane_uses(
    lends: bool, parts: list[int]
) -> None:
    members = [Member(f"compute{number}", "compute", "cpu", "", 1000) for number in range(2)]
    members += [Member(f"memory{number}", "memory", "cpu", "", 1000) for number in range(2)]
    whole = Topology(FIRST, tuple(members), Pipeline(2, 2, lends=lends))
    placement = Placement(whole.capacities, partition="token", topology=whole)
    spans = placement.fitting(900, 1, placement.beyond(0))
    assert spans is not None and [tokens for _, tokens in spans] == parts
    assert len({worker for worker, _ in spans}) == len(parts)
