"""Replicas of ranks and stages that lose a worker, on real processes: they are replaced, and the tokens stay."""

import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lamina.core.outputs import CompletionOutput
from lamina.core.sampling import SamplingParams
from lamina.engine.engine import Engine
from lamina.launch import launch
from lamina.lowering import Target
from tests.support.prepared_checkpoints import write_prepared
from tests.support.random_models import SERVED_VOCABULARY, greedy, served
from tests.support.running import (
    HALF,
    REQUESTS,
    Killable,
    Streams,
    assert_same,
    check_last_loss,
    config,
    wait_for_recoveries,
)
from tests.support.waiting import wait_until

SERVING = {"serving"}


def wait_for_whole(engine: Engine, computes: int, memories: int) -> None:
    """Wait until all pools have so many workers, all of which serve."""

    def is_whole() -> bool:
        stats, topology = engine.stats(), engine.topology
        assert stats.dead is None, stats.dead
        sizes = len(topology.computes), len(topology.memories)
        return sizes == (computes, memories) and {*stats.workers.values()} == SERVING

    wait_until(is_whole, "a worker is not replaced")


@pytest.mark.parametrize(
    ("computes", "victims", "settings"),
    [
        pytest.param(2, ["compute1"], {"tensor_parallel": 2}, id="the only replica, of ranks"),
        pytest.param(
            2, ["compute0"], {"pipeline_parallel": 2}, id="the only replica, of stages", marks=pytest.mark.slow
        ),
        pytest.param(
            2, ["compute0"], {"tensor_parallel": 2, "memory": "local"}, id="with its KV", marks=pytest.mark.slow
        ),
        pytest.param(
            4,
            ["compute2"],
            {"tensor_parallel": 2, "memory": "local"},
            id="one of two with local memory",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2, ["compute1"], {"pipeline_parallel": 2, "memory": "local"}, id="stages with KV", marks=pytest.mark.slow
        ),
        pytest.param(
            4,
            ["compute3"],
            {"pipeline_parallel": 2, "memory": "local", "lanes": 5},
            id="one of two of stages with local memory",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            ["compute3"],
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            id="ranks of stages",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            ["compute0", "compute3"],
            {"tensor_parallel": 2, "lanes": 4, "pipelining": "fixed"},
            id="both replicas at once",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            ["compute1", "memory0"],
            {"tensor_parallel": 2, "pipelining": "rotational", "transport": "tcp"},
            id="rotating, and a memory worker",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4, ["compute0"], {"pipeline_parallel": 2, "lanes": 5}, id="one of two of stages", marks=pytest.mark.slow
        ),
    ],
)
def test_a_lost_replica_is_replaced_as_a_whole(
    computes: int,
    victims: Sequence[str],
    settings: dict[str, Any],
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
) -> None:
    """Twice, the second time the replacement: requests go on with the same tokens, and no process is left."""
    wanted = replace(config(checkpoint, computes, 2, max_restarts=8), **settings)
    memories = 0 if wanted.memory == "local" else 2
    workers = Killable()
    engine = launch(wanted, workers=workers)
    pids = workers.pids
    try:
        streams = Streams(engine, REQUESTS[:HALF])
        streams.wait_for_tokens(150)
        for name in victims:
            workers.signal(name, signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        wait_for_whole(engine, computes, memories)
        last = engine.topology.replicas[-1]
        assert not pids.keys() & {*last} and not psutil.pid_exists(pids[victims[0]])
        assert_same(streams.results(), undisturbed[:HALF])
        pids |= workers.pids
        streams = Streams(engine, REQUESTS[:HALF])
        streams.wait_for_tokens(100)
        workers.signal(last[0], signal.SIGKILL)
        wait_for_recoveries(engine, 2)
        wait_for_whole(engine, computes, memories)
        assert_same(streams.results(), undisturbed[:HALF])
        assert {*last}.isdisjoint(engine.topology.names)
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
        pids |= workers.pids
    finally:
        engine.close()
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_replicas_are_replaced_as_often_as_max_restarts_says(settings: dict[str, int], checkpoint: Path) -> None:
    """Not each worker of a replica counts: the second loss, not the first, ends the engine."""
    workers = Killable()
    engine = launch(config(checkpoint, 2, 2, max_restarts=1, **settings), workers=workers)
    pids = workers.pids
    try:
        streams = Streams(engine, REQUESTS)
        streams.wait_for_tokens(100)
        workers.signal("compute0", signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        wait_for_whole(engine, 2, 2)
        assert not [output.error for output in streams.wait() if output.error]
        streams = Streams(engine, REQUESTS)
        streams.wait_for_tokens(100)
        pids |= workers.pids
        victim = engine.topology.computes[1]
        check_last_loss(streams, workers, victim)
    finally:
        engine.close()
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["compute1", "memory0"])
def test_ranks_on_gpus_are_replaced_where_a_step_ends_early(victim: str, tmp_path: Path) -> None:
    """One of them may wait for another in a sum that it cannot leave. The tokens are Hugging Face's."""
    reference = write_prepared(served("llama"), tmp_path, target=Target.GPU, ranks=2)
    draw = random.Random(victim)
    prompts = [[draw.randrange(3, SERVED_VOCABULARY) for _ in range(length)] for length in (1, 6, 34, 40)]
    workers = Killable()
    wanted = replace(config(tmp_path, 2, 2, tensor_parallel=2, max_restarts=1), compute="emulated:2")
    engine = launch(wanted, workers=workers)
    pids = workers.pids
    try:
        params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
        streams = Streams(engine, [(prompt, params) for prompt in prompts])
        streams.wait_for_tokens(20)
        workers.signal(victim, signal.SIGKILL)
        got = [completion.token_ids for (completion,) in streams.results()]
        assert got == [greedy(reference, prompt, 50) for prompt in prompts]
        wait_for_whole(engine, 2, 2)
        assert engine.topology.names.isdisjoint({victim, "compute0", "compute1"})
        assert engine.stats().recoveries == 1
        pids |= workers.pids
        (joined,) = engine.scale(memory=1).result(120)
        engine.scale(memory=-1).result(120)
        assert joined.startswith("memory") and engine.stats().dead is None
        pids |= workers.pids
    finally:
        engine.close()
    assert not [name for name, pid in pids.items() if psutil.pid_exists(pid)]
