"""The simulator against closed forms, queueing theory and a scheduler driven by hand."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from lamina.core.errors import ConfigError
from lamina.core.pipeline import Shape
from lamina.core.steps import StepPlan
from lamina.core.types import Pipelining, Request
from lamina.kv.placement import WATERMARK, Placement
from lamina.planning.plan import hardware, model_shapes
from lamina.planning.plan.overheads import ROUND_TRIP_S
from lamina.planning.plan.workload import TracedRequest
from lamina.planning.simulate import (
    Arrivals,
    Deployment,
    Fault,
    Result,
    State,
    System,
    draw,
    parse_failure,
    parse_slowdown,
    replay,
    simulate,
    write_requests,
)
from lamina.planning.simulate import virtual_runtime as under_test
from lamina.schedule import turn
from lamina.schedule.scheduler import Scheduler
from tests.support.schedules import client

CATALOGUE = hardware.load()
LLAMA = model_shapes.find("Llama-2-7B")


def pools(**changes: Any) -> Deployment:
    """One A100 and one RTX 3090 in one lane, unless changed."""
    values = {"compute_workers": 1, "memory_workers": 1, "lanes": 1, **changes}
    return Deployment(model=LLAMA, compute=CATALOGUE["a100"], memory=CATALOGUE["rtx3090"], **values)


def alone(**changes: Any) -> Deployment:
    """A compute pool without memory workers."""
    return Deployment(model=LLAMA, compute=CATALOGUE["a100"], **{"compute_workers": 1, **changes})


def arriving(*requests: tuple[float, int, int]) -> Arrivals:
    return replay(TracedRequest(*request) for request in requests)


def poisson(count: int, rate: float, prompt: int, output: int, seed: int = 0) -> Arrivals:
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return Arrivals(np.cumsum(gaps), np.full(count, prompt), np.full(count, output))


def mixed(count: int, seed: int = 1, rate: float = 20.0) -> Arrivals:
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1 / rate, count))
    return Arrivals(times, random.integers(1, 3000, count), random.integers(1, 60, count))


def gaps_of(result: Result) -> list[float]:
    values, counts = result.log.gaps
    return sorted(np.repeat(values, counts).tolist())


class ClosedForm:
    """The time of one request on idle pools, from the cost model's formulas."""

    def __init__(self, deployment: Deployment) -> None:
        self.compute, self.memory = deployment.compute_cost, deployment.memory_cost
        self.kept = 2 * LLAMA.kv_heads * LLAMA.head_size * 2
        self.asked = LLAMA.query_heads * LLAMA.head_size * 2

    def dense(self, rows: int) -> float:
        """All slices and both ends, with one row sampling."""
        return float(LLAMA.layers * self.compute.slice_seconds(rows) + self.compute.ends_seconds(1))

    def prefill(self, tokens: int) -> float:
        """k and v travel while the chunk attends to itself."""
        sent = tokens * self.kept
        travel = float(self.compute.wire_seconds(sent) + self.memory.wire_seconds(sent)) + ROUND_TRIP_S
        chunk = float(self.compute.chunk_attention_seconds(tokens, 0))
        return self.dense(tokens) + LLAMA.layers * max(chunk, travel)

    def decode(self, tokens: int) -> float:
        """``tokens``: those the new one attends to, itself included."""
        sent, back = self.kept + self.asked, self.asked
        there = float(self.compute.wire_seconds(sent) + self.memory.wire_seconds(sent))
        home = max(float(self.compute.wire_seconds(back)), float(self.memory.wire_seconds(back)))
        token_s, at_none = self.memory.attention_line(np.arange(2))
        attention = token_s * tokens + float(at_none[1])
        return self.dense(1) + LLAMA.layers * (there + attention + home + ROUND_TRIP_S)


def test_one_request_takes_what_the_formulas_say() -> None:
    deployment = pools()
    result = simulate(deployment, arriving((0.0, 700, 5)))
    expected = ClosedForm(deployment)
    assert result.ttft_s.p50 == pytest.approx(expected.prefill(700), rel=1e-9)
    assert gaps_of(result) == pytest.approx([expected.decode(700 + i) for i in range(1, 5)], rel=1e-9)
    assert result.log.end_s[0] == result.seconds


