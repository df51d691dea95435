"""What an engine that takes over workers keeps: what compute and memory workers agree on."""

from unittest.mock import Mock

import pytest

from lamina.cluster.bringup import Saved, kept_of
from lamina.control.messages import Computed, Recalled
from lamina.core.errors import TransportError
from lamina.core.pipeline import Pipeline, Shape
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import Segment
from lamina.schedule.limits import Limits

MEMBERS = [Member(f"compute{number}", "compute", "cpu", "") for number in range(2)]
MEMBERS += [Member(f"memory{number}", "memory", "cpu", "", 100) for number in range(2)]
TOPOLOGY = Topology(FIRST, tuple(MEMBERS), Pipeline(2, 2))


def computed(tokens: int, *segments: Segment) -> Computed:
    return Computed("request", 0, 7, tokens, list(segments))


def segment(worker: str, heads: tuple[int, int], start: int, stop: int | None) -> Segment:
    return Segment(7, worker, heads, (start, stop))


WHOLE = segment("memory0", (0, 4), 0, None)
HALVES = [segment("memory0", (0, 2), 0, None), segment("memory1", (2, 4), 0, None)]
RANGES = [segment("memory0", (0, 4), 0, 30), segment("memory1", (0, 4), 30, None)]


@pytest.mark.parametrize(
    ("report", "held", "tokens"),
    [
        (computed(40, WHOLE), {"memory0": [(0, 0, 4, 42)]}, 40),  # two more were planned
        (computed(40, WHOLE), {"memory0": [(0, 0, 4, 39)]}, 0),
        (computed(40, WHOLE), {"memory0": [(0, 0, 2, 40)]}, 0),  # of other heads
        (computed(40, WHOLE), {}, 0),
        (computed(40, *HALVES), {"memory0": [(0, 0, 2, 40)], "memory1": [(0, 2, 4, 40)]}, 40),
        (computed(40, *HALVES), {"memory0": [(0, 0, 2, 40)]}, 0),
        (computed(40, *RANGES), {"memory0": [(0, 0, 4, 30)], "memory1": [(30, 0, 4, 10)]}, 40),
        (computed(40, *RANGES), {"memory0": [(0, 0, 4, 30)], "memory1": [(30, 0, 4, 9)]}, 30),
        (computed(40, *RANGES), {"memory0": [(0, 0, 4, 30)]}, 30),
        (computed(40, *RANGES), {"memory1": [(30, 0, 4, 10)]}, 0),
        (computed(25, *RANGES), {"memory0": [(0, 0, 4, 30)]}, 25),  # nothing of the second has been computed
        (computed(40, segment("memory2", (0, 4), 0, None)), {"memory2": [(0, 0, 4, 40)]}, 0),  # no member
    ],
)
def test_the_longest_beginning_whose_heads_and_tokens_are_all_there_is_kept(
    report: Computed, held: dict[str, list[tuple[int, int, int, int]]], tokens: int
) -> None:
    reports = {"compute0": Recalled([report]), **{name: Recalled(held={7: each}) for name, each in held.items()}}
    found = kept_of(reports, TOPOLOGY)
    assert [one.tokens for one in found] == [tokens] * (tokens > 0)
    assert all(one.tokens[0] < tokens for each in found for one in each.segments)


def test_of_several_reports_the_longest_counts_and_of_lost_workers_none() -> None:
    """Chunks of a prompt may have run on both replicas."""
    held = {"memory0": Recalled(held={7: [(0, 0, 4, 90)]})}
    both = {"compute0": Recalled([computed(20, WHOLE)]), "compute1": Recalled([computed(60, WHOLE)])} | held
    assert [one.tokens for one in kept_of(both, TOPOLOGY)] == [60]
    assert [one.tokens for one in kept_of(both, TOPOLOGY.without(["compute1"]))] == [20]


@pytest.mark.parametrize(("there", "tokens"), [(42, 40), (39, 0), (0, 0)])
def test_of_local_memory_what_all_stages_of_the_replica_have_is_kept(there: int, tokens: int) -> None:
    """Segments name the first stage; the last one reports what was computed."""
    stages = Member("compute0", "compute", "cpu", "", 100), Member("compute1", "compute", "cpu", "")
    topology = Topology(FIRST, stages, Pipeline(2, 1, shape=Shape(1, 2, (0, 2))))
    report = computed(40, segment("compute0", (0, 4), 0, None))
    held = {7: [(0, 0, 4, there)]} if there else {}
    reports = {"compute0": Recalled(held={7: [(0, 0, 4, 40)]}), "compute1": Recalled([report], held)}
    assert [one.tokens for one in kept_of(reports, topology)] == [tokens] * (tokens > 0)
    del reports["compute0"]
    assert not kept_of(reports, topology)


def test_nothing_is_taken_over_once_a_role_has_no_worker_left() -> None:
    fabric = Mock(links={}, offers={}, greetings=dict.fromkeys(TOPOLOGY.names))
    saved = Saved.from_topology(fabric, TOPOLOGY.without(["compute0"]), TOPOLOGY.sizes, Limits(4, 64, 100))
    assert saved.kinds() == {"compute": {"compute1": "cpu"}, "memory": {"memory0": "cpu", "memory1": "cpu"}}
    saved = Saved.from_topology(fabric, TOPOLOGY.without(["compute0", "compute1"]), TOPOLOGY.sizes, Limits(4, 64, 100))
    with pytest.raises(TransportError, match="no compute worker was left"):
        saved.kinds()
