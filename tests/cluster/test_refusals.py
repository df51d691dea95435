"""Every combination of settings is refused with a reason before any worker starts, or has lanes and replicas."""

import itertools
from typing import Any

import pytest

from lamina.cluster import sizing
from lamina.cluster.refusals import refusals, require_allowed
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.pipeline import Shape

VALUES: dict[str, tuple[Any, ...]] = {
    "tensor_parallel": (1, 2),
    "pipeline_parallel": (1, 2),
    "lanes": (None, 1, 2, 3, 5),
    "pipelining": ("auto", "fixed", "rotational"),
    "partition": ("auto", "request", "head", "token"),
    "balance": ("auto", "bandwidth"),
    "kv_overcommit": (1.0, 2.0),
    "autoscale": (None, "memory=1:2", "compute=1:2"),
}
COUNTS = (1, 2, 4)
BALANCED = {"slo_ttft_ms": 500, "slo_tbt_ms": 50}


def test_what_is_not_refused_has_lanes_on_every_stage() -> None:
    seen = {True: 0, False: 0}
    for values in itertools.product(*VALUES.values()):
        settings = dict(zip(VALUES, values, strict=True))
        spill = "/tmp" if settings["kv_overcommit"] > 1 else None
        config = EngineConfig(kv_spill_dir=spill, **settings)
        for count in COUNTS:
            refused = next(refusals(config, ["cpu"] * count, ["cpu", "cpu"]), None)
            seen[refused is not None] += 1
            if refused is not None:
                assert refused.what and refused.why and refused.remedy
                continue
            for shared in (False, True):
                order = sizing.pipeline(config, count, shared)
                assert order.stage_count * order.most_ranks == count
                for one in (order.first_arrangement, *order.choices):
                    visited = {
                        worker for lane in range(one.lanes) for worker in order.workers_of(lane, rotates=one.rotates)
                    }
                    assert visited == set(range(count))
            for left in (each for each in COUNTS if each % order.shape.workers == 0):
                sizing.pipeline(sizing.fit_lanes(config, left), left, shared=False)  # or ValueError
    assert min(seen.values()) > 500