def test_a_prompt_runs_on_workers_for_prompts_and_decodes_on_others() -> None:
    """One request takes what the formulas say of the kind that runs each part."""
    deployment = pools(prefill=CATALOGUE["h100"], prefill_workers=1, lanes=2)
    result = simulate(deployment, arriving((0.0, 700, 5)))
    decoding, prompts = ClosedForm(deployment), ClosedForm(replace(pools(), compute=CATALOGUE["h100"]))
    assert result.ttft_s.p50 == pytest.approx(prompts.prefill(700), rel=1e-9)
    assert prompts.prefill(700) < 0.9 * decoding.prefill(700)
    assert gaps_of(result) == pytest.approx([decoding.decode(700 + i) for i in range(1, 5)], rel=1e-9)
    assert [(pool.name, pool.kind) for pool in result.pools] == [
        ("prefill", "h100"),
        ("compute", "a100-80g"),
        ("memory", "rtx3090"),
    ]


def test_prompts_apart_leave_the_steps_of_others_as_they_are() -> None:
    """Prompts that arrive while a request decodes make its steps longer, unless they run elsewhere."""
    requests = [(0.0, 100, 200), *((1.0 + number, 2000, 1) for number in range(3))]
    gaps = {}
    for prefill in (0, 1):
        apart = {"prefill": CATALOGUE["a100"], "prefill_workers": 1, "lanes": 2} if prefill else {}
        result = simulate(pools(memory_workers=2, **apart), arriving(*requests))
        assert result.log.count(State.FINISHED) == 4
        gaps[prefill] = max(gaps_of(result))
    assert gaps[1] < 1.5 * np.median(gaps_of(simulate(pools(), arriving(requests[0])))) < gaps[0]


def of_roles(prefill: int, **changes: Any) -> Deployment:
    """Return four A100, of which so many only run prompts at first, and two A100 with KV."""
    a100 = CATALOGUE["a100"]
    apart: dict[str, Any] = {"prefill": a100, "prefill_workers": prefill} if prefill else {}
    target: dict[str, Any] = {"slo_ttft_ms": 1000} if "prefill_bounds" in changes else {}
    changes = {"slo_tbt_ms": 60, **target, **apart, **changes}
    return Deployment(model=LLAMA, compute=a100, memory=a100, compute_workers=4 - prefill, memory_workers=2, **changes)


@pytest.mark.parametrize("prefill", [0, 1])
def test_replicas_that_decode_run_prompts_once_first_tokens_come_too_late(prefill: int) -> None:
    arrivals = Arrivals(np.arange(150) / 12, np.full(150, 3000), np.full(150, 10))
    fixed = simulate(of_roles(1), arrivals)
    result = simulate(of_roles(prefill, prefill_bounds=(1, 3)), arrivals)
    assert result.log.count(State.FINISHED) == 150
    assert 1 <= result.role_changes <= 3 and fixed.role_changes == 0
    assert result.ttft_s.p99 < 0.5 * fixed.ttft_s.p99
    assert [(pool.name, pool.workers) for pool in result.pools] == [("compute", 4), ("memory", 2)]


def test_replicas_that_run_prompts_decode_once_tokens_come_too_slowly() -> None:
    arrivals = Arrivals(np.arange(250) / 20, np.full(250, 60), np.full(250, 150))
    fixed = simulate(of_roles(3, slo_tbt_ms=15), arrivals)
    result = simulate(of_roles(3, slo_tbt_ms=15, prefill_bounds=(1, 3)), arrivals)
    assert result.log.count(State.FINISHED) == 250 and 1 <= result.role_changes <= 2
    assert result.tbt_s.p50 < fixed.tbt_s.p50 and result.ttft_s.p99 < 1.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"slo_ttft_ms": None}, "without slo_ttft_ms and slo_tbt_ms"),
        ({"pipelining": "rotational"}, "none can be kept for prompts; leave out pipelining"),
        ({"prefill": CATALOGUE["h100"], "prefill_workers": 1}, "the same kind"),
        ({"shape": Shape(2)}, "give multiples"),
        ({"prefill_bounds": (4, 4)}, "at least one must always decode"),
    ],
)
def test_roles_that_cannot_change_are_an_error(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate(replace(of_roles(0, prefill_bounds=(1, 3)), **changes), mixed(2))


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_workers": 3, "shape": Shape(2), "compute_workers": 2},
        {"prefill_workers": 1, "pipelining": "rotational", "lanes": 3},
    ],
)
def test_workers_for_prompts_that_cannot_be_are_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"multiple|none can be kept for prompts"):
        simulate(replace(pools(), prefill=CATALOGUE["h100"], **changes), mixed(2))


