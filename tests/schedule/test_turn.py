"""The turn, driven by workers that answer in any order, and built alike by the engine and the simulator."""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.cluster import sizing
from lamina.cluster.conversations import Wish
from lamina.config.engine_config import EngineConfig
from lamina.control.messages import StepDone
from lamina.control.sockets import ControlServer
from lamina.core.pipeline import Arrangement, Pipeline
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import AttentionSpec
from lamina.engine import engine
from lamina.kv.placement import Placement
from lamina.models import directory
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.simulate import Arrivals, Deployment, virtual_runtime
from lamina.schedule.admission import SHARE
from lamina.schedule.limits import Limits
from lamina.schedule.policy import Fifo
from lamina.schedule.suspects import Deaths
from lamina.schedule.turn import DEPTH, Turn
from lamina.text.tokenizer import Tokenizer
from tests.support.bare_cluster import bare_cluster
from tests.support.schedules import request
from tests.support.turn_driver import CHOICES, ENOUGH, FIXED, INSTANCES, Driver


@given(
    pipeline=st.sampled_from([FIXED, CHOICES, INSTANCES]),
    depth=st.integers(1, DEPTH),
    requests=st.integers(0, 25),
    leaving=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**32),
    clients=st.integers(1, 5),
    share=st.sampled_from([0, SHARE]),
)
def test_each_request_ends_once_and_every_slot_comes_back(
    pipeline: Pipeline, depth: int, requests: int, leaving: float, seed: int, clients: int, share: int
) -> None:
    chance = random.Random(seed)
    memories = ("compute0", "compute1") if pipeline is INSTANCES else ("memory0", "memory1")
    driver = Driver(pipeline, depth, chance, memories=memories, clients=clients)
    with mock.patch("lamina.schedule.admission.SHARE", share):
        for number in range(requests):
            driver.come(str(number))
            if chance.random() < leaving:
                driver.go()
            driver.turn_once()
        for _ in range(ENOUGH):
            if not driver.live and not driver.turn.in_flight:
                break
            driver.turn_once()
    assert driver.ended == Counter(map(str, range(requests)))
    assert driver.completed == driver.planned, "steps of a lane complete in the order in which they were planned"
    scheduler = driver.turn.scheduler
    assert (scheduler.running, scheduler.waiting) == (0, 0)
    assert not driver.turn.in_flight and not driver.known
    assert not any(scheduler.placement.reserved.values())


def test_a_request_that_outgrows_the_memory_of_its_replica_ends_on_another() -> None:
    """Start a request that may need 44 slots on the smaller of two replicas, which has 40 and runs nothing else."""
    preempted = 0
    for seed in range(30):
        driver = Driver(Pipeline(2, 2), 1, random.Random(seed), memories=("compute0", "compute1"))
        for name, prompt, n in (("0", 5, 1), ("1", 20, 3)):
            driver.live[name] = driver.turn.scheduler.submit(request(name, prompt, n=n, max_tokens=8))
        for _ in range(ENOUGH):
            if not driver.live and not driver.turn.in_flight:
                break
            driver.turn_once()
        assert driver.ended == Counter(["0", "1"]), f"seed {seed}"
        preempted += driver.turn.scheduler.dropped
    assert preempted > 0


def test_lanes_are_chosen_from_what_steps_took() -> None:
    """Slices alone take time: nothing overlaps, and every lane more reads the weights again."""
    pipeline = Pipeline(2, 1, choices=(Arrangement(2), Arrangement(1)))
    turn = Turn(Limits(4, 8, 512), Placement({"memory0": 2000}), pipeline, attentions=1, kv_heads=1)
    for name in ("0", "1"):
        turn.scheduler.submit(request(name, 1, max_tokens=400))
    now = 0.0
    used = [turn.scheduler._dealer.active]
    for _ in range(100):
        for plan in list(turn.plan(now)):
            now += 1.0
            answer = StepDone(plan.step, [], rows=len(plan.sequences), busy_s=1.0, waited_s=1e-3)
            for done in turn.in_order(answer):
                for _, completion in turn.complete(done).values():
                    completion.generated.append(7)
        used.append(turn.scheduler._dealer.active)
    assert used[0] == 2 and used[-1] == 1


def test_the_time_between_tokens_counts_what_a_step_spends_in_slices_and_waiting() -> None:
    turn = Turn(Limits(4, 8, 512), Placement({"memory0": 2000}), Pipeline(1, 1), attentions=1, kv_heads=1)
    turn.scheduler.submit(request("0", 1, max_tokens=400))
    for _ in range(4):
        for plan in list(turn.plan(0.0)):
            answer = StepDone(plan.step, [], rows=len(plan.sequences), busy_s=1.0, waited_s=2.0)
            for done in turn.in_order(answer):
                for _, completion in turn.complete(done).values():
                    completion.generated.append(7)
    assert turn.between_s == 3.0


