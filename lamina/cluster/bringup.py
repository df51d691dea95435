"""Makes a cluster of started worker processes: models loaded, slabs allocated, all links tested.

A cluster may also consist of the workers of an engine that has ended: they keep weights, links, and the KV of completed
steps. Whenever the members change, the engine saves the state that its successor needs. Only members that are linked
to all others are saved: a worker that was joining or leaving when the engine ended is ended too.
"""

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from lamina.cluster.conversations import (
    CONNECT_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    Conversation,
    Gather,
    Launcher,
    OnProgress,
    converse,
)
from lamina.cluster.joining import (
    Fabric,
    check_same_model,
    check_version,
    member_of,
    new_meeting,
    part_setup,
    read_clock,
    require_ranks_together,
    reservation,
)
from lamina.cluster.linking import Pair, link
from lamina.cluster.local_workers import SupervisedWorkers
from lamina.cluster.model_checks import require_holders
from lamina.cluster.pool import CPU
from lamina.cluster.scratch import kv_wanted, make_scratch, untouched_bytes
from lamina.cluster.sizing import ClusterPlan
from lamina.cluster.slabs import with_capacities, without_reserved
from lamina.control.messages import (
    Computed,
    ComputeSetup,
    Connect,
    Connected,
    EndEpoch,
    EpochEnded,
    Hello,
    Inspect,
    MemorySetup,
    ModelLoaded,
    Recall,
    Recalled,
    Registered,
    Resources,
    SlabReady,
    ToWorker,
)
from lamina.control.sockets import ControlServer
from lamina.core.errors import ConfigError, DeadlineError, TransportError, UnreachableError
from lamina.core.heads import HeadShards
from lamina.core.pipeline import Pipeline, Shape
from lamina.core.topology import COMPUTE_POOLS, Epoch, Pool, Role, Topology
from lamina.core.types import Segment
from lamina.dataplane.leases import messages, slot_rows
from lamina.dataplane.transport_choice import Choice, Offer
from lamina.schedule.limits import Limits

REACH_S = 20.0  # longest wait for workers to connect to another engine
RECALL_S = 10.0  # longest wait for a worker's report of what it has kept: its last slice may be long
END_S = 60.0  # longest wait until all workers have dropped their steps: one may be inside a long slice
POLL_S = 0.01


@dataclass(frozen=True)
class Cluster:
    """A running cluster, as ``bring_up`` or ``take_over`` returns it to the engine.

    Attributes:
        topology: The members at the start.
        loaded: The model as the compute workers have loaded it.
        memory_setup: How workers with a slab were set up.
        links: The transport of each pair of workers.
        fabric: How further workers are set up; None: no worker can join.
        wanted: How many workers the pools are to have; None: as many as there are.
        recalled: What the workers have kept of the requests of an earlier engine.
    """

    topology: Topology
    loaded: ModelLoaded
    memory_setup: MemorySetup
    links: Mapping[Pair, Choice] = field(default_factory=dict)
    fabric: Fabric | None = None
    wanted: Mapping[Pool, int] | None = None
    recalled: Sequence[Computed] = ()

    @classmethod
    def from_members(
        cls,
        fabric: Fabric,
        topology: Topology,
        wanted: Mapping[Pool, int] | None = None,
        recalled: Sequence[Computed] = (),
    ) -> "Cluster":
        """Return the cluster of linked members."""
        return cls(topology, fabric.loaded, fabric.memory_setup, fabric.links, fabric, wanted, recalled)

    @property
    def capacities(self) -> Mapping[str, int]:
        """Token slots by worker that holds KV."""
        return self.topology.capacities

    @property
    def missing(self) -> int:
        """Number of memory workers that were lost with the last engine and will be started again."""
        return 0 if self.wanted is None else max(0, self.wanted["memory"] - len(self.topology.memories))

    @property
    def whole(self) -> Mapping[str, int]:
        """Token slots by worker once the missing workers have been started again."""
        most = max(self.capacities.values())
        return {**self.capacities, **{f"missing{number}": most for number in range(self.missing)}}

    @functools.cached_property
    def shards(self) -> HeadShards:
        """How the model's heads are sharded."""
        return HeadShards(max(spec.kv_heads for spec in self.loaded.attentions), self.memory_setup.head_shards)

    @property
    def window(self) -> int:
        """The largest window, in tokens, of layers that drop older tokens; 0 if no layer does."""
        setup = self.memory_setup
        return max(spec.window for spec in setup.attentions) if setup.forgets else 0


