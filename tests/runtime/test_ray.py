"""Workers on a Ray cluster of three nodes, all on this machine: placed, added, removed and lost with their node."""

import contextlib
import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError, LaminaError
from lamina.core.outputs import CompletionOutput
from lamina.launch import launch
from tests.support import ray_cluster
from tests.support.commands import assert_refused, run
from tests.support.running import REQUESTS, Streams, assert_same, config, wait_for_recoveries
from tests.support.waiting import wait_until

ray = pytest.importorskip("ray")
SCALE_S = 120.0
KINDS = "near=zone:a,far=zone:b"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head with zone a, and two nodes with zone b: one has room for two workers, the other for one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = ray_cluster.started(num_cpus=2, resources={"zone:a": 1})
        for room in (2, 1):
            made.add_node(num_cpus=2, resources={"zone:b": room}, **ray_cluster.ports())
        yield made
        made.shutdown()


def settings(checkpoint: Path, cluster: Any, memories: int = 2) -> EngineConfig:
    base = config(checkpoint, 1, 1, max_restarts=2)
    return dataclasses.replace(base, ray=cluster.address, kind=KINDS, compute="near:1", memory=f"far:{memories}")


def worker_processes(*modules: str) -> list[psutil.Process]:
    """Those of this cluster's workers, or of some: raylets are children of this process, and actors theirs."""
    found, wanted = [], set(modules or ("lamina.compute", "lamina.memory.worker"))
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if wanted & set(one.cmdline()):
                found.append(one)
    return found


