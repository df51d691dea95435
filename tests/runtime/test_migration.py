"""Sequences that move to another memory worker while they decode: same tokens as Hugging Face, no slot left behind."""

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.steps import StepPlan
from lamina.core.types import DType, FinishReason, RequestOutput, SamplingParams
from lamina.engine.engine import Engine
from lamina.engine.updates import whole
from lamina.launch import launch
from lamina.schedule import admission
from lamina.schedule.scheduler import Scheduler
from tests.runtime.test_faults import wait_until, worker_processes
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, greedy, served
from tests.support.sweep import sweep

PER_TOKEN = 3 * 2 * (16 + 16) * 4  # layers, heads, K and V, float32
CAPACITY = 540
LENGTHS = [(215, 41), (215, 41), (90, 41), (90, 41), (215, 21)]
"""Prompt and max_tokens: two large requests, two small ones, and a large one that fits beside neither pair."""


@dataclass(frozen=True)
class Model:
    """A checkpoint with prompts, and what Hugging Face answers greedily."""

    path: str
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is sought soon: these requests do not live for as many steps as a queue usually has patience."""
    monkeypatch.setattr(admission, "PATIENCE", 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    place = tmp_path_factory.mktemp("llama")
    reference = write_prepared(served("llama", max_position_embeddings=256), place)
    draw = random.Random(11)
    prompts = [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(prompt)] for prompt, _ in LENGTHS]
    expected = [greedy(reference, prompt, tokens) for prompt, (_, tokens) in zip(prompts, LENGTHS, strict=True)]
    return Model(str(place), prompts, expected)


def start(model: Model, **switches: Any) -> Engine:
    settings: dict[str, Any] = {
        "memory": "cpu:2",
        "dtype": DType.FLOAT32,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return launch(EngineConfig(model=model.path, kv_cache_memory_bytes=CAPACITY * PER_TOKEN, **(settings | switches)))


def generate(
    engine: Engine, model: Model, on_each: Callable[[RequestOutput], None] = lambda output: None
) -> list[RequestOutput]:
    """Final outputs of all requests, submitted at once."""
    finals: dict[str, RequestOutput] = {}
    ended = threading.Event()

    def on_output(output: RequestOutput) -> None:
        on_each(output)
        if output.finished:
            finals[output.request_id] = output
            if len(finals) == len(LENGTHS):
                ended.set()

    for index, (prompt, (_, tokens)) in enumerate(zip(model.prompts, LENGTHS, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        engine.submit(str(index), prompt, params, whole(engine.tokenizer, on_output))
    assert ended.wait(180), f"{len(finals)} of {len(LENGTHS)} requests ended; {engine.stats()}"
    return [finals[str(index)] for index in range(len(LENGTHS))]


def slots_in_use(engine: Engine) -> int:
    return sum(memory.used for memory in engine.stats().memory.values())


SWITCHES: dict[str, dict[str, Any]] = {
    "shm": {"transport": "shm"},
    "TCP": {"transport": "tcp"},
    "lanes that rotate, over TCP": {"transport": "tcp", "compute": "cpu:2", "lanes": 3},
    "nothing ahead": {"plan_ahead": False},
}
if "LAMINA_TEST_RDMA" in os.environ:
    SWITCHES["RDMA"] = {"transport": "rdma"}


@pytest.mark.parametrize("switches", sweep(SWITCHES, {"lanes that rotate, over TCP", "RDMA"} & SWITCHES.keys()))
def test_a_request_gets_room_and_the_one_that_moved_goes_on_as_if_nothing_had_been(
    model: Model, switches: dict[str, Any]
) -> None:
    engine = start(model, **switches)
    seen: dict[str, list[str]] = {}

    def note(output: RequestOutput) -> None:
        for segment in output.placement:
            workers = seen.setdefault(output.request_id, [])
            if segment.worker not in workers:
                workers.append(segment.worker)

    try:
        outputs = generate(engine, model, note)
        assert engine.stats().moved == 1
        wait_until(lambda: slots_in_use(engine) == 0, 10, "slots stayed in use")
    finally:
        engine.close()
    assert [output.outputs[0].token_ids for output in outputs] == model.expected
    assert sorted(map(len, seen.values())) == [1, 1, 1, 1, 2]
    assert len(seen["2"]) + len(seen["3"]) == 3  # one of the small ones has been on both workers


@pytest.mark.slow
def test_codes_move_unchanged(model: Model) -> None:
    """The tokens of a worker that is large enough for all requests, where none moves."""
    per_token = 3 * 2 * 2 * (16 + 4)  # layers, heads, K and V, codes and a scale
    answers = []
    for memory, slots, moved in (("cpu:1", 3 * CAPACITY, 0), ("cpu:2", CAPACITY, 1)):
        engine = launch(
            EngineConfig(
                model=model.path,
                memory=memory,
                dtype=DType.FLOAT32,
                kv_cache_dtype="int8",
                kv_cache_memory_bytes=slots * per_token,
                max_num_seqs=8,
                max_num_batched_tokens=512,  # every prompt is one chunk
            )
        )
        try:
            answers.append([output.outputs[0].token_ids for output in generate(engine, model)])
            assert engine.stats().moved == moved
        finally:
            engine.close()
    assert answers[0] == answers[1] != model.expected


@pytest.mark.parametrize(
    "moments", [(1, 4), pytest.param((0, 1, 2, 4, 8, 16), marks=pytest.mark.slow)], ids=["two moments", "six moments"]
)
def test_a_request_cancelled_at_any_moment_of_its_way_leaves_no_slot(
    model: Model, moments: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(model, prefix_cache=False)  # each round begins like the first
    after, left = [0], [-1]
    plan_of, migrations = Scheduler.plan, []

    def plan(scheduler: Scheduler, lane: int) -> StepPlan | None:
        """The plan; so many plans after a migration has begun, its request is cancelled."""
        made = plan_of(scheduler, lane)
        if made is not None and made.migrations and left[0] < 0:
            migrations.append(made.migrations[0])
            left[0] = after[0]
        if left[0] == 0:
            for name in ("2", "3"):
                engine.abort(name)
        left[0] -= left[0] >= 0
        return made

    monkeypatch.setattr(Scheduler, "plan", plan)
    try:
        for after[0] in moments:
            left[0] = -1
            outputs = generate(engine, model)
            reasons = [output.outputs[0].finish_reason for output in outputs]
            assert reasons == [FinishReason.LENGTH] * 2 + [FinishReason.ABORT] * 2 + [FinishReason.LENGTH]
            for output, expected in zip(outputs, model.expected, strict=True):
                tokens = output.outputs[0].token_ids
                assert tokens == expected[: len(tokens)]
            wait_until(lambda: slots_in_use(engine) == 0, 10, f"slots stayed in use, cancelled after {after[0]} plans")
        assert len(migrations) >= len(moments)
        assert not any(engine._scheduler.placement.reserved.values())
    finally:
        engine.close()


@pytest.mark.parametrize("victim", ["source", pytest.param("target", marks=pytest.mark.slow)])
def test_a_memory_worker_killed_while_a_segment_moves_costs_no_request(
    model: Model, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_of = Scheduler.plan
    processes: dict[str, psutil.Process] = {}

    def plan(scheduler: Scheduler, lane: int) -> StepPlan | None:
        made = plan_of(scheduler, lane)
        if made is not None and made.migrations and processes:
            processes[getattr(made.migrations[0], victim)].kill()
            processes.clear()
        return made

    monkeypatch.setattr(Scheduler, "plan", plan)
    engine = start(model, transport="tcp")
    workers = worker_processes()
    memories = [process for name, process in workers.items() if name.startswith("lamina.memory.worker")]
    processes |= {f"memory{index}": process for index, process in enumerate(sorted(memories, key=lambda p: p.pid))}
    outputs = generate(engine, model)
    assert [output.outputs[0].token_ids for output in outputs] == model.expected
    assert engine.stats().recoveries == 1 and engine.stats().recomputed > 0
    engine.close()
    assert not [process for process in workers.values() if process.is_running()]
