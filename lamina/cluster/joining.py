"""Brings one more worker into a cluster that serves, as conversations with it and with those that serve."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from lamina.cluster.conversations import (
    CONNECT_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    START_TIMEOUT_S,
    Ask,
    Conversation,
    Launcher,
)
from lamina.cluster.linking import Pair, SlotSizes, link
from lamina.cluster.slabs import SlabSize
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
from lamina.core.errors import ConfigError
from lamina.core.topology import Member, Role, Topology
from lamina.core.types import Overlap, TransportName
from lamina.core.version import __version__
from lamina.dataplane.leases import SPARE_LINKS, Messages
from lamina.dataplane.transport_choice import Choice, Offer, Transport
from lamina.schedule.limits import Limits
from lamina.schedule.turn import DEPTH
from lamina.transport.endpoint import SPIN_S
from lamina.transport.shm import host

CLOCK_TIMEOUT_S = 10.0  # for a worker to tell the time


@dataclass(frozen=True)
class Fabric:
    """How the workers of a cluster are set up and linked.

    Attributes:
        launcher: starts workers.
        compute_setup, memory_setup: of every worker; capacities and threads may differ.
        threads: of a worker of a role, given its greeting.
        limits, lanes: of steps.
        loaded: what the first compute worker has loaded, on the machine ``loaded_on``.
        slab: how many bytes KV takes.
        kv_bytes: of another slab, given what its machine has, the bytes that the largest has, and those
            promised to the others on its machine and not used.
        sizes: of messages.
        start_s: within which a worker that was started has to greet.
        transports: that workers offer.
        wanted: as configured.
        is_open: workers on other machines may join.
        spins_s: seconds for which waits busy-wait, by machine (``boot``).
        offers, links, greetings: of the workers so far, by name and by pair.
        clocks: of other machines, by host, where a timeline is recorded.
        pinned: workers whose arenas RDMA may pin: they have no room for links beyond those at the start.
    """

    launcher: Launcher
    compute_setup: ComputeSetup
    memory_setup: MemorySetup
    threads: Callable[[Role, Hello], int]
    limits: Limits
    lanes: int
    loaded: ModelLoaded
    loaded_on: str
    slab: SlabSize
    kv_bytes: Callable[[Resources, int, int], int]
    sizes: Messages
    transports: tuple[Transport, ...]
    wanted: TransportName
    spins_s: Mapping[str, float]
    tls: bool
    is_open: bool
    start_s: float = START_TIMEOUT_S
    offers: dict[str, Offer] = field(default_factory=dict)
    greetings: dict[str, Hello] = field(default_factory=dict)
    links: dict[Pair, Choice] = field(default_factory=dict)
    clocks: dict[str, Clock] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)

    def on_hello(self, name: str, hello: Hello) -> None:
        """A worker has greeted."""
        self.greetings[name] = hello
        if hello.rdma and Transport.RDMA in self.transports and not self.tls:
            self.pinned.add(name)

    def register(self, member: Member, computes: int, memories: int) -> Register:
        """Return the arena of a worker of a cluster with so many of each role, itself included."""
        arena = self.sizes.compute_arena if member.role == "compute" else self.sizes.memory_arena
        plan = arena(computes, memories, 0 if member.name in self.pinned else SPARE_LINKS)
        spin_s = self.spins_s.get(boot(member.host), SPIN_S)
        return Register(plan, list(self.transports), spin_s, self.tls, self.is_open)

    def clock_of(self, name: str) -> Clock | None:
        """Return the clock of a worker's machine; None: that of this process, as far as is known."""
        return self.clocks.get(self.greetings[name].host) if name in self.greetings else None

    def keep_members(self, members: Collection[str]) -> None:
        """Forget the offers and links of all but these."""
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


def boot(host: str) -> str:
    """Return what the hosts (``transport.shm.host``) of all processes of one machine have in common, also in
    containers."""
    return host.partition(" ")[0]


def read_clock(control: ControlServer, fabric: Fabric, name: str) -> Conversation[None]:
    """Read the clock of a worker's machine, if that is another one and a timeline is recorded."""
    there = fabric.greetings[name].host
    if not fabric.compute_setup.trace or there == host():
        return
    readings = []
    for _ in range(READINGS):
        sent_ns = time.monotonic_ns()
        control.send([name], Inspect(sent_ns))
        found: dict[str, Resources] = yield Ask(Resources, [name], CLOCK_TIMEOUT_S)
        readings.append(ClockReading(sent_ns, found[name].now_ns, time.monotonic_ns()))
    fabric.clocks.setdefault(there, Clock()).add_reading(readings)


def check_version(name: str, hello: Hello) -> None:
    """Raises ConfigError if a worker is of another release than this process."""
    if hello.version != __version__:
        raise ConfigError(
            f"{name} on {hello.machine} runs lamina {hello.version or 'of an unknown release'}, the engine "
            f"{__version__}; install the same release on all machines"
        )


def check_same_model(path: str, first: ModelLoaded, on: str, other: ModelLoaded, name: str, machine: str) -> None:
    """Raises ConfigError unless worker ``name`` has loaded what the first compute worker has, on the machine ``on``."""
    if other.digest != first.digest:
        raise ConfigError(
            f"the checkpoint in {path} on {machine}, loaded by {name}, is not that on {on}: its digest is "
            f"{other.digest}, and there it is {first.digest}. Copy the same files to all machines"
        )
    if (other.attentions, other.dtype, other.starts) != (first.attentions, first.dtype, first.starts):
        raise ConfigError(
            f"{name} on {machine} has split {path} differently from the others; install the same packages"
        )