@pytest.mark.slow
def test_workers_run_where_ray_has_room_and_a_node_is_lost(
    cluster: Any,
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = launch(settings(checkpoint, cluster))
    try:
        assert {member.name: member.kind for member in engine.topology.members} == {
            "compute0": "near",
            "memory0": "far",
            "memory1": "far",
        }
        streams = Streams(engine, REQUESTS)
        with pytest.raises(ConfigError, match="unknown kind 'fra'; did you mean far"):
            engine.scale(memory="fra:+1").result(SCALE_S)
        with pytest.raises(ConfigError, match="the memory pool has far:2: 1 of kind near cannot leave"):
            engine.scale(memory="near:-1").result(SCALE_S)
        assert engine.scale(memory="far:+1").result(SCALE_S) == ["memory2"], "all of zone b is taken"
        assert len(engine.scale(memory=-1).result(SCALE_S)) == 1
        streams.wait_for_tokens(streams.tokens + 20)
        (victim,) = worker_processes("lamina.compute")
        victim.send_signal(signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        assert "worker compute0 is gone: its process was ended by signal 9" in caplog.text, "the reason comes back"
        streams.wait_for_tokens(streams.tokens + 20)
        cluster.remove_node(cluster.list_all_nodes()[1])
        assert_same(streams.results(), undisturbed)
        wait_until(lambda: engine.topology.computes == ("compute1",), "no compute worker takes the place of the first")
        assert_same(Streams(engine, REQUESTS).results(), undisturbed)
    finally:
        started = worker_processes()
        engine.close()
        cluster.add_node(num_cpus=2, resources={"zone:b": 2}, **ray_cluster.ports())
    assert started and not psutil.wait_procs(started, SCALE_S)[1], "a worker is left behind"


@pytest.mark.slow
@pytest.mark.parametrize("pools", [{"prefill": "near:1", "compute": "far:1"}, {"compute": "near:1,far:1"}])
def test_workers_that_ray_places_have_local_memory(
    pools: dict[str, str], cluster: Any, checkpoint: Path, undisturbed: list[list[CompletionOutput]]
) -> None:
    """Prompts apart from decoding, and instances. Another joins, and a lost one is replaced by one of its kind."""
    base = dataclasses.replace(settings(checkpoint, cluster), memory="local", **pools)  # type: ignore[arg-type]
    engine = launch(base)
    try:
        assert not engine.topology.memories and engine.topology.local == engine.topology.names
        assert_same(Streams(engine, REQUESTS).results(), undisturbed)
        streams = Streams(engine, REQUESTS)
        streams.wait_for_tokens(60)
        assert engine.scale(compute="far:+1").result(SCALE_S) == ["compute2"]
        worker_processes("lamina.compute")[0].send_signal(signal.SIGKILL)
        wait_for_recoveries(engine, 1)
        assert_same(streams.results(), undisturbed)
        wait_until(lambda: len(engine.topology.computes) == 3, "the lost worker is not replaced")
        assert_same(Streams(engine, REQUESTS).results(), undisturbed)
        wait_until(lambda: not any(one.used for one in engine.stats().memory.values()), "slots stayed in use")
    finally:
        engine.close()


def node_of(worker: str) -> str:
    """Ray's id of the node that a worker runs on."""
    (group,) = [
        each
        for each in ray.util.placement_group_table().values()
        if each["name"].startswith(f"lamina-{worker}-") and each["state"] == "CREATED"
    ]
    return str(group["bundles_to_node_id"][0])


def drain(cluster: Any, node: str) -> None:
    """As an autoscaler does whose machine is taken away in a minute."""
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "drain-node",
        "--address",
        cluster.address,
        "--node-id",
        node,
    ]
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the market"]
    subprocess.run([*command, *reason, "--deadline-remaining-seconds", "60"], check=True, timeout=SCALE_S)


@pytest.mark.slow
def test_workers_move_off_a_node_that_ray_drains(
    cluster: Any,
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
) -> None:
    """Another worker takes the place of the only memory worker, and gets its KV."""
    engine = launch(settings(checkpoint, cluster, 1))
    drained = node_of("memory0")
    room = next(one["Resources"]["zone:b"] for one in ray.nodes() if one["NodeID"] == drained)
    try:
        streams = Streams(engine, REQUESTS)
        streams.wait_for_tokens(60)
        drain(cluster, drained)
        wait_until(lambda: engine.topology.memories == ("memory1",), "memory0 stays")
        assert node_of("memory1") != drained
        assert_same(streams.results(), undisturbed)
        stats = engine.stats()
        assert stats.recoveries == stats.recomputed == 0
        wait_until(lambda: len(worker_processes("lamina.memory.worker")) <= 1, "the process of memory0 stays")
    finally:
        engine.close()
        (node,) = [one for one in cluster.list_all_nodes() if one._node_id == drained]
        cluster.remove_node(node)
        cluster.add_node(num_cpus=2, resources={"zone:b": room}, **ray_cluster.ports())


@pytest.mark.slow
def test_a_dry_run_prints_the_placement_or_what_is_missing(cluster: Any, checkpoint: Path) -> None:
    """In processes of their own: this one may be part of a cluster for one engine at a time."""
    base = ("launch", "--dry-run", "--ray", cluster.address, "--kind", KINDS, "--compute", "near:1")
    done = run(*base, "--memory", "far:2")
    assert done.returncode == 0 and done.stdout.count("zone:b 1") == 2, done.stderr
    lacking = run(*base, "--memory", "rtx3090:6")
    assert_refused(lacking, "need GPU 1, rtx3090 1 each: no node of the Ray cluster has GPU 1, rtx3090 1.")
    assert_refused(run(*base, "--memory", "near:9"), "the Ray cluster has")
    assert_refused(run(*base, "--memory", "fra:1"), "unknown kind 'fra'; did you mean far")


@pytest.mark.slow
def test_two_engines_share_a_cluster_and_each_ends_its_own_workers(
    cluster: Any,
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
) -> None:
    engine = launch(dataclasses.replace(settings(checkpoint, cluster, 1)))
    try:
        streams = Streams(engine, REQUESTS)
        other = ("--ray", cluster.address, "--kind", KINDS, "--compute", "cpu:1", "--memory", "far:1")
        done = run("generate", "def f(", "--max-tokens", "4", "--temperature", "0", *other)
        assert done.returncode == 0 and done.stdout, done.stderr
        assert_same(streams.results(), undisturbed)
        assert engine.stats().recoveries == 0
    finally:
        engine.close()


@pytest.mark.slow
def test_a_kind_that_ray_has_nothing_of_is_one_error_and_the_cluster_goes_on_serving(
    cluster: Any,
    checkpoint: Path,
    undisturbed: list[list[CompletionOutput]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = launch(settings(checkpoint, cluster, 1))
    try:
        streams = Streams(engine, REQUESTS)
        for name, seconds in (("WARN_S", 0.5), ("PLACE_S", 2.0)):
            monkeypatch.setattr(f"lamina.cluster.ray_workers.{name}", seconds)
        nothing = "Ray has found no place for it within 2 s: .*no node of the Ray cluster has GPU 1, rtx3090 1"
        with pytest.raises(LaminaError, match=nothing):
            engine.scale(memory="rtx3090:+1").result(SCALE_S)
        assert_same(streams.results(), undisturbed)
        stats = engine.stats()
        assert set(stats.workers.values()) == {"serving"} and stats.recoveries == 0
    finally:
        engine.close()


def test_without_a_cluster_the_error_says_what_to_start() -> None:
    with pytest.raises(ConfigError, match=r"no Ray cluster can be joined at '127\.0\.0\.1:1'.*ray start --head"):
        launch(EngineConfig(ray="127.0.0.1:1"))
