"""Brings started worker processes up to a cluster that can run steps, over the control plane alone."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from lamina.cluster.gather import (
    CONNECT_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    START_TIMEOUT_S,
    Gather,
    Launcher,
    OnProgress,
    converse,
)
from lamina.cluster.joining import Fabric
from lamina.cluster.linking import link
from lamina.cluster.pool import CPU, Assigned
from lamina.errors import ConfigError
from lamina.pipeline import Pipeline
from lamina.protocol.choice import Choice, Transport, candidates
from lamina.protocol.control import ControlServer
from lamina.protocol.leases import SPARE_LINKS, messages
from lamina.protocol.messages import (
    ComputeSetup,
    Connect,
    Connected,
    Hello,
    MemorySetup,
    ModelLoaded,
    Registered,
    SlabReady,
)
from lamina.schedule.limits import Limits
from lamina.topology import FIRST, Epoch, Member, Role, Topology
from lamina.transport.endpoint import spin_s
from lamina.types import AttentionSpec, DType, KvCacheDType, KvElement, TransportName


@dataclass(frozen=True)
class ClusterPlan:
    """The workers and their settings, decided before any worker starts, except what depends on the model."""

    computes: tuple[str, ...]
    memories: Mapping[str, Assigned]
    compute_setup: ComputeSetup
    memory_threads: int
    kv_bytes_per_worker: Callable[[], int]  # in the host's memory; called once the weights are loaded
    kv_bytes_on_gpu: Callable[[int], int]  # given those free on it
    kv_bytes_of_joiner: Callable[[int, int], int]  # see ``Fabric.kv_bytes``
    limits: Limits  # of the scheduler; they also bound the slots that a worker can use
    pipeline: Pipeline
    transport: TransportName
    tls: bool
    cores: Mapping[str, frozenset[int]]  # by worker
    shared_cores: bool  # both pools run on the same cores
    kv_cache_dtype: KvCacheDType
    kv_overcommit: float = 1.0
    kv_spill_dir: str = ""


@dataclass(frozen=True)
class Cluster:
    """What the engine needs to know about a running cluster."""

    computes: tuple[str, ...]
    capacities: Mapping[str, int]  # token slots by memory worker
    attentions: tuple[AttentionSpec, ...]
    dtype: DType
    parameters: int
    pipeline: Pipeline
    links: Mapping[tuple[str, str], Choice]  # transports by pair of workers
    hosts: Mapping[str, str] = field(default_factory=dict)  # by worker
    epoch: Epoch = FIRST
    kv_cache_dtype: KvCacheDType = "auto"
    kinds: Mapping[str, str] = field(default_factory=dict)  # of devices, by memory worker
    fabric: Fabric | None = None  # without it, no worker can join

    @property
    def topology(self) -> Topology:
        """The members at the start."""

        def member(name: str, role: Role) -> Member:
            return Member(name, role, self.kinds.get(name, CPU), self.hosts.get(name, ""), self.capacities.get(name, 0))

        computes = [member(name, "compute") for name in self.computes]
        return Topology(self.epoch, (*computes, *(member(name, "memory") for name in self.capacities)), self.pipeline)


def bring_up(control: ControlServer, workers: Launcher, plan: ClusterPlan, on_progress: OnProgress) -> Cluster:
    """Load the model, allocate slabs and arenas, connect every memory worker with every other worker.

    Raises the worker's own UserError if the user can fix it, else TransportError, WorkerError or DeadlineError.
    """
    gather = Gather(control, workers, on_progress)
    everyone = (*plan.computes, *plan.memories)
    greetings = gather.all(Hello, everyone, START_TIMEOUT_S)
    control.send(plan.computes, plan.compute_setup)
    loaded = gather.all(ModelLoaded, plan.computes, LOAD_TIMEOUT_S)[plan.computes[0]]
    plan = _with_turns(plan, len(loaded.attentions) + 1)
    capacities = _capacities(plan, loaded, {name: greetings[name].gpu_bytes for name in plan.memories})
    asked, kv_dtype, most = plan.compute_setup, plan.kv_cache_dtype, max(capacities.values())
    setup = MemorySetup(
        loaded.attentions,
        loaded.dtype,
        most,
        plan.memory_threads,
        asked.overlap,
        asked.trace,
        kv_dtype,
        plan.kv_overcommit,
        plan.kv_spill_dir,
    )
    for name, capacity in capacities.items():
        control.send([name], msgspec.structs.replace(setup, capacity=capacity))
    fabric = _fabric(workers, plan, loaded, setup, {hello.host for hello in greetings.values()})
    gather.all(SlabReady, list(plan.memories), LOAD_TIMEOUT_S)
    hosts = {name: hello.host for name, hello in greetings.items()}
    epoch = Epoch(int(time.time()), 1)  # an engine that is started again is a later incarnation
    _connect(control, gather, plan, fabric, epoch)
    return Cluster(
        plan.computes,
        capacities,
        tuple(loaded.attentions),
        loaded.dtype,
        loaded.parameters,
        plan.pipeline,
        fabric.links,
        hosts,
        epoch,
        kv_dtype,
        {name: assigned.kind for name, assigned in plan.memories.items()},
        fabric,
    )


def _with_turns(plan: ClusterPlan, slices: int) -> ClusterPlan:
    """``plan`` without arrangements that a model of so many slices cannot run.

    Where lanes rotate, every replica runs at least one slice of every step, so there must be enough slices. Raises
    ConfigError if the configured order is rotational and there are too few.
    """
    if plan.pipeline.replicas <= slices:
        return plan
    if plan.pipeline.rotates:
        raise ConfigError(
            f"the model has {slices} slices, too few for {plan.pipeline.replicas} compute workers to take turns in "
            f"every step; give at most {slices} compute workers, or --pipelining fixed"
        )
    return dataclasses.replace(plan, pipeline=plan.pipeline.without_rotation())


def _capacities(plan: ClusterPlan, loaded: ModelLoaded, gpu_bytes: Mapping[str, int]) -> dict[str, int]:
    """Token slots of each memory worker, from the bytes free on its GPU; 0: it uses the host's memory.

    Raises ConfigError for fewer than 2 slots.
    """
    per_token = _bytes_per_token(plan, loaded)
    on_host = 0 if all(gpu_bytes.values()) else plan.kv_bytes_per_worker()
    most = plan.limits.max_sequences * plan.limits.max_model_len
    capacities = {}
    for name, free in gpu_bytes.items():
        nbytes = plan.kv_bytes_on_gpu(free) if free else on_host
        capacities[name] = min(most, nbytes // per_token)
        if capacities[name] < 2:
            raise ConfigError(
                f"{name} has {nbytes} bytes for KV; a request needs at least 2 tokens of {per_token} bytes. "
                f"Give more with kv_cache_memory_bytes"
            )
    return capacities


def _bytes_per_token(plan: ClusterPlan, loaded: ModelLoaded) -> int:
    element = KvElement.of(plan.kv_cache_dtype, loaded.dtype)
    return sum(spec.slab_bytes_per_token(element) for spec in loaded.attentions)


def _fabric(workers: Launcher, plan: ClusterPlan, loaded: ModelLoaded, setup: MemorySetup, hosts: set[str]) -> Fabric:
    transports = candidates(plan.transport, hosts)
    may_move = any(one.rotates for one in (plan.pipeline.start, *plan.pipeline.choices))
    context_nbytes = loaded.context_nbytes if may_move else 0
    return Fabric(
        start=workers.start,
        compute_setup=plan.compute_setup,
        memory_setup=setup,
        bytes_per_token=_bytes_per_token(plan, loaded),
        kv_bytes=plan.kv_bytes_of_joiner,
        sizes=messages(loaded.attentions, loaded.dtype, plan.compute_setup.rows, context_nbytes),
        spare=0 if Transport.RDMA in transports else SPARE_LINKS,
        transports=transports,
        wanted=plan.transport,
        spins_s=spin_s(plan.cores.values()),
        tls=plan.tls,
    )


def _connect(control: ControlServer, gather: Gather, plan: ClusterPlan, fabric: Fabric, epoch: Epoch) -> None:
    computes, memories = list(plan.computes), list(plan.memories)
    everyone = [*computes, *memories]
    roles: dict[str, Role] = {name: "compute" for name in computes}
    roles |= {name: "memory" for name in memories}
    for group, role in ((computes, roles[computes[0]]), (memories, roles[memories[0]])):
        control.send(group, fabric.register(role, len(computes), len(memories)))
        registered = gather.all(Registered, group, CONNECT_TIMEOUT_S)
        fabric.offers.update({name: message.offer for name, message in registered.items()})
    pairs = {pair: fabric.slots(roles, *pair) for pair in itertools.combinations(everyone, 2)}
    slots = {pair: each for pair, each in pairs.items() if each is not None}
    between = {pair: each for pair, each in slots.items() if roles[pair[0]] == "memory"}
    used = {pair: each for pair, each in slots.items() if pair not in between}
    fabric.links.update(converse(gather, link(control, plan.transport, fabric.offers, used)))
    if between:  # these prefer transports that are used already
        fabric.links.update(converse(gather, link(control, plan.transport, fabric.offers, between, fabric.links)))
    control.send(everyone, Connect(computes, memories, plan.pipeline, epoch))
    gather.all(Connected, everyone, CONNECT_TIMEOUT_S)
