"""Which pool each worker is in, while replicas join, leave, are lost and change their role."""

from hypothesis import given
from hypothesis import strategies as st

from lamina.core.pipeline import Pipeline, Shape
from lamina.core.topology import FIRST, Member, Topology

MOST = 6  # replicas


@given(st.integers(0, 2), st.integers(1, 3), *(st.integers(1, 3) for _ in range(4)))
def test_places_are_those_of_the_workers_listed_by_replica_stage_and_rank(
    prefills: int, others: int, ranks: int, stages: int, early_ranks: int, early_stages: int
) -> None:
    shapes = [Shape(ranks, stages)] * others
    early = Shape(early_ranks, early_stages)
    shapes[:0] = [early] * prefills
    places = [
        ("prefill" if replica < prefills else "decode" if prefills else "both", replica, stage, rank, shape)
        for replica, shape in enumerate(shapes)
        for stage in range(shape.stages)
        for rank in range(shape.ranks)
    ]
    pipeline = Pipeline(3 * len(shapes), len(shapes), prefill=prefills, shape=shapes[-1], prefill_shape=early)
    held = {number for number, (role, _, stage, *_) in enumerate(places) if role != "prefill" and not stage}
    members = [Member(f"w{number}", "compute", "cpu", "", 10 * (number in held)) for number in range(len(places))]
    topology = Topology(FIRST, (*members, Member("memory0", "memory", "cpu", "", 7)), pipeline)
    assert topology.places == {
        f"w{number}": {
            "role": role,
            "replica": str(replica),
            "stage": str(stage) if shape.stages > 1 else "",
            "rank": str(rank) if shape.ranks > 1 else "",
        }
        for number, (role, replica, stage, rank, shape) in enumerate(places)
    }
    slots = {f"w{number}": 10 for number, (role, *_) in enumerate(places) if role != "prefill"}
    assert topology.slabs == slots | {"memory0": 7}


@given(st.data(), st.integers(1, 3))
def test_a_worker_stays_in_its_pool_until_its_replica_changes_the_role(data: st.DataObject, workers: int) -> None:
    """Compared with a dictionary of the pools, whatever happens to the others."""
    base = Pipeline(MOST, 2, shape=Shape(workers))
    members = [Member(f"compute{number}", "compute", "cpu", "") for number in range(2 * workers)]
    topology = Topology(FIRST, (*members, Member("memory0", "memory", "cpu", "", 9)), base)
    expected = {member.name: "compute" for member in members} | {"memory0": "memory"}

    def pipeline(prefill: int, compute: int) -> Pipeline:
        sizes = topology.sizes
        prefills = sizes["prefill"] // workers + prefill
        return base.with_replicas(max(1, prefills + sizes["compute"] // workers + compute), prefills)

    for number in range(data.draw(st.integers(1, 8))):
        computes = topology.computes
        what = data.draw(st.sampled_from(["turn", "join", "lose"] if len(computes) > workers else ["turn"]))
        name = data.draw(st.sampled_from(computes))
        replica = topology.whole_replicas([name])
        if what == "turn":
            turned = 1 if expected[name] == "compute" else -1
            topology = topology.turned(replica, pipeline(turned, -turned))
            expected |= dict.fromkeys(replica, "prefill" if turned == 1 else "compute")
        elif what == "lose":
            topology = topology.without(replica)
            expected = {one: pool for one, pool in expected.items() if one not in replica}
        elif len(computes) < MOST * workers:
            into = data.draw(st.sampled_from(["prefill", "compute"]))
            joiners = [Member(f"later{number}-{rank}", "compute", "cpu", "") for rank in range(workers)]
            topology = topology.joined(joiners, pipeline(into == "prefill", into == "compute"))
            expected |= {joiner.name: into for joiner in joiners}
        assert {one: topology.pool_of(one) for one in topology.names} == expected
        assert topology.prefills == topology.computes[: len(topology.prefills)]
        assert topology.sizes == {pool: [*expected.values()].count(pool) for pool in ("prefill", "compute", "memory")}
        grouped = [topology.computes[at : at + workers] for at in range(0, len(topology.computes), workers)]
        assert {frozenset(one) for one in grouped} == {topology.whole_replicas([one]) for one in topology.computes}
        for lane in range(topology.pipeline.lanes):
            (number_of,) = topology.pipeline.replicas_of(lane)
            pools = {expected[one] for one in grouped[number_of]}
            role = topology.pipeline.role(lane)
            if {"prefill", "compute"} <= {*expected.values()}:
                assert pools == {"prefill" if role == "prefill" else "compute"}
