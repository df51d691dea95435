"""Brings started worker processes up to a cluster that can run steps, over the control plane alone."""

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from lamina.cluster.conversations import (
    CONNECT_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    START_TIMEOUT_S,
    Gather,
    Launcher,
    OnProgress,
    converse,
)
from lamina.cluster.joining import (
    Fabric,
    boot,
    check_same_model,
    check_version,
    local_setup,
    read_clock,
    reservation,
)
from lamina.cluster.linking import SlotSizes, link
from lamina.cluster.pool import CPU
from lamina.cluster.slabs import LEAST_GAIN, SlabSize, slab_size
from lamina.control.messages import (
    ComputeSetup,
    Connect,
    Connected,
    Hello,
    Inspect,
    MemorySetup,
    ModelLoaded,
    Registered,
    Resources,
    SlabReady,
)
from lamina.control.sockets import ControlServer
from lamina.core.errors import ConfigError
from lamina.core.heads import HeadShards
from lamina.core.pipeline import Pipeline
from lamina.core.topology import FIRST, Epoch, Member, Role, Topology
from lamina.core.types import AttentionSpec, DType, KvCacheDType, KvElement, Polling, TransportName
from lamina.dataplane.leases import messages, slot_rows
from lamina.dataplane.transport_choice import Choice, candidates
from lamina.schedule.limits import Limits


@dataclass(frozen=True)
class ClusterPlan:
    """The workers and their settings, decided once they have greeted, except what depends on the model.

    Attributes:
        kinds: of devices, by worker.
        greetings: by worker.
        threads: of a worker of a role, given its greeting.
        spins_s: see ``Fabric``.
        kv_bytes: of each of so many memory workers of a machine with so many bytes free.
        kv_bytes_on_gpu: given those free on it, all of its, and its share of those free on its machine.
        kv_bytes_of_joiner: given those free, and as ``Fabric.kv_bytes``.
        limits: of the scheduler; they also bound the slots that a worker can use.
        is_open: workers on other machines may join.
        start_s: see ``Fabric``.
        forgets: see ``MemorySetup``; those on GPUs keep everything.
        prefix_cache, polling: as in ``EngineConfig``.
    """

    computes: tuple[str, ...]
    memories: tuple[str, ...]
    kinds: Mapping[str, str]
    greetings: Mapping[str, Hello]
    threads: Callable[[Role, Hello], int]
    spins_s: Mapping[str, float]
    compute_setup: ComputeSetup
    kv_bytes: Callable[[int, int], int]
    kv_bytes_on_gpu: Callable[[int, int, int], int]
    kv_bytes_of_joiner: Callable[[int, int, int], int]
    limits: Limits
    pipeline: Pipeline
    transport: TransportName
    tls: bool
    is_open: bool
    kv_cache_dtype: KvCacheDType
    kv_overcommit: float = 1.0
    kv_spill_dir: str = ""
    forgets: bool = False
    polling: Polling = "host"
    prefix_cache: bool = False
    start_s: float = START_TIMEOUT_S


@dataclass(frozen=True)
class Cluster:
    """What the engine needs to know about a running cluster."""

    computes: tuple[str, ...]
    capacities: Mapping[str, int]  # token slots by worker that holds KV
    attentions: tuple[AttentionSpec, ...]
    dtype: DType
    parameters: int
    vocabulary: int  # rows of the embedding
    pipeline: Pipeline
    links: Mapping[tuple[str, str], Choice]  # transports by pair of workers
    hosts: Mapping[str, str] = field(default_factory=dict)  # by worker
    epoch: Epoch = FIRST
    kv_cache_dtype: KvCacheDType = "auto"
    kinds: Mapping[str, str] = field(default_factory=dict)  # of devices, by worker
    fabric: Fabric | None = None  # without it, no worker can join
    wanted: Mapping[Role, int] | None = None  # how many workers there are to be; None: as many as there are
    head_shards: int = 1
    window: int = 0  # the largest of layers that forget; 0 if none do
    weights: str = ""  # how they are held, in words; empty: all have ``dtype``

    @classmethod
    def from_members(cls, fabric: Fabric, topology: Topology, wanted: Mapping[Role, int] | None = None) -> "Cluster":
        """Return the cluster of linked members. ``wanted``: see above."""
        loaded, setup = fabric.loaded, fabric.memory_setup
        kinds = {member.name: member.kind for member in topology.members}
        may_grow = setup.ranks == 1 or all(kinds[name] == CPU for name in topology.computes)  # see Sums.reset
        return cls(
            topology.computes,
            topology.capacities,
            tuple(loaded.attentions),
            loaded.dtype,
            loaded.parameters,
            loaded.vocabulary,
            topology.pipeline,
            fabric.links,
            {member.name: member.host for member in topology.members},
            topology.epoch,
            setup.kv_cache_dtype,
            kinds,
            fabric if may_grow else None,
            wanted,
            setup.head_shards,
            max(spec.window for spec in setup.attentions) if setup.forgets else 0,
            loaded.weights,
        )

    @property
    def missing(self) -> int:
        """Memory workers that were lost with the last engine and are to be started again."""
        there = sum(name not in self.computes for name in self.capacities)
        return 0 if self.wanted is None else max(0, self.wanted["memory"] - there)

    @property
    def whole(self) -> Mapping[str, int]:
        """Token slots by worker once those that are missing have been started again."""
        most = max(self.capacities.values())
        return {**self.capacities, **{f"missing{number}": most for number in range(self.missing)}}

    @property
    def shards(self) -> HeadShards:
        """How the heads of the model are cut."""
        return HeadShards(max(spec.kv_heads for spec in self.attentions), self.head_shards)

    @property
    def topology(self) -> Topology:
        """The members at the start."""

        def member(name: str, role: Role) -> Member:
            return Member(name, role, self.kinds.get(name, CPU), self.hosts.get(name, ""), self.capacities.get(name, 0))

        computes = [member(name, "compute") for name in self.computes]
        memories = [member(name, "memory") for name in self.capacities if name not in self.computes]
        return Topology(self.epoch, (*computes, *memories), self.pipeline)


