"""Which resources of a Ray cluster workers take, and what is said where they are missing."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.cluster.pool import ACCELERATORS, GPUS, RayNode, own_kinds, place_bundles, ray_bundle, ray_device
from lamina.core.errors import ConfigError

A100 = {"CPU": 16.0, "GPU": 2.0, "accelerator_type:A100": 1.0, "memory": 1e12, "node:10.0.0.5": 1.0}


def node(name: str, **amounts: float) -> RayNode:
    return RayNode(name, amounts, amounts)


def test_each_kind_takes_what_ray_calls_it() -> None:
    assert ray_bundle("cpu", {}, None) == {"CPU": 1.0} and ray_bundle("cpu", {}, 4) == {"CPU": 4.0}
    assert ray_bundle("cuda", {}, 4) == {"GPU": 1.0}
    assert ray_bundle("a100", {}, None) == {"GPU": 1.0, "accelerator_type:A100": 0.001}
    assert ray_bundle("rtx3090", {}, None) == {"GPU": 1.0, "rtx3090": 1.0}
    own = own_kinds("rtx3090=zone:my gpu, far=zone:b")
    assert ray_bundle("rtx3090", own, None) == {"GPU": 1.0, "zone:my gpu": 1.0}
    assert ray_bundle("far", own, 2) == {"CPU": 2.0, "zone:b": 1.0}
    assert (ray_device("a100"), ray_device("cuda"), ray_device("far"), ray_device("emulated")) == (
        "cuda:0",
        "cuda:0",
        "cpu",
        "emulated",
    )
    for wrong in ("far", "far=", "=b"):
        with pytest.raises(ConfigError, match="names no resource; give name=resource"):
            own_kinds(wrong)


def test_ray_itself_recognizes_the_gpus_that_it_is_said_to() -> None:
    nvidia = pytest.importorskip("ray._private.accelerators.nvidia_gpu")
    manager = nvidia.NvidiaGPUAcceleratorManager
    for kind, name in ACCELERATORS.items():
        assert manager._gpu_name_to_accelerator_type(GPUS[kind]) == name
    assert {"a100", "h100", "l40s"} <= ACCELERATORS.keys() and "rtx3090" not in ACCELERATORS


def test_what_is_missing_is_named_with_what_there_is() -> None:
    nodes = [RayNode("10.0.0.5 (ab12cd)", A100, {**A100, "GPU": 1.0}), node("10.0.0.6 (ef34ab)", CPU=8.0)]
    wanted = {f"memory{index}": ray_bundle("rtx3090", {}, None) for index in range(6)}
    with pytest.raises(ConfigError) as caught:
        place_bundles(wanted, nodes)
    assert str(caught.value) == (
        "memory0, memory1, memory2, memory3 and 2 more need GPU 1, rtx3090 1 each: no node of the Ray cluster has "
        "rtx3090 1. 10.0.0.5 (ab12cd) has CPU 16, GPU 2, accelerator_type:A100 1, free before this CPU 16, GPU 1, "
        "accelerator_type:A100 1; 10.0.0.6 (ef34ab) has CPU 8, free before this CPU 8"
    )
    with pytest.raises(ConfigError, match="of 2 workers that need it, the Ray cluster has room for 1"):
        place_bundles({"compute0": ray_bundle("a100", {}, None), "compute1": ray_bundle("a100", {}, None)}, nodes)
    with pytest.raises(ConfigError, match="It has no node"):
        place_bundles({"compute0": ray_bundle("cpu", {}, None)}, [])
    assert place_bundles({}, []) == {}


KINDS = ["cpu", "a100", "far"]


@given(
    st.lists(st.sampled_from(KINDS), max_size=6),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)), max_size=3),
)
def test_what_is_placed_fits(workers: list[str], amounts: list[tuple[int, int, int]]) -> None:
    """And workers of one kind are refused only if brute force finds no place for them either."""
    nodes = [
        node(str(index), **{"CPU": cpu, "GPU": gpu, "accelerator_type:A100": 1.0, "zone:b": far})
        for index, (cpu, gpu, far) in enumerate(amounts)
    ]
    bundles = {f"{kind}{index}": ray_bundle(kind, {"far": "zone:b"}, None) for index, kind in enumerate(workers)}

    def fits(placed: dict[str, str]) -> bool:
        return all(
            sum(bundles[worker].get(name, 0.0) for worker, at in placed.items() if at == one.name) <= total + 1e-6
            for one in nodes
            for name, total in one.total.items()
        )

    try:
        assert fits(place_bundles(bundles, nodes))
    except ConfigError:
        if len(set(workers)) == 1:
            names = [one.name for one in nodes]
            options = itertools.product(names, repeat=len(workers))
            assert not any(fits(dict(zip(bundles, option, strict=True))) for option in options)
