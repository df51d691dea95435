"""Steps that the device serves itself: it waits for their requests, attends, and answers, without the host in between.

A step is served so if its requests come over shared memory, in slots and in one piece, all from one compute worker, and
it keeps no K and V that must be fetched: decode steps, mostly. All others are served by the host, message by message.
While a lane's step is served so, the host launches the next attentions ahead (``WINDOW``), and follows: it takes over
what the device has recorded of messages (``Channel.settle``), wakes peers that sleep, and ends the wait when the epoch
ends.

Both may serve messages of one link at once, since every message names its lane. For its answers, a lane books a slot of
the peer's: each request shows that the answer before was read, so that they need no credits.
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
from lamina.memory.served_lanes import Lane
from lamina.memory.store import KvStore, StepTables
from lamina.worker.links import Links

logger = logging.getLogger(__name__)

MOST_LANES = 24
"""Most lanes that the device serves; the host serves all further ones. Streams need hardware queues of their own
(``set_up_cuda``): two streams that wait in one queue might each wait for what the other's peer does first."""
WINDOW = 4
"""Attentions of a lane that are launched ahead, enough that launching hides behind messages. More would fill the
device's queue, and launches would wait."""


@dataclass
class _Run:
    """A step that the device serves.

    Attributes:
        peer: the compute worker that sends the requests and gets the answers.
        slot: the peer's slot for the answers.
        uses: how often ``slot`` was used before.
        launched: attentions launched.
        done: attentions answered.
    """

    step: StepTables
    peer: str
    slot: int
    uses: int
    launched: int = 0
    done: int = 0


def is_servable(step: StepTables) -> bool:
    """True if the device can serve a step's requests if they come in slots."""
    rows, tables = step.rows, step.tables[0]
    whole = len(step.pieces) == 1 and not step.plan.chunks and not rows.further
    return whole and len(tables) == 1 and tables[0].part == 0 and len(rows.queries) > 0


def attend(
    store: KvStore, lane: PolledLane, layer: int, step: StepTables, request: Array, out: Array, lse: Array
) -> None:
    """Launch the attention of a request, uint8 on the device, for a step that ``is_servable``."""
    spec, rows, new = store.attentions[layer], step.rows, None
    if len(rows.appends):
        k, v = read_kept(request, spec, store.dtype, rows)
        new = New(k, v, step.sent_slots)
        if not step.appends:
            store.device.keep(layer, new.k, new.v, new.slots)
    q = read_queries(request, spec, store.dtype, rows, 0, len(rows.queries))
    lane.attend(layer, step.tables[0][0].table, q, out, lse, spec, new if step.appends else None)


class DeviceSteps:
    """The steps of a memory worker that its device serves. The worker's thread owns it.

    Attributes:
        busy_s: seconds that the device has spent on messages.
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

    def use(self, channels: Mapping[str, Channel], pipeline: Pipeline, computes: Sequence[str]) -> None:
        """Use these compute workers and the links to them from now on.

        While the device waits for messages, it can neither take up nor leave memory: until its steps have ended, the
        host serves all new ones.
        """
        self._channels, self._pipeline, self._computes = channels, pipeline, tuple(computes)
        self._stale = self._polled is not None
        self._renew()

    def _renew(self) -> None:
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
            count = min(pipeline.lanes * pipeline.ranks, MOST_LANES)
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
        """True if the device may serve messages."""
        return bool(self._lanes)

    @property
    def is_busy(self) -> bool:
        """True if a message has arrived that the device has not answered: the host should look again soon."""
        return bool(self._seen)

    def beat(self) -> None:
        """Show the device that the host is alive."""
        for number in self._runs:
            self._lanes[number].stream.beat()

    def begin(self, lane: Lane) -> bool:
        """Return whether the device serves a lane's first step, which is decided once, and begin if it does."""
        if not lane.steps or lane.number >= len(self._lanes):
            return False
        if lane.number in self._runs:
            return True
        step = lane.steps[0]
        self._renew()
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
        """Return how the device serves a step; None if it cannot."""
        specs, rows = self._store.attentions, step.rows
        if self._store.shards.sharers(self._pipeline.ranks) > 1:
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
        """Return the worker that sends the request for an attention and gets the answer of the attention before."""
        ranks, plan = self._pipeline.ranks, step.plan
        stage = self._pipeline.stage(plan.lane, plan.turn, layer, plan.rotates)
        return self._computes[stage * ranks + lane % ranks]

    def _has_slots(self, peer: str) -> bool:
        """Return whether at most as many lanes use the link to a compute worker as the link has slots.

        Then each lane may book a slot. If two lanes shared an unbooked slot, they might wait for each other, since a
        peer does not know which of its slots are booked.
        """
        replica, lanes = self._computes.index(peer) // self._pipeline.workers, range(self._pipeline.lanes)
        return sum(replica in self._pipeline.replicas_of(lane) for lane in lanes) <= SLOTS

    def _launch(self, number: int, run: _Run) -> None:
        """Launch attentions until the window is full."""
        lane, step, ranks = self._lanes[number], run.step, self._pipeline.ranks
        direct, channel = self._direct[run.peer], self._channels[run.peer]
        while run.launched < min(run.done + WINDOW, len(self._store.attentions)):
            layer, spec = run.launched, self._store.attentions[run.launched]
            turn = step.plan.turn + layer
            nbytes, rows = reply_nbytes([spec], len(step.rows.queries)), len(step.rows.queries)
            lane.serve(
                direct.incoming(channel.unread, number, turn),
                direct.outgoing(number // ranks, turn, nbytes, run.slot, run.uses + layer),
                layer % WINDOW,
                body_nbytes(spec, self._store.dtype, step.rows),
                (rows, spec.query_heads, spec.v_dim),
                functools.partial(attend, self._store, lane, layer, step),
            )
            run.launched += 1

    def advance(self, lanes: Sequence[Lane]) -> bool:
        """Record what the device has done, and launch more; return whether a step has ended. Raises DeadlineError."""
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
        """Record the attentions of a lane that the device has answered."""
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
            self._hub.go_on()  # headers may have brought credits

    def take(self, lane: Lane, channel: Channel, slot: int) -> bool:
        """Leave a lane's message in a slot to the device; return False if the device does not serve the lane's step."""
        if not self.begin(lane):
            return False
        channel.close_slot(slot)
        self._seen.add((channel.name, slot))
        return True

    def drop(self) -> None:
        """End all waits, and forget all steps: the device reads and writes no more messages. Raises TransportError."""
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
        """End the device's work and its use of all arenas. Idempotent."""
        for lane in self._lanes:
            lane.stream.close()
        if self._polled is not None:
            for direct in self._direct.values():
                self._polled.slots.unmap(direct.their_arena)
                self._polled.slots.unmap(direct.own_arena)
        self._lanes, self._direct = [], {}
        self._runs.clear()
