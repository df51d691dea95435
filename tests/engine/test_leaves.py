"""Which workers may join and leave, and how often lost ones are replaced."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.cluster.conversations import Wish, Workers
from lamina.cluster.pool import REMOTE, PoolChange
from lamina.control.agent_messages import Start
from lamina.control.liveness import MOST_WAIT_S, WINDOW_S, Restarts
from lamina.control.messages import Change, KvMoved, Release
from lamina.control.sockets import ControlServer
from lamina.core.errors import ConfigError, TransportError
from lamina.core.heads import HeadShards
from lamina.core.pipeline import Pipeline, Shape
from lamina.core.steps import DecodeRows, KvMove, StepPlan
from lamina.core.topology import FIRST, Member, Pool, Role, Topology, may_run
from lamina.dataplane.leases import ArenaPlan
from lamina.engine.changes import Joiner, JoinStage, Leaves
from lamina.engine.losses import MOVE_TIMEOUT_S
from lamina.engine.members import Members
from lamina.engine.pools import Pools, Resize
from lamina.engine.replacements import RETRY_S
from lamina.kv.placement import Placement
from lamina.kv.stripes import placement
from lamina.schedule.limits import Limits
from lamina.schedule.turn import Turn
from lamina.transport.arena import PAGE
from tests.support.bare_cluster import bare_cluster
from tests.support.schedules import plan_of, request, scheduler

TOPOLOGY = Topology(
    FIRST,
    (
        Member("compute0", "compute", "cpu", ""),
        Member("memory0", "memory", "cpu", "", 60),
        Member("memory1", "memory", "cpu", "", 30),
    ),
    Pipeline(1, 1),
)


def leaving(*prompts: int) -> Leaves:
    """Of a scheduler whose requests, with these prompts and one more token each, are all on ``memory0``."""
    under_test = scheduler({"memory0": 60, "memory1": 30})
    for number, prompt in enumerate(prompts):
        assert under_test.submit(request(str(number), prompt, max_tokens=2)).lane < 0
        assert plan_of(under_test).admitted[0].segments[0].worker == "memory0"
    return Leaves(cast(ControlServer, None), cast(Workers, None), under_test)


def test_a_memory_worker_stays_while_the_others_lack_room_for_what_it_holds_or_may_come_to() -> None:
    leaving(20).validate_leave(["memory0"], TOPOLOGY)
    leaving(20, 20).validate_leave(["memory1"], TOPOLOGY)
    with pytest.raises(ConfigError, match="memory0 holds 40 tokens, and the memory workers that stay have room for 30"):
        leaving(20, 20).validate_leave(["memory0"], TOPOLOGY)
    with pytest.raises(ConfigError, match="may need 31 KV tokens, and the memory workers that stay hold 30"):
        leaving(30).validate_leave(["memory0"], TOPOLOGY)


@given(st.integers(0, 5), st.lists(st.floats(0.0, 2 * WINDOW_S), max_size=20))
def test_replacements_are_bounded_and_wait_longer_and_longer(most: int, losses: list[float]) -> None:
    restarts, allowed = Restarts(most), list[float]()
    for now in sorted(losses):
        recent = [at for at in allowed if now - at < WINDOW_S]
        at = restarts.next(now)
        assert (at is None) == (len(recent) >= most)
        if at is not None:
            assert at == now + (min(2.0 ** (len(recent) - 1), MOST_WAIT_S) if recent else 0.0)
            allowed.append(now)


def pools_of(
    topology: Topology,
    turn: Turn | None = None,
    is_drained: bool = True,
    wishes: Sequence[Wish] = (),
    agents: Sequence[Pool] = (),
    wanted: Mapping[Pool, int] | None = None,
) -> Pools:
    """Return pools whose launcher starts nothing, but for giving workers to agents.

    Args:
        is_drained: Whether memory workers are empty at once.
        agents: Pools of the agents of other machines that wait for a worker; a worker that starts removes one.
        wanted: Target sizes of an earlier engine; those of ``topology`` if None.
    """
    if turn is None:
        turn = Mock()
        turn.in_flight, turn.scheduler.requests = {}, []
        turn.scheduler.is_drained = lambda name: is_drained
        turn.scheduler.placement = Placement(topology.capacities)
    plan = Mock(compute_setup=Mock(local=bool(topology.local)), start_s=60.0, limits=Limits(8, 64, 60))
    control, workers, fabric = Mock(), Mock(), Mock(plan=plan)
    fabric.arenas, fabric.memory_setup.attentions = {}, [Mock(), Mock()]
    fabric.arena = lambda own, pipeline, computes, memories: Mock(leases={PAGE: computes + memories - 1})
    fabric.plan.config.prefill, fabric.plan.config.compute = None, f"cpu:{len(topology.computes)}"
    fabric.launcher.default_kind = lambda pool: "cpu"
    waiting = agents if isinstance(agents, list) else [*agents]

    def start(worker: Start) -> None:
        offered = next((one for one in waiting if may_run(one, worker.pool)), None)
        if worker.kind == REMOTE and offered is not None:
            waiting.remove(offered)

    fabric.launcher.start.side_effect = start
    fabric.launcher.offers = lambda: [*waiting]
    control.liveness.awake_s = 0.0
    control.liveness.lost = workers.ended = lambda: {}
    workers.wishes = lambda: wishes
    wanted = topology.sizes if wanted is None else wanted
    return Pools(control, workers, fabric, topology, turn, lambda following: 1, lambda host: 0, 8, wanted)


def test_a_worker_that_has_left_is_not_replaced_when_its_loss_ends_the_epoch() -> None:
    pools = pools_of(TOPOLOGY)
    pools.resize({"memory": PoolChange(-1, "")}, Resize())
    pools.turn(steady=True)
    (leaver,) = TOPOLOGY.names - pools.topology.names
    assert pools.states[leaver] == "parting"
    following = pools.topology.without([leaver])
    pools.on_workers_lost({leaver: TransportError("killed")}, following)
    pools.turn(steady=False)
    assert pools.topology == following and pools.states == {leaver: "parting"}
    assert pools.wanted["memory"] == 1 and not pools.starts("memory")


def test_an_emptied_worker_stays_while_the_other_pool_has_none() -> None:
    """A topology has members of both roles whenever one leaves: the replacement enters first."""
    pools = pools_of(TOPOLOGY)
    pools.resize({"memory": PoolChange(-1, "")}, Resize())
    pools.on_workers_lost({"compute0": TransportError("killed")}, TOPOLOGY.without(["compute0"]))
    pools.turn(steady=True)
    assert pools.topology.memories == TOPOLOGY.memories and pools.states["memory0"] == "draining"


def test_the_last_replica_stays_though_it_only_runs_prompts() -> None:
    """All replicas that decode are lost, and their replacement enters first."""
    computes = tuple(Member(f"compute{number}", "compute", "cpu", "") for number in range(2))
    topology = Topology(FIRST, (*computes, *TOPOLOGY.members[1:]), Pipeline(2, 2, prefill=1))
    pools = pools_of(topology)
    lost = topology.without(["compute1"])
    pools.on_workers_lost({"compute1": TransportError("killed")}, lost)
    pools.resize({"prefill": PoolChange(-1, "")}, Resize())
    pools.turn(steady=True)
    assert pools.topology == lost and pools.states["compute0"] == "draining"


def test_a_change_that_has_been_asked_for_cannot_be_cancelled() -> None:
    """Its result would then be set a second time, which ends the engine's thread."""
    resize = Resize()
    assert not resize.future.cancel()
    pools_of(TOPOLOGY).resize({"memory": PoolChange(2, is_size=True)}, resize)
    assert resize.future.result(0) == []


