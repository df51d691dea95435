"""The order of slices on replicas, played out with the times the rotational schedule is made for."""

import heapq
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.core.pipeline import Arrangement, Pipeline, Shape

rotational = st.integers(1, 6).map(lambda replicas: Pipeline(replicas + 1, replicas, rotates=True))
fixed = st.tuples(st.integers(1, 5), st.integers(0, 6)).map(lambda pair: Pipeline(pair[0] + pair[1], pair[0]))

choosing = st.integers(1, 5).map(
    lambda replicas: Pipeline(
        3 * replicas,
        replicas,
        choices=(
            *(Arrangement(each * replicas) for each in (2, 1, 3)),
            *((Arrangement(replicas + 1, rotates=True),) if replicas > 1 else ()),
        ),
    )
)


def play(pipeline: Pipeline, turns: int, slice_time: int, attention_time: int) -> list[tuple[int, int, int, int]]:
    """(begin, replica, lane, turn) of every slice when each replica runs the slice that is due first, of those whose
    attention has come back, and the memory workers serve one lane at a time in the order of arrival."""
    ready: list[list[tuple[int, int, int]]] = [[] for _ in range(pipeline.replicas)]  # heaps of (tick, lane, turn)
    events = [(0, 0, "ready", lane, 0) for lane in range(pipeline.lanes)]
    free = [0] * pipeline.replicas
    memory_free = 0
    begun = []
    order = 1
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, _, kind, lane, turn = heapq.heappop(events)
            if kind == "ready":
                replica = pipeline.replica(lane, turn)
                heapq.heappush(ready[replica], (pipeline.tick(lane, turn), lane, turn))
            elif kind == "attend":
                memory_free = max(memory_free, now) + attention_time
                if turn + 1 < turns:
                    heapq.heappush(events, (memory_free, order, "ready", lane, turn + 1))
                    order += 1
        for replica, heap in enumerate(ready):
            if heap and free[replica] <= now:
                _, lane, turn = heapq.heappop(heap)
                begun.append((now, replica, lane, turn))
                free[replica] = now + slice_time
                heapq.heappush(events, (now + slice_time, order, "attend", lane, turn))
                heapq.heappush(events, (now + slice_time, order + 1, "free", lane, turn))
                order += 2
    return begun


@given(rotational, st.integers(2, 40), st.integers(1, 5))
def test_rotation_without_conflict_or_bubble_when_times_match(pipeline: Pipeline, turns: int, tick: int) -> None:
    """Slices n - 1 times as long as attentions, lanes let in one tick after another: lane j begins slice k at tick
    k n + j, at once on the replica it should be on, and from then on no replica ever pauses."""
    n, slices = pipeline.lanes, pipeline.replicas * tick
    begin: dict[tuple[int, int], int] = {}
    for lane in range(n):
        for turn in range(turns):
            begin[lane, turn] = pipeline.tick(lane, turn) * tick
    for replica in range(pipeline.replicas):
        own = sorted(time for (lane, turn), time in begin.items() if pipeline.replica(lane, turn) == replica)
        assert own == list(range(own[0], own[0] + slices * len(own), slices))  # back to back: no conflict, no bubble
    attending = sorted(time + slices for time in begin.values())
    assert attending == list(range(attending[0], attending[0] + tick * len(attending), tick))  # one lane at a time
    assert all(
        begin[lane, turn + 1] - begin[lane, turn] == slices + tick for lane in range(n) for turn in range(turns - 1)
    )


@given(st.one_of(rotational, fixed), st.integers(1, 30), st.integers(1, 9), st.integers(1, 9))
def test_no_lane_starves_whatever_the_times(
    pipeline: Pipeline, turns: int, slice_time: int, attention_time: int
) -> None:
    begun = play(pipeline, turns, slice_time, attention_time)
    assert sorted((lane, turn) for _, _, lane, turn in begun) == [
        (lane, turn) for lane in range(pipeline.lanes) for turn in range(turns)
    ]
    lasts: dict[int, int] = {}
    for _, _, lane, turn in begun:
        lasts[lane] = turn
        sharing = [
            other for other in range(pipeline.lanes) if pipeline.replicas_of(other) == pipeline.replicas_of(lane)
        ]
        assert turn - min(lasts.get(other, -1) for other in sharing) <= 2 + pipeline.lanes


