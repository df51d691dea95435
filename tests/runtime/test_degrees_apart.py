"""Replicas for prompts and replicas that decode with other numbers of ranks and stages, in real processes."""

import itertools
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lamina.cluster.local_workers import LocalWorkers
from lamina.config.engine_config import EngineConfig
from lamina.control.agent_messages import Start
from lamina.core.errors import ConfigError
from lamina.core.pipeline import Shape
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType
from lamina.engine.engine import Engine
from lamina.launch import launch
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, greedy, served
from tests.support.running import Killable, Streams, config, run_all, wait_for_recoveries
from tests.support.sweep import sweep
from tests.support.waiting import END_S, wait_until

TOKENS, LONG = 12, 40
SHAPES = [Shape(ranks, stages) for ranks in (1, 2) for stages in (1, 2)]
CASES = {
    f"tp{early.ranks} pp{early.stages}, tp{late.ranks} pp{late.stages}, {memory}": (early, late, memory)
    for early, late, memory in itertools.product(SHAPES, SHAPES, ["cpu:2", "local", "local,cpu:1"])
    if early != late
}
ORDINARY = ("tp1 pp1, tp2 pp1, cpu:2", "tp2 pp1, tp1 pp2, local")


def pool(shape: Shape, replicas: int = 1) -> str:
    return f"cpu:{shape.workers * replicas}/tp{shape.ranks}/pp{shape.stages}"


@pytest.fixture
def prepared(tmp_path: Path) -> Any:
    """Return a model of two KV heads whose slices for one and for two ranks are cached in ``tmp_path``."""
    model = served("llama")
    write_prepared(model, tmp_path, ranks=2)
    return write_prepared(model, tmp_path)