def test_a_long_prompt_runs_in_chunks_whose_prefix_the_memory_worker_attends_to() -> None:
    short = simulate(pools(max_num_batched_tokens=512), arriving((0.0, 512, 1)))
    long = simulate(pools(max_num_batched_tokens=512), arriving((0.0, 1024, 1)))
    memory = pools().memory_cost
    prefix = memory.chunk_attention_seconds(512, 512) - memory.chunk_attention_seconds(512, 0)
    assert long.ttft_s.p50 > 2 * short.ttft_s.p50
    assert long.pools[1].busy * long.seconds == pytest.approx(LLAMA.layers * float(prefix), rel=1e-9)


def test_a_long_prompt_in_scratch_memory_attends_on_the_replica() -> None:
    """Memory workers only store K and V, which travel while the replica attends."""
    deployment = pools(max_num_batched_tokens=512, prompt_attention="compute")
    result, form = simulate(deployment, arriving((0.0, 1024, 1))), ClosedForm(deployment)
    later = LLAMA.layers * float(form.compute.chunk_attention_seconds(512, 512))
    expected = form.prefill(512) + form.dense(512) + max(later, form.prefill(512) - form.dense(512))
    assert result.ttft_s.p50 == pytest.approx(expected, rel=1e-9) and result.pools[1].busy == 0


def test_memory_workers_attend_to_a_cached_prefix_of_a_prompt_in_scratch_memory() -> None:
    deployment = pools(max_num_batched_tokens=512, prompt_attention="compute")
    trace = [TracedRequest(0.0, 513, 1, ((1, 512), (2, 1)), 3), TracedRequest(10.0, 1536, 1, ((1, 512), (4, 1024)), 5)]
    result, memory = simulate(deployment, replay(trace)), deployment.memory_cost
    prefix = 2 * LLAMA.layers * float(memory.prefix_attention_seconds(512, 512))
    assert result.pools[1].busy * result.seconds == pytest.approx(prefix, rel=1e-9)