@given(rotational, st.integers(6, 40))
def test_played_out_the_replicas_are_busy(pipeline: Pipeline, turns: int) -> None:
    """All lanes at once instead of one after another: after the first round the pattern is that of the schedule."""
    begun = play(pipeline, turns, slice_time=pipeline.replicas, attention_time=1)
    end = max(time for time, *_ in begun) + pipeline.replicas
    busy = len(begun) * pipeline.replicas
    bubbles = end * pipeline.replicas - busy
    assert bubbles <= 3 * pipeline.replicas * pipeline.lanes


@given(st.one_of(rotational, fixed), st.integers(0, 9), st.integers(0, 200))
def test_a_lane_runs_only_on_its_replicas(pipeline: Pipeline, lane: int, turn: int) -> None:
    lane %= pipeline.lanes
    assert pipeline.replica(lane, turn) in pipeline.replicas_of(lane)
    if pipeline.may_rotate:
        assert pipeline.replica(lane, turn) == (lane + turn) % (pipeline.lanes - 1)


@pytest.mark.parametrize(
    ("lanes", "replicas", "rotates", "interchangeable"),
    [(1, 1, False, True), (3, 1, False, True), (3, 2, True, True), (3, 2, False, False), (2, 2, False, False)],
)
def test_sequences_may_change_lanes_only_among_the_same_replicas(
    lanes: int, replicas: int, rotates: bool, interchangeable: bool
) -> None:
    assert Pipeline(lanes, replicas, rotates).interchangeable is interchangeable


@pytest.mark.parametrize(("lanes", "replicas", "rotates"), [(1, 2, False), (2, 0, False), (2, 2, True), (4, 2, True)])
def test_impossible_pipelines_are_refused(lanes: int, replicas: int, rotates: bool) -> None:
    with pytest.raises(ValueError, match="lanes"):
        Pipeline(lanes, replicas, rotates)


staged = st.tuples(st.integers(1, 3), st.integers(2, 4), st.integers(0, 3), st.integers(1, 3)).map(
    lambda sizes: Pipeline(
        sizes[0] * sizes[1] + sizes[2],
        sizes[0],
        shape=Shape(sizes[3], sizes[1], tuple(2 * one for one in range(sizes[1]))),
    )
)


@given(st.one_of(rotational, fixed, staged), st.integers(0, 9), st.integers(0, 50), st.none() | st.booleans())
def test_the_stages_of_a_step_are_those_of_its_slices(
    pipeline: Pipeline, lane: int, turn: int, rotates: bool | None
) -> None:
    rotates = False if pipeline.shape.starts else rotates
    each = [pipeline.stage(lane, turn, index, rotates) for index in range(7)]
    assert pipeline.stages_of(lane, turn, 7, rotates) == each