def room_for(links: int) -> ArenaPlan:
    return ArenaPlan(0, stages=False, pool_nbytes=0, leases={PAGE: links})


def test_pools_grow_no_further_than_a_memory_worker_has_room_for_links() -> None:
    """Lost workers could not be replaced once others have taken the room of their links."""
    pools = pools_of(TOPOLOGY)
    pools._fabric.arenas.update({"memory0": room_for(3), "memory1": room_for(5)})
    with pytest.raises(ConfigError, match="memory0 has room for 3 links of 4096 bytes, and would need 4"):
        pools.resize({"memory": PoolChange(2, "")}, Resize())
    pools.resize({"memory": PoolChange(1, "")}, Resize())
    assert pools.wanted["memory"] == 3


def test_an_agent_whose_worker_would_take_the_room_of_lost_ones_is_told_so() -> None:
    pools = pools_of(TOPOLOGY, agents=["memory"])
    pools._fabric.arenas.update({"memory0": room_for(2)})
    pools.turn(steady=True)
    assert pools.coming("memory") == 0 and pools.wanted["memory"] == 2
    ((pool, why),) = [call.args for call in cast(Mock, pools._fabric.launcher).refuse_offers.mock_calls]
    assert pool == "memory" and why.startswith("memory0 has room for 2 links of 4096 bytes, and would need 3")


