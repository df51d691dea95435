"""Ranges that move between real workers while their sequences decode: same tokens as Hugging Face, no slot left."""

import random
from pathlib import Path
from typing import Any

import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.requests import Group
from lamina.core.sampling import SamplingParams
from lamina.core.steps import StepPlan
from lamina.core.types import Balance, DType
from lamina.kv import balancing as policies
from lamina.launch import launch
from lamina.schedule import balancing
from lamina.schedule.moves import Moves
from lamina.schedule.scheduler import Scheduler
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, greedy, served
from tests.support.running import run_all
from tests.support.sweep import sweep
from tests.support.waiting import wait_until

TOKENS = 40


def moving_at_random(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[int]:
    """With every plan, some range of a request that runs moves to another worker; returns the tokens of each."""
    plan_of, draw, moved = Scheduler.plan, random.Random(seed), list[int]()

    def plan(scheduler: Scheduler, lane: int) -> StepPlan | None:
        groups = [group for own in scheduler._lanes for group in own.running]
        scheduler.moves._credit = 1000.0
        if groups:
            source, target = draw.sample(sorted(scheduler.placement.capacities), 2)
            if tokens := scheduler.moves.try_move(draw.choice(groups), source, target, draw.randint(1, 40)):
                moved.append(tokens)
        return plan_of(scheduler, lane)

    monkeypatch.setattr(Scheduler, "plan", plan)
    return moved


BASE: dict[str, Any] = {
    "memory": "cpu:3",
    "dtype": DType.FLOAT32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
}
SWITCHES: dict[str, dict[str, Any]] = {
    "sinks, windows, two lanes": {"family": "gpt_oss", "lanes": 2},
    "local memory of two replicas": {"family": "llama", "compute": "cpu:2", "memory": "local"},
    "local memory beside memory workers": {"family": "llama", "compute": "cpu:2", "memory": "local,cpu:1"},
    "a bias by position": {"family": "bloom"},
    "replicas, TCP": {"family": "llama", "compute": "cpu:2", "transport": "tcp"},
    "lanes that rotate": {"family": "llama", "compute": "cpu:2", "lanes": 3, "transport": "tcp"},
    "segments of 17": {"family": "llama", "kv_tokens_per_worker": 17},
}


@pytest.mark.parametrize("switches", sweep(SWITCHES, ["sinks, windows, two lanes", "local memory of two replicas"]))
def test_sequences_whose_ranges_move_at_random_equal_hugging_face(
    switches: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dict(switches)
    family = settings.pop("family")
    reference = write_prepared(served(family), tmp_path)
    draw = random.Random(3)
    begin = [draw.randrange(3, SERVED_VOCABULARY) for _ in range(30)]  # that all prompts share
    prompts = [begin + [draw.randrange(3, SERVED_VOCABULARY) for _ in range(count)] for count in (1, 9, 17, 3)]
    moved = moving_at_random(monkeypatch, 5)
    engine = launch(EngineConfig(model=str(tmp_path), **(BASE | settings)))
    try:
        params = [SamplingParams(n=n, temperature=0.0, max_tokens=TOKENS, ignore_eos=True) for n in (1, 2)]
        outputs = run_all(engine, prompts * 2, [each for each in params for _ in prompts])
        wait_until(lambda: not any(one.used for one in engine.stats().memory.values()), "slots stayed in use", 10)
        counts = engine._scheduler.moves.counts
        reserved = engine._scheduler.placement.reserved  # the next plan frees what ended with the last step
        wait_until(lambda: not any(reserved.values()), f"slots stayed reserved: {reserved}", 10)
    finally:
        engine.close()
    expected = [greedy(reference, prompt, TOKENS) for prompt in prompts]
    got = [[part.token_ids for part in output.outputs] for output in outputs]
    assert got == [[tokens] for tokens in expected] + [[tokens] * 2 for tokens in expected]
    assert counts.moves > 20 and len(moved) >= counts.moves


LENDING: dict[Balance, tuple[int, list[tuple[int, int, int]]]] = {
    # One replica runs one sequence, the other one four.
    "throughput": (4 << 20, [(90, 150, 1), (90, 150, 4)]),
    # One request nearly fills a replica, so that the short ones run on the other.
    "ledger": (322_560, [(370, 40, 1), (25, 60, 1), (27, 60, 1), (33, 60, 1)]),
}


@pytest.mark.parametrize("balance", LENDING)
def test_replicas_lend_local_memory_as_a_policy_proposes(balance: Balance, tmp_path: Path) -> None:
    nbytes, shapes = LENDING[balance]
    reference = write_prepared(served("llama", max_position_embeddings=512), tmp_path)
    draw = random.Random(3)
    prompts = [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(length)] for length, *_ in shapes]
    settings = BASE | {"compute": "cpu:2", "memory": "local", "kv_cache_memory_bytes": nbytes, "prefix_cache": False}
    engine = launch(EngineConfig(model=str(tmp_path), balance=balance, **settings))
    try:
        params = [SamplingParams(n=n, temperature=0.0, max_tokens=count, ignore_eos=True) for _, count, n in shapes]
        outputs = run_all(engine, prompts, params)
        moved = engine._scheduler.moves.counts
        wait_until(lambda: not any(one.used for one in engine.stats().memory.values()), "slots stayed in use", 10)
        reserved = engine._scheduler.placement.reserved  # the next plan frees what ended with the last step
        wait_until(lambda: not any(reserved.values()), f"slots stayed reserved: {reserved}", 10)
    finally:
        engine.close()
    expected = [[greedy(reference, prompt, count)] * n for prompt, (_, count, n) in zip(prompts, shapes, strict=True)]
    assert [[part.token_ids for part in output.outputs] for output in outputs] == expected
    assert moved.moves > 0
    holders = [{segment.worker for segment in output.placement} for output in outputs]
    assert {"compute0", "compute1"} in holders


Begun = tuple[str, str, str, int]  # request, source, target and tokens of a move


def lending_once(monkeypatch: pytest.MonkeyPatch, requests: int) -> list[Begun]:
    """Once two requests decode on two replicas, the first ``requests`` of them move tokens to the other replica, once.
    Returns all moves."""
    plan_of, try_move, begun, lent = Scheduler.plan, Moves.try_move, list[Begun](), set[Group]()

    def watched(moves: Moves, group: Group, source: str, target: str, tokens: int) -> int:
        moved = try_move(moves, group, source, target, tokens)
        if moved:
            begun.append((group.request.request_id, source, target, moved))
        return moved

    def plan(scheduler: Scheduler, lane: int) -> StepPlan | None:
        running = [group for own in scheduler._lanes for group in own.running]
        for group in running[:requests] if len(running) == 2 else []:
            home = group.completions[0].worker
            (other,) = scheduler.placement.capacities.keys() - {home}
            scheduler.moves._credit = 1000.0
            if group not in lent and scheduler.moves.try_move(group, home, other, 128):
                lent.add(group)
        return plan_of(scheduler, lane)

    monkeypatch.setattr(Moves, "try_move", watched)
    monkeypatch.setattr(Scheduler, "plan", plan)
    return begun


@pytest.mark.parametrize(
    ("debtors", "nbytes"), [(2, 4 << 20), (1, 322_560)], ids=["a cycle of debts", "a creditor short of slots"]
)
def test_the_ledger_brings_lent_tokens_home(
    debtors: int, nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balancing, "LOOK_STEPS", 2)
    monkeypatch.setattr(policies, "LEAST", 16)
    reference = write_prepared(served("llama", max_position_embeddings=512), tmp_path)
    draw = random.Random(3)
    prompts = [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(150)] for _ in range(2)]
    begun = lending_once(monkeypatch, debtors)
    settings = BASE | {"compute": "cpu:2", "memory": "local", "kv_cache_memory_bytes": nbytes, "prefix_cache": False}
    engine = launch(EngineConfig(model=str(tmp_path), balance="ledger", **settings))
    try:
        params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
        outputs = run_all(engine, prompts, params)
        wait_until(lambda: not any(one.used for one in engine.stats().memory.values()), "slots stayed in use", 10)
    finally:
        engine.close()
    assert [output.outputs[0].token_ids for output in outputs] == [greedy(reference, each, 120) for each in prompts]
    lent, back = begun[:debtors], begun[debtors:]
    for request, home, creditor, tokens in lent:
        returned = sum(one[3] for one in back if one[:3] == (request, creditor, home))
        assert returned == tokens if debtors == 2 else 16 <= returned <= tokens, begun
    if debtors == 2:
        assert all(len({segment.worker for segment in output.placement}) == 1 for output in outputs)