def greet(control: ControlServer, workers: Launcher, names: Sequence[str], timeout_s: float) -> dict[str, Hello]:
    """Wait for the first message of each worker.

    Raises ConfigError if a worker is of another release, WorkerError or DeadlineError if a message does not arrive.
    """
    greetings = Gather(control, workers, lambda worker, progress: None).all(Hello, names, timeout_s)
    for name, hello in greetings.items():
        check_version(name, hello)
    return greetings


def bring_up(control: ControlServer, workers: Launcher, plan: ClusterPlan, on_progress: OnProgress) -> Cluster:
    """Load the model, allocate slabs and arenas, connect every memory worker with every other worker.

    Raises the worker's own UserError if the user can fix it, else TransportError, WorkerError or DeadlineError.
    """
    gather, local = Gather(control, workers, on_progress), plan.with_slabs
    numbers, meeting = Counter[Pool](), new_meeting()
    for wanted in COMPUTE_POOLS:
        greeted = {name: plan.greetings[name] for name, pool in plan.pools.items() if pool == wanted}
        require_ranks_together(plan, greeted, wanted)
    for name, pool in plan.pools.items():
        control.send([name], part_setup(plan, numbers[pool], plan.greetings[name], meeting, pool))
        numbers[pool] += 1
    models = gather.all(ModelLoaded, plan.computes, LOAD_TIMEOUT_S)
    loaded = _same(plan, models)
    plan = _without_impossible_rotation(plan, len(loaded.attentions) + 1)
    plan = dataclasses.replace(plan, pipeline=_with_starts(plan, models))
    holders = [*local, *plan.memories]
    scratch = converse(gather, _scratch(control, plan, loaded, holders))
    setup = plan.memory_setup(loaded, _shards(plan, loaded).count)
    rows = slot_rows(plan.compute_setup.rows, _links(plan))
    for name in holders:
        control.send([name], reservation(plan, plan.slab_setup(setup, name), rows))
    control.send(holders, Inspect())  # not before: weights may be loaded where they are
    hosts = {name: hello.host for name, hello in plan.greetings.items()}
    untouched = untouched_bytes(plan, loaded, scratch, plan.greetings)
    found = without_reserved(gather.all(Resources, holders, LOAD_TIMEOUT_S), hosts, untouched)
    setup, capacities = with_capacities(plan, setup, found)
    slots = dict[str, int]()  # by worker that segments name
    for name, capacity in capacities.items():
        threads = plan.threads("compute" if name in local else "memory", plan.greetings[name])
        own = plan.slab_setup(setup, name)
        slots[own.home or name] = capacity
        control.send([name], msgspec.structs.replace(own, capacity=capacity, threads=threads))
    fabric = _fabric_of(workers, plan, loaded, setup)
    gather.all(SlabReady, holders, LOAD_TIMEOUT_S)
    for name in {hello.host: name for name, hello in plan.greetings.items()}.values():
        converse(gather, read_clock(control, fabric, name))
    epoch = Epoch(int(time.time()), 1)  # an engine that is started again is a later incarnation
    members = [
        member_of(name, role, kind, plan.greetings[name], slots, scratch)
        for role, pool in plan.kinds.items()
        for name, kind in pool.items()
    ]
    topology = Topology(epoch, tuple(members), plan.pipeline)
    _connect(control, gather, fabric, topology)
    return Cluster.from_members(fabric, topology)


def _scratch(
    control: ControlServer, plan: ClusterPlan, loaded: ModelLoaded, holders: Sequence[str]
) -> Conversation[dict[str, int]]:
    """Return the tokens of each compute worker's scratch memory. ``holders``: Workers that get slabs afterwards."""
    greetings = {name: plan.greetings[name] for name, pool in plan.pools.items() if plan.has_scratch(pool)}
    slabs = [plan.greetings[one] for one in holders]
    return make_scratch(control, plan, loaded, greetings, slabs, kv_wanted(plan, slabs))


