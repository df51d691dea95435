"""Which clusters have scratch memory, and how much of it."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from lamina.cluster.joining import part_setup
from lamina.cluster.scratch import kv_wanted, scratch_bytes, scratch_tokens, untouched_bytes
from lamina.cluster.sizing import ClusterPlan, cluster_plan
from lamina.cluster.slabs import with_capacities, without_reserved
from lamina.config.engine_config import EngineConfig
from lamina.control.messages import Hello, ModelLoaded, Resources
from lamina.core.errors import ConfigError
from lamina.core.types import AttentionSpec, DType, PromptAttention
from tests.simulation.cluster import MODEL

SPECS = [AttentionSpec(layer, query_heads=8, kv_heads=4, qk_dim=8, v_dim=8, scale=1.0) for layer in range(4)]
TOKEN = 4 * (8 + 8) * 4  # bytes of one layer, in float32
LONGEST = 100


def plan(computes: list[str], memories: list[str], **settings: Any) -> ClusterPlan:
    kinds: Any = {
        "compute": {f"compute{number}": kind for number, kind in enumerate(computes)},
        "memory": {f"memory{number}": kind for number, kind in enumerate(memories)},
    }
    greetings = {name: Hello("host one", "", "", [number]) for number, name in enumerate(kinds["compute"])}
    greetings |= {name: Hello("host two", "", "", [9]) for name in kinds["memory"]}
    config = EngineConfig(compute=f"cpu:{len(computes)}", max_model_len=LONGEST, **settings)
    return cluster_plan(config, MODEL, [], kinds, greetings, is_open=False, trace=False, local=not memories)


@pytest.mark.parametrize(
    ("computes", "memories", "settings", "keeps"),
    [
        (["cpu"], ["cpu"], {}, False),
        (["cpu"], ["cpu"], {"prompt_attention": "compute"}, True),
        (["cpu"] * 2, ["cpu"], {"prefill": "cpu:1"}, True),
        (["cpu"] * 2, ["cpu"], {"prefill": "cpu:1", "prompt_attention": "memory"}, False),
        (["cpu"] * 3, ["cpu"], {"prefill": "cpu:2"}, False),
        (["cpu"] * 4, ["cpu"], {"prefill": "cpu:2", "tensor_parallel": 2}, True),
        (["cpu"] * 4, ["cpu"], {"prefill": "cpu:2", "pipeline_parallel": 2}, False),
        (["h100"], ["cpu"], {}, True),
        (["h100"], ["h20"], {}, False),
        (["h100"], [], {"prompt_attention": "compute"}, False),
        (["h100"] * 2, ["cpu"], {}, False),
        (["h100"], ["cpu"], {"lanes": 2}, True),
        (["cpu"] * 2, ["cpu"], {"prompt_attention": "compute", "lanes": 3}, True),
    ],
)
def test_by_itself_where_one_replica_runs_all_prompts_and_attention_disturbs_others_or_is_slow(
    computes: list[str], memories: list[str], settings: dict[str, Any], keeps: bool
) -> None:
    assert plan(computes, memories, **settings).compute_setup.scratch == keeps


@pytest.mark.parametrize(
    ("memories", "settings", "prefill", "compute"),
    [
        ([], {"prefill": "cpu:1"}, True, False),
        (["cpu"], {"prefill": "cpu:1"}, True, True),  # holds no other KV, and may change its role
        ([], {"prefill": "cpu:1", "prompt_attention": "memory"}, False, False),
        (["cpu"], {"prompt_attention": "compute"}, True, True),
    ],
)
def test_replicas_that_only_decode_get_none_beside_kv(
    memories: list[str], settings: dict[str, Any], prefill: bool, compute: bool
) -> None:
    made = plan(["cpu"] * 2, memories, **settings)
    assert (made.has_scratch("prefill"), made.has_scratch("compute")) == (prefill, compute)
    numbered = enumerate(made.pools.items())
    setups = [part_setup(made, number, made.greetings[name], "", pool) for number, (name, pool) in numbered]
    assert [one.scratch for one in setups] == [made.has_scratch(pool) for pool in made.pools.values()]


def sized(
    found: dict[str, Resources],
    places: dict[str, tuple[str, str]],
    starts: tuple[int, ...] = (0,),
    holders: Collection[tuple[str, str]] = (),
    taken: Mapping[str, int] | None = None,
    prompt_attention: PromptAttention = "auto",
    **settings: Any,
) -> dict[str, int]:
    """Return the tokens of each worker's scratch memory."""
    made = plan(["cpu"] * 4, ["cpu"], prompt_attention=prompt_attention, **settings)
    shape = replace(made.pipeline.shape, starts=starts)
    made = replace(made, pipeline=replace(made.pipeline, shape=shape))
    nbytes = scratch_bytes(made, found, places, holders, taken or dict.fromkeys(found, 0))
    return scratch_tokens(made, loaded(starts), nbytes)


