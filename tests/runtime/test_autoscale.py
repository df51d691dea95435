"""Pools that scale by load while requests run: every output is that of an undisturbed run."""

import dataclasses
import random
from pathlib import Path

import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.outputs import CompletionOutput
from lamina.core.sampling import SamplingParams
from lamina.engine import scaling
from lamina.engine.engine import Engine
from lamina.engine.scaling import Windows
from lamina.launch import launch
from tests.support.random_models import SERVED_VOCABULARY
from tests.support.running import REQUESTS, Killable, Prompt, Streams, assert_same, config
from tests.support.waiting import wait_until


def contexts(count: int) -> list[Prompt]:
    """Long contexts with short answers, as an agent's calls have."""
    draw = random.Random(3)
    params = [
        SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True) for temperature in (0.0, 1.0)
    ]
    return [([draw.randrange(3, SERVED_VOCABULARY) for _ in range(80)], params[number % 2]) for number in range(count)]


def slots(engine: Engine) -> int:
    return sum(memory.used for memory in engine.stats().memory.values())


@pytest.mark.slow
def test_a_burst_of_long_contexts_makes_the_memory_pool_grow_and_it_shrinks_afterwards(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a memory worker holds is two of the contexts; those that leave are not waited for, and none is lost."""
    burst, calm = contexts(12), contexts(1)
    engine = launch(config(checkpoint, 1, 1, kv_cache_memory_bytes=4_000_000))
    try:
        expected, quiet = Streams(engine, burst).results(), Streams(engine, calm).results()
    finally:
        engine.close()
    monkeypatch.setattr(scaling, "WINDOWS", {"memory": Windows(0.5, 3.0)})
    workers = Killable()
    assert engine.cluster.fabric is not None
    per_token = engine.cluster.fabric.slab.nbytes(1)
    engine = launch(
        config(checkpoint, 1, 1, kv_cache_memory_bytes=250 * per_token, autoscale="memory=1:3"), workers=workers
    )
    try:
        assert_same(Streams(engine, calm).results(), quiet)
        assert engine.stats().scaling["memory"].grown == 0
        assert_same(Streams(engine, burst).results(), expected)
        grown = engine.stats().scaling["memory"]
        assert grown.grown == 2 and grown.last in ("+2, requests waited", "+1, requests waited")
        wait_until(lambda: len(engine.topology.memories) == 1 and slots(engine) == 0, "the pool stays large")
        wait_until(lambda: len(workers.pids) == 2, "a process is left behind")
        shrunk = engine.stats().scaling["memory"]
        assert shrunk.shrunk == 2 and shrunk.last == "-1, it was hardly used" and shrunk.load == 0.0
        assert_same(Streams(engine, calm).results(), quiet)
        assert engine.stats().recoveries == engine.stats().recomputed == 0
    finally:
        engine.close()
    said = [record.getMessage() for record in caplog.records if "scales by" in record.getMessage()]
    assert "the memory pool of 1 scales by +" in said[0] and "KV slots are in use, and requests wait for" in said[0]
    assert "the memory pool of 2 scales by -1: 0 of " in said[-1]


@pytest.mark.parametrize(
    ("computes", "bounds", "size"),
    [pytest.param(2, "4:4", 4, marks=pytest.mark.slow, id="grows"), pytest.param(4, "2:4", 2, id="shrinks")],
)
def test_the_compute_pool_scales_by_whole_replicas(
    computes: int,
    bounds: str,
    size: int,
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replicas of two stages hold all KV. Requests that run when one leaves are computed again elsewhere."""
    monkeypatch.setattr(scaling, "WINDOWS", {"compute": Windows(0.2, 0.5)})
    settings = config(checkpoint, computes, 1, pipeline_parallel=2, lanes=4, autoscale=f"compute={bounds}")
    engine = launch(dataclasses.replace(settings, memory="local"))
    try:
        wait_until(lambda: len(engine.topology.computes) == size, "the pool keeps its size")
        assert_same(Streams(engine, REQUESTS).results(), undisturbed)
        scaled = engine.stats().scaling["compute"]
        assert scaled.grown - scaled.shrunk == size - computes
        wait_until(lambda: slots(engine) == 0, "slots stayed in use")
    finally:
        engine.close()


class Broken(Killable):
    """Workers that are started later exit at once."""

    started = 0

    def command(self, name: str, module: str) -> list[str]:
        self.started += 1
        return ["/bin/false"] if name not in {"memory0", "compute0"} else super().command(name, module)


@pytest.mark.slow
def test_workers_that_do_not_start_are_not_tried_again_at_once(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaling, "WINDOWS", {"memory": Windows(0.0, 60.0)})
    workers = Broken()
    engine = launch(config(checkpoint, 1, 1, autoscale="memory=2:3"), workers=workers)
    try:
        wait_until(lambda: "refused or failed" in engine.stats().scaling["memory"].last, "nothing is reported")
        Streams(engine, contexts(2)).results()
        assert workers.started == 3 and len(engine.topology.memories) == 1
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"autoscale": "memory=3:2"}, "3 to 2 memory workers"),
        ({"autoscale": "memory=0:2"}, "without local memory: one memory worker must stay"),
        (
            {"autoscale": "compute=2:3", "compute": "cpu:2", "tensor_parallel": 2},
            "a replica joins, leaves or changes its role as a whole; give multiples of 2",
        ),
    ],
)
def test_bounds_that_the_pools_rule_out_are_refused_before_anything_is_started(
    settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        launch(dataclasses.replace(EngineConfig(memory="cpu:1"), **settings))  # type: ignore[arg-type]