def _shards(plan: ClusterPlan, loaded: ModelLoaded) -> HeadShards:
    """Return how heads are sharded. Raises ConfigError if memory workers must share heads and cannot."""
    shards = HeadShards.for_model(loaded.attentions, plan.compute_setup.head_workers, *plan.compute_setup.degrees)
    require_holders(shards, plan.config.partition, plan.pipeline.most_ranks if plan.compute_setup.local else 1)
    return shards


def _same(plan: ClusterPlan, loaded: Mapping[str, ModelLoaded]) -> ModelLoaded:
    firsts = dict[Pool, ModelLoaded]()  # replicas of two pools may have other stages, so that they begin elsewhere
    for name, pool in plan.pools.items():
        first = firsts.setdefault(pool, loaded[name])
        starts = first.starts
        check_same_model(plan, loaded[plan.computes[0]], starts, loaded[name], name, plan.greetings[name].machine)
    return msgspec.structs.replace(
        loaded[plan.computes[0]], context_nbytes=max(one.context_nbytes for one in firsts.values())
    )


def _with_starts(plan: ClusterPlan, loaded: Mapping[str, ModelLoaded]) -> Pipeline:
    """Return the pipeline with the first slice of each stage."""
    starts = {pool: loaded[name].starts for name, pool in plan.pools.items()}

    def begun(shape: Shape, pool: Pool) -> Shape:
        return dataclasses.replace(shape, starts=starts.get(pool, ())) if shape.stages > 1 else shape

    pipeline = plan.pipeline
    early = pipeline.prefill_shape
    if early is None:
        return dataclasses.replace(pipeline, shape=begun(pipeline.shape, "compute"))
    return dataclasses.replace(pipeline, shape=begun(pipeline.shape, "compute"), prefill_shape=begun(early, "prefill"))


def _without_impossible_rotation(plan: ClusterPlan, slices: int) -> ClusterPlan:
    """Return ``plan`` without lanes that rotate, if the model has fewer ``slices`` than replicas.

    Where lanes rotate, every replica runs at least one slice of every step. Raises ConfigError if the configured order
    is rotational and the model has too few slices.
    """
    if plan.pipeline.replicas <= slices:
        return plan
    if plan.pipeline.rotates:
        raise ConfigError(
            f"the model has {slices} slices, too few for {plan.pipeline.replicas} compute workers to take turns in "
            f"every step; give at most {slices} compute workers, or --pipelining fixed"
        )
    return dataclasses.replace(plan, pipeline=plan.pipeline.without_rotation())


def _links(plan: ClusterPlan) -> int:
    return max(1, len(plan.greetings) - 1)


def _fabric_of(workers: Launcher, plan: ClusterPlan, loaded: ModelLoaded, setup: MemorySetup) -> Fabric:
    """Return the fabric of a plan whose workers have sent their greetings."""
    pipeline, rows = plan.pipeline, plan.compute_setup.rows
    may_move = any(one.rotates for one in (pipeline.first_arrangement, *pipeline.choices))
    context_nbytes = loaded.context_nbytes if may_move or pipeline.most_stages > 1 else 0
    sizes = messages(
        loaded.attentions, loaded.dtype, rows, context_nbytes, pipeline.most_ranks, _links(plan), pipeline.lends
    )
    fabric = Fabric(workers, plan, loaded, setup, sizes)
    for name, hello in plan.greetings.items():
        fabric.on_hello(name, hello)
    return fabric


def _connect(control: ControlServer, gather: Gather, fabric: Fabric, topology: Topology) -> None:
    plan, members = fabric.plan, topology.members
    names, memories = [member.name for member in members], set(topology.memories)
    for role in ("compute", "memory"):
        group = [member for member in members if member.role == role]
        for member in group:
            control.send([member.name], fabric.register_message(member, topology))
        registered = gather.all(Registered, [member.name for member in group], CONNECT_TIMEOUT_S)
        fabric.offers.update({name: message.offer for name, message in registered.items()})
    slots = fabric.link_slots(topology, names)
    between = {pair: each for pair, each in slots.items() if memories.issuperset(pair)}
    used = {pair: each for pair, each in slots.items() if pair not in between}
    fabric.links.update(converse(gather, link(control, plan.config.transport, fabric.offers, used)))
    if between:  # links between ranks prefer transports that are used already
        fabric.links.update(
            converse(gather, link(control, plan.config.transport, fabric.offers, between, fabric.links))
        )
    control.send(names, Connect(plan.computes, plan.memories, topology.pipeline, topology.epoch))
    gather.all(Connected, names, CONNECT_TIMEOUT_S)


