"""How many token slots some bytes have room for."""

from dataclasses import replace
from typing import Any

import pytest

from lamina.cluster import slabs
from lamina.cluster.slabs import Rows, SlabSize, slab_size, with_capacities
from lamina.config.engine_config import EngineConfig
from lamina.control.messages import MemorySetup, Resources
from lamina.core.errors import ConfigError
from lamina.core.pipeline import Shape
from lamina.core.types import AttentionSpec, KvElement
from lamina.kernels.gpu.specialize import power_of_two
from lamina.memory.device.windows import most_rows
from lamina.schedule.limits import Limits
from tests.cluster.test_scratch import SPECS, TOKEN, loaded, plan

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=4096)


@pytest.mark.parametrize(
    "size",
    [
        SlabSize(7),
        SlabSize(0, (Rows(5, 100),)),
        SlabSize(3, (Rows(5, 100), Rows(2, 1000))),
        SlabSize(3, (Rows(5, 9, 30), Rows(1, 100))),
    ],
)
@pytest.mark.parametrize("nbytes", [0, 6, 7, 499, 500, 501, 12_345])
def test_the_slots_are_the_most_that_fit(size: SlabSize, nbytes: int) -> None:
    slots = size.slots(nbytes, 3000)
    assert size.nbytes(slots) <= nbytes and (slots == 3000 or size.nbytes(slots + 1) > nbytes)


def test_only_layers_with_a_window_have_fewer_rows_than_slots_and_only_if_they_forget() -> None:
    windows = (0, 512, 0, 128)
    sizes: dict[str, Any] = {"query_heads": 4, "kv_heads": 2, "qk_dim": 8, "v_dim": 8, "scale": 1.0}
    specs = [AttentionSpec(layer=layer, window=window, **sizes) for layer, window in enumerate(windows)]
    each = specs[0].slab_bytes_per_token(KvElement.BFLOAT16)
    size = slab_size(specs, KvElement.BFLOAT16, True, LIMITS, lanes=2)
    rows = [most_rows(window, 8, 128) for window in (512, 128)]
    assert size == SlabSize(2 * each, (Rows(each, rows[0]), Rows(each, rows[1])))
    assert rows[0] == 1024 + (8 * 516 + 4 * 128) * 9 // 8
    assert slab_size(specs, KvElement.BFLOAT16, False, LIMITS, lanes=2) == SlabSize(4 * each) == size.whole
    cached = slab_size(specs, KvElement.BFLOAT16, True, LIMITS, lanes=2, prefix_cache=True)
    assert cached.rows == (Rows(each, rows[0], 8 * 512), Rows(each, rows[1], 8 * 128))
    assert cached.rows[0].most(10**6) == rows[0] + 10**6 // 4 * 9 // 8
    assert cached.rows[0].most(15_000) == rows[0] + 8 * 512 * 9 // 8 and cached.rows[0].most(9000) == 9000
    assert 1.3 * size.whole.slots(10**7, 10**9) < cached.slots(10**7, 10**9) < size.slots(10**7, 10**9)
    assert size.slots(10**7, 10**9) > 1.8 * size.whole.slots(10**7, 10**9)


@pytest.mark.parametrize("capacity", [1, 2, 3, 1000, 1024, 1025])
def test_a_gpu_holds_page_tables_as_well(capacity: int) -> None:
    words = power_of_two(2 * (2 * capacity))  # as ``lamina.memory.device.gpu`` makes them
    assert SlabSize(7).with_pages(2).nbytes(capacity) >= 7 * capacity + 4 * words


def test_stages_of_a_replica_have_as_many_slots_as_the_fewest_of_them_for_their_own_layers() -> None:
    """Segments name the first stage. A stage without attention counts tokens too."""
    made = plan(["cpu"] * 4, [], pipeline_parallel=2, kv_cache_memory_bytes=300 * TOKEN)
    assert made.pipeline.lends

    def made_of(*starts: int) -> tuple[list[MemorySetup], dict[str, int]]:
        staged = replace(made, pipeline=replace(made.pipeline, shape=Shape(1, 2, starts)))
        setup = staged.memory_setup(loaded(starts), shards=1)
        found = dict.fromkeys(staged.computes, Resources(0, 0, 10**9, 10**9))
        _, capacities = with_capacities(staged, setup, found)
        return [staged.slab_setup(setup, name) for name in staged.computes], capacities

    setups, capacities = made_of(0, 1)
    assert [one.home for one in setups] == ["compute0", "compute0", "compute2", "compute2"]
    assert [one.own for one in setups] == [SPECS[:1], SPECS[1:]] * 2
    assert capacities == dict.fromkeys(made.computes, 100)
    setups, capacities = made_of(0, 4)
    assert [one.layers for one in setups] == [(0, 4), (4, 4)] * 2 and len(setups[1].own) == 1
    assert capacities == dict.fromkeys(made.computes, 75)


