"""Prompts on one compute worker and decoding on others, with real workers: the same tokens as Hugging Face."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.steps import StepPlan
from lamina.core.types import DType, SamplingParams
from lamina.launch import launch
from lamina.schedule.scheduler import Scheduler
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, greedy, served
from tests.support.running import run_all
from tests.support.sweep import sweep
from tests.support.waiting import wait_until

TOKENS = 16
SWITCHES: dict[str, dict[str, Any]] = {
    "one and one, TCP": {"compute": "cpu:1", "transport": "tcp"},
    "one and two, segments of 17": {"compute": "cpu:2", "lanes": 6, "kv_tokens_per_worker": 17},
    "nothing ahead, no cache": {"compute": "cpu:1", "plan_ahead": False, "prefix_cache": False},
}


@pytest.mark.parametrize("switches", sweep(SWITCHES, ["one and two, segments of 17"]))
def test_prompts_apart_equal_hugging_face(
    switches: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = write_prepared(served("llama"), tmp_path)
    draw = random.Random(3)
    begin = [draw.randrange(3, SERVED_VOCABULARY) for _ in range(30)]  # that all prompts share
    prompts = [begin + [draw.randrange(3, SERVED_VOCABULARY) for _ in range(count)] for count in (1, 9, 57, 3)]
    plans, plan_of = list[StepPlan](), Scheduler.plan

    def plan(scheduler: Scheduler, lane: int) -> StepPlan | None:
        made = plan_of(scheduler, lane)
        plans.extend([] if made is None else [made])
        return made

    monkeypatch.setattr(Scheduler, "plan", plan)
    settings: dict[str, Any] = {"memory": "cpu:2", "max_num_seqs": 8, "max_num_batched_tokens": 32, **switches}
    engine = launch(EngineConfig(model=str(tmp_path), dtype=DType.FLOAT32, prefill="cpu:1", **settings))
    try:
        role = engine.topology.pipeline.role
        assert {role(lane) for lane in range(engine.topology.pipeline.lanes)} == {"prefill", "decode"}
        params = [SamplingParams(n=n, temperature=0.0, max_tokens=TOKENS, ignore_eos=True) for n in (1, 2)]
        outputs = run_all(engine, prompts * 2, [each for each in params for _ in prompts])
        seeded = [SamplingParams(seed=5, max_tokens=TOKENS, repetition_penalty=1.3, ignore_eos=True)] * 2
        drawn = [output.outputs[0].token_ids for output in run_all(engine, [prompts[0]] * 2, seeded)]
        wait_until(lambda: not any(one.used for one in engine.stats().memory.values()), "slots stayed in use")
        assert not any(engine._scheduler.placement.reserved.values())
    finally:
        engine.close()
    expected = [greedy(reference, prompt, TOKENS) for prompt in prompts]
    got = [[part.token_ids for part in output.outputs] for output in outputs]
    assert got == [[tokens] for tokens in expected] + [[tokens] * 2 for tokens in expected]
    assert drawn[0] == drawn[1]
    assert not any(one.decoding.sequences for one in plans if role(one.lane) == "prefill")
    assert not any(one.chunks for one in plans if role(one.lane) == "decode")
    assert sum(len(one.decoding.sequences) for one in plans) >= 12 * (TOKENS - 1)


def test_a_pool_for_prompts_that_cannot_serve_is_an_error_before_workers_start() -> None:
    pool = EngineConfig(compute="cpu:1", memory="cpu:1", prefill="cpu:1")
    bad: list[dict[str, Any]] = [
        {"prefill": "cpu:0"},
        {"prefill": "local"},
        {"pipelining": "rotational"},
        {"memory": "local"},
    ]
    for changes in bad:
        with pytest.raises(ConfigError, match=r"prefill|pool|local"):
            launch(dataclasses.replace(pool, **changes))
