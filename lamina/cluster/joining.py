"""Adds workers to a serving cluster: has them load the model and make slabs, then links them to the members."""

import functools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from lamina.cluster.conversations import (
    CONNECT_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    Ask,
    Conversation,
    Launcher,
)
from lamina.cluster.linking import Pair, SlotSizes, link
from lamina.cluster.pool import CPU
from lamina.cluster.scratch import kv_wanted, make_scratch, memory_place, untouched_bytes
from lamina.cluster.sizing import ClusterPlan, boot_id, local_setup
from lamina.cluster.slabs import SlabSize, kv_bytes_of_joiner, slab_of, slab_there, token_slots
from lamina.control.messages import (
    ComputeSetup,
    Connect,
    Connected,
    Hello,
    Inspect,
    MemorySetup,
    ModelLoaded,
    Register,
    Registered,
    Reserve,
    Resources,
    SlabReady,
)
from lamina.control.sockets import ControlServer
from lamina.control.timeline import READINGS, Clock, ClockReading
from lamina.core import __version__
from lamina.core.errors import ConfigError
from lamina.core.pipeline import Pipeline
from lamina.core.topology import Member, Pool, Role, Topology, role_of
from lamina.dataplane.leases import PINNED_SPARE_LINKS, SPARE_LINKS, ArenaPlan, Messages
from lamina.dataplane.transport_choice import Choice, Offer, Transport, candidates
from lamina.schedule.turn import DEPTH
from lamina.transport.endpoint import SPIN_S
from lamina.transport.shm import host

CLOCK_TIMEOUT_S = 10.0  # longest wait for a reading of a worker's clock


@dataclass(frozen=True)
class Fabric:
    """How the workers of a cluster are set up and linked.

    Attributes:
        launcher: Starts workers.
        plan: The workers at the start and their settings.
        loaded: The model as the first compute worker has loaded it.
        memory_setup: The setup message of workers with a slab; capacities and threads differ by worker.
        sizes: Sizes of messages.
        offers: Transports that each worker offers, by name.
        greetings: First message of each worker, by name.
        links: Transport of each linked pair.
        clocks: Clock of each other machine, by host; empty unless a timeline is recorded.
        pinned: Workers whose arenas may be pinned for RDMA. Such an arena has space for few links to later joiners.
        arenas: Parts of each worker's arena, by name. Workers that an earlier engine has started are not in it.
    """

    launcher: Launcher
    plan: ClusterPlan
    loaded: ModelLoaded
    memory_setup: MemorySetup
    sizes: Messages
    offers: dict[str, Offer] = field(default_factory=dict)
    greetings: dict[str, Hello] = field(default_factory=dict)
    links: dict[Pair, Choice] = field(default_factory=dict)
    clocks: dict[str, Clock] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    arenas: dict[str, ArenaPlan] = field(default_factory=dict)

    @functools.cached_property
    def slab(self) -> SlabSize:
        """The size of a slab on a CPU."""
        return slab_of(self.plan, self.memory_setup)

    @functools.cached_property
    def transports(self) -> tuple[Transport, ...]:
        """The transports that workers offer."""
        return candidates(self.plan.config.transport, {hello.host for hello in self.plan.greetings.values()})

    def on_hello(self, name: str, hello: Hello) -> None:
        """Record a worker's first message."""
        self.greetings[name] = hello
        if hello.rdma and Transport.RDMA in self.transports and not self.plan.config.tls:
            self.pinned.add(name)

    def register_message(self, member: Member, topology: Topology, missing: int = 0) -> Register:
        """Return the message that has a member allocate an arena for its links to other members of ``topology``, and to
        ``missing`` workers that join later. Record the arena's parts in ``arenas``."""
        plan, computes = self.plan, topology.computes
        spare = missing + (PINNED_SPARE_LINKS if member.name in self.pinned else SPARE_LINKS)
        own = computes.index(member.name) if member.role == "compute" else None
        size = self.arena(own, topology.pipeline, len(computes), len(topology.memories), spare)
        self.arenas[member.name] = size
        spin_s = plan.machines.spins_s().get(boot_id(member.host), SPIN_S)
        return Register(size, list(self.transports), spin_s, plan.config.tls, plan.is_open)

    def arena(self, own: int | None, pipeline: Pipeline, computes: int, memories: int, spare: int = 0) -> ArenaPlan:
        """Return the arena of a worker with its links to the others and ``spare`` more of each kind.

        Args:
            own: Number of the compute worker in ``pipeline``; None: it is a memory worker.
            pipeline: Which compute workers exchange data with each other.
            computes: Number of compute workers.
            memories: Number of memory workers.
            spare: Number of links to workers that join later.
        """
        if own is None:
            return self.sizes.memory_arena(computes, memories, spare)
        exchanging = sum(pipeline.exchanges(own, other) for other in range(computes))
        return self.sizes.compute_arena(1 + exchanging, memories, spare)

    def clock_of(self, name: str) -> Clock | None:
        """Return the clock of a worker's machine; None if it is this process's clock or unknown."""
        return self.clocks.get(self.greetings[name].host) if name in self.greetings else None

    def keep_members(self, members: Collection[str]) -> None:
        """Forget offers, greetings and links of all workers except ``members``."""
        for name in self.offers.keys() - set(members):
            del self.offers[name], self.greetings[name]
            self.arenas.pop(name, None)
        for pair in [pair for pair in self.links if not set(pair) <= set(members)]:
            del self.links[pair]

    def link_slots(self, topology: Topology, joiners: Collection[str]) -> dict[Pair, SlotSizes]:
        """Return the message slots of each pair of workers that needs a link and has a joiner.

        The second worker of a pair is always a joiner; the first may be one too.
        """
        members = sorted(topology.members, key=lambda member: member.name in joiners)
        order, found = topology.pipeline, dict[Pair, SlotSizes]()
        numbers = {name: number for number, name in enumerate(topology.computes)}
        for place, far in enumerate(members):
            for near in members[:place] if far.name in joiners else ():
                if near.role == far.role == "compute":
                    slots = self._between_computes(order, numbers[near.name], numbers[far.name])
                else:
                    slots = self._with_memory_worker(near.role, far.role)
                if slots is not None:
                    found[near.name, far.name] = slots
        return found

    def _with_memory_worker(self, near: Role, far: Role) -> SlotSizes:
        """Return the slots of a pair with a memory worker, by roles; two memory workers need a link, but no slots."""
        sizes = self.sizes
        if near == far:
            return SlotSizes(0, 0)
        if near == "compute":
            return SlotSizes(sizes.reply, sizes.request, on_devices=True)
        return SlotSizes(sizes.request, sizes.reply, on_devices=True)

    def _between_computes(self, order: Pipeline, near: int, far: int) -> SlotSizes | None:
        """Return the slots of two compute workers, given their numbers in the pipeline; None if they need no link."""
        if far in order.ranks_at(near):
            return SlotSizes(self.sizes.sums, self.sizes.sums)
        context = self.sizes.context
        return SlotSizes(context, context) if context and order.exchanges(near, far) else None


