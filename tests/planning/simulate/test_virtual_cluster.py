"""Slices and attentions in virtual time, against the rotational schedule and a plain implementation of the rules."""

import heapq
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina._native import Shares, StepTimes, VirtualCluster
from lamina.core.pipeline import Pipeline

Span = tuple[str, int, int, float, float]
rotational = st.integers(1, 5).map(lambda replicas: Pipeline(replicas + 1, replicas, rotates=True))
fixed = st.tuples(st.integers(1, 4), st.integers(0, 4)).map(lambda pair: Pipeline(pair[0] + pair[1], pair[0]))


def submit(
    cluster: VirtualCluster,
    pipeline: Pipeline,
    lane: int,
    now: float,
    attentions: int,
    slice_s: float,
    attention_s: list[float],
    turn: int = 0,
    memory_receive_s: float = 0.0,
    memory_send_s: float = 0.0,
    **times: float,
) -> None:
    cluster.submit(
        lane,
        now,
        turn // attentions,
        [pipeline.replica(lane, turn + k) for k in range(attentions + 1)],
        pipeline.tick(lane, turn),
        pipeline.tick(lane, turn + 1) - pipeline.tick(lane, turn),
        StepTimes(
            first_s=slice_s,
            inner_s=slice_s,
            last_s=slice_s,
            shares=Shares([(n, memory_receive_s, seconds, memory_send_s) for n, seconds in enumerate(attention_s)]),
            **times,
        ),
    )


def play(cluster: VirtualCluster) -> list[tuple[float, int, int, float, float]]:
    finished = []
    while (done := cluster.advance(math.inf)) is not None:
        finished.append(done)
    return finished


@given(st.integers(1, 6), st.integers(2, 30))
def test_rotation_with_equal_times_is_the_schedule_and_leaves_no_bubble(replicas: int, attentions: int) -> None:
    """Slices n - 1 times as long as attentions, lanes let in one tick after another (Lamina, section 4.3)."""
    pipeline = Pipeline(replicas + 1, replicas, rotates=True)
    cluster = VirtualCluster(replicas, 1, pipeline.lanes, 0.0, 100_000)
    for lane in range(pipeline.lanes):
        submit(cluster, pipeline, lane, float(lane), attentions, float(replicas), [1.0])
    play(cluster)
    spans = cluster.spans()
    for lane in range(pipeline.lanes):
        begun = [begin for stage, _, own, begin, _ in spans if (stage, own) == ("slice", lane)]
        assert begun == [pipeline.tick(lane, turn) for turn in range(attentions + 1)]
    attended = sorted((begin, end) for stage, _, _, begin, end in spans if stage == "attention")
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(attended))  # no bubble


def account(
    pipeline: Pipeline, attentions: int, slice_s: list[float], attention_s: list[list[float]]
) -> list[list[float]]:
    """By lane, when its slices begin: a replica runs the slice that is due first, memory workers first come first."""
    begins: list[list[float]] = [[] for _ in range(pipeline.lanes)]
    events = [(0.0, order, "ready", lane) for order, lane in enumerate(range(pipeline.lanes))]
    due: list[list[tuple[int, int]]] = [[] for _ in range(pipeline.replicas)]
    running: list[bool] = [False] * pipeline.replicas
    served = [0.0] * len(attention_s[0])
    order = len(events)
    while events:
        now, _, what, lane = heapq.heappop(events)
        turn = len(begins[lane])
        if what == "ready":
            heapq.heappush(due[pipeline.replica(lane, turn)], (pipeline.tick(lane, turn), lane))
        else:
            running[pipeline.replica(lane, turn - 1)] = False
        if what == "ended" and turn <= attentions:
            for worker, seconds in enumerate(attention_s[lane]):
                served[worker] = max(served[worker], now) + seconds
            heapq.heappush(events, (max(served), order, "ready", lane))
            order += 1
        # Everything that happens at one moment happens before a replica chooses.
        if events and events[0][0] == now:
            continue
        for replica, heap in enumerate(due):
            if heap and not running[replica]:
                _, chosen = heapq.heappop(heap)
                running[replica] = True
                begins[chosen].append(now)
                heapq.heappush(events, (now + slice_s[chosen], order, "ended", chosen))
                order += 1
    return begins


@given(st.one_of(rotational, fixed), st.integers(1, 12), st.integers(1, 3), st.randoms(use_true_random=False))
def test_slices_begin_when_the_rules_say(pipeline: Pipeline, attentions: int, workers: int, random) -> None:
    """Times without ties, so that the order of what happens at one moment does not matter."""
    slice_s = [random.uniform(1, 9) for _ in range(pipeline.lanes)]
    # Equal on all workers: then a lane's answer comes when the pool has served it.
    attention_s = [[random.uniform(1, 9)] * workers for _ in range(pipeline.lanes)]
    expected = account(pipeline, attentions, slice_s, attention_s)
    cluster = VirtualCluster(pipeline.replicas, workers, pipeline.lanes, 0.0, 100_000)
    for lane in range(pipeline.lanes):
        submit(cluster, pipeline, lane, 0.0, attentions, slice_s[lane], attention_s[lane])
    finished = play(cluster)
    for lane in range(pipeline.lanes):
        begun = [begin for stage, _, own, begin, _ in cluster.spans() if (stage, own) == ("slice", lane)]
        assert begun == pytest.approx(expected[lane])
        (end,) = (time for time, own, *_ in finished if own == lane)
        assert end == pytest.approx(expected[lane][-1] + slice_s[lane])