def some_prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(6)
    begin = [draw.randrange(3, SERVED_VOCABULARY) for _ in range(20)]
    return [begin + [draw.randrange(3, SERVED_VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("case", sweep(CASES, ORDINARY))
def test_pools_of_other_degrees_equal_hugging_face(
    case: tuple[Shape, Shape, str], prepared: Any, tmp_path: Path
) -> None:
    """Two replicas that decode, several chunks of each prompt, and prompts that begin alike."""
    early, late, memory = case
    wanted = EngineConfig(
        model=str(tmp_path),
        dtype=DType.FLOAT32,
        prefill=pool(early),
        compute=pool(late, replicas=2),
        memory=memory,
        max_num_seqs=8,
        max_num_batched_tokens=24,
    )
    prompts = some_prompts(1, 9, 57, 3, 30)
    engine = launch(wanted)
    try:
        shape_of, role = engine.topology.pipeline.shape_of, engine.topology.pipeline.role
        assert [shape_of(replica) for replica in range(3)] == [
            replace(shape, starts=shape_of(place).starts) for place, shape in enumerate((early, late, late))
        ]
        assert {role(lane) for lane in range(engine.topology.pipeline.lanes)} == {"prefill", "decode"}
        params = [SamplingParams(n=n, temperature=0.0, max_tokens=TOKENS, ignore_eos=True) for n in (1, 2)]
        outputs = run_all(engine, prompts * 2, [each for each in params for _ in prompts])
        assert engine.stats().handovers >= len(prompts)
        wait_until(lambda: not any(one.used for one in engine.stats().memory.values()), "slots stayed in use")
    finally:
        engine.close()
    expected = [greedy(prepared, prompt, TOKENS) for prompt in prompts]
    got = [[part.token_ids for part in output.outputs] for output in outputs]
    assert got == [[tokens] for tokens in expected] + [[tokens] * 2 for tokens in expected]


def answered(engine: Engine, answers: list[tuple[list[int], list[int]]], disturb: Callable[[], object]) -> None:
    """Compare the tokens of requests that run while ``disturb`` is called. ``answers``: prompts and their tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
    streams = Streams(engine, [(prompt, params) for prompt, _ in answers])
    streams.wait_for_tokens(10)
    disturb()
    assert [[one.token_ids for one in each] for each in streams.results()] == [[tokens] for _, tokens in answers]


def test_a_lost_rank_and_a_lost_stage_are_replaced_in_their_own_shape(prepared: Any, tmp_path: Path) -> None:
    """Meanwhile, replicas of the other shape run prompts and decode."""
    answers = [(prompt, greedy(prepared, prompt, LONG)) for prompt in some_prompts(9, 57, 30)]
    workers = Killable()
    wanted = config(tmp_path, 2, 1, prefill="cpu:2/tp2", max_restarts=4)
    engine = launch(replace(wanted, compute="cpu:2/pp2"), workers=workers)
    try:
        for number, victim in enumerate(["compute1", "compute2"], 1):
            answered(engine, answers, partial(workers.signal, victim, signal.SIGKILL))
            wait_for_recoveries(engine, number)
            wait_until(lambda: len(engine.topology.computes) == 4, "the lost replica was not replaced")
            assert victim not in engine.topology.names
            shapes = [replace(engine.topology.pipeline.shape_of(replica), starts=()) for replica in range(2)]
            assert shapes == [Shape(2, 1), Shape(1, 2)]
            assert engine.topology.prefills == ("compute4", "compute5")
        answered(engine, answers, lambda: None)
    finally:
        engine.close()


@pytest.mark.slow
def test_replicas_of_both_shapes_join_and_leave(prepared: Any, tmp_path: Path) -> None:
    """One of other degrees than the pool that grows leaves, and does not change its role."""
    answers = [(prompt, greedy(prepared, prompt, LONG)) for prompt in some_prompts(9, 57, 30)]
    wanted = config(tmp_path, 1, 1, prefill="cpu:2/tp2")
    engine = launch(replace(wanted, compute="cpu:2/tp1"))
    try:
        with pytest.raises(ConfigError, match="a replica has 2 compute workers, and 1 is no multiple of that"):
            engine.scale(prefill=1).result(END_S)
        for change, changed in (
            ({"prefill": 2}, ["compute4", "compute5"]),
            ({"compute": 1}, ["compute6"]),
            ({"prefill": -2, "compute": 1}, ["compute4", "compute5", "compute7"]),
            ({"compute": -2}, ["compute6", "compute7"]),
        ):
            found = list[str]()
            answered(engine, answers, lambda: found.extend(engine.scale(**change).result(END_S)))  # noqa: B023
            assert sorted(found) == changed
        assert engine.topology.computes == ("compute0", "compute1", "compute2", "compute3")
        assert engine.stats().recoveries == 0
    finally:
        engine.close()


class Unstarted(LocalWorkers):
    """Fails as soon as a worker is to be started."""

    def start(self, worker: Start) -> None:
        raise AssertionError(f"{worker} was started")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"compute": "cpu:3/tp3"}, "have 2 KV heads, which 3 ranks cannot share evenly"),
        ({"compute": "cpu:4/tp4"}, "which 4 ranks share by parts of their query heads, and replicas of 1 ranks do not"),
        ({"compute": "cpu:4/tp4", "prefill": None, "tensor_parallel": 3}, None),
        ({"prefill": "cpu:4/pp4"}, "pipeline_parallel is 4, and the model has 3 slices to divide; give at most 3"),
        ({"compute": "cpu:3/tp2"}, "a replica has 2 compute workers, and 3 is no multiple of that"),
        ({"memory": "cpu:1/tp2"}, "has degrees; `lamina launch` and `simulate` take them in --prefill"),
    ],
)
def test_impossible_degrees_are_refused_before_a_worker_starts(
    settings: dict[str, Any], says: str | None, tmp_path: Path
) -> None:
    write_prepared(served("llama", layers=2), tmp_path)
    wanted = replace(config(tmp_path, 1, 1, prefill="cpu:1"), **settings)
    if says is None:
        with pytest.raises(AssertionError, match="was started"):
            launch(wanted, workers=Unstarted())
    else:
        with pytest.raises(ConfigError, match=says):
            launch(wanted, workers=Unstarted())