def read_clock(control: ControlServer, fabric: Fabric, name: str) -> Conversation[None]:
    """Read the clock of a worker on another machine, if a timeline is recorded."""
    there = fabric.greetings[name].host
    if not fabric.plan.compute_setup.trace or there == host():
        return
    readings = []
    for _ in range(READINGS):
        sent_ns = time.monotonic_ns()
        control.send([name], Inspect(sent_ns))
        found: dict[str, Resources] = yield Ask(Resources, [name], CLOCK_TIMEOUT_S)
        readings.append(ClockReading(sent_ns, found[name].now_ns, time.monotonic_ns()))
    fabric.clocks.setdefault(there, Clock()).add_reading(readings)


def check_version(name: str, hello: Hello) -> None:
    """Raise ConfigError if a worker runs another release of Lamina than this process."""
    if hello.version != __version__:
        raise ConfigError(
            f"{name} on {hello.machine} runs lamina {hello.version or 'of an unknown release'}, the engine "
            f"{__version__}; install the same release on all machines"
        )


def check_same_model(
    plan: ClusterPlan, first: ModelLoaded, starts: Sequence[int], other: ModelLoaded, name: str, machine: str
) -> None:
    """Raise ConfigError unless worker ``name``, on ``machine``, has loaded what the first compute worker has.

    ``starts``: First slice of each stage of its pool's replicas.
    """
    path, on = plan.compute_setup.model, plan.greetings[plan.computes[0]].machine
    if other.digest != first.digest:
        raise ConfigError(
            f"the checkpoint in {path} differs: {name} on {machine} has digest {other.digest}, {on} has "
            f"{first.digest}. Copy the same files to all machines"
        )
    if (other.attentions, other.dtype, other.starts) != (first.attentions, first.dtype, starts):
        raise ConfigError(
            f"{name} on {machine} has split {path} into other slices than {on}; install the same packages on all "
            "machines"
        )


def require_ranks_together(plan: ClusterPlan, greeted: Mapping[str, Hello], pool: Pool) -> None:
    """Raise ConfigError if ranks of a stage are on GPUs of several machines: they sum in the GPUs' memory.

    ``greeted``: First message of each compute worker of some replicas of a pool, in order.
    """
    names, ranks = list(greeted), plan.pipeline.shape_in(pool).ranks
    for stage in (names[first : first + ranks] for first in range(0, len(names), ranks)):
        hosts = {greeted[name].host: f"{name} on {greeted[name].machine}" for name in stage}
        if len(hosts) > 1 and any(greeted[name].device != CPU for name in stage):
            raise ConfigError(
                f"the {ranks} ranks of a replica on GPUs must be on one machine, and {' and '.join(hosts.values())} "
                f"are not; run a multiple of {ranks} workers on each machine"
            )