class Saved(msgspec.Struct, frozen=True):
    """The state of a running cluster that the next engine cannot ask its workers for."""

    topology: Topology
    loaded: ModelLoaded
    compute_setup: ComputeSetup
    memory_setup: MemorySetup
    limits: Limits
    greetings: dict[str, Hello]
    offers: dict[str, Offer]
    links: list[tuple[str, str, Choice]]
    wanted: dict[Pool, int]

    @classmethod
    def from_topology(cls, fabric: Fabric, topology: Topology, wanted: Mapping[Pool, int], limits: Limits) -> "Saved":
        """Return the state with the members of ``topology``.

        Args:
            wanted: Target size of each pool.
            limits: Bounds of steps and requests at the start, which workers have reserved memory for.
        """
        names = topology.names
        links = [(*pair, choice) for pair, choice in fabric.links.items() if names.issuperset(pair)]
        offers = {name: offer for name, offer in fabric.offers.items() if name in names}
        greetings = {name: fabric.greetings[name] for name in names}
        return cls(
            topology,
            fabric.loaded,
            fabric.plan.compute_setup,
            fabric.memory_setup,
            limits,
            greetings,
            offers,
            links,
            dict(wanted),
        )

    def restore(self, plan: ClusterPlan) -> ClusterPlan:
        """Return a plan for the workers that are left with what was decided at the start, for more or fewer workers.

        Workers have reserved memory for these limits, and joining workers have to fit them and the lanes.
        """
        return dataclasses.replace(
            plan, limits=self.limits, compute_setup=self.compute_setup, pipeline=self.topology.pipeline
        )

    def kinds(self) -> dict[Role, dict[str, str]]:
        """Return the kinds of the workers by role. Raises TransportError if a role has no worker left."""
        if (role := self.topology.lacks(())) is not None:
            raise TransportError(f"the engine has ended while no {role} worker was left: all start again")
        kinds: dict[Role, dict[str, str]] = {"compute": {}, "memory": {}}
        for member in self.topology.members:
            kinds[member.role][member.name] = member.kind
        return kinds


def take_over(control: ControlServer, workers: SupervisedWorkers, plan: ClusterPlan, saved: Saved) -> Cluster:
    """Return the cluster of the remaining workers, which keep the KV that completed steps have computed.

    ``plan``: see ``Saved.restore``.

    Raises TransportError if a role has no worker left, or workers do not answer.
    """
    fabric = _fabric_of(workers, plan, saved.loaded, saved.memory_setup)
    before, last = saved.topology, saved.topology.epoch
    before = msgspec.structs.replace(before, epoch=Epoch(last.incarnation + 1, last.number))
    reports: dict[str, Recalled] | None = None
    while True:
        stuck = set[str]() if reports is None else _stuck(before) - reports.keys()
        lost = before.whole_replicas(stuck | (before.names & workers.ended().keys()))
        if (role := before.lacks(lost)) is not None:
            raise TransportError(f"no {role} worker is left: {dict(workers.ended())}")
        before = before.without(lost)
        control.apply_topology(before)
        workers.kill_workers(workers.processes - before.names)
        if reports is None:
            reports = _recall(control, workers, before)
            continue
        kept = kept_of(reports, before)
        if _end_epoch(control, workers, before, kept):
            break
    fabric.offers.update({name: offer for name, offer in saved.offers.items() if name in before.names})
    fabric.links.update({(a, b): choice for a, b, choice in saved.links if {a, b} <= before.names})
    return Cluster.from_members(fabric, before, saved.wanted, kept)


