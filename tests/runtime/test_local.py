"""Memory of the compute worker itself as the memory pool, or a part of it: the same tokens, whatever is lost."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError, RequestError
from lamina.core.outputs import CompletionOutput
from lamina.core.sampling import SamplingParams
from lamina.launch import launch
from tests.support.random_models import SERVED
from tests.support.running import (
    LONG,
    REQUESTS,
    Killable,
    Streams,
    assert_same,
    check_greedy,
    config,
    wait_for_recoveries,
)
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


@pytest.mark.parametrize("family", sweep(SERVED, ["llama"]))
def test_requests_span_the_local_memory_of_two_replicas(family: str, tmp_path: Path) -> None:
    """Sequences continue on the other replica after 16 tokens: each attends for the other."""
    check_greedy(
        family, tmp_path, compute="cpu:2", memory="local", holders={"compute0", "compute1"}, kv_tokens_per_worker=16
    )


@pytest.mark.slow
def test_requests_span_the_local_memory_of_two_gpus(tmp_path: Path) -> None:
    """GPUs attend for each other through the memory of their hosts."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    holders, shape = {"compute0", "compute1"}, {"compute": "emulated:2", "kv_tokens_per_worker": 8}
    check_greedy("llama", tmp_path, memory="local", holders=holders, lengths=(1, 13), tokens=5, **shape)  # type: ignore[arg-type]


def test_requests_span_the_local_memory_of_tensor_parallel_replicas(tmp_path: Path) -> None:
    """Ranks of one replica attend for those of the other while they wait for each other in sums."""
    check_greedy(
        "llama",
        tmp_path,
        compute="cpu:4",
        memory="local",
        holders={f"compute{number}" for number in range(4)},
        kv_tokens_per_worker=16,
        tensor_parallel=2,
    )


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_requests_span_the_local_memory_of_replicas_of_stages(ranks: int, tmp_path: Path) -> None:
    """Each stage attends for the same stage of the other replica, and replies to the next stage after its last
    layer."""
    check_greedy(
        "llama",
        tmp_path,
        compute=f"cpu:{4 * ranks}",
        memory="local",
        holders={f"compute{first + rank}" for first in (0, 2 * ranks) for rank in range(ranks)},
        kv_tokens_per_worker=16,
        tensor_parallel=ranks,
        pipeline_parallel=2,
    )


def test_a_request_is_as_long_as_the_local_memory_of_all_replicas(checkpoint: Path) -> None:
    """No replica could hold it alone. Its tokens are the same also if a replica that attends for it is lost."""
    workers = Killable()
    settings = replace(with_memory(checkpoint, "local", kv_cache_memory_bytes=50_000, max_restarts=1), compute="cpu:2")
    request = ([*range(3, 43)], replace(LONG, max_tokens=80))
    engine = launch(with_memory(checkpoint, "local"))
    try:
        expected = Streams(engine, [request]).results()
    finally:
        engine.close()
    engine = launch(settings, workers=workers)
    try:
        capacities = engine.topology.capacities
        assert max(capacities.values()) < 120 <= sum(capacities.values())
        streams = Streams(engine, [request])
        (output,) = streams.wait()
        assert {segment.worker for segment in output.placement} == {"compute0", "compute1"}
        assert_same(streams.results(), expected)
        assert engine.stats().preempted == 0
        streams = Streams(engine, [request])
        streams.wait_for_tokens(60)  # it has outgrown the memory of its replica
        workers.signal("compute1", signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        assert_same(streams.results(), expected)
        assert engine.stats().recomputed > 0
        with pytest.raises(RequestError, match="may need"):
            engine.submit("too long", request[0], replace(request[1], n=2), lambda update: None)
        wait_until(lambda: not any(memory.used for memory in engine.stats().memory.values()), "slots stayed in use")
    finally:
        engine.close()


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