def new_meeting() -> str:
    """Return a name that nobody can guess, for folders in which ranks find each other."""
    return f"lamina-{secrets.token_hex(16)}"


def part_setup(plan: ClusterPlan, number: int, hello: Hello, meeting: str, pool: Pool) -> ComputeSetup:
    """Return the setup message of a compute worker.

    Args:
        plan: The cluster's plan.
        number: Number of the worker, counted over all replicas of its pool that are set up together.
        hello: The worker's greeting.
        meeting: Begin of the names of folders in which the ranks of a stage on GPUs find each other.
        pool: Pool of the worker.
    """
    shape = plan.pipeline.shape_in(pool)
    stage, rank = divmod(number, shape.ranks)
    return msgspec.structs.replace(
        plan.compute_setup,
        threads=plan.threads("compute", hello),
        local=plan.has_slab(pool),
        scratch=plan.has_scratch(pool),
        meeting=f"{meeting}-{pool}{stage}",
        rank=rank,
        ranks=shape.ranks,
        stage=stage % shape.stages,
        stages=shape.stages,
    )


def prepare_workers(
    control: ControlServer, fabric: Fabric, kinds: Mapping[str, str], pool: Pool, promised: Callable[[str], int]
) -> Conversation[tuple[Member, ...]]:
    """Prepare started workers to join; return the future members, in the order of ``kinds``.

    Compute workers load the model. Memory workers, and compute workers with local memory, make their slabs.

    Args:
        kinds: The kind of each worker: a memory worker, or the compute workers of one replica in order.
        pool: Pool of all these workers.
        promised: Returns, for a host, the bytes of KV that its workers were given but have not yet used.

    Raises ConfigError if a worker has another release or model, or too little memory.
    """
    names, plan, role = list(kinds), fabric.plan, role_of(pool)
    greeted: dict[str, Hello] = yield Ask(Hello, names, plan.start_s)
    for name in names:
        check_version(name, greeted[name])
        fabric.on_hello(name, greeted[name])
        yield from read_clock(control, fabric, name)
    has_slab = plan.has_slab(pool)
    scratch = dict[str, int]()
    if role == "compute":
        _require_device(plan, greeted)
        yield from _load(control, fabric, [(name, greeted[name]) for name in names], pool)
        if plan.has_scratch(pool):
            scratch = yield from _scratch(control, fabric, greeted, has_slab, promised)
    slots = dict[str, int]()
    if has_slab:
        given = untouched_bytes(plan, fabric.loaded, scratch, greeted)  # by host: bytes of memory allocated here
        hellos = {name: greeted[name] for name in names}
        slots = yield from _make_slabs(control, fabric, hellos, pool, lambda host: promised(host) + given[host])
    return tuple(member_of(name, role, kind, greeted[name], slots, scratch) for name, kind in kinds.items())


def member_of(
    name: str, role: Role, kind: str, hello: Hello, slots: Mapping[str, int], scratch: Mapping[str, int]
) -> Member:
    """Return the member that a worker is once it is linked.

    ``slots``, ``scratch``: By worker, the token slots of its slab and the tokens that its scratch memory holds.
    """
    return Member(name, role, kind, hello.host, slots.get(name, 0), scratch.get(name, 0), hello.device)


def _require_device(plan: ClusterPlan, greeted: Mapping[str, Hello]) -> None:
    """Raise ConfigError if the ranks of a joining replica are on GPUs, and those of the cluster attend for each other:
    ranks on GPUs serve nothing in sums."""
    on_gpus = [name for name, hello in greeted.items() if hello.device != CPU]
    if on_gpus and plan.pipeline.spreads and plan.pipeline.most_ranks > 1:
        raise ConfigError(
            f"{on_gpus[0]} on {greeted[on_gpus[0]].machine} is a rank on a GPU, which serves no requests while it "
            f"waits for other ranks, and the replicas here attend for each other; let replicas of {CPU} join"
        )


def _make_slabs(
    control: ControlServer, fabric: Fabric, greeted: Mapping[str, Hello], pool: Pool, promised: Callable[[str], int]
) -> Conversation[dict[str, int]]:
    """Have workers make their slabs, one after the other. Returns the token slots of the workers that segments name.

    Args:
        greeted: First message of each worker: a memory worker, or the compute workers of one replica in order.
        pool: Their pool.
        promised: Returns, for a host, the bytes that other workers were given but have not yet used.
    """
    plan, setup, role = fabric.plan, fabric.memory_setup, role_of(pool)
    slots, given = dict[str, int](), Counter[str]()
    for name, hello in greeted.items():
        shape = plan.pipeline.shape_in(pool)
        own = local_setup(setup, shape, list(greeted), name) if role == "compute" else setup
        home = own.home or name  # no stage has more slots than the one before it
        most, threads = slots.get(home, setup.capacity), plan.threads(role, hello)
        own = msgspec.structs.replace(own, capacity=most, threads=threads)
        slots[home] = yield from _make_slab(control, fabric, name, own, promised(hello.host) + given[hello.host])
        given[hello.host] += slab_of(plan, own).nbytes(slots[home])
    return slots