@given(staged, st.integers(0, 9), st.integers(0, 50))
def test_stages_run_their_own_slices_of_every_step_in_order(pipeline: Pipeline, lane: int, turn: int) -> None:
    lane %= pipeline.lanes
    stages = pipeline.shape.stages
    slices = range(2 * stages + 1)
    ran = [pipeline.stage(lane, turn, index) for index in slices]
    first = lane % pipeline.replicas * stages
    assert ran == [first + min(index // 2, stages - 1) for index in slices]
    ranks = range(pipeline.shape.ranks)
    assert pipeline.workers_of(lane) == tuple(one * len(ranks) + rank for one in dict.fromkeys(ran) for rank in ranks)
    following = ran[1:] + ran[:1]  # the tokens drawn go back to the first stage
    for one, other in zip(ran, following, strict=True):
        for rank in ranks:
            assert one == other or pipeline.exchanges(one * len(ranks) + rank, other * len(ranks) + rank)


@given(staged)
def test_stages_are_linked_with_their_neighbours_in_the_replica_alone(pipeline: Pipeline) -> None:
    """Rank by rank."""
    shape = pipeline.shape
    workers = range(pipeline.replicas * shape.workers)
    for one in workers:
        peers = [other for other in workers if other != one and pipeline.exchanges(one, other)]
        assert len(peers) == min(2, shape.stages - 1)
        assert {peer // shape.workers for peer in peers} == {one // shape.workers}
        assert {peer % shape.ranks for peer in peers} == {one % shape.ranks}


SLICES = 6


def divided(ranks: int, stages: int, cuts: tuple[int, ...]) -> Shape:
    """Return a shape with stages of different sizes, of a model with ``SLICES`` slices."""
    return Shape(ranks, stages, (0, *sorted(cuts[: stages - 1])) if stages > 1 else ())


loaded = st.builds(divided, st.integers(1, 3), st.integers(1, 3), st.permutations(range(1, SLICES)))


@given(loaded, loaded, st.integers(0, 2), st.integers(1, 2), st.booleans())
def test_replicas_that_attend_for_each_other_are_linked_as_their_layers_and_heads_need(
    early: Shape, late: Shape, prefill: int, decode: int, one_way: bool
) -> None:
    """Compared with all attentions and heads one by one: a worker is linked to those that have the K and V that it asks
    for, and to those whose replies it merges, which the worker of the slice before has asked for."""
    lanes, replicas = (prefill + decode) * max(early.stages, late.stages), prefill + decode
    pipeline = Pipeline(lanes, replicas, shape=late, prefill_shape=early, prefill=prefill, lends=True, one_way=one_way)
    heads = 6
    owners = dict[tuple[int, int, int], int]()  # by replica, slice and head
    for replica, index, head in itertools.product(range(replicas), range(SLICES), range(heads)):
        shape = pipeline.shape_of(replica)
        stage = sum(start <= index for start in shape.starts[1:])
        rank = head // (heads // shape.ranks)
        owners[replica, index, head] = pipeline.workers_in(replica).start + stage * shape.ranks + rank
        home = pipeline.workers_in(replica).start + rank
        assert pipeline.holder(home, index) == owners[replica, index, head]
    pairs = itertools.permutations(range(replicas), 2)
    needed = {
        frozenset((owners[far, index, head], owners[near, following, head]))
        for (near, far), index, head in itertools.product(pairs, range(SLICES - 1), range(heads))
        for following in (index, index + 1)
    }
    workers = range(pipeline.workers_in(replicas - 1).stop)
    linked = {
        frozenset(pair)
        for pair in itertools.combinations(workers, 2)
        if pipeline.replica_at(pair[0]) != pipeline.replica_at(pair[1]) and pipeline.exchanges(*pair)
    }
    assert needed <= linked
    # The last slice has no attention, so that a stage which only runs this slice has no layer that others ask for.
    only_last = {number for number in workers if pipeline.slices_at(number)[0] == SLICES - 1}
    assert all(only_last & pair for pair in linked - needed)


def test_segments_name_the_same_rank_of_the_first_stage() -> None:
    pipeline = Pipeline(4, 2, shape=Shape(2, 2))
    assert [pipeline.home(number) for number in range(8)] == [0, 1, 0, 1, 4, 5, 4, 5]
    assert pipeline.holders("abcdefgh") == {"a": ("a", "c"), "b": ("b", "d"), "e": ("e", "g"), "f": ("f", "h")}
    assert Pipeline(4, 4, shape=Shape(2)).holders("abcdefgh") == {}


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        ({"lanes": 3, "replicas": 2, "shape": Shape(stages=2)}, "3 lanes cannot keep 2 replicas of 2 stages busy"),
        ({"lanes": 2, "replicas": 1, "shape": Shape(stages=2), "rotates": True}, "cannot rotate over replicas besides"),
    ],
)
def test_impossible_stages_are_refused(pipeline: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Pipeline(**pipeline)


@given(st.one_of(rotational, fixed, choosing, staged), st.data())
def test_any_pipeline_goes_on_with_fewer_replicas(pipeline: Pipeline, data: st.DataObject) -> None:
    """On the lanes that exist, each of which some replica runs, and in the same orders as far as there are any."""
    left = pipeline.with_replicas(data.draw(st.integers(1, pipeline.replicas)))
    assert left.lanes <= pipeline.lanes and left.rotates == pipeline.rotates
    for one in (left.first_arrangement, *left.choices):
        assert left.replicas <= one.lanes <= pipeline.lanes
        assert not one.rotates or one.lanes == left.replicas + 1
        assert left.shape == pipeline.shape
        used = {left.replica(lane, 0, one.rotates) for lane in range(one.lanes)}
        assert used == set(range(left.replicas))
    assert {one.rotates for one in left.choices} >= {False} & {one.rotates for one in pipeline.choices}


shapes = st.builds(Shape, st.integers(1, 3), st.integers(1, 3))


@given(shapes, shapes, st.integers(0, 3), st.integers(1, 3))
def test_workers_are_numbered_by_replica_stage_and_rank_whatever_their_shapes(
    early: Shape, late: Shape, prefill: int, decode: int
) -> None:
    """Compared with a list of all workers."""
    replicas, own = prefill + decode, [early] * prefill + [late] * decode
    lanes = replicas * max(each.stages for each in own)
    pipeline = Pipeline(lanes, replicas, shape=late, prefill_shape=early, prefill=prefill)
    stages = [(replica, stage) for replica, shape in enumerate(own) for stage in range(shape.stages)]
    every = [(*stage, rank) for stage in stages for rank in range(own[stage[0]].ranks)]
    assert pipeline.stage_count == len(stages)
    for number, (replica, stage, rank) in enumerate(every):
        alike = [other for other, one in enumerate(every) if one[:2] == (replica, stage)]
        assert (pipeline.replica_at(number), pipeline.shape_of(replica)) == (replica, own[replica])
        assert pipeline.stage_at(number) == stages.index((replica, stage))
        assert list(pipeline.ranks_at(number)) == alike
        assert pipeline.worker_at(pipeline.stage_at(number), rank) == number
        assert every[pipeline.home(number)] == (replica, 0, rank)
        assert [*pipeline.workers_in(replica)] == [other for other, one in enumerate(every) if one[0] == replica]
        holders = [one for one in every if one[0] == replica and one[2] == rank]
        names = [str(one) for one in every]
        found = pipeline.holders(names).get(names[pipeline.home(number)])
        assert found == (tuple(map(str, holders)) if len(holders) > 1 else None)
    for lane in range(lanes):
        assert list(pipeline.workers_of(lane)) == [*pipeline.workers_in(lane % replicas)]
        assert pipeline.stage(lane, 0, 0) == stages.index((lane % replicas, 0))
    doors = [pipeline.door(lane, rank) for lane in range(lanes) for rank in range(own[lane % replicas].ranks)]
    assert len({*doors}) == len(doors)
    assert all(pipeline.door(pipeline.lane_of(door), pipeline.rank_of(door)) == door for door in doors)


@given(shapes, shapes, st.integers(0, 3), st.integers(1, 3), st.data())
def test_shapes_of_pools_stay_while_replicas_are_lost_and_come(
    early: Shape, late: Shape, prefill: int, decode: int, data: st.DataObject
) -> None:
    lanes = (prefill + decode) * max(early.stages, late.stages)
    pipeline = Pipeline(lanes, prefill + decode, shape=late, prefill_shape=early).with_replicas(
        prefill + decode, prefill
    )
    for _ in range(3):
        prefills, computes = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
        left = pipeline.with_workers(prefills * early.workers, computes * late.workers)
        own = [left.shape_of(replica) for replica in range(left.replicas)]
        assert own == ([early] * prefills + [late] * computes or [late])
        assert left.door(3, 0) == pipeline.door(3, 0), "memory workers know lanes by these numbers"
