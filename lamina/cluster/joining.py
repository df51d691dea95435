"""Adds a worker to a serving cluster: sets it up, checks its model and links it with all members."""

import functools
import time
from collections.abc import Callable, Collection, Mapping
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
from lamina.cluster.sizing import ClusterPlan, boot
from lamina.cluster.slabs import SlabSize, kv_bytes_of_joiner, slab_of, slab_there, slots
from lamina.control.messages import (
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
from lamina.core.topology import Member, Role, Topology
from lamina.core.types import Overlap
from lamina.dataplane.leases import SPARE_LINKS, Messages
from lamina.dataplane.transport_choice import Choice, Offer, Transport, candidates
from lamina.schedule.turn import DEPTH
from lamina.transport.endpoint import SPIN_S
from lamina.transport.shm import host

CLOCK_TIMEOUT_S = 10.0  # for a worker to tell the time


@dataclass(frozen=True)
class Fabric:
    """How the workers of a cluster are set up and linked.

    Attributes:
        launcher: Starts workers.
        plan: The workers at the start and their settings.
        loaded: The model as the first compute worker has loaded it.
        memory_setup: The message to workers with a slab; capacities and threads may differ.
        sizes: Sizes of messages.
        offers: Transports that each worker offers, by name.
        greetings: First message of each worker, by name.
        links: Transport of each linked pair.
        clocks: The clocks of other machines, by host, where a timeline is recorded.
        pinned: Workers whose arenas RDMA may pin, which have no space for links beyond those at the start.
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

    def register(self, member: Member, computes: int, memories: int) -> Register:
        """Return the message that sizes a worker's arena, for a cluster of ``computes`` and ``memories`` workers."""
        arena = self.sizes.compute_arena if member.role == "compute" else self.sizes.memory_arena
        size, plan = arena(computes, memories, 0 if member.name in self.pinned else SPARE_LINKS), self.plan
        spin_s = plan.machines.spins_s().get(boot(member.host), SPIN_S)
        return Register(size, list(self.transports), spin_s, plan.config.tls, plan.is_open)

    def clock_of(self, name: str) -> Clock | None:
        """Return the clock of a worker's machine; None if it is this process's clock or unknown."""
        return self.clocks.get(self.greetings[name].host) if name in self.greetings else None

    def keep_members(self, members: Collection[str]) -> None:
        """Forget offers and links of all workers but ``members``."""
        for name in self.offers.keys() - set(members):
            del self.offers[name], self.greetings[name]
        for pair in [pair for pair in self.links if not set(pair) <= set(members)]:
            del self.links[pair]

    def slots(self, roles: Mapping[str, Role], near: str, far: str) -> SlotSizes | None:
        """Return the slots of two workers for each other's messages; None: they need no link."""
        sizes = self.sizes
        match roles[near], roles[far]:
            case "compute", "memory":
                return SlotSizes(sizes.reply, sizes.request, on_devices=True)
            case "memory", "compute":
                return SlotSizes(sizes.request, sizes.reply, on_devices=True)
            case "memory", "memory":
                return SlotSizes(0, 0)
        return SlotSizes(sizes.context, sizes.context) if sizes.context else None


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
    """Raise ConfigError if a worker is of another release than this process."""
    if hello.version != __version__:
        raise ConfigError(
            f"{name} on {hello.machine} runs lamina {hello.version or 'of an unknown release'}, the engine "
            f"{__version__}; install the same release on all machines"
        )


def check_same_model(plan: ClusterPlan, first: ModelLoaded, other: ModelLoaded, name: str, machine: str) -> None:
    """Raise ConfigError unless worker ``name``, on ``machine``, has loaded what the first compute worker has."""
    path, on = plan.compute_setup.model, plan.greetings[plan.computes[0]].machine
    if other.digest != first.digest:
        raise ConfigError(
            f"the checkpoint in {path} on {machine}, loaded by {name}, is not that on {on}: its digest is "
            f"{other.digest}, and there it is {first.digest}. Copy the same files to all machines"
        )
    if (other.attentions, other.dtype, other.starts) != (first.attentions, first.dtype, first.starts):
        raise ConfigError(
            f"{name} on {machine} has split {path} differently from the others; install the same packages"
        )


def prepare_worker(
    control: ControlServer, fabric: Fabric, name: str, role: Role, kind: str, promised: Callable[[str], int]
) -> Conversation[Member]:
    """Wait for a started worker; have it load the model, if it computes, and allocate its slab, if it has one.

    Args:
        promised: Returns the unused bytes of KV slabs on a host.

    Raises ConfigError for another release or model, or for too little memory.
    """
    greeted: dict[str, Hello] = yield Ask(Hello, [name], fabric.plan.start_s)
    hello, plan = greeted[name], fabric.plan
    check_version(name, hello)
    fabric.on_hello(name, hello)
    yield from read_clock(control, fabric, name)
    setup, threads = fabric.memory_setup, plan.threads(role, hello)
    if role == "compute":
        control.send([name], msgspec.structs.replace(plan.compute_setup, threads=threads))
        loaded: dict[str, ModelLoaded] = yield Ask(ModelLoaded, [name], LOAD_TIMEOUT_S)
        check_same_model(plan, fabric.loaded, loaded[name], name, hello.machine)
        if not plan.compute_setup.local:
            return Member(name, role, kind, hello.host)
        setup = local_setup(setup)
    control.send([name], reservation(plan, setup, fabric.sizes.slot_rows))
    control.send([name], Inspect())
    answers: dict[str, Resources] = yield Ask(Resources, [name], LOAD_TIMEOUT_S)
    found = answers[name]
    largest = slab_there(fabric.slab, setup, found).nbytes(setup.capacity)
    nbytes = kv_bytes_of_joiner(plan.config, found, largest, promised(hello.host))
    capacity = slots(name, fabric.slab, setup, found, nbytes)
    control.send([name], msgspec.structs.replace(setup, threads=threads, capacity=capacity))
    yield Ask(SlabReady, [name], LOAD_TIMEOUT_S)
    return Member(name, role, kind, hello.host, capacity)


def reservation(plan: ClusterPlan, setup: MemorySetup, slot_rows: int) -> Reserve:
    """Return the memory that a worker with a slab reserves before its capacity is computed."""
    limits, lanes = plan.limits, plan.pipeline.lanes
    return Reserve(setup, limits.max_num_batched_tokens, limits.max_sequences, DEPTH * lanes, slot_rows, lanes)


def local_setup(setup: MemorySetup) -> MemorySetup:
    """Return the setup of a compute worker's own slab: without mini-batches, since it receives no messages, and without
    a disk, which nothing would read between steps."""
    return msgspec.structs.replace(setup, overlap=Overlap(), overcommit=1.0, polling="host")


def enter(control: ControlServer, fabric: Fabric, topology: Topology, joiner: Member) -> Conversation[None]:
    """Link a prepared worker with the members of ``topology``, which includes it.

    Raises TransportError if it cannot be linked with every member.
    """
    name, roles = joiner.name, {member.name: member.role for member in topology.members}
    computes, memories = list(topology.computes), list(topology.memories)
    control.send([name], fabric.register(joiner, len(computes), len(memories)))
    registered: dict[str, Registered] = yield Ask(Registered, [name], CONNECT_TIMEOUT_S)
    offers = {**fabric.offers, name: registered[name].offer}
    sizes = {(other, name): fabric.slots(roles, other, name) for other in roles if other != name}
    slots = {pair: each for pair, each in sizes.items() if each is not None}
    links = yield from link(control, fabric.plan.config.transport, offers, slots, fabric.links)
    control.send([name], Connect(computes, memories, topology.pipeline, topology.epoch))
    yield Ask(Connected, [name], CONNECT_TIMEOUT_S)
    fabric.offers[name] = registered[name].offer
    fabric.links.update(links)
