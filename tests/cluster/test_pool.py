"""The pool grammar: every text is either a pool or gives one clear error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.cluster.degrees import parse_computes, shapes
from lamina.cluster.pool import (
    GPUS,
    LOCAL,
    MAX_COUNT,
    PLANNED,
    REMOTE,
    RUNNABLE,
    Assigned,
    Devices,
    PoolEntry,
    assign,
    assign_pools,
    kinds,
    memory_pool,
    parse,
    parse_bounds,
    size,
)
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.pipeline import Shape

KINDS = ["cpu", *GPUS]
NO_GPU = Devices(cores=2, ram_bytes=23 * 2**30)


@pytest.mark.parametrize("kind", ["local", "a100:1", "cpu:1000", "epyc:1"])
def test_an_error_names_the_pool_that_asks_for_what_is_missing(kind: str) -> None:
    """The prefill pool's entries come before those of the compute pool."""
    with pytest.raises(ConfigError, match="Use --prefill cpu:1, or leave it out"):
        assign("compute", (*parse(kind), *parse("cpu:1")), NO_GPU, prefills=1)
    with pytest.raises(ConfigError, match="Use --compute cpu:1"):
        assign("compute", (*parse("cpu:1"), *parse(kind)), NO_GPU, prefills=1)


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, MAX_COUNT)), min_size=1, unique_by=lambda e: e[0]))
def test_every_pool_survives_being_written_and_read(entries: list[tuple[str, int]]) -> None:
    pool = tuple(PoolEntry(kind, count) for kind, count in entries)
    assert parse(",".join(map(str, pool))) == pool
    assert parse(" , ".join(f"{e.kind.upper()} : {e.count}" for e in pool)) == pool


@given(st.text() | st.text(alphabet="cpua10:,- ٣", max_size=12))
def test_any_text_is_a_pool_or_a_config_error(text: str) -> None:
    try:
        pool = parse(text)
    except ConfigError:
        return
    assert pool == parse(",".join(map(str, pool)))
    assert all(entry.kind in [*RUNNABLE, *PLANNED, LOCAL, REMOTE] and 1 <= entry.count <= MAX_COUNT for entry in pool)


def test_a_count_left_out_is_one() -> None:
    assert parse("cpu") == (PoolEntry("cpu", 1),)
    assert parse("cpu,rtx3090:6") == (PoolEntry("cpu", 1), PoolEntry("rtx3090", 6))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the pool is empty; give kind:count"),
        ("  ", "the pool is empty; give kind:count"),
        (",cpu:1", "contains an empty entry"),
        ("cpu:1,", "contains an empty entry"),
        ("cpu:", "invalid count '' for cpu; give a whole number from 1 to 1024"),
        ("cpu:0", "invalid count '0' for cpu; give a whole number from 1 to 1024"),
        ("cpu:-1", "invalid count '-1' for cpu"),
        ("cpu:1.5", "invalid count '1.5' for cpu"),
        ("cpu:1:2", "invalid count '1:2' for cpu"),
        ("cpu:٣", "invalid count '٣' for cpu"),
        ("cpu:1025", "invalid count '1025' for cpu"),
        ("cpu:" + "9" * 5000, "give a whole number from 1 to 1024"),
        ("cpu:1,cpu:2", "names cpu 2 times; write cpu:3 once"),
        ("gpu:1", "unknown kind 'gpu'; did you mean cuda or a100?"),
        ("nvidia", "unknown kind 'nvidia'; did you mean cuda or a100?"),
        ("rtx309:6", "unknown kind 'rtx309'; did you mean rtx3090"),
        ("toaster:1", "unknown kind 'toaster'. Known: cpu, local, cuda, p100"),
        ("cpu 2", "contains 'cpu 2'"),
        ("local:2", "gives local a count"),
        ("local,local", "names local 2 times; write it once"),
        ("cpu:2/tp2", "has degrees; `lamina launch` and `simulate` take them in --prefill"),
    ],
)
def test_a_bad_pool_says_what_is_wrong_and_what_to_type(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("prefill", "compute", "shapes_of_both", "workers"),
    [
        (None, "cpu:8", (Shape(2, 2), Shape(2, 2)), 8),
        (None, "cpu:4/tp4", (Shape(4, 2), Shape(4, 2)), 4),
        ("cpu:6/tp1", "cpu:8/tp4/pp1", (Shape(1, 2), Shape(4, 1)), 14),
        ("a100:2,h100:2 / PP4", "cpu", (Shape(2, 4), Shape(2, 2)), 5),
    ],
)
def test_degrees_of_a_pool_replace_those_of_both(
    prefill: str | None, compute: str, shapes_of_both: tuple[Shape, Shape], workers: int
) -> None:
    config = EngineConfig(prefill=prefill, compute=compute, tensor_parallel=2, pipeline_parallel=2)
    assert shapes(config) == shapes_of_both
    assert len(kinds(parse_computes(config))) == size(prefill) + size(compute) == workers


@pytest.mark.parametrize("text", ["cpu:2/", "cpu:2/tp", "cpu:2/tp0", "cpu:2/pp2/tp2", "cpu/tp2,h100/tp2", "cpu/x2"])
def test_bad_degrees_say_what_to_type(text: str) -> None:
    with pytest.raises(ConfigError, match="once, after the last count, such as cpu:4/tp2 or"):
        parse_computes(EngineConfig(compute=text))


def test_cpus_are_always_available() -> None:
    assert assign("memory", parse("cpu:16"), NO_GPU) == (Assigned("cpu", "cpu"),) * 16