def on_gpu(free: int) -> Resources:
    """The answer of a worker on a GPU with 1000 bytes, of which so many are free."""
    return Resources(0, 0, 0, 0, gpu_bytes=free, gpu_total=1000)


def test_kv_takes_half_of_what_is_free_or_what_is_asked_for_if_it_fits() -> None:
    assert slabs.kv_bytes_per_worker(EngineConfig(), 4, 800) == 100
    assert slabs.kv_bytes_per_worker(EngineConfig(kv_cache_memory_bytes=400), 2, 800) == 400
    with pytest.raises(ConfigError, match="401 for each of 2 memory workers; 800 bytes are free"):
        slabs.kv_bytes_per_worker(EngineConfig(kv_cache_memory_bytes=401), 2, 800)


def test_kv_on_a_gpu_leaves_the_share_that_is_not_to_be_used() -> None:
    """1000 bytes, of which weights and others take some."""
    assert slabs.kv_bytes_on_gpu(EngineConfig(), on_gpu(1000)) == 900
    assert slabs.kv_bytes_on_gpu(EngineConfig(gpu_memory_utilization=0.75), on_gpu(400)) == 150
    assert slabs.kv_bytes_on_gpu(EngineConfig(kv_cache_memory_bytes=400), on_gpu(400)) == 400
    with pytest.raises(ConfigError, match=r"90 of the 1000 bytes .* gpu_memory_utilization 0.9 leaves 100"):
        slabs.kv_bytes_on_gpu(EngineConfig(), on_gpu(90))
    with pytest.raises(ConfigError, match="401 for each memory worker; 400 bytes are free on its GPU"):
        slabs.kv_bytes_on_gpu(EngineConfig(kv_cache_memory_bytes=401), on_gpu(400))
    assert slabs.kv_bytes_on_gpu(EngineConfig(kv_cache_memory_bytes=600), on_gpu(400), 400) == 600
    assert slabs.kv_bytes_on_gpu(EngineConfig(), on_gpu(1000), 400) == 900, "more only if asked for"
    with pytest.raises(ConfigError, match="400 bytes are free on its GPU and 200 in host memory"):
        slabs.kv_bytes_on_gpu(EngineConfig(kv_cache_memory_bytes=601), on_gpu(400), 400)


def test_memory_is_shared_by_the_workers_of_a_machine_also_across_containers() -> None:
    hosts = {"memory0": "a 1", "memory1": "a 1", "memory2": "a 2", "memory3": "b 1"}
    free = {"memory0": 400, "memory1": 420, "memory2": 1000, "memory3": 1000}
    found = {name: Resources(0, 0, each, 1500 if name != "memory3" else 1000) for name, each in free.items()}
    shares = {name: slabs._share(name, hosts, found) for name in hosts}
    assert shares == {"memory0": (2, 400), "memory1": (2, 400), "memory2": (3, 1500), "memory3": (1, 1000)}


@pytest.mark.parametrize(("wanted", "fits"), [(200, True), (250, True), (251, False)])
def test_what_cpu_workers_take_of_a_machine_its_gpus_cannot_have_as_well(wanted: int, fits: bool) -> None:
    """Two workers on CPUs take their part of 1000 bytes; two GPUs with 125 each may have half of the rest besides."""
    config = EngineConfig(kv_cache_memory_bytes=wanted)
    found = {name: Resources(0, 0, 1000, 1000) for name in ("memory0", "memory1")}
    found |= {name: Resources(0, 0, 1000, 1000, 125, 500) for name in ("memory2", "memory3")}
    hosts = dict.fromkeys(found, "a 1")
    if fits:
        assert slabs._kv_bytes(config, hosts, found) == dict.fromkeys(found, wanted)
    else:
        with pytest.raises(ConfigError, match="125 bytes are free on its GPU and 124 in host memory"):
            slabs._kv_bytes(config, hosts, found)