def _stuck(topology: Topology) -> set[str]:
    """Return the ranks that cannot leave a sum, and are lost if they have not run all their steps in time."""
    computes = (member for member in topology.members if member.role == "compute")
    return {one.name for one in computes if len(topology.ranks_of(one.name)) > 1 and one.device != CPU}


def kept_of(reports: Mapping[str, Recalled], topology: Topology) -> list[Computed]:
    """Return the sequences whose KV is complete on members, each with its longest complete beginning.

    Args:
        reports: By worker. Of a worker without a report, nothing is kept.
    """
    longest: dict[int, Computed] = {}
    for one in (one for name in topology.computes if name in reports for one in reports[name].computed):
        if one.sequence not in longest or longest[one.sequence].tokens < one.tokens:
            longest[one.sequence] = one
    found = []
    for one in longest.values():
        missing = [segment.tokens[0] for segment in one.segments if not _holds(reports, topology, segment, one.tokens)]
        if tokens := min([one.tokens, *missing]):
            segments = [segment for segment in one.segments if segment.tokens[0] < tokens]
            found.append(msgspec.structs.replace(one, tokens=tokens, segments=segments))
    return found


def _holds(reports: Mapping[str, Recalled], topology: Topology, segment: Segment, tokens: int) -> bool:
    """Return whether the members with KV of a segment have all of the first ``tokens`` tokens of its sequence that
    belong to the segment."""
    start, stop = segment.tokens
    wanted = (tokens if stop is None else min(stop, tokens)) - start
    if wanted <= 0:
        return True
    holders = topology.holders(segment.worker)
    if not topology.names.intersection(reports).issuperset(holders):
        return False
    held = [reports[worker].held.get(segment.sequence, []) for worker in holders]
    place = start, *segment.heads
    return all(
        any((first, low, high) == place and count >= wanted for first, low, high, count in each) for each in held
    )


def _recall(control: ControlServer, workers: SupervisedWorkers, topology: Topology) -> dict[str, Recalled]:
    """Ask all members what they have kept. Returns the reports that come in time.

    Raises DeadlineError if a member does not connect.
    """
    untold, reports = set(topology.names), dict[str, Recalled]()
    begun = time.monotonic()
    while alive := topology.names - reports.keys() - workers.ended().keys():
        untold = _tell(control, dict.fromkeys(untold & alive, Recall()))
        for worker, message in control.receive(POLL_S):
            if isinstance(message, Recalled):
                reports[worker] = message
        waited = time.monotonic() - begun
        if untold and waited > REACH_S:
            raise DeadlineError(f"{', '.join(sorted(untold))} have not followed the new engine within {waited:.0f} s")
        if not untold and waited > RECALL_S:
            break
    return reports


def _end_epoch(
    control: ControlServer, workers: SupervisedWorkers, topology: Topology, kept: Sequence[Computed]
) -> bool:
    """Let all members drop the last engine's steps, and all KV but ``kept``. Returns False if a member exits meanwhile.

    Raises DeadlineError.
    """
    tokens: dict[str, dict[int, int]] = {name: {} for name in topology.names}
    for one in kept:
        for worker in (worker for segment in one.segments for worker in topology.holders(segment.worker)):
            tokens[worker][one.sequence] = one.tokens
    untold, missing = set(topology.names), dict[str, list[str]]()
    begun = time.monotonic()
    while missing.keys() < topology.names or any(missing.values()):
        untold = _tell(control, {name: EndEpoch(topology, tokens[name]) for name in untold})
        for worker, message in control.receive(POLL_S):
            if isinstance(message, EpochEnded) and message.epoch == topology.epoch:
                missing[worker] = message.missing
        if topology.names & workers.ended().keys():
            return False
        waited = time.monotonic() - begun
        if waited > (REACH_S if untold else END_S):
            late = untold or topology.names - missing.keys() or {name for name, left in missing.items() if left}
            raise DeadlineError(f"{', '.join(sorted(late))} have not followed the new engine within {waited:.0f} s")
    return True


def _tell(control: ControlServer, messages: Mapping[str, ToWorker]) -> set[str]:
    """Send a message to each of these workers. Returns the workers that have not connected yet."""
    untold = set[str]()
    for worker, message in messages.items():
        try:
            control.send([worker], message)
        except UnreachableError:
            untold.add(worker)
    return untold