def greet(control: ControlServer, workers: Launcher, names: Sequence[str], timeout_s: float) -> dict[str, Hello]:
    """Wait for the first message of each worker.

    Raises ConfigError if one is of another release, WorkerError or DeadlineError if one does not come.
    """
    greetings = Gather(control, workers, lambda worker, progress: None).all(Hello, names, timeout_s)
    for name, hello in greetings.items():
        check_version(name, hello)
    return greetings


def bring_up(control: ControlServer, workers: Launcher, plan: ClusterPlan, on_progress: OnProgress) -> Cluster:
    """Load the model, allocate slabs and arenas, connect every memory worker with every other worker.

    Raises the worker's own UserError if the user can fix it, else TransportError, WorkerError or DeadlineError.
    """
    gather = Gather(control, workers, on_progress)
    ranks, stages = plan.pipeline.ranks, plan.pipeline.stages
    with tempfile.TemporaryDirectory(prefix="lamina-") as folder:
        for number, name in enumerate(plan.computes):
            threads, meeting = plan.threads("compute", plan.greetings[name]), f"{folder}/stage{number // ranks}"
            part = {"rank": number % ranks, "ranks": ranks, "stage": number // ranks % stages, "stages": stages}
            setup_of = msgspec.structs.replace(plan.compute_setup, threads=threads, meeting=meeting, **part)
            control.send([name], setup_of)
        loaded = _same(plan, gather.all(ModelLoaded, plan.computes, LOAD_TIMEOUT_S))
    plan = with_turns(plan, len(loaded.attentions) + 1)
    if stages > 1:
        plan = dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline, starts=loaded.starts))
    shards = _shards(plan, loaded)
    local = plan.computes if plan.compute_setup.local else ()
    holders = (*local, *plan.memories)
    asked = plan.compute_setup
    setup = MemorySetup(
        loaded.attentions,
        loaded.dtype,
        plan.limits.max_sequences * plan.limits.max_model_len,
        1,
        asked.overlap,
        asked.trace,
        plan.kv_cache_dtype,
        shards.count,
        plan.kv_overcommit,
        plan.kv_spill_dir,
        ranks,
        plan.forgets,
        plan.polling,
        asked.gpu_share,
    )
    rows = slot_rows(plan.compute_setup.rows, _links(plan))
    control.send(holders, reservation(setup, plan.limits, plan.pipeline.lanes, rows))
    control.send(holders, Inspect())  # not before: weights may be loaded where they are
    found = gather.all(Resources, holders, LOAD_TIMEOUT_S)
    plan, capacities = _forgetting(plan, loaded, shards.count, setup.capacity, found)
    setup = msgspec.structs.replace(setup, capacity=max(capacities.values()), forgets=plan.forgets)
    for name, capacity in capacities.items():
        threads = plan.threads("compute" if name in local else "memory", plan.greetings[name])
        own = local_setup(setup) if name in local else setup
        control.send([name], msgspec.structs.replace(own, capacity=capacity, threads=threads))
    fabric = fabric_of(workers, plan, loaded, setup)
    gather.all(SlabReady, holders, LOAD_TIMEOUT_S)
    for name in {hello.host: name for name, hello in plan.greetings.items()}.values():
        converse(gather, read_clock(control, fabric, name))
    epoch = Epoch(int(time.time()), 1)  # an engine that is started again is a later incarnation
    _connect(control, gather, plan, fabric, epoch)
    roles: dict[str, Role] = {**dict.fromkeys(plan.computes, "compute"), **dict.fromkeys(plan.memories, "memory")}
    members = [
        Member(name, role, plan.kinds[name], plan.greetings[name].host, capacities.get(name, 0))
        for name, role in roles.items()
    ]
    return Cluster.from_members(fabric, Topology(epoch, tuple(members), plan.pipeline))