@pytest.mark.parametrize(
    ("settings", "computes", "memories", "says"),
    [
        ({"tensor_parallel": 2}, ["cpu"] * 3, ["cpu"], "a replica has 2 compute workers, and 3 is no multiple of that"),
        (
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            ["cpu"],
            ["cpu"],
            "with 1 compute worker: a replica has 2 x 2 = 4",
        ),
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, ["cpu"] * 6, ["cpu"], "give --compute a multiple of 4"),
        (
            {"quantization": "fp8"},
            ["a100", "cpu"],
            ["cpu"],
            "no product of fp8 weights; give quantization int8 or int4",
        ),
        ({"tensor_parallel": 2}, ["a100", "a100", "a100", "h100"], ["cpu"], "tensor_parallel 2 of a100 and h100"),
        ({"tensor_parallel": 2, "autoscale": "compute=1:2"}, ["cpu"] * 2, ["cpu"], "give multiples of 2"),
        ({"autoscale": "prefill=1:2", "slo_tbt_ms": 50}, ["cpu"] * 3, ["cpu"], "without slo_ttft_ms and slo_tbt_ms"),
        ({**BALANCED, "autoscale": "prefill=1:2"}, ["cpu"], ["cpu"], "one must always decode; give --compute 2"),
        (
            {**BALANCED, "autoscale": "prefill=2:2", "tensor_parallel": 2},
            ["cuda"] * 4,
            ["local"],
            "could wait in a circle: .* only those that decode hold KV, and they keep their role; use memory workers",
        ),
        ({**BALANCED, "autoscale": "prefill=1:1", "pipelining": "rotational"}, ["cpu"] * 2, ["cpu"], "leave out pipel"),
        (
            {**BALANCED, "autoscale": "prefill=1:2", "pipeline_parallel": 2},
            ["cpu"] * 4,
            ["cpu"],
            "a replica joins, leaves or changes its role as a whole; give multiples of 2",
        ),
        (
            {"pipeline_parallel": 2, "pipelining": "rotational"},
            ["cpu"] * 4,
            ["cpu"],
            "a lane takes turns on the stages already",
        ),
        ({"pipelining": "rotational", "lanes": 4}, ["cpu"] * 2, ["cpu"], "give lanes 3, or leave it out"),
        ({"pipeline_parallel": 2, "lanes": 3}, ["cpu"] * 4, ["cpu"], "lanes 3 with 2 replicas of 2 stages"),
        ({"partition": "request", "kv_tokens_per_worker": 9}, ["cpu"], ["cpu"], "the second keeps it on one"),
        ({"partition": "head", "balance": "ledger"}, ["cpu"], ["cpu"], "gives each worker the same heads"),
        ({"partition": "request", "balance": "ledger"}, ["cpu"], ["cpu"], "keeps a request on one worker"),
        ({"pipelining": "rotational"}, ["cpu"] * 2, ["local"], "a lane stays on the replica"),
        ({"prefill": "cuda:2", "tensor_parallel": 2}, ["cuda"] * 4, ["local", "cpu"], "continues on no memory worker"),
        (
            {"prefill": "cuda:2", "tensor_parallel": 2, "autoscale": "memory=0:2"},
            ["cuda"] * 4,
            ["local"],
            "prefill cuda:2 and autoscale memory=0:2.*use only local memory",
        ),
        (
            {"prefill": "cuda:2", "tensor_parallel": 2, "kv_tokens_per_worker": 64},
            ["cuda"] * 4,
            ["local"],
            "cannot attend for each other, so that a request's KV stays on one replica; leave out kv_tokens_per_worker",
        ),
        ({"prefill": "cpu:1", "tensor_parallel": 2}, ["cpu"] * 4, ["cpu"], "give --prefill a multiple of 2"),
        (
            {"prefill": "cpu:3/tp2"},
            ["cpu"] * 4,
            ["cpu"],
            "tensor_parallel 2 with 3 prefill workers.*give --prefill",
        ),
        (
            {"prefill": "cpu:2/tp2", "compute": "cpu:6/pp4"},
            ["cpu"] * 8,
            ["cpu"],
            "pipeline_parallel 4 with 6 compute workers: .*give --compute a multiple of 4",
        ),
        (
            {**BALANCED, "autoscale": "prefill=1:2", "prefill": "cpu:1", "compute": "cpu:4/tp2"},
            ["cpu"] * 5,
            ["cpu"],
            "a replica that changes its role keeps its ranks and stages.*leave prefill out of autoscale",
        ),
        (
            {"prefill": "cpu:2/pp2", "lanes": 3},
            ["cpu"] * 3,
            ["cpu"],
            "lanes 3 with 2 replicas of 2 stages",
        ),
        ({"partition": "head"}, ["cpu"] * 2, ["local"], "the heads of a request stay on one replica"),
        ({"partition": "head", "pipeline_parallel": 2}, ["cpu"] * 4, ["local"], "the heads of a request stay on one"),
        ({"kv_overcommit": 2.0}, ["cpu"], ["local"], "kv_overcommit and memory local"),
        (
            {"prompt_attention": "compute"},
            ["cpu"] * 2,
            ["local"],
            "in its own memory.*has no effect; leave out prompt_",
        ),
        (
            {"prompt_attention": "compute", "pipelining": "rotational", "tensor_parallel": 2},
            ["cpu"] * 4,
            ["cpu"],
            "lanes rotate over 2 replicas, and a copy of a prompt's KV is on one; leave out pipelining",
        ),
        ({"polling": "device"}, ["cpu"], ["cpu"], "only GPUs can poll for messages"),
        ({"policy": "slo"}, ["cpu"], ["cpu"], "orders requests by their deadlines; give slo_ttft_ms"),
        ({"slo_ttft_ms": 500}, ["cpu"], ["cpu"], "slo_ttft_ms 500 and policy fifo: .*no effect; give policy slo"),
        ({"slo_ttft_ms": 500, "policy": "loongserve"}, ["cpu"], ["cpu"], "slo_ttft_ms 500 and policy loongserve"),
        ({"advertise": "10.0.0.1"}, ["cpu"], ["cpu"], "advertise 10.0.0.1 without listen: .*give listen, or leave out"),
        ({"ray": "auto", "listen": "10.0.0.1:7070"}, ["cpu"], ["cpu"], "Ray places and starts all workers; leave out"),
        (
            {"ray": "auto", "memory_cores": "0-3"},
            ["cpu"],
            ["cpu"],
            "memory_cores 0-3 and ray auto: .*Ray places worke",
        ),
        ({"autoscale": "memory=0:2"}, ["cpu"], ["cpu"], "one memory worker must stay"),
    ],
)
def test_the_reason_is_said(settings: dict[str, Any], computes: list[str], memories: list[str], says: str) -> None:
    spill = "/tmp" if "kv_overcommit" in settings else None
    with pytest.raises(ConfigError, match=says):
        require_allowed(EngineConfig(kv_spill_dir=spill, **settings), computes, memories)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("memories", [["local"], ["local", "cpu"]])
@pytest.mark.parametrize("lanes", [None, 4, 5])
def test_stages_may_have_local_memory(ranks: int, memories: list[str], lanes: int | None) -> None:
    """Their replicas attend for each other, and no KV moves between them."""
    config = EngineConfig(pipeline_parallel=2, tensor_parallel=ranks, lanes=lanes)
    require_allowed(config, ["cpu"] * 4 * ranks, memories)
    order = sizing.with_lending(sizing.pipeline(config, 4 * ranks, shared=False, local=True), ["cpu"])
    assert (order.replicas, order.shape) == (2, Shape(ranks, 2))
    assert order.spreads and not order.may_rotate and not order.moves_local


@pytest.mark.parametrize(
    ("settings", "computes", "memories"),
    [
        ({"prefill": "cpu:1"}, 2, ["local"]),
        ({}, 2, ["local", "cpu"]),
        ({"pipelining": "rotational"}, 1, ["cpu"]),
        ({"lanes": 3}, 2, ["cpu"]),
        ({}, 2, ["cpu"]),
    ],
)
def test_where_a_copy_of_a_prompts_kv_is_used_lanes_stay(
    settings: dict[str, Any], computes: int, memories: list[str]
) -> None:
    config = EngineConfig(prompt_attention="compute", **settings)
    require_allowed(config, ["cpu"] * computes, memories)
    order = sizing.pipeline(config, computes, shared=False, local="local" in memories)
    assert not order.may_rotate