def test_a_replica_that_leaves_stays_as_a_whole_once_the_other_one_is_lost() -> None:
    computes = tuple(Member(f"compute{number}", "compute", "cpu", "") for number in range(4))
    topology = Topology(FIRST, (*computes, *TOPOLOGY.members[1:]), Pipeline(2, 2, shape=Shape(2)))
    pools, resize = pools_of(topology), Resize()
    pools.resize({"compute": PoolChange(-2, "")}, resize)
    assert pools.states == {"compute2": "draining", "compute3": "draining"}
    lost = dict.fromkeys(("compute0", "compute1"), TransportError("killed"))
    pools.on_workers_lost(lost, topology.without([*lost]))
    assert not pools.states and pools.topology.computes == ("compute2", "compute3")
    assert pools.wanted["compute"] == 4 and "it stays" in str(resize.future.exception(0))


def test_nobody_leaves_while_a_joiner_is_linked_and_has_not_entered() -> None:
    joins = pools_of(TOPOLOGY)._joins
    assert not joins.is_linking
    for stage, links in zip(JoinStage, (False, False, True, True), strict=True):
        joins._joiners[:] = [Joiner(("memory2",), "memory", 0.0, Mock(), Mock(), stage)]
        assert joins.is_linking == links


def test_a_linked_joiner_whose_process_has_ended_does_not_enter() -> None:
    joins = pools_of(TOPOLOGY)._joins
    joiner = Joiner(("memory2",), "memory", 0.0, Mock(), Mock(), JoinStage.LINKED)
    joins._joiners[:] = [joiner]
    assert joins.linked is joiner
    joiner.exited_at = 0.0
    assert joins.linked is None and joins.is_linking


def test_a_worker_that_asked_to_leave_stays_once_the_other_one_is_lost() -> None:
    pools = pools_of(TOPOLOGY, is_drained=False, wishes=[Wish("memory1")])
    pools.turn(steady=True)
    assert pools.states == {"memory1": "draining"}
    assert pools.wanted["memory"] == 1, "it is not missed"
    pools.on_workers_lost({"memory0": TransportError("killed")}, TOPOLOGY.without(["memory0"]))
    assert not pools.states and pools.wanted["memory"] == 2


def test_pools_are_to_have_the_workers_that_joined_from_other_machines_and_not_those_that_left() -> None:
    """Or an engine that takes over would start workers for those that left, and end those that joined."""
    wishes = list[Wish]()
    pools = pools_of(TOPOLOGY, wishes=wishes, agents=["memory"])
    pools.turn(steady=True)
    assert pools.coming("memory") == 1 and pools.wanted["memory"] == 3
    (joiner,) = pools._joins._joiners
    pools._joins._fail(joiner, TransportError("its machine has gone"))
    assert pools.coming("memory") == 0 and pools.wanted["memory"] == 2
    wishes[:] = [Wish("memory0")]
    pools.turn(steady=True)
    assert pools.wanted["memory"] == 1 and pools.topology.memories == ("memory1",)


def test_lost_workers_are_still_missed_after_a_worker_of_another_machine_has_failed_to_join() -> None:
    pools = pools_of(TOPOLOGY, agents=["memory"], wanted={**TOPOLOGY.sizes, "memory": 3})
    pools._replacements.pop_due(0.0)  # an engine that replaces none
    pools.turn(steady=True)
    (joiner,) = pools._joins._joiners
    pools._joins._fail(joiner, TransportError("its machine has gone"))
    assert pools.coming("memory") == 0 and pools.wanted["memory"] == 3


@pytest.mark.parametrize("capacity", [0, 9])
def test_a_worker_of_another_machine_joins_the_pool_that_it_is_for(capacity: int) -> None:
    """But the prefill pool only where other replicas can decode what it has computed: not with local memory. There the
    machine is told why."""
    compute = Member("compute0", "compute", "cpu", "", capacity)
    topology = Topology(FIRST, (compute, *TOPOLOGY.members[1:]), TOPOLOGY.pipeline)
    pools = pools_of(topology, agents=["prefill"])
    pools.turn(steady=True)
    assert (pools.coming("prefill"), pools.coming("compute")) == ((0, 0) if capacity else (1, 0))
    assert pools.wanted["prefill"] == pools.coming("prefill")
    refused = [call.args for call in cast(Mock, pools._fabric.launcher).refuse_offers.mock_calls]
    assert [(pool, "start with only memory workers" in why) for pool, why in refused] == [("prefill", True)] * (
        capacity > 0
    )


