"""Which workers are given up, and when an epoch has ended."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.control.messages import EpochEnded
from lamina.core.errors import TransportError
from lamina.core.pipeline import Pipeline
from lamina.core.steps import DecodeRows, KvMove, StepPlan
from lamina.core.topology import Epoch, Member, Topology
from lamina.engine import losses
from lamina.engine.losses import Complaints, Ending, Watch, blamed

FIRST = Epoch(7, 1)
MEMBERS = (
    Member("compute0", "compute", "cpu", "here"),
    Member("compute1", "compute", "cpu", "here"),
    Member("memory0", "memory", "cpu", "here", 50),
    Member("memory1", "memory", "cpu", "there", 60),
)
TOPOLOGY = Topology(FIRST, MEMBERS, Pipeline(3, 2, rotates=True))
LATE = losses.ACKNOWLEDGE_S + 1


def test_an_epoch_has_ended_once_all_have_dropped_it_and_heard_each_other() -> None:
    ending = Ending(TOPOLOGY, 0.0, 0.0)
    for name in ("compute0", "compute1", "memory0"):
        assert not ending.on_epoch_ended(name, EpochEnded(FIRST, ["memory1"]))
    assert not ending.on_epoch_ended("memory1", EpochEnded(FIRST, []))
    assert not ending.on_epoch_ended("compute0", EpochEnded(FIRST, []))
    assert not ending.on_epoch_ended("memory0", EpochEnded(FIRST, []))
    assert not ending.on_epoch_ended("compute1", EpochEnded(Epoch(7, 0), [])), "of an earlier epoch"
    assert ending.on_epoch_ended("compute1", EpochEnded(FIRST, []))
    assert not ending.overdue(0.0)


def test_a_worker_that_does_not_answer_is_given_up_and_not_those_that_wait_for_it() -> None:
    ending = Ending(TOPOLOGY, 0.0, 0.0)
    for name in ("compute0", "compute1", "memory0"):
        ending.on_epoch_ended(name, EpochEnded(FIRST, ["memory1"]))
    assert not ending.overdue(LATE - 2)
    assert ending.overdue(LATE).keys() == {"memory1"}


def test_of_two_that_do_not_reach_each_other_only_the_one_in_more_pairs_is_given_up() -> None:
    ending = Ending(TOPOLOGY, 0.0, 0.0)
    for name, missing in (("compute0", ["memory0"]), ("compute1", ["memory0"]), ("memory0", ["compute0"])):
        ending.on_epoch_ended(name, EpochEnded(FIRST, missing))
    ending.on_epoch_ended("memory1", EpochEnded(FIRST, []))
    assert ending.overdue(LATE) == {"memory0": "what it sends has not reached compute0, compute1 for 61 s"}


def test_a_complaint_counts_once_it_is_old_and_both_are_members() -> None:
    complaints = Complaints()
    complaints.report("compute0", "memory1", "no route", 10.0)
    assert complaints.due(TOPOLOGY, 11.0) is None
    assert complaints.due(TOPOLOGY, 13.0) == ("memory1", "compute0: no route")
    complaints.keep_members(TOPOLOGY.without(["memory1"]))
    assert complaints.due(TOPOLOGY, 99.0) is None
    complaints.report("engine", "memory0", "gone", 0.0)
    assert complaints.due(TOPOLOGY, 9.0) == ("memory0", "engine: gone")


@given(st.sampled_from(["compute0", "compute1", "memory0", "memory1"]), st.data())
def test_a_worker_whose_network_fails_is_found_among_those_that_complain(broken: str, data: st.DataObject) -> None:
    """Whoever of each pair complains first."""
    others = [member.name for member in MEMBERS if member.name != broken]
    pairs = [(broken, one) if data.draw(st.booleans()) else (one, broken) for one in others]
    assert blamed(pairs, TOPOLOGY) == broken


def test_the_last_compute_worker_is_not_given_up_for_a_link_to_one_of_several_memory_workers() -> None:
    alone = TOPOLOGY.without(["compute1"])
    for pairs in (
        [("compute0", "memory0")],
        [("memory0", "compute0")],
        [("memory0", "compute0"), ("engine", "compute0")],
    ):
        assert blamed(pairs, alone) == "memory0"
    assert blamed([("compute0", "memory0")], alone.without(["memory1"])) == "memory0"


@pytest.mark.parametrize("pair", [("compute0", "compute1"), ("compute1", "compute0")])
def test_of_two_instances_the_one_that_does_not_answer_is_given_up(pair: tuple[str, str]) -> None:
    """Of two machines with a single link, neither has more complaints."""
    instances = tuple(Member(f"compute{number}", "compute", "remote", f"host{number}", 60) for number in (0, 1))
    topology, complaints = Topology(FIRST, instances, Pipeline(2, 2)), Complaints()
    complaints.report(*pair, "nothing listens", 10.0)
    for silent in ("compute0", "compute1"):
        assert complaints.due(topology, 13.0, {silent}) == (silent, f"{pair[0]}: nothing listens")
    last = topology.without(["compute1"]).joined(
        [Member("prefill", "compute", "remote", "far")], Pipeline(2, 2, prefill=1)
    )
    complaints.report("prefill", "compute0", "nothing listens", 10.0)
    complaints.keep_members(last)
    assert complaints.due(last, 13.0, {"compute0"}) is None, "its silence decides: no other worker has the KV"
    assert complaints.due(last, 13.0, ()) == ("prefill", "prefill: nothing listens")


def test_a_topology_without_a_worker_is_the_next_epoch() -> None:
    after = TOPOLOGY.without(["compute0"])
    assert after.epoch == Epoch(7, 2) > FIRST and after.computes == ("compute1",)
    assert after.pipeline == Pipeline(2, 1, rotates=True)
    assert after.without(["memory0"]).capacities == {"memory1": 60}
    assert after.without(["memory0"]).pipeline == after.pipeline
    assert after.lacks(["compute1"]) == "compute" and after.lacks(["memory0", "memory1"]) == "memory"


def watching(silent: Mapping[str, float] = MappingProxyType({})) -> Watch:
    control, workers, turn = Mock(), Mock(), Mock()
    control.liveness.awake_s = 0.0
    control.liveness.suspects = control.liveness.lost = lambda: silent
    workers.ended = lambda: {}
    return Watch(control, workers, turn, TOPOLOGY)


@pytest.mark.parametrize("complained", ["before", "after"])
def test_a_member_that_cannot_reach_a_worker_as_it_leaves_ends_the_epoch(complained: str) -> None:
    """The member has stopped its steps, and only the next epoch lets it run them again."""
    left = TOPOLOGY.left(["memory1"], TOPOLOGY.pipeline)
    watch = watching()
    if complained == "before":
        watch.complain("compute0", "memory1", "no route")
        assert not watch.lost()
    watch.apply_topology(left)
    if complained == "after":
        watch.complain("engine", "memory1", "no route")
        assert not watch.lost()
        watch.complain("compute0", "memory1", "no route")
    (worker,), (why,) = zip(*watch.lost().items(), strict=True)
    assert worker == "memory1" and "as it left: compute0: no route" in str(why)
    watch.apply_topology(left.without(["memory1"]))
    watch.complain("compute1", "memory1", "no route")
    assert not watch.lost(), "all members have stopped their steps for the new epoch"


def test_a_move_that_stalls_is_blamed_on_the_workers_of_the_part_that_has_not_arrived() -> None:
    """Checks a move from two ranks, of which one part has arrived."""
    watch = watching()
    parts = [KvMove(1, 9, source, "memory1", 0, 5, 3, (0, 1)) for source in ("compute0", "compute1")]
    watch.began(StepPlan(1, 0, 0, [], [], [], [], DecodeRows([], [], []), moves=parts))
    going: Any = watch._turn
    going.in_flight, going.scheduler.moves.numbers = {}, [1]
    watch.moved(1, "compute0", "memory1")
    watch._control.liveness.awake_s = losses.MOVE_TIMEOUT_S + 1
    with pytest.raises(TransportError, match="of sequence 9 from compute1"):
        watch.raise_if_stalled()


def test_a_silent_worker_that_is_no_member_is_not_a_loss() -> None:
    """Such a worker is joining or has left: nothing of the epoch depends on it."""
    watch = watching({"memory1": 14.0, "memory2": 14.0})
    assert watch.lost().keys() == {"memory1"}