def _shards(plan: ClusterPlan, loaded: ModelLoaded) -> HeadShards:
    """How heads are cut. Raises ConfigError if they are to be on several memory workers, and cannot."""
    shards = HeadShards.over(loaded.attentions, plan.compute_setup.head_workers, plan.pipeline.ranks)
    if plan.compute_setup.local and (sharers := shards.sharers(plan.pipeline.ranks)) > 1:
        raise ConfigError(
            f"{sharers} ranks of a replica share each of the {shards.heads} KV heads, which local memory would have to "
            f"hold {sharers} times; give --tensor-parallel {shards.heads} at most, or memory workers"
        )
    if plan.compute_setup.head_workers > 1 and shards.count == 1:
        counts = " or ".join(str(count) for count in sorted({spec.kv_heads for spec in loaded.attentions}))
        raise ConfigError(
            f"the attentions of this model have {counts} KV heads, which memory workers cannot share evenly; give "
            "--partition token, request or auto"
        )
    return shards


def _same(plan: ClusterPlan, loaded: Mapping[str, ModelLoaded]) -> ModelLoaded:
    """Return what the first compute worker has loaded. Raises ConfigError unless all others have loaded the same."""
    first = plan.computes[0]
    for name in plan.computes[1:]:
        machines = [plan.greetings[one].machine for one in (first, name)]
        check_same_model(plan.compute_setup.model, loaded[first], machines[0], loaded[name], name, machines[1])
    return loaded[first]


def with_turns(plan: ClusterPlan, slices: int) -> ClusterPlan:
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


def _forgetting(
    plan: ClusterPlan, loaded: ModelLoaded, shards: int, most: int, found: Mapping[str, Resources]
) -> tuple[ClusterPlan, dict[str, int]]:
    """Return whether layers with a window forget, and the token slots of each memory worker. Arguments as
    ``_capacities``."""
    keeps = dataclasses.replace(plan, forgets=False)
    capacities, whole = (_capacities(each, loaded, shards, most, found) for each in (plan, keeps))
    if plan.prefix_cache and sum(capacities.values()) < LEAST_GAIN * sum(whole.values()):
        return keeps, whole
    return plan, capacities


def _capacities(
    plan: ClusterPlan, loaded: ModelLoaded, shards: int, most: int, found: Mapping[str, Resources]
) -> dict[str, int]:
    """Token slots of each memory worker, ``most`` at most, from what is free on its GPU or its machine.

    Raises ConfigError for fewer than 2 slots.
    """
    slab, sizes = _slab(plan, loaded), _kv_bytes(plan, {name: plan.greetings[name].host for name in found}, found)
    capacities = {}
    for name, each in found.items():
        nbytes = sizes[name]
        capacities[name] = (slab if each.forgets else slab.whole.with_pages(shards)).slots(nbytes, most)
        if capacities[name] < 2:
            raise ConfigError(
                f"{name} has {nbytes} bytes for KV; a request needs at least 2 tokens of {slab.nbytes(1)} bytes. "
                f"Give more with kv_cache_memory_bytes"
            )
    return capacities