def test_a_worker_that_joins_in_the_place_of_a_lost_one_is_none_too_many() -> None:
    topology = TOPOLOGY.joined([Member("memory2", "memory", "remote", "", 30)], TOPOLOGY.pipeline)
    pools = pools_of(topology, agents=["memory"])
    pools.on_workers_lost({"memory2": TransportError("killed")}, topology.without(["memory2"]))
    pools.turn(steady=True)
    assert pools.coming("memory") == 1 and pools.wanted["memory"] == 3


def test_a_lost_replica_of_another_machine_is_replaced_by_an_agent_that_waits_already() -> None:
    agents = list[Pool]()
    topology = TOPOLOGY.joined([Member("compute1", "compute", "remote", "")], Pipeline(2, 2))
    pools = pools_of(topology, agents=agents)
    pools.on_workers_lost({"compute1": TransportError("killed")}, topology.without(["compute1"]))
    pools.turn(steady=True)
    assert pools.coming("compute") == 0
    agents[:] = ["compute"]
    pools.turn(steady=True)
    assert pools.coming("compute") == 1 and pools.wanted["compute"] == 2


def test_a_replica_of_another_machine_that_cannot_start_is_not_started_again_at_once() -> None:
    topology = TOPOLOGY.joined([Member("compute1", "compute", "remote", "")], Pipeline(2, 2))
    pools = pools_of(topology, agents=["compute"])
    launcher = cast(Mock, pools._fabric.launcher)
    launcher.start.side_effect = TransportError("no room")
    pools.on_workers_lost({"compute1": TransportError("killed")}, topology.without(["compute1"]))
    for awake_s, tries in ((0.0, 1), (RETRY_S / 2, 1), (RETRY_S, 2)):
        cast(Mock, pools._control).liveness.awake_s = awake_s
        pools.turn(steady=True)
        assert launcher.start.call_count == tries


def test_a_pool_grows_no_further_than_its_lost_workers_leave_room() -> None:
    """Lanes rotate over at most as many replicas as the model has slices: three."""
    computes = tuple(Member(f"compute{number}", "compute", "cpu", "") for number in range(2))
    topology = Topology(FIRST, (*computes, *TOPOLOGY.members[1:]), Pipeline(3, 2, rotates=True))
    pools = pools_of(topology)
    pools.on_workers_lost({"compute1": TransportError("killed")}, topology.without(["compute1"]))
    with pytest.raises(ConfigError, match="too few for 4 replicas"):
        pools.resize({"compute": PoolChange(2, "")}, Resize())
    pools.resize({"compute": PoolChange(1, "")}, Resize())


def test_a_pool_gets_a_size_whatever_joins_leaves_or_turns_meanwhile() -> None:
    computes = tuple(Member(f"compute{number}", "compute", "cpu", "") for number in range(3))
    topology = Topology(FIRST, (*computes, *TOPOLOGY.members[1:]), Pipeline(3, 3))
    pools = pools_of(topology, is_drained=False)
    sizes = {pool: PoolChange(size, is_size=True) for pool, size in (("prefill", 1), ("compute", 2), ("memory", 4))}
    for _ in range(2):  # the second time, nothing is left to do
        resize = Resize()
        pools.resize(cast(Mapping[Pool, PoolChange], sizes), resize)
        assert pools.states | dict.fromkeys(pools._joins.stages, "joins") == {
            "compute2": "turning",
            "memory2": "joins",
            "memory3": "joins",
        }
        assert pools.wanted == {"prefill": 1, "compute": 2, "memory": 4}
    assert resize.future.result(0) == []
    pools.resize({"memory": PoolChange(3, is_size=True)}, Resize())
    assert [*pools.states.values()].count("draining") == 1 and pools.wanted["memory"] == 3
    with pytest.raises(ConfigError, match="the compute pool has 2, of which 1 must stay: 2 cannot leave"):
        pools.resize({"compute": PoolChange(0, is_size=True)}, Resize())
    pools.turn(steady=True)
    pools.resize({"prefill": PoolChange(0, is_size=True), "compute": PoolChange(3, is_size=True)}, Resize())
    pools.turn(steady=True)
    assert pools.topology.sizes["prefill"] == 0 and pools.topology.sizes["compute"] == 3


