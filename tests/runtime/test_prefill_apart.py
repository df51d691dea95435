"""Prompts on one compute worker and decoding on others, with real workers: the same tokens as Hugging Face."""

import dataclasses
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lamina.cluster import sizing
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.sampling import SamplingParams
from lamina.core.steps import StepPlan
from lamina.core.types import DType
from lamina.engine.engine import Engine
from lamina.launch import launch
from lamina.schedule.plan_times import PlanTimes
from lamina.schedule.scheduler import Scheduler
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, greedy, served
from tests.support.running import Killable, Streams, config, run_all, wait_for_recoveries
from tests.support.sweep import sweep
from tests.support.waiting import END_S, wait_until

TOKENS, LONG = 16, 40
RANKS: dict[str, Any] = {"prefill": "cpu:2", "compute": "cpu:2", "memory": "local", "tensor_parallel": 2}
STAGES: dict[str, Any] = {"prefill": "cpu:2", "compute": "cpu:2", "memory": "local", "pipeline_parallel": 2}
SWITCHES: dict[str, dict[str, Any]] = {
    "one and one, TCP": {"compute": "cpu:1", "transport": "tcp"},
    "one and two, segments of 17": {"compute": "cpu:2", "lanes": 6, "kv_tokens_per_worker": 17},
    "in local memory of three": {"compute": "cpu:2", "memory": "local"},
    "nothing ahead, no cache": {"compute": "cpu:1", "plan_ahead": False, "prefix_cache": False},
    "ranks": RANKS,
    "ranks, one way": {**RANKS, "one_way": True},
    "ranks, one way, no scratch": {**RANKS, "one_way": True, "prompt_attention": "memory"},
    "two and two of ranks, one way": {**RANKS, "prefill": "cpu:4", "compute": "cpu:4", "lanes": 6, "one_way": True},
    "stages": {**STAGES, "prompt_attention": "memory"},
    "stages, scratch": STAGES,
    "one and two of stages, segments of 17": {**STAGES, "compute": "cpu:4", "kv_tokens_per_worker": 17},
    "stages of ranks": {**STAGES, "prefill": "cpu:4", "compute": "cpu:4", "tensor_parallel": 2},
    "stages of ranks, one way": {**RANKS, **STAGES, "prefill": "cpu:4", "compute": "cpu:4", "one_way": True},
    "four stages, the last without attention": {
        **STAGES,
        "prefill": "cpu:4",
        "compute": "cpu:4",
        "pipeline_parallel": 4,
    },
}