def test_a_lanes_next_step_goes_on_where_the_last_slice_ran() -> None:
    pipeline = Pipeline(3, 2, rotates=True)
    cluster = VirtualCluster(2, 1, 3, 0.0, 1000)
    for turn in (0, 3):
        submit(cluster, pipeline, 1, 0.0, 3, 2.0, [1.0], turn)
    finished = play(cluster)
    assert [(time, number) for time, _, number, *_ in finished] == [(11.0, 0), (22.0, 1)]
    slices = [(worker, begin) for stage, worker, _, begin, _ in cluster.spans() if stage == "slice"]
    assert slices == [(1, 0.0), (0, 3.0), (1, 6.0), (0, 9.0), (0, 11.0), (1, 14.0), (0, 17.0), (1, 20.0)]


def test_messages_take_their_latency_and_their_time_on_nics() -> None:
    """Out: 3 + 5 (latency) + 2; attention 4; back: 1 + 5. The replies' 6 on the replica's NIC begin with the first."""
    pipeline = Pipeline(1, 1)
    cluster = VirtualCluster(1, 1, 1, 5.0, 100)
    submit(cluster, pipeline, 0, 0.0, 1, 10.0, [4.0], send_s=3.0, memory_receive_s=2.0, memory_send_s=1.0)
    ((end, *_),) = play(cluster)
    assert end == 10 + 3 + 5 + 2 + 4 + 1 + 5 + 10
    submit(cluster, pipeline, 0, 100.0, 1, 10.0, [4.0], send_s=3.0, memory_receive_s=2.0, receive_s=6.0)
    ((end, *_),) = play(cluster)
    assert end == 100 + 10 + 3 + 5 + 2 + 4 + 5 + 6 + 10
    assert cluster.replica_work(0) == (40.0, 6.0, 6.0)
    assert cluster.memory_work(0) == (8.0, 1.0, 4.0)


def test_a_chunk_keeps_the_replica_busy_while_its_keys_travel() -> None:
    pipeline = Pipeline(2, 1)
    cluster = VirtualCluster(1, 1, 2, 0.0, 100)
    submit(cluster, pipeline, 0, 0.0, 1, 1.0, [0.5], chunks_s=3.0)
    submit(cluster, pipeline, 1, 0.0, 1, 1.0, [0.5])
    play(cluster)
    begun = [(lane, begin) for stage, _, lane, begin, _ in cluster.spans() if stage == "slice"]
    # Lane 1's slice 0 waits for the chunk; after it, nothing was due before lane 0's slice 1.
    assert begun == [(0, 0.0), (1, 4.0), (0, 5.0), (1, 6.0)]


def test_a_lane_that_waits_for_nothing_keeps_its_replica_unless_another_is_due_first() -> None:
    """The replica attends itself, for a second after each slice: the older step ends before the other goes on."""
    cluster = VirtualCluster(1, 1, 2, 0.0, 100)
    for lane, begins in ((1, 0.0), (0, 0.5)):
        times = StepTimes(first_s=1, inner_s=1, last_s=1, chunks_s=1, shares=Shares([]))
        cluster.submit(lane, begins, lane, [0] * 3, 1 - lane, 0, times)
    assert [(end, lane) for end, lane, *_ in play(cluster)] == [(5.0, 1), (10.0, 0)]


def submit_plain(
    cluster: VirtualCluster, lane: int, number: int, stages: list[int], slice_s: float, behind: tuple[int, ...] = ()
) -> None:
    """A step whose attentions take a second."""
    times = StepTimes(first_s=slice_s, inner_s=slice_s, last_s=slice_s, shares=Shares([(0, 0.0, 1.0, 0.0)]))
    cluster.submit(lane, 0.0, number, stages, 0, 1, times, behind)


@pytest.mark.parametrize(
    ("behind", "begun"),
    [((), [1, 3, 4, 9]), ((7,), [4, 5, 9, 10]), ((6,), [1, 3, 4, 9])],
    ids=["alone", "behind a slower chunk", "behind a step that has ended"],
)
def test_an_attention_waits_for_the_keys_of_an_earlier_chunk(behind: tuple[int, ...], begun: list[float]) -> None:
    """Lane 0's slices take 4 s and lane 1's 1 s, on replicas of their own: lane 0 stores K and V at 4 and 9 s."""
    cluster = VirtualCluster(2, 1, 2, 0.0, 100)
    submit_plain(cluster, 0, 7, [0, 0, 0], 4.0)
    submit_plain(cluster, 1, 8, [1, 1, 1], 1.0, behind)
    play(cluster)
    assert sorted(begin for stage, _, _, begin, _ in cluster.spans() if stage == "attention") == begun


def test_the_next_step_of_a_lane_begins_on_the_first_stage() -> None:
    """Two stages with a slice each: messages take 5 s, and so do the tokens drawn on their way back."""
    cluster = VirtualCluster(2, 1, 1, 5.0, 100)
    for number in (0, 1):
        submit_plain(cluster, 0, number, [0, 1], 2.0)
    assert [(end, number) for end, _, number, *_ in play(cluster)] == [(15.0, 0), (35.0, 1)]
    slices = [(worker, begin) for stage, worker, _, begin, _ in cluster.spans() if stage == "slice"]
    assert slices == [(0, 0.0), (1, 13.0), (0, 20.0), (1, 33.0)]


def test_what_cannot_be_run_is_refused() -> None:
    cluster = VirtualCluster(1, 1, 1, 0.0)
    for replicas, memories in (([0], 1), ([0, 1], 1), ([0, 0], 2)):
        with pytest.raises(ValueError, match="a step n"):
            times = StepTimes(first_s=1, inner_s=1, last_s=1, shares=Shares([(memories - 1, 1, 1, 1)]))
            cluster.submit(0, 0.0, 0, replicas, 0, 1, times)