@pytest.mark.parametrize(
    ("wanted_compute", "wanted_memory", "leaving"),
    [(4, 1, ["memory1"]), (2, 2, ["compute2", "compute3"]), (4, 2, []), (0, 0, ["compute2", "compute3", "memory1"])],
)
def test_an_engine_that_takes_over_lets_workers_leave_that_were_to_leave(
    wanted_compute: int, wanted_memory: int, leaving: Sequence[str]
) -> None:
    """But never the last of a pool, and of a replica with several workers all or none."""
    computes = tuple(Member(f"compute{number}", "compute", "cpu", "") for number in range(4))
    topology = Topology(FIRST, (*computes, *TOPOLOGY.members[1:]), Pipeline(2, 2, shape=Shape(2)))
    turn = Turn(Limits(8, 64, 60), Placement(topology.capacities), topology.pipeline, attentions=2, kv_heads=4)
    turn.scheduler.placement.reserve_on("memory0", 5)
    wanted: dict[Pool, int] = {"prefill": 0, "compute": wanted_compute, "memory": wanted_memory}
    pools = pools_of(topology, turn, wanted=wanted)
    assert pools.states == dict.fromkeys(leaving, "draining")
    assert all(not pools.coming(pool) for pool in wanted)


def test_workers_stay_after_all_if_the_others_have_no_room_for_what_they_hold() -> None:
    turn = Turn(Limits(8, 64, 60), Placement(TOPOLOGY.capacities), TOPOLOGY.pipeline, attentions=2, kv_heads=4)
    for worker, tokens in (("memory0", 50), ("memory1", 20)):
        turn.scheduler.placement.reserve_on(worker, tokens)
    pools = pools_of(TOPOLOGY, turn, wanted={"prefill": 0, "compute": 1, "memory": 1})
    assert not pools.states and pools.wanted["memory"] == 2


def test_the_sizes_that_pools_are_to_have_are_saved_as_soon_as_they_change() -> None:
    """So that an engine that takes over in the middle of a change ends it."""
    pools, saved = pools_of(TOPOLOGY, is_drained=False), list[tuple[Topology, Mapping[Pool, int]]]()
    cluster = replace(bare_cluster(["compute0"], TOPOLOGY.capacities, [], TOPOLOGY.pipeline), fabric=pools._fabric)

    def save(topology: Topology, wanted: Mapping[Pool, int]) -> None:
        saved.append((topology, dict(wanted)))

    members = Members(pools._control, pools._workers, cluster, pools._turn, 8, save)
    assert members.pools is not None
    members.turn()
    assert [wanted["memory"] for _, wanted in saved] == [2]
    members.pools.resize({"memory": PoolChange(-1, "")}, Resize())
    for _ in range(3):
        members.turn()
    assert [wanted["memory"] for _, wanted in saved] == [2, 1]
    assert saved[0][0] == saved[1][0] == cluster.topology


def test_a_part_of_a_move_that_has_arrived_is_not_overdue() -> None:
    """The move is still under way, since another of its parts has not arrived."""
    pools = pools_of(TOPOLOGY)
    cluster = replace(bare_cluster(["compute0"], TOPOLOGY.capacities, [], TOPOLOGY.pipeline), fabric=pools._fabric)
    members = Members(pools._control, pools._workers, cluster, pools._turn, 8, lambda topology, wanted: None)
    move = KvMove(1, 9, "memory0", "memory1", 0, 5, 3, (0, 1))
    members.watch.began(StepPlan(1, 0, 0, [], [], [], [], DecodeRows([], [], []), moves=[move]))
    members.handle_message("memory1", KvMoved(1, "memory0"))
    turn, pools._control.liveness.awake_s = cast(Mock, pools._turn), MOVE_TIMEOUT_S + 1
    turn.in_flight, turn.scheduler.moves.numbers = {}, [1]
    members.watch.raise_if_stalled()


def test_workers_hear_of_released_sequences_before_a_member_leaves() -> None:
    """A sequence may have been moving from that member, which is empty because it was released."""
    pools = pools_of(TOPOLOGY)
    cluster = replace(bare_cluster(["compute0"], TOPOLOGY.capacities, [], TOPOLOGY.pipeline), fabric=pools._fabric)
    members = Members(pools._control, pools._workers, cluster, pools._turn, 8, lambda topology, wanted: None)
    members.recipients._forget("memory1", 7, 0.0)
    members._adopt(TOPOLOGY.left("memory0", TOPOLOGY.pipeline))
    sent = cast(Mock, pools._control).send.call_args_list
    told = [call.args[1] for call in sent if "memory1" in call.args[0]]
    assert told[0] == Release([7]) and isinstance(told[1], Change) and len(told) == 2