def keep_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replicas on CPUs attend for each other as those of several GPUs do, and serve nothing during sums."""
    with_lending = sizing.with_lending
    monkeypatch.setattr(sizing, "with_lending", lambda order, kinds: with_lending(order, ["cuda"]))


# test_a_lost_rank_that_runs_prompts_or_decodes_costs_no_token has ranks, one way.
@pytest.mark.parametrize("switches", sweep(SWITCHES, ["one and two, segments of 17", "in local memory of three"]))
def test_prompts_apart_equal_hugging_face(
    switches: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"memory": "cpu:2", "max_num_seqs": 8, "max_num_batched_tokens": 32, **switches}
    if settings.pop("one_way", False):
        keep_one_way(monkeypatch)
    reference = write_prepared(served("llama"), tmp_path, ranks=settings.get("tensor_parallel", 1))
    draw = random.Random(3)
    begin = [draw.randrange(3, SERVED_VOCABULARY) for _ in range(30)]  # that all prompts share
    prompts = [begin + [draw.randrange(3, SERVED_VOCABULARY) for _ in range(count)] for count in (1, 9, 57, 3)]
    plans, plan_of = list[StepPlan](), Scheduler.plan

    def plan(scheduler: Scheduler, lane: int) -> StepPlan | None:
        made = plan_of(scheduler, lane)
        plans.extend([] if made is None else [made])
        return made

    monkeypatch.setattr(Scheduler, "plan", plan)
    starved, note = dict[int, list[float]](), PlanTimes.on_step_done

    def on_step_done(times: PlanTimes, lane: int, step: int, starved_s: float) -> None:
        starved.setdefault(lane, []).append(starved_s)
        note(times, lane, step, starved_s)

    monkeypatch.setattr(PlanTimes, "on_step_done", on_step_done)
    begun_s = time.monotonic()
    engine = launch(EngineConfig(**{"model": str(tmp_path), "dtype": DType.FLOAT32, "prefill": "cpu:1", **settings}))
    try:
        role = engine.topology.pipeline.role
        assert {role(lane) for lane in range(engine.topology.pipeline.lanes)} == {"prefill", "decode"}
        params = [SamplingParams(n=n, temperature=0.0, max_tokens=TOKENS, ignore_eos=True) for n in (1, 2)]
        outputs = run_all(engine, prompts * 2, [each for each in params for _ in prompts])
        seeded = [SamplingParams(seed=5, max_tokens=TOKENS, repetition_penalty=1.3, ignore_eos=True)] * 2
        drawn = [output.outputs[0].token_ids for output in run_all(engine, [prompts[0]] * 2, seeded)]
        holders = {segment.worker for output in outputs for segment in output.placement}
        assert holders.isdisjoint(engine.topology.prefills), "KV is where it is decoded"
        wait_until(lambda: not any(one.used for one in engine.stats().memory.values()), "slots stayed in use")
        assert not any(engine._scheduler.placement.reserved.values())
    finally:
        engine.close()
    expected = [greedy(reference, prompt, TOKENS) for prompt in prompts]
    got = [[part.token_ids for part in output.outputs] for output in outputs]
    assert got == [[tokens] for tokens in expected] + [[tokens] * 2 for tokens in expected]
    assert drawn[0] == drawn[1]
    assert not any(one.decoding.sequences for one in plans if role(one.lane) == "prefill")
    roles = [(chunk.sequence, role(one.lane)) for one in plans for chunk in one.chunks]
    assert len({*roles}) == len({sequence for sequence, _ in roles}), "chunks of a prompt run in lanes of one role"
    assert sum(len(one.decoding.sequences) for one in plans) >= 12 * (TOKENS - 1)
    assert any(times[0] > 0 for times in starved.values()), "no worker has waited for its first plan"
    assert all(sum(times) < time.monotonic() - begun_s for times in starved.values())


def test_roles_change_and_replicas_for_prompts_join_and_leave_while_requests_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker loads weights for a role, no lane runs what its role excludes, and every token is that of Hugging
    Face."""
    reference = write_prepared(served("llama"), tmp_path)
    draw = random.Random(4)
    prompts = [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(count)] for count in (1, 9, 57, 30, 70, 3)]
    expected = [greedy(reference, prompt, LONG) for prompt in prompts]
    engine = launch(config(tmp_path, 2, 2))
    plan_of = Scheduler.plan

    def plan(scheduler: Scheduler, lane: int) -> StepPlan | None:
        made, role = plan_of(scheduler, lane), engine.topology.pipeline.role(lane)
        assert made is None or not (role == "prefill" and made.decoding.sequences)
        return made

    monkeypatch.setattr(Scheduler, "plan", plan)
    params = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
    changes: list[tuple[dict[str, int], list[str], tuple[str, ...]]] = [
        ({"prefill": 1, "compute": -1}, ["compute1"], ("compute1",)),
        ({"prefill": 1}, ["compute2"], ("compute1", "compute2")),
        ({"prefill": -1, "compute": 1}, ["compute2"], ("compute1",)),
        ({"prefill": -1}, ["compute1"], ()),
    ]
    try:
        for change, names, prefills in changes:
            streams = Streams(engine, [(prompt, params) for prompt in prompts])
            streams.wait_for_tokens(2 * len(prompts))
            assert engine.scale(**change).result(END_S) == names
            assert engine.topology.prefills == prefills
            assert [[one.token_ids for one in each] for each in streams.results()] == [[one] for one in expected]
        assert engine.topology.epoch.number == 1 and engine.stats().recomputed == 0
        assert sorted(engine.topology.computes) == ["compute0", "compute2"]
        with pytest.raises(ConfigError, match="the compute pool has 2, of which 1 must stay: 2 cannot leave"):
            engine.scale(prefill=2, compute=-2).result(END_S)
        wait_until(lambda: not any(one.used for one in engine.stats().memory.values()), "slots stayed in use")
    finally:
        engine.close()