def test_a_prompt_that_scratch_memory_has_no_room_for_attends_on_memory_workers() -> None:
    """70B on two A100 leaves room for few tokens: half of what is free, and two of the longest prompts at most."""
    deployment = replace(
        pools(max_num_batched_tokens=2048, prompt_attention="compute", memory_workers=8),
        model=model_shapes.find("Llama-3-70B"),
        compute_workers=2,
        shape=Shape(2),
    )
    simulation = under_test.Simulation(deployment, arriving((0.0, 30_000, 1)), [], 0)
    ((_, held),) = simulation._topology.scratch
    assert 0 < held < 30_000
    busy = [simulate(deployment, arriving((0.0, tokens, 1))).pools[1].busy for tokens in (held, held + 2)]
    assert busy[0] == 0 < busy[1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"memory": None, "memory_workers": 0, "local": True}, "has no effect"),
        ({"compute_workers": 2, "lanes": 3, "pipelining": "rotational"}, "lanes rotate over 2 replicas"),
    ],
)
def test_prompts_attend_on_compute_workers_where_the_runtime_allows_it(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate(replace(pools(prompt_attention="compute"), **changes), arriving((0.0, 10, 1)))


@pytest.mark.parametrize("kind", ["rtx3090", "h20", "a100"])
@pytest.mark.parametrize("model", ["Llama-2-7B", "Llama-3-70B"])
def test_long_attention_is_linear_in_tokens_whatever_the_rows(model: str, kind: str) -> None:
    """The simulator takes its seconds per token from the cost model only once."""
    cost = replace(pools(), model=model_shapes.find(model), memory=CATALOGUE[kind]).memory_cost
    token_s, at_none = cost.attention_line(np.arange(257))
    for rows, tokens in ((1, 400_000), (16, 900_000), (256, 2_000_000)):
        expected = float(at_none[rows]) + token_s * tokens
        assert float(cost.attention_seconds(tokens, rows)) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("clients", [1, 5])
def test_tokens_are_conserved_and_every_request_ends_once(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its scheduler has several clients, and compares their seats with every step."""

    class Shared(Scheduler):
        def submit(self, request: Request, drawn: Any = None) -> Any:
            return super().submit(replace(request, client=client(int(request.request_id), clients)), drawn)

    monkeypatch.setattr(turn, "Scheduler", Shared)
    monkeypatch.setattr("lamina.schedule.admission.SHARE", 0)
    arrivals = mixed(300)
    for system, deployment in (
        (System.LAMINA, pools(compute_workers=2, memory_workers=3, lanes=None)),
        (System.LAMINA, pools(compute_workers=4, memory_workers=5, lanes=8, pipelining="fixed")),
        (System.TENSOR_PARALLEL, alone(compute_workers=2)),
        (System.CHUNKED_PREFILL, alone(compute_workers=2, shape=Shape(2))),
        (System.DISAGGREGATED, pools(memory_workers=3)),
    ):
        result = simulate(deployment, arrivals, system)
        log = result.log
        assert log.count(State.FINISHED) == len(arrivals)
        assert (log.drawn == arrivals.output).all()
        gaps, counts = log.gaps
        assert counts.sum() == (arrivals.output - 1).sum()
        assert float(gaps @ counts) == pytest.approx(float((log.end_s - log.first_s).sum()))
        assert (log.first_s > arrivals.arrival_s).all() and (log.end_s >= log.first_s).all()
        assert all(0 < pool.busy <= pool.busiest <= 1 and pool.network <= 1 for pool in result.pools)


@pytest.mark.parametrize(("requests", "within"), [(5000, 0.1), pytest.param(20_000, 0.06, marks=pytest.mark.slow)])
@pytest.mark.parametrize("system", [System.LAMINA, System.TENSOR_PARALLEL])
def test_prompts_alone_queue_as_m_d_1_says(system: System, requests: int, within: float) -> None:
    """Prompts that fill a step and draw one token are customers with equal service times."""
    prompt = 512
    deployment = (pools if system is System.LAMINA else alone)(max_num_seqs=prompt, max_num_batched_tokens=prompt)
    service = simulate(deployment, arriving((0.0, prompt, 1)), system).seconds
    load = 0.7
    result = simulate(deployment, poisson(requests, load / service, prompt, 1), system)
    waits = result.log.first_s - result.log.arrivals.arrival_s - service
    assert waits.mean() == pytest.approx(load * service / (2 * (1 - load)), rel=within)


def test_same_seed_same_result_and_another_seed_another() -> None:
    trace = [TracedRequest(float(i), 100 + i, 5 + i % 40) for i in range(50)]
    deployment = pools(compute_workers=2, memory_workers=3, lanes=None)
    first, second, other = (simulate(deployment, draw(trace, 200, seed, 30.0)) for seed in (3, 3, 4))
    assert first.summary() == second.summary() != other.summary()
    assert (first.log.end_s == second.log.end_s).all() and gaps_of(first) == gaps_of(second)


def test_decisions_are_those_of_a_scheduler_driven_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh scheduler, given the same arrivals and ends of steps by the engine's rules, makes the same plans."""
    told: list[tuple[str, Any]] = []
    plans: list[StepPlan] = []

    class Watched(Scheduler):
        def submit(self, request: Request, drawn: Any = None) -> Any:
            told.append(("add", request))
            return super().submit(request, drawn)

        def complete(self, lane: int, step: int | None = None) -> Any:
            told.append(("complete", (lane, step)))
            return super().complete(lane, step)

        def repeat(self, lane: int, steps: int) -> None:
            told.append(("repeat", (lane, steps)))
            super().repeat(lane, steps)

        def on_move_done(self, number: int) -> None:
            told.append(("moved", number))
            super().on_move_done(number)

        def plan(self, lane: int) -> StepPlan | None:
            plan = super().plan(lane)
            if plan is not None:
                told.append(("plan", None))
                plans.append(plan)
            return plan

    monkeypatch.setattr(turn, "Scheduler", Watched)
    deployment = pools(compute_workers=3, memory_workers=2, lanes=6, pipelining="fixed")
    simulation = under_test.Simulation(deployment, mixed(150), [], 0)
    limits, capacities = simulation._scheduler.limits, simulation._scheduler.placement.capacities
    simulation.simulate()

    scheduler = Scheduler(limits, Placement(capacities), 6, attentions=LLAMA.layers, kv_heads=LLAMA.kv_heads)
    expected: list[StepPlan] = []

    def complete(lane: int) -> None:
        for group, completion in scheduler.complete(lane).values():
            completion.generated.append(0)
            if len(completion.generated) == group.max_tokens:
                scheduler.end_completion(group, completion)

    for index, (what, detail) in enumerate(told):
        if what == "add":
            scheduler.submit(detail)
        elif what == "moved":
            scheduler.on_move_done(detail)
        elif what == "repeat":  # by plans that say nothing new
            lane, steps = detail
            for _ in range(steps):
                complete(lane)
                repeated = scheduler.plan(lane)
                assert repeated is not None and repeated.decoding.sequences and not repeated.chunks
                assert not (repeated.admitted or repeated.released or repeated.grown or repeated.moves)
        elif what == "complete":
            complete(detail[0])
        if index + 1 == len(told) or told[index + 1][0] == "plan" != what:
            for lane in range(6):  # Engine._step
                while scheduler.in_flight(lane) < 2 and (plan := scheduler.plan(lane)) is not None:
                    expected.append(plan)
    assert any(what == "repeat" for what, _ in told)
    # Steps that repeat another have numbers here, and none there.
    assert [structs.replace(plan, step=0) for plan in expected] == [structs.replace(plan, step=0) for plan in plans]


def test_kv_that_leaves_a_drained_worker_takes_the_time_of_its_bytes() -> None:
    deployment = pools(memory_workers=2)
    simulation = under_test.Simulation(deployment, arriving((0.0, 4000, 200)), [], 0)
    begun: list[tuple[float, float, int]] = []
    submit, scheduler = simulation._submit, simulation._scheduler

    def watch(plan: StepPlan, now: float) -> None:
        submit(plan, now)
        for move in plan.moves:
            (end, _) = max(simulation._moves)
            begun.append((now, end, move.stop - move.start))
        if plan.decoding.sequences and not begun and not scheduler.placement.closed:
            scheduler.drain(scheduler.requests[0].home)

    simulation._submit = watch  # type: ignore[method-assign]
    result = simulation.simulate()
    assert result.log.states == [State.FINISHED] and scheduler.dropped == 0
    token_bytes = LLAMA.layers * 2 * LLAMA.kv_heads * LLAMA.head_size * 2
    wire_s = float(deployment.memory_cost.wire_seconds(1.0))
    assert begun and sum(tokens for _, _, tokens in begun) >= 4000
    for start, end, tokens in begun:
        assert end - start == pytest.approx(ROUND_TRIP_S + tokens * token_bytes * wire_s)


def test_a_lost_worker_ends_every_request_with_an_error_as_the_runtime_does() -> None:
    arrivals = mixed(200)
    whole = simulate(pools(memory_workers=2), arrivals)
    at = whole.seconds / 2
    result = simulate(pools(memory_workers=2), arrivals, faults=[Fault("memory", 1, at)])
    states = np.array(result.log.states)
    before = whole.log.end_s <= at
    assert (states[before] == State.FINISHED).all()
    assert (states[~before & (arrivals.arrival_s < at)] == State.ERROR).all()
    assert (states[arrivals.arrival_s > at] == State.REFUSED).all()
    assert result.seconds <= max(at, arrivals.arrival_s[-1])


def test_who_came_before_a_loss_ends_with_an_error_wherever_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "MAX_WAITING", 2)
    arrivals = arriving(*((0.01 * i, 2000, 200) for i in range(60)))
    result = simulate(pools(max_num_seqs=4), arrivals, faults=[Fault("memory", 0, 0.3)])
    states = np.array(result.log.states)
    assert (states[arrivals.arrival_s < 0.3] == State.ERROR).all()
    assert (states[arrivals.arrival_s >= 0.3] == State.REFUSED).all()


def test_a_lost_instance_takes_only_its_own_requests() -> None:
    arrivals = mixed(200, rate=60.0)
    for system, deployment in (
        (System.CHUNKED_PREFILL, alone(compute_workers=2)),
        (System.DISAGGREGATED, pools(compute_workers=2, memory_workers=4)),
    ):
        result = simulate(deployment, arrivals, system, [Fault("compute", 1, 2.0)])
        assert result.log.count(State.ERROR) > 0 and result.log.count(State.REFUSED) == 0
        assert result.log.count(State.FINISHED) > len(arrivals) / 2
        assert np.nanmax(result.log.end_s[np.array(result.log.states) == State.ERROR]) == 2.0


def test_no_worker_is_busy_longer_than_there_was_time() -> None:
    """The one instance is lost in the middle of a step."""
    result = simulate(
        alone(), arriving((0.0, 2000, 1), (0.0, 2000, 1)), System.TENSOR_PARALLEL, [Fault("compute", 0, 0.01)]
    )
    assert result.log.states == [State.ERROR] * 2 and result.seconds == 0.01
    assert result.pools[0].busiest <= 1


def test_without_any_instance_that_decodes_nothing_is_served_any_more() -> None:
    arrivals = mixed(200)
    result = simulate(pools(memory_workers=1), arrivals, System.DISAGGREGATED, [Fault("memory", 0, 2.0)])
    after = arrivals.arrival_s > 2.0
    assert (np.array(result.log.states)[after] == State.REFUSED).all()


def test_a_slow_memory_worker_attends_twice_as_long() -> None:
    usual = simulate(pools(), arriving((0.0, 700, 5)))
    slow = simulate(pools(), arriving((0.0, 700, 5)), faults=[Fault("memory", 0, 0.0, 2.0)])
    assert slow.pools[1].busy * slow.seconds == pytest.approx(2 * usual.pools[1].busy * usual.seconds)
    assert slow.pools[0].busy * slow.seconds == pytest.approx(usual.pools[0].busy * usual.seconds)


def test_a_sequence_that_is_too_long_for_one_worker_decodes_on_several_at_once() -> None:
    """It fills one worker, but for what is always left free, and has the rest on the other. Both attend at once."""
    deployment = pools(memory_workers=2)
    capacity = deployment.memory_cost.kv_tokens
    result = simulate(deployment, arriving((0.0, capacity + capacity // 2, 3)))
    slowest = ClosedForm(deployment).decode(capacity - int(WATERMARK * capacity))
    assert gaps_of(result) == pytest.approx([slowest] * 2, rel=0.01)


def test_what_can_never_fit_is_refused_and_others_go_on() -> None:
    capacity = pools().memory_cost.kv_tokens
    result = simulate(pools(), arriving((0.0, capacity + 1, 2), (0.1, 100, 2)))
    assert result.log.states == [State.REFUSED, State.FINISHED]
    # A prompt that no memory could hold is not created either.
    result = simulate(pools(), arriving((0.0, 10**12, 2), (0.1, 100, 1)))
    assert result.log.states == [State.REFUSED, State.FINISHED]


def test_what_has_no_value_is_none_in_a_summary() -> None:
    one, none = (simulate(pools(), arriving((0.0, prompt, 1))).summary() for prompt in (10, 10**6))
    assert one["ttft_s"]["p50"] > 0 and one["tbt_s"] == {"p50": None, "p90": None, "p99": None}
    assert none["ttft_s"]["p99"] is none["usd_per_million_out"] is None and none["bottleneck"] == "nothing"
    json.dumps([one, none], allow_nan=False)


@pytest.mark.parametrize("chunked", [False, True])
def test_one_request_on_one_instance_takes_what_the_formulas_say(chunked: bool) -> None:
    deployment = alone(compute_workers=2, shape=Shape(2))
    system = System.CHUNKED_PREFILL if chunked else System.TENSOR_PARALLEL
    result = simulate(deployment, arriving((0.0, 700, 4)), system)
    cost, layers = deployment.compute_cost, LLAMA.layers

    def step(rows: int, attention: float) -> float:
        return float(layers * (cost.slice_seconds(rows, 2) + attention) + cost.ends_seconds(1, 2))

    assert result.ttft_s.p50 == pytest.approx(step(700, float(cost.chunk_attention_seconds(700, 0, 2))), rel=1e-9)
    decodes = [step(1, float(cost.attention_seconds(700 + i, 1, 0.5))) for i in range(1, 4)]
    assert gaps_of(result) == pytest.approx(decodes, rel=1e-9)


def test_whole_prompts_hold_decoding_up_and_chunks_do_not() -> None:
    arrivals = arriving((0.0, 100, 200), (0.5, 16000, 1))
    deployment = alone(max_num_batched_tokens=512)
    whole, chunked = (
        simulate(deployment, arrivals, system) for system in (System.TENSOR_PARALLEL, System.CHUNKED_PREFILL)
    )
    assert whole.log.longest_gap_s[0] > 5 * chunked.log.longest_gap_s[0]


def test_sequences_that_outgrow_the_blocks_are_computed_again() -> None:
    small = replace(CATALOGUE["a100"], memory_bytes=(LLAMA.weight_bytes + 3e9) / 0.9)
    deployment = Deployment(model=LLAMA, compute=small, compute_workers=1)
    arrivals = Arrivals(np.zeros(40), np.full(40, 100), np.full(40, 400))
    for system in (System.TENSOR_PARALLEL, System.CHUNKED_PREFILL):
        result = simulate(deployment, arrivals, system)
        assert result.preempted > 0
        assert result.log.count(State.FINISHED) == 40


def test_kv_travels_before_a_disaggregated_request_decodes() -> None:
    deployment = pools()
    result = simulate(deployment, arriving((0.0, 1000, 3)), System.DISAGGREGATED)
    travel = float(deployment.memory_cost.wire_seconds(1000 * LLAMA.kv_bytes_per_token)) + ROUND_TRIP_S / 2
    usual, first = gaps_of(result)
    assert first - usual == pytest.approx(travel, rel=0.01)
    assert {pool.name for pool in result.pools} == {"prefill", "decode"}


@pytest.mark.parametrize(
    ("system", "deployment", "faults", "says"),
    [
        (System.LAMINA, alone(), [], "two pools"),
        (System.TENSOR_PARALLEL, pools(), [], "one pool"),
        (System.LAMINA, pools(), [Fault("memory", 1, 1.0)], "the pool has 1, counted from 0"),
        (System.LAMINA, pools(lanes=1, compute_workers=2), [], "lanes 1 with 2 replicas: a lane runs on one replica"),
        (System.DISAGGREGATED, pools(compute_workers=2, shape=Shape(2), memory_workers=3), [], "do not divide"),
    ],
)
def test_what_cannot_be_is_refused(system: System, deployment: Deployment, faults: list[Fault], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate(deployment, mixed(2), system, faults)


def test_weights_that_do_not_fit_or_heads_that_do_not_divide_are_refused() -> None:
    for degree in (3, 64):
        with pytest.raises(ConfigError, match=f"of {degree} does not divide the 32 key/value heads"):
            pools(compute_workers=degree, shape=Shape(degree))
    large = replace(pools(), model=model_shapes.find("LLaMA-65B"))
    with pytest.raises(ConfigError, match="--tensor-parallel"):
        simulate(large, mixed(2))


def test_faults_as_typed() -> None:
    assert parse_failure("memory:3@120s") == Fault("memory", 3, 120.0)
    assert parse_slowdown("compute:0@1.5s:2.5x") == Fault("compute", 0, 1.5, 2.5)
    assert str(parse_slowdown("compute:0@60s:2x")) == "compute:0@60s:2x"
    for text in ("memory:3", "gpu:1@3s", "memory:3@120s:2x", "memory:-1@3s", "memory:3@120"):
        with pytest.raises(ConfigError, match="such as memory:3@120s"):
            parse_failure(text)
    for text in ("compute:0@60s", "compute:0@60s:0x", "compute:0@60s:x"):
        with pytest.raises(ConfigError, match="such as compute:0@60s:2x"):
            parse_slowdown(text)


def test_requests_drawn_have_the_traces_lengths_and_rate() -> None:
    trace = [TracedRequest(i / 4, 10 * (i % 3 + 1), i % 3 + 1) for i in range(1000)]
    drawn = draw(trace, 30_000, seed=0, rate_scale=2.0)
    assert set(zip(drawn.prompt.tolist(), drawn.output.tolist(), strict=True)) == {(10, 1), (20, 2), (30, 3)}
    assert len(drawn) / drawn.arrival_s[-1] == pytest.approx(8.0, rel=0.03)
    with pytest.raises(ConfigError, match="no rate"):
        draw(trace[:1], 10, seed=0)
    with pytest.raises(ConfigError, match="above 0"):
        replay(trace, 0.0)


def test_metrics_of_requests_are_written(tmp_path: Path) -> None:
    arrivals = mixed(20)
    result = simulate(pools(memory_workers=2), arrivals, faults=[Fault("memory", 0, 0.3)])
    write_requests(tmp_path / "requests.csv", result.log)
    with (tmp_path / "requests.csv").open() as opened:
        rows = list(csv.DictReader(opened))
    assert [row["state"] for row in rows] == [state.value for state in result.log.states]
    assert [int(row["prompt"]) for row in rows] == arrivals.prompt.tolist()
    assert {row["first_token_s"] for row in rows if row["state"] == "refused"} <= {""}
    parquet = pytest.importorskip("pyarrow.parquet")
    write_requests(tmp_path / "requests.parquet", result.log)
    table = parquet.read_table(tmp_path / "requests.parquet").to_pydict()
    assert table["state"] == [row["state"] for row in rows]
    assert [None if row["end_s"] == "" else float(row["end_s"]) for row in rows] == table["end_s"]
    with pytest.raises(ConfigError, match=r"ends in .csv or .parquet"):
        write_requests(tmp_path / "requests.json", result.log)


def test_what_is_asked_for_and_not_drawn_takes_no_room() -> None:
    """Requests that may fill most of the slots are served together, as if they had asked for what they use."""
    three = arriving((0.0, 100, 20), (0.0, 100, 20), (0.0, 100, 20))
    asking = replace(three, max_tokens=int(0.6 * pools().memory_cost.kv_tokens))
    exact, much = simulate(pools(), three), simulate(pools(), asking)
    assert exact.log.first_s.max() < exact.log.end_s.min()
    assert (much.log.drawn == 20).all() and (much.log.end_s == exact.log.end_s).all()
    assert gaps_of(much) == gaps_of(exact)


def test_a_memory_worker_that_runs_out_of_slots_drops_the_latest_request_which_ends_all_the_same() -> None:
    """Three requests that grow to half of all slots each, from a quarter: one of them must wait for another's end."""
    quarter = pools().memory_cost.kv_tokens // 4
    result = simulate(pools(), arriving(*((0.0, quarter, quarter),) * 3))
    assert result.log.states == [State.FINISHED] * 3 and (result.log.drawn == quarter).all()
    assert result.preempted >= 1 and result.log.end_s.argmax() == 2
    ends = np.sort(result.log.end_s)
    assert ends[2] > 1.2 * ends[0]


@pytest.mark.parametrize(
    ("prompt", "output", "count"), [(2048, 1, 100), (64, 48, 500)], ids=["prompts alone", "mostly decoding"]
)
def test_chosen_lanes_are_near_the_best_that_can_be_asked_for(prompt: int, output: int, count: int) -> None:
    arrivals = Arrivals(np.zeros(count), np.full(count, prompt), np.full(count, output))
    asked: list[tuple[int, Pipelining]] = [(2, "fixed"), (4, "fixed"), (6, "fixed"), (3, "rotational")]
    two = pools(compute_workers=2, memory_workers=4)
    best = min(simulate(replace(two, lanes=lanes, pipelining=order), arrivals).seconds for lanes, order in asked)
    assert simulate(replace(two, lanes=None), arrivals).seconds <= 1.1 * best


def test_lanes_that_wait_for_one_pool_after_the_other_are_not_taken_for_missing_room() -> None:
    """One lane per replica and long prompts: requests are queued despite free slots, and both pools are half idle."""
    arrivals = Arrivals(np.zeros(60), np.full(60, 2048), np.full(60, 1))
    waiting = simulate(pools(lanes=1), arrivals)
    assert waiting.queued > 0.8 and waiting.refused == 0
    assert waiting.bottleneck.startswith("lanes")
    assert simulate(pools(lanes=2, pipelining="fixed"), arrivals).bottleneck == "compute workers"