def _scratch(
    control: ControlServer,
    fabric: Fabric,
    greeted: Mapping[str, Hello],
    has_slab: bool,
    promised: Callable[[str], int],
) -> Conversation[dict[str, int]]:
    """Have the compute workers of a replica allocate scratch memory. ``promised`` is that of ``prepare_workers``.

    ``has_slab``: Whether these workers will hold KV of requests.
    """
    plan = fabric.plan
    local = list(greeted.values()) if has_slab else []
    beside, wanted = [fabric.greetings[one] for one in plan.memories if one in fabric.greetings], kv_wanted(plan, local)

    def taken(hello: Hello) -> int:
        on_gpu = memory_place(hello)[1]  # where free memory falls as soon as a slab is allocated
        return wanted(hello) + (0 if on_gpu else promised(hello.host))

    return (yield from make_scratch(control, plan, fabric.loaded, greeted, [*local, *beside], taken))


def _load(
    control: ControlServer, fabric: Fabric, greeted: Sequence[tuple[str, Hello]], pool: Pool
) -> Conversation[None]:
    """Have the compute workers of a replica load the model. Raises ConfigError if one has loaded another model."""
    plan, names = fabric.plan, [name for name, _ in greeted]
    require_ranks_together(plan, dict(greeted), pool)
    meeting = new_meeting()
    for number, (name, hello) in enumerate(greeted):
        control.send([name], part_setup(plan, number, hello, meeting, pool))
    loaded: dict[str, ModelLoaded] = yield Ask(ModelLoaded, names, LOAD_TIMEOUT_S)
    for name, hello in greeted:
        starts = plan.pipeline.shape_in(pool).starts or (0,)
        check_same_model(plan, fabric.loaded, starts, loaded[name], name, hello.machine)


def _make_slab(
    control: ControlServer, fabric: Fabric, name: str, setup: MemorySetup, promised: int
) -> Conversation[int]:
    """Have a worker make its slab; return the number of token slots. Raises ConfigError if there is too little memory.

    ``promised``: Free bytes on the worker's host that other slabs may still use.
    """
    plan = fabric.plan
    control.send([name], reservation(plan, setup, fabric.sizes.slot_rows))
    control.send([name], Inspect())
    answers: dict[str, Resources] = yield Ask(Resources, [name], LOAD_TIMEOUT_S)
    found = answers[name]
    slab = slab_of(plan, setup)
    largest = slab_there(slab, setup, found).nbytes(setup.capacity)
    nbytes = kv_bytes_of_joiner(plan.config, found, largest, promised)
    capacity = token_slots(name, slab, setup, found, nbytes)
    control.send([name], msgspec.structs.replace(setup, capacity=capacity))
    yield Ask(SlabReady, [name], LOAD_TIMEOUT_S)
    return capacity


def reservation(plan: ClusterPlan, setup: MemorySetup, slot_rows: int) -> Reserve:
    """Return the memory that a worker with a slab reserves before its capacity is computed."""
    limits, lanes = plan.limits, plan.pipeline.lanes
    return Reserve(setup, limits.max_num_batched_tokens, limits.max_sequences, DEPTH * lanes, slot_rows, lanes)


def link_joiners(
    control: ControlServer, fabric: Fabric, topology: Topology, joiners: Sequence[Member], missing: int
) -> Conversation[None]:
    """Link prepared workers with each other and with the other members of ``topology``.

    ``missing``: number of workers that are to join as well, for whose links the arenas get room.

    Raises TransportError if two workers cannot be linked.
    """
    names = [joiner.name for joiner in joiners]
    for joiner in joiners:
        control.send([joiner.name], fabric.register_message(joiner, topology, missing))
    registered: dict[str, Registered] = yield Ask(Registered, names, CONNECT_TIMEOUT_S)
    own = {name: registered[name].offer for name in names}
    slots = fabric.link_slots(topology, names)
    links = yield from link(control, fabric.plan.config.transport, {**fabric.offers, **own}, slots, fabric.links)
    computes, memories = list(topology.computes), list(topology.memories)
    control.send(names, Connect(computes, memories, topology.pipeline, topology.epoch))
    yield Ask(Connected, names, CONNECT_TIMEOUT_S)
    fabric.offers.update(own)
    fabric.links.update(links)
