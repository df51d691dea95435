"""The memory worker: stores KV in a slab, computes attention over it and replies to compute workers. Needs no torch.

One thread waits for doorbells. Between requests it fetches K and V of prompt chunks (``lamina.memory.pulls``) and of
segments that move (``lamina.memory.moving``). The attention of a long chunk is served in cuts of a few milliseconds,
with requests of other lanes between them (``lamina.memory.cuts``). A GPU may serve decode steps itself
(``lamina.memory.device_steps``). Control messages are read when the worker is idle, between cuts, and when a request
arrives before its plan. Plans are applied in the order in which the engine sent them.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence

from lamina.control.messages import (
    REPORT_S,
    Connect,
    Connected,
    EndEpoch,
    KvMoved,
    Recalled,
    Working,
)
from lamina.control.sockets import ControlClient
from lamina.core.errors import DeadlineError
from lamina.core.steps import StepPlan
from lamina.core.topology import Topology
from lamina.dataplane.channel import Arrival
from lamina.dataplane.leases import SLOTS
from lamina.dataplane.wire import piece_nbytes
from lamina.memory.device import gpu_memory
from lamina.memory.device_steps import DeviceSteps
from lamina.memory.disk_tier import Tier
from lamina.memory.moving import KvMoves
from lamina.memory.pulls import MOST_IN_A_ROW, Puller
from lamina.memory.serving import PLAN_TIMEOUT_S, Door, Lane, Serving
from lamina.memory.slab_setup import UsageReports, make_store
from lamina.memory.store import KvStore
from lamina.transport.base import Target
from lamina.worker.links import (
    LINKING_SLICE_S,
    Links,
    OpenEndpoint,
    open_endpoint,
    set_up_links,
)
from lamina.worker.loop import WorkerLoop
from lamina.worker.process import run_worker

IDLE_SLICE_S = 0.05  # how long an idle worker may leave a control message unread
MOVING_SLICE_S = 0.001  # the same while a sequence moves, which may wait for a plan
PLAN_SLICE_S = 0.001  # how long a worker that waits for a plan may leave a message of the data plane unread


class MemoryWorker(WorkerLoop):
    """Serves its channels until the engine says stop."""

    def __init__(
        self, control: ControlClient, store: KvStore, tier: Tier | None, links: Links, connect: Connect, trace: bool
    ) -> None:
        """``tier``: copies between ``store`` and a disk; None without a disk."""
        super().__init__(control, links, store.device, connect.epoch, trace)
        self._store, self._tier = store, tier
        self._copies = False  # whether the tier's last ``work`` did something
        self._since_copied = 0
        self._hub = links.hub
        self._channels = {name: links.channel(name) for name in connect.computes}
        self._puller = Puller(links.fetch, links.arena, links.plan, store)
        moving = connect.computes if connect.pipeline.moves_local else ()
        others = links.leases_of([*connect.memories, *moving])
        self._moves = KvMoves(
            store,
            self._puller,
            links.arena,
            links.plan,
            others,
            links.outbox,
            lambda move: control.send(KvMoved(move.number, move.source)),
            connect.epoch,
        )
        self._serving = Serving(
            store,
            self._puller,
            self._timeline,
            self._channels,
            connect.pipeline,
            connect.computes,
            self._read_control,  # compute workers run a last slice then: the best time to prepare a step
        )
        self._lanes = self._serving.lanes
        self._slots.register_channels(self._channels.values())
        self._doors = self._closed_doors()
        self._device_steps = DeviceSteps(store, links, self._timeline)
        self._device_steps.change_channels(self._channels, connect.pipeline, tuple(connect.computes))
        self._early: dict[Door, float] = {}  # requests whose plans have not arrived, each with its deadline
        self._reported = 0.0
        self._usage = UsageReports(control, store)

    def close(self) -> None:
        """Stop the device's own serving of steps."""
        self._device_steps.close()

    def _serve_once(self) -> None:
        serving = self._serving
        self._usage.send_if_due(serving.busy_s + self._device_steps.busy_s, serving.parked, serving.parked_nbytes)
        if not self._fence.open:
            if (message := self._fence.stand_by(self._wait)) is not None:
                self._handle(message)
            return
        if not self._channels:  # all compute workers were lost: there is nothing to do until another one joins
            timeout_s = LINKING_SLICE_S if self._newcomers.pending else IDLE_SLICE_S
            if (message := self._control.poll(timeout_s)) is not None:
                self._handle(message)
            return
        self._device_steps.beat()
        if self._device_steps.advance(self._lanes):
            self._read_control()
            return
        if self._open_early():
            return
        self._copy(MOST_IN_A_ROW)
        begun = serving.begun()
        waiting = self._timeline.now()
        self._hub.flush()
        doors, targets = self._awaited()
        timeout_s = 0.0 if begun is not None else self._patience_s
        ready, pulled = self._puller.wait(self._wait, targets, timeout_s, self._moves, begun is not None)
        if pulled is not None:
            self._timeline.record_span("pull", pulled, waiting)
            serving.answer(self._lanes[pulled])
        if ready is not None and ready >= len(doors):
            self._hub.send_kept()
        elif ready is not None:
            self._open(doors[ready], waiting)
        elif begun is not None:
            self._serve_begun(*begun)
        elif pulled is None:
            self._copy(0)
            self._read_control(PLAN_SLICE_S if self._early else 0.0)

    @property
    def _patience_s(self) -> float:
        """Longest wait for messages of the data plane while no request is being served."""
        if self._copies or self._device_steps.is_busy or self._early:
            return 0.0
        timeout_s = MOVING_SLICE_S if self._moves.active or self._copying else IDLE_SLICE_S
        return min(timeout_s, LINKING_SLICE_S) if self._newcomers.pending else timeout_s

    @property
    def _copying(self) -> bool:
        return self._tier is not None and self._tier.active

    def _copy(self, every: int) -> None:
        """Copy one part from or to the disk, at most once in ``every`` calls."""
        self._since_copied += 1
        if self._tier is not None and self._since_copied > every:
            self._copies, self._since_copied = self._tier.active and self._tier.work(), 0

    def _recall(self) -> None:
        self._control.send(Recalled(held=self._store.held.lengths))

    def _end_epoch(self, message: EndEpoch) -> None:
        """Drop every step, fetch and move, and the tokens that they have stored."""
        topology = message.topology
        self._device_steps.drop()
        for peer in set(self._links.peers) - topology.names:
            self._puller.forget(peer)
        self._puller.drop_all()
        self._moves.drop(topology.epoch)
        if self._tier is not None:
            self._tier.drop()
        self._store.truncate(message.kept)
        self._early.clear()
        self._serving.drop_steps()
        self._hub.restart(topology)
        members = set(topology.computes)  # one that joins, and whose link was cut, has no channel
        self._channels = {name: channel for name, channel in self._channels.items() if name in members}
        self._slots.unmap_others(self._channels)
        self._doors = self._closed_doors()
        self._serving.set_members(self._channels, topology.pipeline, topology.computes)
        self._fence.begin_epoch(topology)
        self._device_steps.change_channels(self._channels, topology.pipeline, topology.computes)

    def _change_members(self, topology: Topology) -> None:
        self._puller.drop_queued(topology.names)
        kept = {name: channel for name, channel in self._channels.items() if name in topology.computes}
        new = [name for name in topology.computes if name not in kept and self._links.has(name)]
        joined = {name: self._links.channel(name) for name in new}
        self._channels = kept | joined
        self._slots.unmap_others(kept)
        self._slots.register_channels(joined.values())
        self._doors = [door for door in self._doors if door.channel.name in kept]
        self._early = {door: deadline for door, deadline in self._early.items() if door in self._doors}
        self._doors += [Door(self._channels[name], slot) for slot in range(SLOTS) for name in new]
        moving = topology.computes if topology.pipeline.moves_local else ()
        self._moves.change(self._links.leases_of([*topology.memories, *moving]))
        self._serving.set_members(self._channels, topology.pipeline, topology.computes)
        self._device_steps.change_channels(self._channels, topology.pipeline, topology.computes)

    def _closed_doors(self) -> list[Door]:
        """Return a door without a request for each slot, to be ordered by last use."""
        return [Door(channel, slot) for slot in range(SLOTS) for channel in self._channels.values()]

    def _awaited(self) -> tuple[list[Door], list[Target]]:
        """Return the doors at which a piece of a request may arrive; and their doorbells, then those of credits."""
        doors = [door for door in self._doors if door.slot in door.channel.awaited]
        if self._early:
            doors = [door for door in doors if door not in self._early]
        return doors, [door.channel.awaited[door.slot] for door in doors] + self._hub.credits

    def _open(self, door: Door, waiting: int) -> None:
        if self._device_steps.is_used and door.request is None and self._leave(door):
            return
        self._doors.remove(door)
        self._doors.append(door)
        door.channel.close_slot(door.slot)
        if door.request is None:
            door.request = door.channel.read(door.slot)
            if self._hub.keeping:
                self._hub.send_kept()  # its header may bring credits
            door.body = memoryview(bytearray(door.request.nbytes)) if door.request.body is None else door.request.body
        self._timeline.record_span("wait", door.request.lane, waiting)
        self._enter(door, door.request)

    def _enter(self, door: Door, request: Arrival) -> None:
        """Serve a piece that has arrived, or postpone it if its plan has not."""
        if not self._serving.has_step(request.lane):
            self._postpone(door)
            return
        self._receive(self._serving.admit(door, request), door, request)

    def _leave(self, door: Door) -> bool:
        """Return whether the host must not serve the message at this door: the device does, or its plan is missing."""
        self._device_steps.advance(self._lanes)  # the device may have served the last message in this slot
        number = door.channel.lane_at(door.slot)
        if number is None:
            return True
        if not self._serving.has_step(number):
            self._postpone(door)
            return True
        return self._device_steps.leave_to_device(self._lanes[number], door.channel, door.slot)

    def _postpone(self, door: Door) -> None:
        """Leave a request in its slot until its plan has arrived."""
        self._early[door] = time.monotonic() + PLAN_TIMEOUT_S

    def _open_early(self) -> bool:
        """Serve one postponed request whose plan has arrived; return whether there was one. Raises DeadlineError."""
        if self._early:
            self._read_control()
        for door, deadline in self._early.items():
            number = door.channel.lane_at(door.slot) if door.request is None else door.request.lane
            if number is None or self._serving.has_step(number):
                del self._early[door]
                if door.request is None:
                    self._open(door, self._timeline.now())
                else:
                    self._enter(door, door.request)
                return True
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"no plan for a request of {door.channel.name} in lane {number} within {PLAN_TIMEOUT_S:g} s"
                )
        return False

    def _receive(self, lane: Lane, door: Door, request: Arrival) -> None:
        if request.body is not None:
            self._serving.begin(lane)
            return
        step, spec = lane.steps[0], self._store.attentions[lane.layer]
        begin = lane.begin
        lane.begin += piece_nbytes(spec, self._store.dtype, step.rows, step.pieces[lane.piece])
        if begin == lane.begin:
            self._serving.begin(lane)
            return
        into = door.body[begin : lane.begin]
        self._puller.add_body(door.channel.name, request.fetched_at + begin, into, lambda: self._serving.begin(lane))

    def _serve_begun(self, lane: Lane, work: Iterator[None]) -> None:
        self._serving.serve_cut(lane, work)
        self._report()
        self._read_control()

    def _report(self) -> None:
        now = time.monotonic()
        lanes = self._serving.working
        if lanes and now - self._reported >= REPORT_S:
            self._reported = now
            self._control.send(Working(lanes))

    def _read_control(self, timeout_s: float = 0.0) -> None:
        while self._running and (message := self._control.poll(timeout_s)) is not None:
            self._handle(message)
            timeout_s = 0.0

    def _apply_plan(self, plan: StepPlan) -> None:
        shares = self._store.apply(plan, self._serving.ranks_of(plan.lane))
        self._moves.apply(plan)
        if self._tier is not None:
            self._tier.apply(plan)
        self._serving.add_steps(shares)

    def _drop_fetches(self, peers: Sequence[str]) -> None:
        for peer in peers:
            self._puller.forget(peer)

    def _release(self, sequences: Sequence[int]) -> None:
        self._store.release(sequences)
        self._moves.release(sequences)
        if self._tier is not None:
            self._tier.release(sequences)


def build(
    control: ControlClient, resources: contextlib.ExitStack, open_endpoint: OpenEndpoint = open_endpoint
) -> MemoryWorker:
    """Set up the slab and link to the peers as the engine directs; ``resources`` closes the links."""
    store, tier, setup = make_store(control, resources)
    links, connect = set_up_links(control, resources, store.device.inboxes, open_endpoint)
    worker = MemoryWorker(control, store, tier, links, connect, setup.trace)
    resources.callback(worker.close)
    control.send(Connected())
    return worker


def main() -> None:
    """Body of the process."""
    run_worker(build, gpu_memory)


if __name__ == "__main__":
    main()