def test_one_compute_worker_keeps_kv_itself_unless_told_otherwise() -> None:
    one, two, gpu = parse("cpu:1"), parse("cpu:2"), parse("cuda:1")
    assert memory_pool(None, one, apart=False) == (PoolEntry("local", 1),)
    assert memory_pool(None, one, apart=True) == (PoolEntry("cpu", 1),)
    assert memory_pool(None, two, apart=False) == memory_pool(None, gpu, apart=False) == (PoolEntry("cpu", 1),)
    assert memory_pool("local,cpu:2", one, apart=True) == (PoolEntry("local", 1), PoolEntry("cpu", 2))
    assert assign("memory", parse("local,cpu:2"), NO_GPU) == (Assigned("cpu", "cpu"),) * 2
    with pytest.raises(ConfigError, match="local is memory of the compute workers; it cannot compute"):
        assign("compute", parse("local"), NO_GPU)


def test_each_worker_gets_a_gpu_of_its_own() -> None:
    devices = Devices(cores=16, ram_bytes=2**37, gpus=("NVIDIA H20", "NVIDIA A100-SXM4-80GB", "NVIDIA H20"))
    assert assign("memory", parse("cuda:1,h20:1,cpu:1,a100:1"), devices) == (
        Assigned("cuda", "cuda:2"),
        Assigned("h20", "cuda:0"),
        Assigned("cpu", "cpu"),
        Assigned("a100", "cuda:1"),
    )
    with pytest.raises(ConfigError, match=r"cuda:2 asks for 2 GPUs; this machine has 2 x NVIDIA H20, 1 x NVIDIA A100"):
        assign("memory", parse("cuda:2,h20:2"), devices)


def test_missing_gpus_are_refused_with_the_devices_that_exist() -> None:
    with pytest.raises(ConfigError) as caught:
        assign("memory", parse("cpu:1,rtx3090:6"), NO_GPU)
    assert str(caught.value) == (
        "rtx3090:6 asks for 6 GPUs; this machine has no GPU (2 CPU cores, 23 GiB RAM). Use --memory cpu:2"
    )


def test_too_few_gpus_are_refused_with_the_ones_found() -> None:
    devices = Devices(cores=1, ram_bytes=2**37, gpus=("NVIDIA A100-SXM4-80GB", "NVIDIA H20", "NVIDIA A100-SXM4-80GB"))
    with pytest.raises(ConfigError, match=r"a100:4 asks for 4 GPUs; this machine has 2 x NVIDIA A100-SXM4-80GB, 1 x"):
        assign("compute", parse("a100:4"), devices)


def test_a_gpu_of_another_kind_is_refused() -> None:
    devices = Devices(cores=16, ram_bytes=2**37, gpus=("NVIDIA H200",))
    with pytest.raises(ConfigError, match=r"h20:1 asks for 1 GPU; this machine has 1 x NVIDIA H200 \([^)]*\). Use"):
        assign("compute", parse("h20:1"), devices)


@pytest.mark.parametrize(
    ("compute", "memory", "computes", "memories"),
    [
        ("a100:2", "rtx3090:1", ["cuda:1", "cuda:3"], ["cuda:0"]),
        ("cuda:1", "rtx3090:2", ["cuda:1"], ["cuda:0", "cuda:2"]),  # a kind by name comes first
        ("cuda:3", "cuda:1,cpu:1", ["cuda:0", "cuda:1", "cuda:2"], ["cuda:3", "cpu"]),
        ("a100:2", "cuda:3", ["cuda:1", "cuda:3"], ["cuda:0", "cuda:2", "cuda:1"]),  # one in both roles
    ],
)
def test_pools_share_gpus_only_where_there_are_too_few(
    compute: str, memory: str, computes: list[str], memories: list[str]
) -> None:
    a100, rtx3090 = "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090"
    devices = Devices(cores=16, ram_bytes=2**37, gpus=(rtx3090, a100, rtx3090, a100))
    assigned = assign_pools({"compute": parse(compute), "memory": parse(memory)}, devices)
    assert [worker.device for worker in assigned["compute"]] == computes
    assert [worker.device for worker in assigned["memory"]] == memories
    emulated = assign_pools({"compute": parse(compute)}, Devices(16, 2**37, devices.gpus, emulated=True))
    assert emulated["compute"][0].device.startswith("emulated:")


def test_bounds_are_parsed_or_refused_with_the_range() -> None:
    assert parse_bounds("memory=1:4") == {"memory": (1, 4)}
    assert parse_bounds(" Memory = 0:4 , compute=2:2") == {"memory": (0, 4), "compute": (2, 2)}
    for text, said in (
        ("", "give the smallest and the largest size of a pool, such as memory=1:4"),
        ("memory", "give the smallest and the largest"),
        ("memory=1..4", "give the smallest and the largest"),
        ("disk=1:2", "give the smallest and the largest"),
        ("memory=-1:2", "give the smallest and the largest"),
        ("memory=1:4;compute=1:2", "give the smallest and the largest"),
        ("memory=4:1", "4 to 1 memory workers; give a smallest size of 0 .beside local memory. or 1 and a largest"),
        ("compute=0:2", "0 to 2 compute workers; give a smallest size of 1 and a largest from that to 1024"),
        ("memory=0:0", "0 to 0 memory workers"),
        ("memory=1:1025", "1 to 1025 memory workers"),
        ("memory=1:2,memory=1:3", "names the memory pool twice"),
    ):
        with pytest.raises(ConfigError, match=f"^autoscale is .*{said}"):
            parse_bounds(text)