def test_autoscaling_keeps_replicas_for_prompts_within_its_bounds(tmp_path: Path) -> None:
    reference = write_prepared(served("llama"), tmp_path)
    prompts = [[3 + number for number in range(count)] for count in (9, 57, 30)]
    params = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
    targets = {"slo_ttft_ms": 60_000, "slo_tbt_ms": 60_000}
    engine = launch(config(tmp_path, 2, 1, autoscale="prefill=1:1", **targets))
    try:
        wait_until(lambda: engine.topology.prefills, "no replica only runs prompts")
        outputs = run_all(engine, prompts, params)
        assert [one.outputs[0].token_ids for one in outputs] == [greedy(reference, one, LONG) for one in prompts]
        stats = engine.stats()
        roles = sorted(place["role"] for place in stats.places.values())
        assert stats.handovers == len(prompts) and roles == ["decode", "prefill"]
        assert (stats.scaling["prefill"].grown, stats.scaling["prefill"].shrunk) == (1, 0)
    finally:
        engine.close()


@pytest.mark.parametrize("parts", sweep({"stages": "pipeline_parallel", "ranks": "tensor_parallel"}, ["stages"]))
def test_a_replica_of_several_workers_changes_its_role_as_a_whole(parts: str, tmp_path: Path) -> None:
    model = served("llama")
    write_prepared(model, tmp_path)
    reference = write_prepared(model, tmp_path, ranks=2)
    prompts = [[3 + number for number in range(count)] for count in (9, 57, 30)]
    expected = [greedy(reference, prompt, LONG) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
    engine = launch(config(tmp_path, 4, 1, lanes=4, **{parts: 2}))
    try:
        with pytest.raises(ConfigError, match="a replica has 2 compute workers, and 1 is no multiple of that"):
            engine.scale(prefill=1, compute=-1).result(END_S)
        with pytest.raises(ConfigError, match="the compute pool has 4, of which 2 must stay: 4 cannot leave"):
            engine.scale(prefill=4, compute=-4).result(END_S)
        streams = Streams(engine, [(prompt, params) for prompt in prompts])
        streams.wait_for_tokens(10)
        assert sorted(engine.scale(prefill=2, compute=-2).result(END_S)) == ["compute2", "compute3"]
        assert engine.topology.prefills == ("compute2", "compute3")
        assert [[one.token_ids for one in each] for each in streams.results()] == [[one] for one in expected]
    finally:
        engine.close()


def check_loss(engine: Engine, workers: Killable, victim: str, answers: list[tuple[list[int], list[int]]]) -> None:
    """Kill a worker while requests run, and compare their tokens. ``answers``: prompts and the tokens that follow."""
    params = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
    recoveries = engine.stats().recoveries
    streams = Streams(engine, [(prompt, params) for prompt, _ in answers])
    streams.wait_for_tokens(10)
    workers.signal(victim, signal.SIGKILL)
    wait_for_recoveries(engine, recoveries + 1)
    assert [[one.token_ids for one in each] for each in streams.results()] == [[tokens] for _, tokens in answers]


def test_a_lost_rank_that_runs_prompts_or_decodes_costs_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all KV on one replica of two ranks, which serves nothing during sums. Without it, requests wait."""
    keep_one_way(monkeypatch)
    reference = write_prepared(served("llama"), tmp_path, ranks=2)
    prompts = [[3 + number for number in range(count)] for count in (9, 57, 30)]
    expected = [greedy(reference, prompt, LONG) for prompt in prompts]
    workers = Killable()
    engine = launch(dataclasses.replace(config(tmp_path, 2, 0), **RANKS, max_restarts=4), workers=workers)
    try:
        with pytest.raises(ConfigError, match="they keep their role; start with only memory workers"):
            engine.scale(prefill=2, compute=-2).result(END_S)
        with pytest.raises(ConfigError, match="uses no memory workers"):
            engine.scale(memory=1).result(END_S)
        for victim, prefills in (("compute1", ("compute4", "compute5")), ("compute2", ("compute4", "compute5"))):
            check_loss(engine, workers, victim, list(zip(prompts, expected, strict=True)))
            wait_until(lambda: len(engine.topology.computes) == 4, "the lost replica was not replaced")
            assert engine.topology.prefills == prefills
            assert not engine.topology.local.intersection(prefills)
            wait_until(lambda: not any(one.used for one in engine.stats().memory.values()), "slots stayed in use")
    finally:
        engine.close()


@pytest.mark.slow
def test_a_lost_stage_that_runs_prompts_or_decodes_costs_no_token(tmp_path: Path) -> None:
    """With all KV in the stages' memory. Then the replicas exchange their roles."""
    reference = write_prepared(served("llama"), tmp_path)
    prompts = [[3 + number for number in range(count)] for count in (9, 57, 30)]
    answers = [(prompt, greedy(reference, prompt, LONG)) for prompt in prompts]
    workers = Killable()
    engine = launch(dataclasses.replace(config(tmp_path, 2, 0), **STAGES, max_restarts=4), workers=workers)
    try:
        for victim in ("compute1", "compute2"):
            check_loss(engine, workers, victim, answers)
            wait_until(lambda: len(engine.topology.computes) == 4, "the lost replica was not replaced")
            assert engine.topology.prefills == ("compute4", "compute5")
            wait_until(lambda: not any(one.used for one in engine.stats().memory.values()), "slots stayed in use")
        assert engine.scale(prefill=-2, compute=2).result(END_S) == ["compute4", "compute5"]
        check_loss(engine, workers, "compute5", answers)
    finally:
        engine.close()


@pytest.mark.slow
def test_a_lost_replica_for_prompts_is_replaced_in_its_role(tmp_path: Path) -> None:
    reference = write_prepared(served("llama"), tmp_path)
    prompts = [[3 + number for number in range(count)] for count in (9, 57, 30)]
    expected = [greedy(reference, prompt, LONG) for prompt in prompts]
    workers = Killable()
    engine = launch(config(tmp_path, 2, 1, prefill="cpu:1", max_restarts=4), workers=workers)
    try:
        for victim, pools in (("compute0", ("compute3",)), ("compute1", ("compute3",)), ("compute2", ("compute3",))):
            check_loss(engine, workers, victim, list(zip(prompts, expected, strict=True)))
            wait_until(lambda: len(engine.topology.computes) == 3, "the lost worker was not replaced")
            assert engine.topology.prefills == pools
    finally:
        engine.close()


def test_a_pool_for_prompts_that_cannot_serve_is_an_error_before_workers_start() -> None:
    pool = EngineConfig(compute="cpu:1", memory="cpu:1", prefill="cpu:1")
    bad: list[dict[str, Any]] = [
        {"prefill": "cpu:0"},
        {"prefill": "local"},
        {"pipelining": "rotational"},
        {"memory": "local,cpu:1", "tensor_parallel": 2, "prefill": "cuda:2", "compute": "cuda:2"},
    ]
    for changes in bad:
        with pytest.raises(ConfigError, match=r"prefill|pool|local"):
            launch(dataclasses.replace(pool, **changes))
