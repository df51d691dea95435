"""Serves decode steps on the GPU alone: the GPU polls for requests, attends and replies, without the host in between.

The GPU serves a step if all its requests come from one compute worker over shared memory, each in one slot and one
piece, and bring no K and V that must be fetched. The host serves all other steps, message by message. For a step that
the GPU serves, the host launches the next ``WINDOW`` attentions ahead, copies the GPU's records of messages into the
links' counters (``Channel.settle``), wakes sleeping peers, and aborts the GPU's polling when the epoch ends.

Host and GPU may serve messages of one link at the same time, since every message names its lane. A lane books one of
the peer's slots for its replies. The replies need no credits: each request shows that the last reply was read.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamina.control.timeline import Timeline
from lamina.core.errors import TransportError
from lamina.core.pipeline import Pipeline
from lamina.dataplane.channel import Channel
from lamina.dataplane.leases import SLOTS
from lamina.dataplane.slot import Direct
from lamina.dataplane.wire import body_nbytes, read_kept, read_queries, reply_nbytes
from lamina.memory.device.base import Array, New, PolledLane
from lamina.memory.serving import Lane
from lamina.memory.store import KvStore, StepTables
from lamina.worker.links import Links

logger = logging.getLogger(__name__)

MOST_LANES = 24
"""Most lanes that the device serves; the host serves further lanes. Every stream needs its own hardware queue
(``set_up_cuda``): two streams that poll in one queue could deadlock."""
WINDOW = 4
"""Attentions of a lane that are launched ahead: enough to hide the launches, few enough not to fill the device's
queue, which would block them."""


@dataclass
class _Run:
    """A step that the device serves.

    Attributes:
        peer: Compute worker that sends the requests and receives the replies.
        slot: The peer's slot for the replies.
        uses: Number of messages in ``slot`` before this step.
        launched: Attentions launched.
        done: Attentions replied to.
    """

    step: StepTables
    peer: str
    slot: int
    uses: int
    launched: int = 0
    done: int = 0


def is_servable(step: StepTables) -> bool:
    """Return whether the device can serve a step whose requests arrive in slots."""
    rows, tables = step.rows, step.tables[0]
    whole = len(step.pieces) == 1 and not step.plan.chunks and not rows.further
    return whole and len(tables) == 1 and tables[0].part == 0 and len(rows.queries) > 0


def attend(
    store: KvStore, lane: PolledLane, layer: int, step: StepTables, request: Array, out: Array, lse: Array
) -> None:
    """Launch the attention of ``request``, uint8 in device memory, for a step that ``is_servable``."""
    spec, rows, new = store.attentions[layer], step.rows, None
    if len(rows.appends):
        k, v = read_kept(request, spec, store.dtype, rows)
        new = New(k, v, step.sent_slots)
        if not step.appends:
            store.device.keep(layer, new.k, new.v, new.slots)
    q = read_queries(request, spec, store.dtype, rows, 0, len(rows.queries))
    lane.attend(layer, step.tables[0][0].table, q, out, lse, spec, new if step.appends else None)


class DeviceSteps:
    """Decides which steps of a memory worker its device serves, and launches them. The worker's thread owns it.

    Attributes:
        busy_s: Seconds that the device has spent on messages.
    """

    def __init__(self, store: KvStore, links: Links, timeline: Timeline) -> None:
        self._store, self._links, self._hub, self._timeline = store, links, links.hub, timeline
        self._polled = store.device.polled
        self._lanes: list[PolledLane] = []
        self._direct: dict[str, Direct] = {}
        self._channels: Mapping[str, Channel] = {}
        self._pipeline, self._computes = Pipeline(1, 1), tuple[str, ...]()
        self._runs: dict[int, _Run] = {}
        self._left: dict[int, int] = {}  # by lane, the turn of the last step that was left to the host
        self._seen = set[tuple[str, int]]()  # slots with messages that the device serves
        self._stale = False  # links have changed since they were mapped
        self.busy_s = 0.0

    def change_channels(self, channels: Mapping[str, Channel], pipeline: Pipeline, computes: Sequence[str]) -> None:
        """Replace the links to compute workers.

        Arenas cannot be mapped or unmapped while the device polls. Until its steps have ended, the host serves all new
        steps.
        """
        self._channels, self._pipeline, self._computes = channels, pipeline, tuple(computes)
        self._stale = self._polled is not None
        self._map_links()

    def _map_links(self) -> None:
        """Map new links and unmap those that have ended, if links have changed and the device serves no step."""
        if self._polled is None or not self._stale or self._runs:
            return
        self._stale = False
        if self._store.device.inboxes is not None:
            self._store.device.inboxes.retire()
        channels, pipeline = self._channels, self._pipeline
        for name in [name for name in self._direct if self._links.direct(name) != self._direct[name]]:
            self._polled.slots.unmap(self._direct.pop(name).their_arena)
        for name in channels.keys() - self._direct.keys():
            self._map(name)
        if self._direct and not self._lanes:
            request_nbytes = max(one.own.body_nbytes for one in self._direct.values())
            reply_nbytes = max(one.theirs.body_nbytes for one in self._direct.values())
            count = min(pipeline.door(pipeline.lanes, 0), MOST_LANES)
            self._lanes = [self._polled.lane(WINDOW, request_nbytes, reply_nbytes) for _ in range(count)]

    def _map(self, name: str) -> None:
        direct = self._links.direct(name)
        if direct is None:
            logger.info("%s: the host waits for messages of %s, which shares no memory", self._links.name, name)
            return
        assert self._polled is not None
        try:
            direct.map(self._polled.slots)
        except TransportError as error:
            logger.warning("%s: the host waits for messages of %s: %s", self._links.name, name, error)
            return
        self._direct[name] = direct

    @property
    def is_used(self) -> bool:
        """Whether the device may serve messages."""
        return bool(self._lanes)

    @property
    def is_busy(self) -> bool:
        """Whether a message has arrived that the device has not replied to."""
        return bool(self._seen)

    def beat(self) -> None:
        """Show the device that the host is alive."""
        for number in self._runs:
            self._lanes[number].stream.beat()

    def begin(self, lane: Lane) -> bool:
        """Launch a lane's first step if the device serves it; return whether it does. Decided once per step."""
        if not lane.steps or lane.number >= len(self._lanes):
            return False
        if lane.number in self._runs:
            return True
        step = lane.steps[0]
        self._map_links()
        if not lane.is_idle or self._left.get(lane.number) == step.plan.turn:
            return False
        run = self._plan(lane.number, step) if is_servable(step) and not self._stale else None
        if run is None:
            self._left[lane.number] = step.plan.turn
            for channel in self._channels.values():
                channel.unbook(lane.number)
            return False
        self._runs[lane.number] = run
        self._lanes[lane.number].stream.order_after_host()
        self._launch(lane.number, run)
        return True

    def _plan(self, lane: int, step: StepTables) -> _Run | None:
        """Return the peer and booked slot of a step; None if the device cannot serve the step."""
        specs, rows = self._store.attentions, step.rows
        if self._store.shards.sharers(self._pipeline.most_ranks) > 1:
            return None  # it attends to K and V that another rank's lane may still fetch, on another stream
        peer, *others = {self._peer(lane, step, layer) for layer in range(len(specs) + 1)}
        if others or peer not in self._direct or peer not in self._channels or not self._has_slots(peer):
            return None
        requests = [body_nbytes(spec, self._store.dtype, rows) for spec in specs]
        replies = [reply_nbytes([spec], len(rows.queries)) for spec in specs]
        direct = self._direct[peer]
        if max(requests) > direct.own.body_nbytes or max(replies) > direct.theirs.body_nbytes:
            return None
        booked = self._channels[peer].book(lane, len(specs))
        return None if booked is None else _Run(step, peer, *booked)

    def _peer(self, lane: int, step: StepTables, layer: int) -> str:
        """Return the worker that requests attention ``layer`` and receives the reply of the attention before."""
        plan = step.plan
        stage = self._pipeline.stage(plan.lane, plan.turn, layer, plan.rotates)
        return self._computes[self._pipeline.worker_at(stage, self._pipeline.rank_of(lane))]

    def _has_slots(self, peer: str) -> bool:
        """Return whether the link to a compute worker has a slot for each lane that uses it.

        Only then may lanes book slots: a peer does not know which slots are booked, so two lanes that share an unbooked
        slot could deadlock.
        """
        replica, lanes = self._pipeline.replica_at(self._computes.index(peer)), range(self._pipeline.lanes)
        return sum(replica in self._pipeline.replicas_of(lane) for lane in lanes) <= SLOTS

    def _launch(self, number: int, run: _Run) -> None:
        lane, step = self._lanes[number], run.step
        direct, channel = self._direct[run.peer], self._channels[run.peer]
        while run.launched < min(run.done + WINDOW, len(self._store.attentions)):
            layer, spec = run.launched, self._store.attentions[run.launched]
            turn = step.plan.turn + layer
            nbytes, rows = reply_nbytes([spec], len(step.rows.queries)), len(step.rows.queries)
            lane.serve(
                direct.incoming(channel.unread, number, turn),
                direct.outgoing(step.plan.lane, turn, nbytes, run.slot, run.uses + layer),
                layer % WINDOW,
                body_nbytes(spec, self._store.dtype, step.rows),
                (rows, spec.query_heads, spec.v_dim),
                functools.partial(attend, self._store, lane, layer, step),
            )
            run.launched += 1

    def advance(self, lanes: Sequence[Lane]) -> bool:
        """Record the attentions that the device has completed, and launch more.

        Returns whether a step has ended. Raises DeadlineError.
        """
        ended = False
        for lane in lanes[: len(self._lanes)]:
            run = self._runs.get(lane.number)
            if run is not None:
                self._settle(lane.number, run)
                if run.done == len(self._store.attentions):
                    lane.steps.popleft()
                    del self._runs[lane.number]
                    ended = True
                else:
                    self._launch(lane.number, run)
            self.begin(lane)
        return ended

    def _settle(self, number: int, run: _Run) -> None:
        stream = self._lanes[number].stream
        stream.raise_failure()
        while run.done < run.launched and (done_ns := int((row := stream.records[run.done % WINDOW])["done_ns"])):
            name, slot = run.peer, int(row["slot"])
            self._channels[name].settle(slot, int(row["number"]), row["header"].tobytes())
            self._seen.discard((name, slot))
            spent_ns = done_ns - int(row["found_ns"])
            self.busy_s += 1e-9 * spent_ns
            self._timeline.record_span("attention", number, self._timeline.now() - spent_ns)
            row["done_ns"] = 0
            self._direct[name].their_arena.nudge()
            run.done += 1
        if self._hub.keeping:
            self._hub.send_kept()  # headers may have brought credits

    def leave_to_device(self, lane: Lane, channel: Channel, slot: int) -> bool:
        """Leave the message in a slot to the device; return False if the device does not serve the lane's step."""
        if not self.begin(lane):
            return False
        channel.close_slot(slot)
        self._seen.add((channel.name, slot))
        return True

    def drop(self) -> None:
        """Abort all steps that the device serves; it then reads and writes no messages. Raises TransportError."""
        streams = [self._lanes[number].stream for number in self._runs]
        for stream in streams:
            stream.abort()
        for stream in streams:
            stream.drain()
            stream.reset()
            stream.records["done_ns"] = 0
        self._runs.clear()
        self._left.clear()
        self._seen.clear()

    def close(self) -> None:
        """Stop the device and unmap all arenas. Idempotent."""
        for lane in self._lanes:
            lane.stream.close()
        if self._polled is not None:
            for direct in self._direct.values():
                self._polled.slots.unmap(direct.their_arena)
                self._polled.slots.unmap(direct.own_arena)
        self._lanes, self._direct = [], {}
        self._runs.clear()