def test_pools_are_looked_at_in_every_turn_only_while_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, looks = pools_of(TOPOLOGY, is_drained=False), list[float]()
    pools._turn.is_paused = False
    cluster = replace(bare_cluster(["compute0"], TOPOLOGY.capacities, [], TOPOLOGY.pipeline), fabric=pools._fabric)
    members = Members(pools._control, pools._workers, cluster, pools._turn, 8, lambda topology, wanted: None)
    assert members.pools is not None
    clock = pools._control.liveness
    monkeypatch.setattr(members.pools, "turn", lambda steady: looks.append(clock.awake_s))

    def turns(*times: float) -> list[float]:
        looks.clear()
        for clock.awake_s in times:
            members.turn()
        return [*looks]

    assert turns(0.0, 0.01, 0.05, 0.11, 0.15, 0.3) == [0.0, 0.11, 0.3]
    members.pools.resize({"memory": PoolChange(-1, "")}, Resize())
    assert turns(0.31, 0.32) == [0.31, 0.32]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("prefill", "wanted_prefill", "wanted_compute", "turning", "started"),
    [
        (0, 1, 2, [2], 0),  # scale prefill=+1, compute=-1
        (1, 0, 3, [0], 0),  # scale prefill=-1, compute=+1
        (0, 1, 3, [], 1),  # a replica for prompts was lost, and no pool has one too many
        (0, 2, 2, [2], 1),  # one changes its role, and another one was lost
    ],
)
def test_an_engine_that_takes_over_ends_role_changes_and_starts_only_what_is_lost(
    ranks: int, prefill: int, wanted_prefill: int, wanted_compute: int, turning: Sequence[int], started: int
) -> None:
    """The earlier engine has saved its targets, and died before any role had changed."""
    computes = tuple(Member(f"compute{number}", "compute", "cpu", "") for number in range(3 * ranks))
    topology = Topology(FIRST, (*computes, *TOPOLOGY.members[1:]), Pipeline(3, 3, shape=Shape(ranks), prefill=prefill))
    wanted: dict[Pool, int] = {"prefill": wanted_prefill * ranks, "compute": wanted_compute * ranks, "memory": 2}
    pools = pools_of(topology, wanted=wanted)
    assert pools.states == {f"compute{number * ranks + rank}": "turning" for number in turning for rank in range(ranks)}
    pools.turn(steady=True)
    assert "turning" not in pools.states.values()
    assert {pool: pools.topology.sizes[pool] + pools.coming(pool) for pool in wanted} == wanted
    assert sum(pools.coming(pool) for pool in wanted) == started * ranks


def test_a_replica_starts_once_as_many_agents_wait_as_it_has_workers() -> None:
    """An agent that has gone before the next one applies does not count, nor as an offer of another one."""
    computes = tuple(Member(f"compute{number}", "compute", "cpu", "") for number in range(2))
    topology = Topology(FIRST, (*computes, *TOPOLOGY.members[1:]), Pipeline(1, 1, shape=Shape(2)))
    agents = list[Pool]()
    pools = pools_of(topology, agents=agents)
    waits: Sequence[tuple[Sequence[Pool], int]] = [
        (["compute"], 0),
        ([], 0),
        (["prefill"], 0),
        (["compute"], 0),
        (["compute", "compute"], 2),
    ]
    for waiting, joining in waits:
        agents[:] = waiting
        pools.turn(steady=True)
        assert sum(map(pools.coming, pools.wanted)) == pools.coming("compute") == joining


def test_steps_are_planned_again_when_a_joiner_dies_for_which_they_paused() -> None:
    turn = Turn(Limits(8, 64, 60), Placement(TOPOLOGY.capacities), TOPOLOGY.pipeline, attentions=2, kv_heads=4)
    pools = pools_of(TOPOLOGY, turn)
    joiner = Member("compute1", "compute", "cpu", "")
    joining = Joiner(("compute1",), "compute", 0.0, Mock(), Mock(), JoinStage.LINKED, members=(joiner,))
    pools._joins._joiners.append(joining)
    turn.in_flight[1] = Mock()
    pools.turn(steady=True)
    assert turn.is_paused
    pools._joins._joiners.clear()
    pools.turn(steady=True)
    assert not turn.is_paused


def with_remote_replica() -> Topology:
    """Return two replicas, of which compute1 is of another machine."""
    return TOPOLOGY.joined([Member("compute1", "compute", "remote", "")], Pipeline(2, 2))


