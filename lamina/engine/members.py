"""Maintains the members of a serving cluster: losses end an epoch, joins and leaves change members within an epoch."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from lamina.cluster.bringup import Cluster
from lamina.cluster.conversations import Workers
from lamina.cluster.pool import CPU
from lamina.control.messages import (
    Change,
    Changed,
    EndEpoch,
    EpochEnded,
    Failed,
    KvMoved,
    PeerLost,
    Release,
    SlabUsage,
    Stored,
    ToEngine,
    ToWorker,
    Working,
)
from lamina.control.sockets import ControlServer
from lamina.core.errors import LaminaError, TransportError, UnreachableError, WorkerError
from lamina.core.topology import Pool, Topology
from lamina.engine.losses import POLL_S, Ending, Watch
from lamina.engine.pools import Pools
from lamina.engine.stats import MemoryStats
from lamina.schedule.recipients import Recipients
from lamina.schedule.suspects import Deaths
from lamina.schedule.turn import Turn


class Record:
    """Saves the members whenever they change, for an engine that takes over.

    A joining worker is saved once all members have applied the change; a leaving worker is removed before members are
    told. An engine that takes over ends workers that are not saved.
    """

    def __init__(self, topology: Topology, save: Callable[[Topology], None]) -> None:
        self._topology, self._save = topology, save
        self._pending: tuple[int, Topology] | None = None  # a change that has not been applied by all, and its number
        self._waiting = set[str]()
        save(topology)

    def begin_change(self, number: int, topology: Topology) -> None:
        """Record that change ``number`` is about to be sent to all members of ``topology``."""
        if left := self._topology.names - topology.names:
            self._leave_out(left)
        self._pending, self._waiting = (number, topology), set(topology.names)

    def note_changed(self, worker: str, number: int) -> None:
        """Record that ``worker`` has applied topology change ``number`` and all earlier ones."""
        if self._pending is None or number < self._pending[0]:
            return
        self._waiting.discard(worker)
        if not self._waiting:
            self.set_members(self._pending[1])

    def on_workers_lost(self, lost: Collection[str]) -> None:
        """Save the members without ``lost``, as the next epoch, before the others are told to end this one.

        ``set_members`` follows once they have begun the next epoch.
        """
        self._pending = None
        self._leave_out(lost)

    def save_again(self) -> None:
        """Save the current members, since what is saved with them has changed."""
        self._save(self._topology)

    def set_members(self, topology: Topology) -> None:
        """Make ``topology``, which all members have applied, the current one and save it."""
        self._pending = None
        self._topology = topology
        self._save(topology)

    def _leave_out(self, names: Collection[str]) -> None:
        self._topology = self._topology.without(names)
        self._save(self._topology)


log = logging.getLogger(__name__)

Save = Callable[[Topology, Mapping[Pool, int]], None]
"""Called with members that another engine could take over, and how many workers the pools are to have, whenever the
members change."""


class Members:
    """The workers of a running engine, and their messages that are not about steps. The engine's thread owns it.

    Attributes:
        topology: The current members.
        usage: The latest slab usage of each memory worker.
        pools: Starts and ends workers; None if the pools are fixed.
        recoveries: Epochs that losses have ended.
        recomputed: Tokens whose KV was lost with workers.
    """

    def __init__(
        self,
        control: ControlServer,
        workers: Workers,
        cluster: Cluster,
        turn: Turn,
        max_restarts: int,
        save: Save,
    ) -> None:
        self._control = control
        self._workers = workers
        self._turn = turn
        self.topology = topology = cluster.topology
        self.recipients = Recipients(cluster.topology.computes, cluster.topology.pipeline)
        self.recipients.recall({one.sequence: one.segments for one in cluster.recalled})
        self.watch = Watch(control, workers, turn, topology)
        self.usage = {name: MemoryStats(0, capacity, 0) for name, capacity in topology.slabs.items()}
        self.recoveries = self.recomputed = 0
        self._turned = -POLL_S  # when ``turn`` last advanced the pools
        self._behind = set[str]()  # workers whose disks were logged as too slow
        self._changes = 0  # number of changes of the topology within epochs
        self._ending: Ending | None = None  # workers are lost, and the others still have to end the epoch
        fabric, wanted = cluster.fabric, cluster.wanted or topology.sizes
        self.pools = (
            None
            if fabric is None
            else Pools(control, workers, fabric, topology, turn, self._adopt, self._unused, max_restarts, wanted)
        )
        self._save, self._saved_sizes = save, dict[Pool, int]()
        self._record = Record(topology, self._save_members)

    @property
    def states(self) -> Mapping[str, str]:
        """State by worker: "serving", or the stage of a joining or leaving worker."""
        changing = {} if self.pools is None else self.pools.states
        return {**dict.fromkeys((member.name for member in self.topology.members), "serving"), **changing}

    @property
    def memory_grows(self) -> bool:
        """Whether more memory workers will join."""
        return self.pools is not None and self.pools.grows("memory")

    @property
    def memory_starts(self) -> bool:
        """Whether memory workers that this engine starts will join soon."""
        return self.pools is not None and self.pools.starts("memory")

    @property
    def is_steady(self) -> bool:
        return self._ending is None

    def turn(self) -> None:
        """Advance workers that join or leave, and save how many workers the pools are to have if that has changed.

        While the pools are calm, that happens every ``POLL_S``: workers of other machines may want to join or leave.
        """
        now = self._control.liveness.awake_s
        if self.pools is None or (self.pools.is_calm and self.is_steady and now < self._turned + POLL_S):
            return
        self._turned = now
        self.pools.turn(steady=self.is_steady)
        if self.pools.wanted != self._saved_sizes:
            self._record.save_again()

    def _save_members(self, topology: Topology) -> None:
        self._saved_sizes = dict(self.topology.sizes if self.pools is None else self.pools.wanted)
        self._save(topology, self._saved_sizes)

    def handle_message(self, worker: str, message: ToEngine) -> None:
        """Handle a message that is not about a step. Raises TransportError if it is not expected while serving."""
        if isinstance(message, Changed):
            self._record.note_changed(worker, message.number)
        if self.pools is not None and self.pools.handle_member_message(worker, message):
            return  # it is about a worker that joins
        if worker not in self.topology.names:
            return  # it was lost after it sent this
        if isinstance(message, SlabUsage):
            capacity, parked = self.usage[worker].capacity, (message.parked, message.parked_nbytes)
            self.usage[worker] = MemoryStats(message.used, capacity, message.sequences, 0, *parked)
            if worker in self.topology.capacities:  # not of a later stage, whose KV has the first stage's name
                self._turn.note_attention(worker, message.busy_s)
        elif isinstance(message, Working):
            self.watch.progressed(message.lanes, worker)
        elif isinstance(message, KvMoved):
            self.watch.moved(message.number, message.source, worker)
            self._turn.scheduler.on_move_done(message.number)
        elif isinstance(message, Stored):
            self._note_stored(worker, message)
        elif isinstance(message, EpochEnded):
            self._note_ended(worker, message)
        elif isinstance(message, PeerLost):
            self.watch.complain(worker, message.peer, message.reason)
        elif isinstance(message, Failed):
            self.watch.failed(worker, message)
        else:
            raise TransportError(f"{worker} sent a {type(message).__name__} while serving")

    def _note_stored(self, worker: str, message: Stored) -> None:
        if message.error:
            log.warning("the disk of %s failed: %s; it takes no more KV", worker, message.error)
        scheduler = self._turn.scheduler
        scheduler.transferred(worker, message.number, message.complete, message.error)
        missed = scheduler.disks.evicted_uncopied(worker)
        if missed > self.usage[worker].capacity and worker not in self._behind:
            self._behind.add(worker)
            log.warning(
                "the disk of %s is too slow: %d tokens of prefixes were forgotten before it had them",
                worker,
                missed,
            )

    def tell(self, workers: Sequence[str], message: ToWorker) -> None:
        """Send a message; record workers that cannot be reached, which may be lost."""
        try:
            self._control.send(workers, message)
        except UnreachableError as error:
            for worker, reason in error.workers.items():
                self.watch.complain("engine", worker, reason)

    def lost(self) -> Mapping[str, LaminaError]:
        """Return workers that are lost or overdue in ending the epoch, with the reasons."""
        lost = self.watch.lost()
        if lost or self._ending is None:
            return lost
        overdue = self._ending.overdue(self._control.liveness.awake_s)
        return {
            worker: TransportError(f"worker {worker} holds all others up: {why}") for worker, why in overdue.items()
        }

    def on_workers_lost(self, lost: Mapping[str, LaminaError]) -> str | None:
        """End the epoch, continue without the lost workers, and start replacements for those that have not left.

        If a role has no worker left, requests wait for a replacement; raises the reason for the loss if the lost worker
        may not be replaced.
        Returns a request that makes workers die, if this loss proves it; the caller ends the request.
        """
        pools = self.pools
        reason = next((str(why) for name, why in lost.items() if name in self.topology.computes), "")
        others = sorted(self.topology.whole_replicas(lost) - lost.keys())
        lost = {**lost, **{name: WorkerError(name, f"its replica has lost a worker: {reason}") for name in others}}
        stuck = self._stuck_in_sums() - lost.keys()
        early = f"ranks on GPUs cannot leave a sum, and a step has ended early: {next(iter(lost.values()))}"
        lost = {**lost, **{name: WorkerError(name, early) for name in sorted(stuck)}}
        role, roles = self.topology.lacks(lost), {member.name: member.roles for member in self.topology.members}
        last = [why for name, why in lost.items() if role in roles.get(name, ())]
        if role is not None and last and (pools is None or not pools.may_replace(role)):
            raise last[0]
        deaths = self._deaths(lost)
        for worker in [one for one in lost if one in self.topology.names]:  # ``pools`` ends those that have left
            self._workers.kill_worker(worker, cut=True)
        now = self._control.liveness.awake_s
        lost_at = now if self._ending is None else self._ending.lost_at
        self.topology = topology = self.topology.without(lost)
        self._ending = Ending(topology, lost_at, now)
        self._record.on_workers_lost(lost.keys())
        self._control.apply_topology(topology)
        self.watch.apply_topology(topology)
        remains = self._turn.end_epoch(topology, deaths)
        if pools is not None:
            pools.on_workers_lost(lost, topology, lost.keys() if remains.on_trial else stuck)
        self.usage = {name: usage for name, usage in self.usage.items() if name in topology.names}
        self.recomputed += remains.recomputed
        for why in lost.values():
            log.warning("%s", why)
        log.warning(
            "epoch %d ends without %s: %d compute and %d memory workers go on; %d requests have lost KV, and %d tokens "
            "are computed again",
            topology.epoch.number - 1,
            ", ".join(lost),
            len(topology.computes),
            len(topology.capacities),
            remains.dropped,
            remains.recomputed,
        )
        self.recipients.end_epoch(topology, remains.kept)
        held = topology.by_slab(remains.kept)
        for worker, kept in held.items():
            self.tell([worker], EndEpoch(topology, kept))
        self.tell([name for name in topology.computes if name not in held], EndEpoch(topology))
        if not topology.members:  # no member has an epoch to end
            self._begin_epoch(self._ending)
        return remains.poison

    def _stuck_in_sums(self) -> frozenset[str]:
        """Return the workers of replicas whose ranks may wait for each other in a sum that they cannot leave (see
        ``Sums.may_leave``): a step in flight runs there."""
        topology, order = self.topology, self.topology.pipeline
        plans = [plan for plan in self._turn.in_flight.values() if plan.runs]
        running = {number for plan in plans for number in order.workers_of(plan.lane, plan.rotates)}
        running = {number for number in running if len(order.ranks_at(number)) > 1}
        on_cpus = {member.name for member in topology.members if member.device == CPU}
        names = {name for number, name in enumerate(topology.computes) if number in running}
        return topology.whole_replicas(names - on_cpus)

    def _deaths(self, lost: Mapping[str, LaminaError]) -> Deaths:
        died = self.watch.died & lost.keys()
        computes = self.topology.computes
        replicas = [self.topology.pipeline.replica_at(n) for n, name in enumerate(computes) if name in died]
        return Deaths(died & self.topology.capacities.keys(), replicas)

    def _adopt(self, topology: Topology) -> int:
        """Change the members within the epoch; return the change's number. Leaving workers hold no KV, run no step."""
        for worker, sequences in self.recipients.overdue(math.inf):  # ends moves from and to workers that leave
            self.tell([worker], Release(sequences))
        self.topology = topology
        self._control.apply_topology(topology)
        self.watch.apply_topology(topology)
        self._turn.change_members(topology)
        self.recipients.change_members(topology)
        fresh = {name: MemoryStats(0, capacity, 0) for name, capacity in topology.slabs.items()}
        self.usage = {name: self.usage.get(name, usage) for name, usage in fresh.items()}
        self._changes += 1
        self._record.begin_change(self._changes, topology)
        self.tell(sorted(topology.names), Change(self._changes, topology))
        return self._changes

    def _unused(self, host: str) -> int:
        there = [self.usage[member.name] for member in self.topology.members if member.host == host and member.capacity]
        return sum(usage.capacity - usage.used for usage in there)

    def _note_ended(self, worker: str, message: EpochEnded) -> None:
        ending = self._ending
        if ending is not None and ending.on_epoch_ended(worker, message):
            self._begin_epoch(ending)

    def _begin_epoch(self, ending: Ending) -> None:
        self._ending = None
        self._record.set_members(self.topology)
        self.recoveries += 1
        self._turn.begin_epoch()
        seconds = self._control.liveness.awake_s - ending.lost_at
        log.warning("epoch %d begins %.2f s after the loss was noticed", ending.topology.epoch.number, seconds)