def _kv_bytes(plan: ClusterPlan, hosts: Mapping[str, str], found: Mapping[str, Resources]) -> dict[str, int]:
    """Bytes for the KV of each memory worker. What those on CPUs take of a machine, its GPUs cannot have as well.

    Raises ConfigError.
    """
    on_hosts = {name: host for name, host in hosts.items() if not found[name].gpu_total}
    on_gpus = {name: host for name, host in hosts.items() if name not in on_hosts}
    sizes = {name: plan.kv_bytes(*_share(name, on_hosts, found)) for name in on_hosts}
    for name, host in on_gpus.items():
        count, free = _share(name, on_gpus, found)
        left = free - sum(sizes[one] for one in on_hosts if boot(hosts[one]) == boot(host))
        sizes[name] = plan.kv_bytes_on_gpu(found[name].gpu_bytes, found[name].gpu_total, max(0, left) // count)
    return sizes


def _share(name: str, hosts: Mapping[str, str], found: Mapping[str, Resources]) -> tuple[int, int]:
    """Return how many memory workers share how many bytes: those of this worker's container, or of its machine if that
    leaves each of them less."""
    here = [one for one, host in hosts.items() if host == hosts[name]]
    near = [one for one, host in hosts.items() if boot(host) == boot(hosts[name])]
    shares = (
        (len(here), min(found[one].free_bytes for one in here)),
        (len(near), min(found[one].machine_bytes for one in near)),
    )
    return min(shares, key=lambda share: share[1] / share[0])


def _slab(plan: ClusterPlan, loaded: ModelLoaded) -> SlabSize:
    element = KvElement.from_setting(plan.kv_cache_dtype, loaded.dtype)
    return slab_size(loaded.attentions, element, plan.forgets, plan.limits, plan.pipeline.lanes, plan.prefix_cache)


def _links(plan: ClusterPlan) -> int:
    """Return the most links that a worker has at the start."""
    return max(1, len(plan.greetings) - 1)


def fabric_of(workers: Launcher, plan: ClusterPlan, loaded: ModelLoaded, setup: MemorySetup) -> Fabric:
    """How to link the workers of a plan; nothing is known of them yet but their greetings."""
    transports = candidates(plan.transport, {hello.host for hello in plan.greetings.values()})
    may_move = any(one.rotates for one in (plan.pipeline.start, *plan.pipeline.choices))
    context_nbytes = loaded.context_nbytes if may_move or plan.pipeline.stages > 1 else 0

    def kv_bytes(found: Resources, largest: int, promised: int) -> int:
        if found.gpu_total:
            return plan.kv_bytes_on_gpu(found.gpu_bytes, found.gpu_total, max(0, found.machine_bytes - promised))
        return plan.kv_bytes_of_joiner(found.free_bytes, largest, promised)

    fabric = Fabric(
        launcher=workers,
        compute_setup=plan.compute_setup,
        memory_setup=setup,
        threads=plan.threads,
        limits=plan.limits,
        lanes=plan.pipeline.lanes,
        loaded=loaded,
        loaded_on=plan.greetings[plan.computes[0]].machine,
        slab=_slab(plan, loaded),
        kv_bytes=kv_bytes,
        sizes=messages(
            loaded.attentions, loaded.dtype, plan.compute_setup.rows, context_nbytes, plan.pipeline.ranks, _links(plan)
        ),
        transports=transports,
        wanted=plan.transport,
        spins_s=plan.spins_s,
        tls=plan.tls,
        is_open=plan.is_open,
        start_s=plan.start_s,
    )
    for name, hello in plan.greetings.items():
        fabric.on_hello(name, hello)
    return fabric


def _between_ranks(plan: ClusterPlan, fabric: Fabric) -> dict[tuple[str, str], SlotSizes]:
    """Return the slots that the ranks of each stage have for each other's sums."""
    ranks, size = plan.pipeline.ranks, fabric.sizes.sums
    stages = [plan.computes[first : first + ranks] for first in range(0, len(plan.computes), ranks)]
    return {pair: SlotSizes(size, size) for stage in stages for pair in itertools.combinations(stage, 2)}


def _near(plan: ClusterPlan, number: int) -> list[str]:
    """Return the compute workers to which compute worker ``number`` may send something besides sums, or get it from."""
    return [name for other, name in enumerate(plan.computes) if plan.pipeline.exchanges(number, other)]


def _connect(control: ControlServer, gather: Gather, plan: ClusterPlan, fabric: Fabric, epoch: Epoch) -> None:
    computes, memories = list(plan.computes), list(plan.memories)
    everyone = [*computes, *memories]
    roles: dict[str, Role] = {name: "compute" for name in computes}
    roles |= {name: "memory" for name in memories}
    near = {name: _near(plan, number) for number, name in enumerate(computes)}
    for group in (computes, memories):
        for name in group:
            member = Member(name, roles[name], plan.kinds[name], plan.greetings[name].host)
            linked = len(near[name]) + 1 if name in near else len(computes)
            control.send([name], fabric.register(member, linked, len(memories)))
        registered = gather.all(Registered, group, CONNECT_TIMEOUT_S)
        fabric.offers.update({name: message.offer for name, message in registered.items()})
    apart = itertools.combinations(everyone, 2)
    pairs = {(a, b): fabric.slots(roles, a, b) for a, b in apart if b not in near or a in near[b]}
    slots = {pair: each for pair, each in pairs.items() if each is not None} | _between_ranks(plan, fabric)
    between = {pair: each for pair, each in slots.items() if roles[pair[0]] == "memory"}
    used = {pair: each for pair, each in slots.items() if pair not in between}
    fabric.links.update(converse(gather, link(control, plan.transport, fabric.offers, used)))
    if between:  # these prefer transports that are used already
        fabric.links.update(converse(gather, link(control, plan.transport, fabric.offers, between, fabric.links)))
    control.send(everyone, Connect(computes, memories, plan.pipeline, epoch))
    gather.all(Connected, everyone, CONNECT_TIMEOUT_S)