def test_no_agent_idles_when_two_apply_while_a_lost_replica_waits_to_be_started_again() -> None:
    topology, agents = with_remote_replica(), list[Pool](["compute"])
    pools = pools_of(topology, agents=agents)
    launcher, liveness = cast(Mock, pools._fabric.launcher), cast(Mock, pools._control).liveness
    gives, launcher.start.side_effect = launcher.start.side_effect, TransportError("no room")
    pools.on_workers_lost({"compute1": TransportError("killed")}, topology.without(["compute1"]))
    pools.turn(steady=True)
    launcher.start.side_effect = gives
    agents[:] = ["compute"] * 2
    pools.turn(steady=True)
    liveness.awake_s = RETRY_S
    pools.turn(steady=True)
    assert not agents and pools.coming("compute") == 2 and pools.wanted["compute"] == 3


@pytest.mark.parametrize("pool", ["compute", "memory"])
def test_a_pool_grows_only_until_its_lost_worker_of_another_machine_is_replaced_or_given_up(pool: Role) -> None:
    """Requests that are too long for what is left wait as long as it grows."""
    name = f"{pool}9"
    topology = TOPOLOGY.joined([Member(name, pool, "remote", "", 30 * (pool == "memory"))], Pipeline(2, 2))
    for size in (None, TOPOLOGY.sizes[pool]):
        agents = list[Pool]()
        pools = pools_of(topology, agents=agents)
        pools.on_workers_lost({name: TransportError("killed")}, topology.without([name]))
        pools.turn(steady=True)
        assert pools.grows(pool)
        if size is not None:
            pools.resize({pool: PoolChange(size, is_size=True)}, Resize())
        else:
            agents[:] = [pool]
            pools.turn(steady=True)
            assert pools.grows(pool) and pools.coming(pool) == 1
            pools._joins._joiners.clear()  # it has entered
        assert not pools.grows(pool)


def test_a_size_counts_no_worker_that_may_come_for_a_lost_one() -> None:
    """A machine that offers a worker afterwards adds it to that size, as to any other."""
    topology, agents = with_remote_replica(), list[Pool]()
    pools = pools_of(topology, agents=agents)
    pools.on_workers_lost({"compute1": TransportError("killed")}, topology.without(["compute1"]))
    pools.resize({"compute": PoolChange(2, is_size=True)}, Resize())
    assert pools.coming("compute") == 1 and pools.wanted["compute"] == 2
    agents[:] = ["compute"]
    pools.turn(steady=True)
    assert pools.coming("compute") == 2 and pools.wanted["compute"] == 3


def test_a_pool_that_has_the_size_asked_for_gets_no_more_workers_from_the_next_engine() -> None:
    pools = pools_of(TOPOLOGY, wanted={"prefill": 0, "compute": 1, "memory": 3})
    pools._replacements.pop_due(0.0)  # an engine that replaces none
    resize = Resize()
    pools.resize({"memory": PoolChange(2, is_size=True)}, resize)
    assert resize.future.result(0) == [] and pools.wanted["memory"] == 2


def test_a_pool_whose_workers_are_all_lost_is_not_given_the_size_zero() -> None:
    pools = pools_of(TOPOLOGY)
    pools.on_workers_lost({"compute0": TransportError("killed")}, TOPOLOGY.without(["compute0"]))
    pools._replacements.pop_due(0.0)
    with pytest.raises(ConfigError, match="the compute pool must have 1 at least, not 0"):
        pools.resize({"compute": PoolChange(0, is_size=True)}, Resize())
    assert pools.wanted["compute"] == 1


def test_a_worker_that_leaves_while_it_changes_its_role_is_missed_in_no_pool() -> None:
    computes = tuple(Member(f"compute{number}", "compute", "remote", "") for number in range(3))
    topology = Topology(FIRST, (*computes, *TOPOLOGY.members[1:]), Pipeline(3, 3))
    wishes = list[Wish]()
    pools = pools_of(topology, wishes=wishes)
    pools.resize({"prefill": PoolChange(1), "compute": PoolChange(-1)}, Resize())
    assert pools.states == {"compute2": "turning"}
    wishes[:] = [Wish("compute2")]
    pools.turn(steady=False)
    wishes.clear()
    assert {pool: pools._coming_size(pool) for pool in pools.wanted} == pools.wanted
    for _ in range(2):
        pools.turn(steady=True)
    assert pools.topology.sizes == pools.wanted == {"prefill": 0, "compute": 2, "memory": 2}


