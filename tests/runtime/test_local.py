"""Memory of the compute worker itself as the memory pool, or a part of it: the same tokens, whatever is lost."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.types import CompletionOutput, SamplingParams
from lamina.launch import launch
from tests.support.random_models import SERVED
from tests.support.running import REQUESTS, Killable, Streams, assert_same, check_greedy, config, wait_for_recoveries
from tests.support.sweep import sweep
from tests.support.waiting import wait_until


def with_memory(checkpoint: Path, memory: str | None, **settings: object) -> EngineConfig:
    return replace(config(checkpoint, 1, 1, **settings), memory=memory)


@pytest.mark.parametrize("family", sweep(SERVED, ["gpt_oss"]))
def test_local_memory_gives_the_tokens_of_hugging_face(family: str, tmp_path: Path) -> None:
    check_greedy(family, tmp_path, memory="local", holders={"compute0"})


@pytest.mark.parametrize("family", sweep(SERVED, ["gemma2"]))
def test_local_memory_of_a_gpu_gives_the_tokens_of_hugging_face(family: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    check_greedy(
        family, tmp_path, compute="emulated:1", memory="local", holders={"compute0"}, lengths=(1, 13), tokens=3
    )


@pytest.mark.slow
def test_a_mixed_pool_of_a_gpu_and_a_cpu(tmp_path: Path) -> None:
    """Sequences have segments on both, some of them two on the GPU."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    names, shape = {"compute0", "memory0"}, {"compute": "emulated:1", "kv_tokens_per_worker": 8}
    check_greedy("llama", tmp_path, memory="local,cpu:1", holders=names, **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", sweep(SERVED, []))
def test_a_mixed_pool_gives_the_tokens_of_hugging_face(family: str, tmp_path: Path) -> None:
    """Sequences continue on the other after 16 tokens, so that nearly all have segments on both."""
    check_greedy(family, tmp_path, memory="local,cpu:1", holders={"compute0", "memory0"}, kv_tokens_per_worker=16)


@pytest.mark.parametrize("family", sweep(SERVED, ["llama"]))
def test_each_replica_keeps_the_kv_of_its_requests(family: str, tmp_path: Path) -> None:
    check_greedy(family, tmp_path, compute="cpu:2", memory="local", holders={"compute0", "compute1"})


def test_replicas_with_local_memory_join_leave_and_are_lost(
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
) -> None:
    """The KV of a replica that leaves or is lost is computed again by others; that of others stays."""
    workers = Killable()
    settings = replace(with_memory(checkpoint, "local", kv_cache_memory_bytes=500_000), compute="cpu:2")
    engine = launch(settings, workers=workers)
    try:
        streams = Streams(engine, REQUESTS)
        streams.wait_for_tokens(50)
        workers.signal("compute0", signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        assert engine.stats().recomputed > 0
        assert engine.scale(compute=1).result(60) == ["compute2"]
        assert_same(streams.results(), undisturbed)
        streams = Streams(engine, REQUESTS)
        streams.wait_for_tokens(50)
        assert engine.scale(compute=-1).result(60) == ["compute2"]
        assert_same(streams.results(), undisturbed)
        assert engine.stats().memory.keys() == {"compute1"}
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
        assert_same(Streams(engine, REQUESTS).results(), undisturbed)
    finally:
        engine.close()


@pytest.mark.slow
def test_a_lost_compute_worker_takes_its_memory_with_it_and_is_replaced(
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
) -> None:
    """It is the only worker: nobody is left to end the epoch."""
    workers = Killable()
    engine = launch(with_memory(checkpoint, None, max_restarts=1), workers=workers)
    try:
        assert workers.pids.keys() == engine.stats().memory.keys() == {"compute0"}  # local memory is the default
        streams = Streams(engine, REQUESTS)
        streams.wait_for_tokens(150)
        workers.signal("compute0", signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        assert_same(streams.results(), undisturbed)
        stats = engine.stats()
        assert stats.recomputed > 0 and stats.memory.keys() == stats.workers.keys() == {"compute1"}
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
    finally:
        engine.close()


@pytest.mark.slow  # test_pools.py does the same without local memory
def test_memory_workers_join_local_memory_are_lost_and_leave(
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
) -> None:
    """What is in local memory survives the loss of others; nothing moves from or to there."""
    workers = Killable()
    settings = with_memory(checkpoint, "local", kv_cache_memory_bytes=500_000, kv_tokens_per_worker=24)
    engine = launch(settings, workers=workers)
    try:
        streams = Streams(engine, REQUESTS)
        assert sorted(engine.scale(memory=2).result(60)) == ["memory0", "memory1"]
        streams.wait_for_tokens(streams.tokens + 100)
        workers.signal("memory0", signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        assert engine.scale(memory=-1).result(60) == ["memory1"]
        assert_same(streams.results(), undisturbed)
        assert engine.stats().memory.keys() == {"compute0"}
        with pytest.raises(ConfigError, match="the memory pool has 0"):
            engine.scale(memory=-1).result(60)
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
        assert_same(Streams(engine, REQUESTS).results(), undisturbed)
    finally:
        engine.close()


@pytest.mark.slow
def test_prefixes_are_found_and_requests_give_way_in_local_memory(checkpoint: Path) -> None:
    """With room for a third of the requests, KV is dropped; a prompt seen before is not computed again."""
    engine = launch(with_memory(checkpoint, "local", kv_cache_memory_bytes=250_000))
    try:
        prompt = list(range(3, 43))
        first, again = (
            Streams(engine, [(prompt, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))]).results()
            for _ in range(2)
        )
        assert first == again and engine.stats().prefix_hits >= 32
        long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        requests = [([3 + number] * 20, long) for number in range(12)]
        crowded = Streams(engine, requests).results()
        assert engine.stats().preempted > 0
        alone = [Streams(engine, [one]).results()[0] for one in requests[:3]]
        assert_same(crowded[:3], alone)
    finally:
        engine.close()