def loaded(starts: tuple[int, ...] = (0,)) -> ModelLoaded:
    return ModelLoaded(SPECS, DType.FLOAT32, 1, 1, 1, starts=starts)


def test_a_tenth_of_free_memory_is_for_two_of_the_longest_prompts_at_most() -> None:
    """Workers of one machine share its memory; ranks and stages have a part of a token each."""
    found = {name: Resources(0, 0, free, 0) for name, free in (("a", 10**9), ("b", 10**6), ("c", 10**6))}
    here = {"a": ("one", ""), "b": ("two", ""), "c": ("two", "")}
    share = 10**6 // 20
    assert sized(found, here) == {"a": 2 * LONGEST, "b": share // (4 * TOKEN), "c": share // (4 * TOKEN)}
    assert sized(found, here, tensor_parallel=2)["b"] == share // (2 * TOKEN)
    assert sized(found, here, (0, 1), pipeline_parallel=2)["b"] == share // (3 * TOKEN)
    assert sized(found, here, kv_cache_dtype="int8")["b"] == share // (4 * (4 * 16 + 2 * 4 * 4))


@pytest.mark.parametrize(("holder", "share"), [(("one", "cuda:1"), 0.5), (("one", ""), 0.5), (("one", "cuda:0"), 0.1)])
def test_a_gpu_gives_half_of_what_may_be_used_of_its_memory_but_a_tenth_beside_kv(
    holder: tuple[str, str], share: float
) -> None:
    found = {"a": Resources(0, 0, 0, 0, gpu_bytes=300_000, gpu_total=1_000_000), "b": Resources(0, 0, 0, 0, 9, 10**6)}
    places = {"a": ("one", "cuda:0"), "b": ("one", "cuda:2")}
    assert sized(found, places, holders=[holder]) == {"a": int(share * 200_000) // (4 * TOKEN), "b": 0}


def test_kv_that_the_settings_ask_for_has_room_first_and_an_error_has_the_numbers() -> None:
    found, places = {"a": Resources(0, 0, 10**6, 0)}, {"a": ("one", "")}
    assert sized(found, places, taken={"a": 970_000}) == {"a": 30_000 // (4 * TOKEN)}
    assert sized(found, places, taken={"a": 2 * 10**6}) == {"a": 0}
    enough = 8 * 4 * TOKEN
    settings: dict[str, Any] = {"prompt_attention": "compute", "max_num_seqs": 4, "max_num_batched_tokens": 8}
    assert sized(found, places, taken={"a": 10**6 - enough}, **settings) == {"a": 8}
    says = (
        f"a has {enough - 1} bytes for copies of prompts' KV, and one step's 8 tokens need {enough}.*kv_cache_memory_b"
    )
    with pytest.raises(ConfigError, match=says):
        sized(found, places, taken={"a": 10**6 - enough + 1}, **settings)


def test_slabs_take_no_memory_that_scratch_memory_was_given() -> None:
    """On a CPU, memory counts as free until it is used. On a GPU it does not, from the allocation on."""
    made = plan(["cpu"] * 2, ["cpu"], prompt_attention="compute", kv_cache_memory_bytes=900_000)
    greetings = {**made.greetings, "compute1": Hello("host two", device="cuda:0")}
    reserved = untouched_bytes(made, loaded(), {"compute0": 100, "compute1": 100}, greetings)
    nbytes = 100 * 4 * TOKEN
    assert reserved == {"host one": nbytes}
    hosts, free = {"memory0": "host one", "memory1": "another one"}, Resources(0, 0, 900_000, 900_000)
    left = without_reserved(dict.fromkeys(hosts, free), hosts, reserved)
    assert left == {"memory0": Resources(0, 0, 900_000 - nbytes, 900_000 - nbytes), "memory1": free}
    setup = made.memory_setup(loaded(), shards=1)
    with_capacities(made, setup, {"memory0": free})
    with pytest.raises(ConfigError, match=f"1 memory workers; {900_000 - nbytes} bytes are free"):
        with_capacities(made, setup, {"memory0": left["memory0"]})


def test_kv_is_counted_where_it_shares_memory_with_a_replica() -> None:
    made = plan(["cpu"], ["cpu"], prompt_attention="compute", kv_cache_memory_bytes=1000)
    gpu, other, cpu = (Hello("host two", device=device) for device in ("cuda:0", "cuda:1", "cpu"))
    taken = kv_wanted(made, [gpu, gpu, cpu])
    assert [taken(one) for one in (gpu, other, cpu, Hello("another one"))] == [2000, 0, 1000, 0]
