"""Settings against the limits of a machine and a model."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lamina.cluster import model_checks, sizing
from lamina.cluster.pool import Assigned, Devices
from lamina.config.engine_config import EngineConfig
from lamina.control.messages import Hello
from lamina.core.errors import ConfigError
from lamina.core.pipeline import Pipeline, Shape
from lamina.core.topology import Role
from lamina.models import directory
from lamina.transport.endpoint import OWN_CORES_SPIN_S, SPIN_S, spin_s

ONE = Pipeline(1, 1)


@pytest.mark.parametrize(("wanted", "says"), [(1025, "at most 1024"), (1, "at least 2"), (0, "at least 2")])
def test_context_lengths_the_bundled_model_cannot_have(wanted: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sizing.limits(EngineConfig(max_model_len=wanted), directory.find(None), ONE)


def test_a_model_that_states_no_context_length_asks_for_one() -> None:
    bundled = directory.find(None)
    silent = {key: value for key, value in bundled.config.items() if key != "max_position_embeddings"}
    model = dataclasses.replace(bundled, config=silent)
    with pytest.raises(ConfigError, match="give max_model_len"):
        sizing.limits(EngineConfig(), model, ONE)
    assert sizing.limits(EngineConfig(max_model_len=77), model, ONE).max_model_len == 77


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2}}, 128),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}}, 64),
        ({}, 64),
    ],
)
def test_linear_scaling_lets_longer_contexts_be_asked_for(rope: dict[str, Any], most: int) -> None:
    model = directory.ModelDirectory(Path("model"), "model", {"max_position_embeddings": 64} | rope)
    assert sizing.limits(EngineConfig(), model, ONE).max_model_len == 64
    assert sizing.limits(EngineConfig(max_model_len=most), model, ONE).max_model_len == most
    with pytest.raises(ConfigError, match=f"supports at most {most} tokens"):
        sizing.limits(EngineConfig(max_model_len=most + 1), model, ONE)


def test_a_lower_bound_of_weights_is_below_those_of_the_bundled_checkpoint() -> None:
    model = directory.find(None)
    stored = sum(entry.nbytes for entry in model.tensors.values())  # bfloat16
    least = {
        given: model_checks.least_weight_nbytes(EngineConfig(quantization=given), model) for given in ("none", "int4")
    }
    assert least == {"none": stored, "int4": stored // 4}
    assert model_checks.least_weight_nbytes(EngineConfig(dtype="float32"), model) == 2 * stored


@pytest.mark.parametrize(
    ("settings", "kinds", "devices", "says"),
    [
        ({}, ["cpu"], Devices(2, 3_000_000), "this machine has 0.0 GB of memory, and the weights of"),
        ({"tensor_parallel": 2}, ["cpu", "cpu"], Devices(2, 3_000_000), "divide the model over machines"),
        (
            {},
            ["cuda"],
            Devices(2, 2**30, ("H20",), gpu_bytes=(3_000_000,)),
            "raise tensor_parallel or pipeline_parallel",
        ),
        ({}, ["cpu"], Devices(2, 5_000_000), None),
        ({"quantization": "int8"}, ["cpu"], Devices(2, 3_000_000), None),
        ({"tensor_parallel": 2}, ["cuda", "cuda"], Devices(2, 1, ("H20",) * 2, gpu_bytes=(3_000_000,) * 2), None),
        ({"pipeline_parallel": 2}, ["cpu", "remote"], Devices(2, 3_000_000), None),
        # Of two stages, the smaller one has less than half of the weights, whose 3.7 MB both GPUs hold together.
        ({"pipeline_parallel": 2}, ["cuda"] * 2, Devices(2, 1, ("H20",) * 2, gpu_bytes=(1_500_000, 2_500_000)), None),
        (
            {"pipeline_parallel": 2},
            ["cuda"] * 2,
            Devices(2, 1, ("H20",) * 2, gpu_bytes=(1_000_000, 2_500_000)),
            "compute0, compute1 on cuda together have 0.0 GB of memory",
        ),
        (
            {"tensor_parallel": 2},
            ["cuda"] * 2,
            Devices(2, 1, ("H20",) * 2, gpu_bytes=(3_000_000, 1_500_000)),
            "compute1 on cuda has 0.0 GB of memory, and the weights of .* take at least 0.0 / 2 GB",
        ),
        ({"ray": "auto"}, ["cuda"], Devices(2, 1), None),  # of a machine that the engine is not on
        ({"ray": "auto"}, ["cpu"], Devices(2, 1), None),
    ],
)
def test_devices_that_cannot_hold_the_weights_are_refused_before_workers_start(
    settings: dict[str, Any], kinds: list[str], devices: Devices, says: str | None
) -> None:
    computes = {
        f"compute{index}": Assigned(kind, {"remote": "", "cuda": f"cuda:{index}"}.get(kind, kind))
        for index, kind in enumerate(kinds)
    }
    config, model = EngineConfig(**settings), directory.find(None)
    if says is None:
        model_checks.require_room(config, model, computes, devices)
        return
    with pytest.raises(ConfigError, match=says):
        model_checks.require_room(config, model, computes, devices)


@pytest.mark.parametrize(
    ("quantization", "packed", "advised"),
    [("none", False, "int8 or int4"), ("int8", False, "int4"), ("int4", False, ""), ("none", True, "")],
)
def test_weights_are_advised_to_be_rounded_only_where_they_can_be(
    quantization: Any, packed: bool, advised: str
) -> None:
    model: Any = directory.find(None)
    if packed:
        model = dataclasses.replace(model, packed=dict.fromkeys(model.tensors))
    config = EngineConfig(quantization=quantization)
    for kind, devices in ("cpu", Devices(2, 1)), ("cuda", Devices(2, 1, ("H20",), gpu_bytes=(1,))):
        with pytest.raises(ConfigError) as error:
            model_checks.require_room(config, model, {"compute0": Assigned(kind, f"{kind}:0")}, devices)
        assert (f"give quantization {advised}, or" in str(error.value)) == bool(advised)
        assert ("quantization" in str(error.value)) == bool(advised)


def test_sequences_of_a_large_cluster_need_a_row_of_their_own_in_their_lane_alone() -> None:
    config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=1024)
    assert sizing.step_limits(config, Pipeline(3, 2, rotates=True), 1).max_sequences == 512
    one_may_hold_all = Pipeline(9, 8, rotates=True)
    assert sizing.step_limits(config, one_may_hold_all, 1).max_sequences == 1024
    assert sizing.step_limits(config, Pipeline(16, 8), 1).max_sequences == 2048


@pytest.mark.parametrize(
    ("compute", "memory", "alone"),
    [("0", "1,2", True), ("0", "0,1", False), (None, None, False), (None, "1", False), ("0", "1", False)],
    ids=["cores of their own", "pools share one", "all share all", "one has all", "two memory workers share one"],
)
def test_waits_spin_longer_only_where_no_worker_shares_a_core(
    compute: str | None, memory: str | None, alone: bool
) -> None:
    available = frozenset(range(3))
    computes, memories = sizing.worker_cores(compute, 1, available), sizing.worker_cores(memory, 2, available)
    assert spin_s([*computes, *memories]) == (OWN_CORES_SPIN_S if alone else SPIN_S)


def greeting(machine: str, *cores: int) -> Hello:
    return Hello(f"{machine} pid:[1]", "", machine, list(cores))


def test_threads_and_waits_depend_on_the_cores_of_each_machine() -> None:
    """Machine a runs two memory workers beside a compute worker; the worker on b has it to itself."""
    greetings = {
        "compute0": greeting("a", 0, 1, 2, 3),
        "memory0": greeting("a", 4, 5, 6),
        "memory1": greeting("a", 4, 5, 6),
        "memory2": greeting("b", *range(8)),
    }
    roles: dict[str, Role] = {name: "compute" if name == "compute0" else "memory" for name in greetings}
    machines = sizing.Machines.from_greetings(roles, greetings)
    assert not machines.shared
    threads = [machines.threads(roles[name], hello, None) for name, hello in greetings.items()]
    assert threads == [4, 1, 1, 8]
    assert machines.threads("memory", greetings["memory2"], 3) == 3
    assert machines.threads("compute", greeting("c", 0, 1), None) == 2, "one that joins on a machine of its own"
    assert machines.spins_s() == {"a": SPIN_S, "b": OWN_CORES_SPIN_S}
    same = {**greetings, "compute0": greeting("a", 4), "memory2": greeting("a", 9)}
    assert sizing.Machines.from_greetings(roles, same).shared
    elsewhere = {**greetings, "compute0": greeting("c", 4)}
    assert not sizing.Machines.from_greetings(roles, elsewhere).shared, "core 4 of another machine"


def test_four_compute_workers_are_two_replicas_of_two_ranks() -> None:
    order = sizing.pipeline(EngineConfig(tensor_parallel=2), 4, shared=False)
    assert (order.replicas, order.lanes, order.rotates) == (2, 6, False)
    assert [(one.lanes, one.rotates) for one in order.choices] == [(4, False), (2, False), (6, False), (3, True)]
    assert [order.workers_of(lane) for lane in range(2)] == [(0, 1), (2, 3)]
    assert sizing.pipeline(EngineConfig(tensor_parallel=2), 4, shared=True).lanes == 2


def test_eight_compute_workers_are_two_replicas_of_two_stages_of_two_ranks() -> None:
    order = sizing.pipeline(EngineConfig(tensor_parallel=2, pipeline_parallel=2), 8, shared=True)
    assert (order.replicas, order.shape, order.lanes) == (2, Shape(2, 2), 4)
    assert [order.workers_of(lane) for lane in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert order.announces and not sizing.pipeline(EngineConfig(tensor_parallel=2), 2, shared=True).announces


def test_four_compute_workers_are_two_replicas_of_two_stages() -> None:
    order = sizing.pipeline(EngineConfig(pipeline_parallel=2), 4, shared=True)
    assert (order.replicas, order.shape, order.lanes, order.rotates) == (2, Shape(1, 2), 4, False)
    assert order.first_arrangement.lanes == 4
    assert [order.workers_of(lane) for lane in range(4)] == [(0, 1), (2, 3)] * 2
    apart = sizing.pipeline(EngineConfig(pipeline_parallel=2), 4, shared=False)
    assert (apart.lanes, [one.lanes for one in apart.choices]) == (12, [8, 4, 12])
    given = sizing.pipeline(EngineConfig(pipeline_parallel=2, lanes=5), 4, shared=False)
    assert (given.lanes, given.choices) == (5, ())


def test_workers_of_one_machine_become_ranks_of_one_replica() -> None:
    """They join in any order; those that only run prompts stay in front."""
    machines = {"a": "h1", "b": "h2", "c": "h1", "d": "h2", "e": "h2", "f": "h3", "g": "h2", "h": "h3"}
    greetings = {name: Hello(host) for name, host in machines.items()}
    kinds = dict.fromkeys("abcdef", "remote") | dict.fromkeys("gh", "cuda")
    assert list(sizing.by_machine(kinds, 4, greetings)) == ["a", "c", "b", "d", "e", "f", "g", "h"]
    same = dict.fromkeys(machines, Hello("h1"))
    assert list(sizing.by_machine(kinds, 4, same)) == list(machines), "on one machine, all stay where they are"


def test_the_device_of_a_remote_worker_is_what_it_says() -> None:
    """Whether ranks attend for others while they wait in sums depends on it."""
    kinds: dict[Role, dict[str, str]] = {
        "compute": {"a": "remote", "b": "near", "c": "h100"},
        "memory": {"d": "remote", "e": "emulated"},
    }
    greetings = {"a": Hello("", device="cuda:3"), "b": Hello("", device="cpu"), "d": Hello("", device="emulated:0")}
    reported = sizing.reported_kinds(kinds, greetings)
    assert reported == {
        "compute": {"a": "cuda", "b": "cpu", "c": "h100"},
        "memory": {"d": "emulated", "e": "emulated"},
    }


@pytest.mark.parametrize(("devices", "lends", "one_way"), [(["cpu"] * 4, True, False), (["cuda:0"] * 4, True, True)])
def test_ranks_of_other_machines_attend_for_others_as_their_devices_allow(
    devices: list[str], lends: bool, one_way: bool
) -> None:
    kinds: Any = {"compute": {f"compute{number}": "remote" for number in range(4)}, "memory": {}}
    greetings = {f"compute{number}": Hello("h", device=device) for number, device in enumerate(devices)}
    config = EngineConfig(compute="remote:2", prefill="remote:2", tensor_parallel=2)
    made = sizing.cluster_plan(
        config, directory.find(None), [], kinds, greetings, is_open=True, trace=False, local=True
    ).pipeline
    assert (made.lends, made.one_way) == (lends, one_way)