def prepare_memory(
    control: ControlServer, fabric: Fabric, name: str, kind: str, promised: Callable[[str], int]
) -> Conversation[Member]:
    """Wait for a memory worker that was started and have it make its slab.

    ``promised``: bytes of KV promised to memory workers on a host and not used, see ``Fabric.kv_bytes``.

    Raises ConfigError if there is too little memory.
    """
    hello: dict[str, Hello] = yield Ask(Hello, [name], fabric.start_s)
    check_version(name, hello[name])
    fabric.on_hello(name, hello[name])
    yield from read_clock(control, fabric, name)
    setup = msgspec.structs.replace(fabric.memory_setup, threads=fabric.threads("memory", hello[name]))
    capacity = yield from _make_slab(control, fabric, name, setup, promised(hello[name].host))
    return Member(name, "memory", kind, hello[name].host, capacity)


def _make_slab(
    control: ControlServer, fabric: Fabric, name: str, setup: MemorySetup, promised: int
) -> Conversation[int]:
    """Have a worker make its slab; the result is its capacity. Raises ConfigError if there is too little memory."""
    control.send([name], reservation(setup, fabric.limits, fabric.lanes, fabric.sizes.slot_rows))
    control.send([name], Inspect())
    found: dict[str, Resources] = yield Ask(Resources, [name], LOAD_TIMEOUT_S)
    most = setup.capacity
    slab = fabric.slab if found[name].forgets else fabric.slab.whole.with_pages(setup.head_shards)
    nbytes = fabric.kv_bytes(found[name], slab.nbytes(most), promised)
    capacity = slab.slots(nbytes, most)
    if capacity < 2:
        raise ConfigError(
            f"{nbytes} bytes are free for the KV of {name}, and a token takes {slab.nbytes(1)}; free memory"
        )
    control.send([name], msgspec.structs.replace(setup, capacity=capacity))
    yield Ask(SlabReady, [name], LOAD_TIMEOUT_S)
    return capacity


def reservation(setup: MemorySetup, limits: Limits, lanes: int, slot_rows: int) -> Reserve:
    """Return what a worker with a slab reserves before its capacity is computed."""
    return Reserve(setup, limits.max_num_batched_tokens, limits.max_sequences, DEPTH * lanes, slot_rows, lanes)


def local_setup(setup: MemorySetup) -> MemorySetup:
    """Return the slab of a compute worker, like that of memory workers. There are no messages whose pieces could
    overlap, and it has no disk: nothing reads that between the steps."""
    return msgspec.structs.replace(setup, overlap=Overlap(), overcommit=1.0, polling="host")


def prepare_compute(
    control: ControlServer, fabric: Fabric, name: str, kind: str, promised: Callable[[str], int]
) -> Conversation[Member]:
    """Wait for a compute worker that was started and have it load the model, and make its slab if it is to have one.

    ``promised``: as for ``prepare_memory``. Raises ConfigError for another model, or for too little memory.
    """
    hello: dict[str, Hello] = yield Ask(Hello, [name], fabric.start_s)
    check_version(name, hello[name])
    fabric.on_hello(name, hello[name])
    yield from read_clock(control, fabric, name)
    threads = fabric.threads("compute", hello[name])
    control.send([name], msgspec.structs.replace(fabric.compute_setup, threads=threads))
    loaded: dict[str, ModelLoaded] = yield Ask(ModelLoaded, [name], LOAD_TIMEOUT_S)
    path = fabric.compute_setup.model
    check_same_model(path, fabric.loaded, fabric.loaded_on, loaded[name], name, hello[name].machine)
    capacity = 0
    if fabric.compute_setup.local:
        setup = msgspec.structs.replace(local_setup(fabric.memory_setup), threads=threads)
        capacity = yield from _make_slab(control, fabric, name, setup, promised(hello[name].host))
    return Member(name, "compute", kind, hello[name].host, capacity)


def enter(control: ControlServer, fabric: Fabric, topology: Topology, joiner: Member) -> Conversation[None]:
    """Link a prepared worker with the members of ``topology``, which includes it.

    Raises TransportError if it cannot be linked with one of them.
    """
    name, roles = joiner.name, {member.name: member.role for member in topology.members}
    computes, memories = list(topology.computes), list(topology.memories)
    control.send([name], fabric.register(joiner, len(computes), len(memories)))
    registered: dict[str, Registered] = yield Ask(Registered, [name], CONNECT_TIMEOUT_S)
    offers = {**fabric.offers, name: registered[name].offer}
    sizes = {(other, name): fabric.slots(roles, other, name) for other in roles if other != name}
    slots = {pair: each for pair, each in sizes.items() if each is not None}
    links = yield from link(control, fabric.wanted, offers, slots, fabric.links)
    control.send([name], Connect(computes, memories, topology.pipeline, topology.epoch))
    yield Ask(Connected, [name], CONNECT_TIMEOUT_S)
    fabric.offers[name] = registered[name].offer
    fabric.links.update(links)
