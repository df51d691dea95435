"""Which clusters have scratch memory, and how much of it."""

from typing import Any

import pytest

from lamina.cluster.scratch import scratch_tokens
from lamina.cluster.sizing import ClusterPlan, cluster_plan
from lamina.config.engine_config import EngineConfig
from lamina.control.messages import Hello, ModelLoaded, Resources
from lamina.core.types import AttentionSpec, DType
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


def tokens(
    found: dict[str, Resources], machines: dict[str, str], starts: tuple[int, ...] = (0,), **settings: Any
) -> Any:
    made = plan(["cpu"] * 4, ["cpu"], prompt_attention="compute", **settings)
    loaded = ModelLoaded(SPECS, DType.FLOAT32, 1, 1, 1, starts=starts)
    return scratch_tokens(made, loaded, found, machines)


def test_a_tenth_of_free_memory_is_for_two_of_the_longest_prompts_at_most() -> None:
    """Workers of one machine share its memory; ranks and stages have a part of a token each."""
    found = {name: Resources(0, 0, free, 0) for name, free in (("a", 10**9), ("b", 10**6), ("c", 10**6))}
    here = {"a": "one", "b": "two", "c": "two"}
    share = 10**6 // 20
    assert tokens(found, here) == {"a": 2 * LONGEST, "b": share // (4 * TOKEN), "c": share // (4 * TOKEN)}
    assert tokens(found, here, tensor_parallel=2)["b"] == share // (2 * TOKEN)
    assert tokens(found, here, (0, 1), pipeline_parallel=2)["b"] == share // (3 * TOKEN)
    assert tokens(found, here, kv_cache_dtype="int8")["b"] == share // (4 * (4 * 16 + 2 * 4 * 4))


def test_a_gpu_gives_half_of_what_may_be_used_of_its_memory() -> None:
    found = {"a": Resources(0, 0, 0, 0, gpu_bytes=300_000, gpu_total=1_000_000), "b": Resources(0, 0, 0, 0, 9, 10**6)}
    assert tokens(found, {"a": "one", "b": "one"}) == {"a": 100_000 // (4 * TOKEN), "b": 0}