def test_attention_that_workers_report_tells_how_fast_they_are() -> None:
    """memory1 takes four times as long as memory0 for as many tokens."""
    placement = Placement({"memory0": 2000, "memory1": 2000})
    turn = Turn(
        Limits(4, 64, 512), placement, Pipeline(1, 1), attentions=1, kv_heads=1, plan_ahead=False, balance="bandwidth"
    )
    for name in ("0", "1"):
        turn.scheduler.submit(request(name, 20, max_tokens=400))
    for steps in range(100):
        for plan in list(turn.plan(0.0)):
            for done in turn.in_order(StepDone(plan.step, [], rows=len(plan.sequences), busy_s=1.0)):
                for _, completion in turn.complete(done).values():
                    completion.generated.append(7)
        for worker, seconds in (("memory0", 1e-3), ("memory1", 4e-3)):
            turn.note_attention(worker, seconds * steps)
    assert placement.token_s["memory1"] == pytest.approx(4 * placement.token_s["memory0"], rel=0.1)


def test_some_requests_wait_after_a_death_until_the_others_have_run_what_was_in_flight() -> None:
    memory = Member("memory0", "memory", "cpu", "", 2000)
    topology = Topology(FIRST, (Member("compute0", "compute", "cpu", ""), memory), Pipeline(1, 1))
    turn = Turn(
        Limits(4, 64, 512), Placement({"memory0": 2000}), Pipeline(1, 1), attentions=1, kv_heads=1, plan_ahead=False
    )
    for name in ("0", "1"):
        turn.scheduler.submit(request(name, 1, max_tokens=400))

    def run() -> set[str]:
        """Run a step; return its requests."""
        (plan,) = turn.plan(0.0)
        ran = {turn.scheduler.owners[one.sequence][0].request.request_id for one in plan.sequences}
        (done,) = turn.in_order(StepDone(plan.step, [], rows=len(plan.sequences), busy_s=1.0))
        for _, completion in turn.complete(done).values():
            completion.generated.append(7)
        return ran

    assert run() == {"0", "1"}
    assert [len(plan.sequences) for plan in turn.plan(0.0)] == [2], "in flight as the worker dies"
    turn.end_epoch(topology, Deaths(replicas=[0]))
    turn.begin_epoch()
    assert run() == {"0"}
    assert run() == {"0", "1"}


class NoWorkers:
    def ended(self) -> Mapping[str, str]:
        return {}

    def kill_worker(self, worker: str, *, cut: bool = False, reason: str = "") -> None:
        pass

    def wishes(self) -> list[Wish]:
        return []

    def close(self) -> None:
        pass


def test_the_engine_and_the_simulator_build_the_same_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Recorded(Turn):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append((args, kwargs))
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(engine, "Turn", Recorded)
    monkeypatch.setattr(virtual_runtime, "Turn", Recorded)
    catalogue, shape = hardware.load(), model_shapes.find("Llama-2-7B")
    deployment = Deployment(
        model=shape, compute=catalogue["a100"], compute_workers=2, memory=catalogue["rtx3090"], memory_workers=1
    )
    virtual_runtime.Simulation(deployment, Arrivals(np.array([0.0]), np.array([5]), np.array([3])), [], 0)
    ((limits, placement, pipeline), _) = made[0]

    config = EngineConfig()
    specs = tuple(AttentionSpec(layer, shape.query_heads, shape.kv_heads, 8, 8, 1.0) for layer in range(shape.layers))
    engine_pipeline = sizing.pipeline(config, 2, shared=False)
    cluster = bare_cluster(["compute0", "compute1"], placement.capacities, specs, engine_pipeline)
    control = ControlServer(["compute0", "compute1", "memory0"])
    model = directory.find(None)
    engine.Engine(config, model, Tokenizer(model), limits, control, NoWorkers(), cluster).close()

    (simulated, simulated_settings), (real, real_settings) = made
    assert type(simulated_settings.pop("policy")) is type(real_settings.pop("policy")) is Fifo
    assert real_settings.pop("overcommit") == 1.0  # simulated workers have no disks
    assert real_settings.pop("window") == 0  # layers of the model see everything, as simulated ones do
    for settings in (real_settings, simulated_settings):  # prompts attend on memory workers
        assert not any(tokens for _, tokens in settings.pop("scratch"))
    # These arrivals say nothing of what prompts have in common.
    assert real_settings.pop("prefix_cache") and not simulated_settings.pop("prefix_cache")
    assert pipeline == real[2] and simulated_settings == real_settings
    assert simulated[1].capacities == real[1].capacities
    assert limits.max_sequences == sizing.step_limits(config, engine_pipeline, 1).max_sequences
    plans = []
    for arguments, named in made:
        turn = Turn(arguments[0], Placement(arguments[1].capacities), *arguments[2:], **named)
        for number in range(6):
            turn.scheduler.submit(request(str(number), number % 3 + 1, max_tokens=2))
        plans.append(list(turn.plan(0.0)))
    assert plans[0] == plans[1]
    assert max(Counter(plan.lane for plan in plans[0]).values()) == DEPTH
