"""A cluster for engines whose workers are scripted: it has no fabric, so that no worker can join."""

from collections.abc import Mapping, Sequence

from lamina.cluster.bringup import Cluster
from lamina.control.messages import MemorySetup, ModelLoaded
from lamina.core.pipeline import Pipeline
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import AttentionSpec, DType, Overlap


def bare_cluster(
    computes: Sequence[str], capacities: Mapping[str, int], attentions: Sequence[AttentionSpec], pipeline: Pipeline
) -> Cluster:
    """Return a cluster of CPU workers. ``capacities``: token slots by memory worker."""
    members = [Member(name, "compute", "cpu", "") for name in computes]
    members += [Member(name, "memory", "cpu", "", capacity) for name, capacity in capacities.items()]
    specs, most = list(attentions), max(capacities.values())
    loaded = ModelLoaded(specs, DType.FLOAT32, 1, 2048, 0)
    setup = MemorySetup(specs, DType.FLOAT32, most, 1, Overlap(), trace=False)
    return Cluster(Topology(FIRST, tuple(members), pipeline), loaded, setup)