@pytest.mark.parametrize(("lost", "stays"), [("compute2", False), ("compute0", True)])
@pytest.mark.parametrize("memories", [0, 1])
def test_a_replica_that_holds_kv_stays_only_if_no_other_is_left(memories: int, lost: str, stays: bool) -> None:
    members = tuple(Member(f"compute{number}", "compute", "cpu", "", 30) for number in ((0, 1) if stays else range(3)))
    count = len(members)
    topology = Topology(FIRST, (*members, *TOPOLOGY.members[1 : 1 + memories]), Pipeline(count, count))
    leaves = Leaves(Mock(), Mock(), Mock())
    leaves.begin_leave("compute1", topology)
    assert leaves.apply_topology(topology.without([lost])) == (["compute1"] if stays else [])


def whole_replicas(stages: int = 1, ranks: int = 1) -> Topology:
    """Return two replicas with local memory, of which only the workers of the first stage have capacities."""
    pipeline = Pipeline(2 * stages, 2, shape=Shape(ranks, stages))
    members = (
        Member(f"compute{number}", "compute", "cpu", "", 30 * (pipeline.home(number) == number))
        for number in range(2 * pipeline.shape.workers)
    )
    return Topology(FIRST, tuple(members), pipeline)


def test_a_replica_of_stages_leaves_once_its_first_stage_holds_no_kv() -> None:
    topology = whole_replicas(stages=2)
    pools = pools_of(topology, is_drained=False)
    pools.resize({"compute": PoolChange(-2)}, Resize())
    pools.turn(steady=True)
    assert pools.states == {"compute2": "draining", "compute3": "draining"} and pools.topology == topology
    cast(Mock, pools._turn.scheduler).is_drained = lambda name: True
    pools.turn(steady=True)
    assert pools.topology.computes == ("compute0", "compute1") and pools.topology.capacities == {"compute0": 30}


def test_a_replica_of_stages_that_stays_after_all_takes_kv_again() -> None:
    topology, scheduler_of_leaves = whole_replicas(stages=2), Mock()
    leaves = Leaves(Mock(), Mock(), scheduler_of_leaves)
    for name in ("compute3", "compute2"):  # the stage that segments do not name comes first
        leaves.begin_leave(name, topology)
    assert sorted(leaves.apply_topology(topology.without(["compute0", "compute1"]))) == ["compute2", "compute3"]
    scheduler_of_leaves.resume.assert_called_once_with("compute2")


def test_ranks_leave_only_if_the_local_memory_of_other_replicas_has_room() -> None:
    topology, own = whole_replicas(ranks=2), ["compute2", "compute3"]
    placed = placement("auto", topology.capacities, HeadShards(2, 2), None, topology)
    leaves = Leaves(Mock(), Mock(), Mock(placement=placed, requests=[]))
    first, second = sorted(placed.local)
    placed.reserve_on(second, 40)
    leaves.validate_leave(own, topology)
    placed.reserve_on(first, 25)
    with pytest.raises(ConfigError, match="hold 40 tokens, and the memory workers that stay have room for 35"):
        leaves.validate_leave(own, topology)
    placed.will_release(second, 40)
    leaves = Leaves(Mock(), Mock(), Mock(placement=placed, requests=[Mock(tokens=61)]))
    with pytest.raises(ConfigError, match="may need 61 KV tokens, and the memory workers that stay hold 60"):
        leaves.validate_leave(own, topology)


@pytest.mark.parametrize("moves", [False, True])
def test_a_replica_leaves_or_moves_as_a_whole_when_the_machine_of_one_worker_ends(moves: bool) -> None:
    topology = whole_replicas(stages=2)
    pools = pools_of(topology, wishes=[Wish("compute1", moves)])
    pools.turn(steady=True)
    assert pools.topology.computes == ("compute2", "compute3")
    assert pools.coming("compute") == (2 if moves else 0)
    assert pools.wanted["compute"] == (4 if moves else 2)


def test_replicas_whose_ranks_lend_nothing_keep_their_role_while_all_of_them_are_lost() -> None:
    """Workers that would join have local memory, though no member has."""
    topology = whole_replicas(ranks=2)
    members = (*topology.members, *TOPOLOGY.members[1:])
    pools = pools_of(Topology(FIRST, members, topology.pipeline))
    lost = dict.fromkeys(topology.computes, TransportError("killed"))
    pools.on_workers_lost(lost, pools.topology.without([*lost]))
    with pytest.raises(ConfigError, match="only those that decode hold KV, and they keep their role"):
        pools.resize({"prefill": PoolChange(2)}, Resize())
