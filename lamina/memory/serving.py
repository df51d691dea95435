"""Serves the requests of lanes from a KV store: stores k and v, attends with q, and replies.

The memory worker owns one for its slab. A compute worker with local memory owns one for the requests of other replicas
(``lamina.compute.lending``).
"""

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lamina.control.timeline import PARKED, Timeline
from lamina.core.errors import WorkerError
from lamina.core.pipeline import Pipeline
from lamina.dataplane.channel import Arrival, Channel
from lamina.memory.device.base import Floats
from lamina.memory.pulls import Puller
from lamina.memory.store import KvStore, StepTables

PLAN_TIMEOUT_S = 30.0  # longest wait for the plan of a request that has arrived
_DONE = object()


class Reply(NamedTuple):
    """The reply to a request.

    Attributes:
        pulled: attention of the lane up to which all K and V must be stored before the reply is sent.
        slot: the receiver's slot that holds the parts already; None if they must be sent.
    """

    peer: str
    parts: list[Floats]
    turn: int
    pulled: int
    slot: int | None


@dataclass(eq=False)
class Door:
    """One slot for requests.

    Attributes:
        request: the message in the slot, until its last piece has been served.
        body: the bytes of ``request``, see ``Arrival.body``.
    """

    channel: Channel
    slot: int
    request: Arrival | None = None
    body: Any = field(default_factory=lambda: memoryview(b""))

    def set_aside(self) -> "Door":
        """Free slot and region of the request, which has arrived as a whole. Return a door with a copy of it.

        The region stays while K and V are fetched from it.
        """
        assert self.request is not None
        request, body = self.request, self.body
        if request.body is None:  # the body was fetched
            request.free()
        else:
            request.set_aside()
            body = request.body
        request.end_reading()
        self.clear()
        return Door(self.channel, -1, dataclasses.replace(request, fetched_at=-1, readers=1), body)

    def clear(self) -> None:
        """Forget the request."""
        self.request, self.body = None, memoryview(b"")


@dataclass
class Lane:
    """The announced steps of one lane, and the progress of the first of them.

    With several ranks, each rank's requests are served as a lane of their own, with the number ``Pipeline.door``.

    Attributes:
        number: number of the lane.
        steps: announced steps, oldest first.
        layer: index of the first step's next attention.
        piece: index of the next piece of that attention's request.
        begin: byte at which that piece begins, if the request is fetched.
        out: float32 [R, Hq, Dv] of the request's rows so far.
        lse: float32 [R, Hq] of the request's rows so far.
        slot: the receiver's slot that holds ``out`` and ``lse``; None if they are in local memory.
        work: the remaining cuts of the request at ``door``.
        door: slot of the request being served.
        parked: whether the request at ``door`` waits for K and V of earlier chunks.
        parked_at: since when, by the timeline.
        reply: a finished reply that has not been sent.
    """

    number: int
    steps: collections.deque[StepTables] = field(default_factory=collections.deque)
    layer: int = 0
    piece: int = 0
    begin: int = 0
    out: Floats = field(default_factory=lambda: np.empty((0, 0, 0), np.float32))
    lse: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))
    slot: int | None = None
    work: Iterator[None] | None = None
    door: Door | None = None
    parked: bool = False
    parked_at: int = 0
    reply: Reply | None = None

    def drop(self) -> None:
        """Forget all steps."""
        self.steps.clear()
        self.layer = self.piece = self.begin = 0
        self.work = self.door = self.reply = None
        self.parked = False
        self.leave_slot()

    def leave_slot(self) -> None:
        """Write later results to local memory, not to a receiver's slot."""
        if self.slot is not None:
            self.out, self.lse = np.empty((0, 0, 0), np.float32), np.empty((0, 0), np.float32)
            self.slot = None

    @property
    def is_idle(self) -> bool:
        """Whether no request of the first step has been served, and the last reply has been sent."""
        return self.layer == self.piece == 0 and self.work is None and self.door is None and self.reply is None


class Serving:
    """The steps of all lanes that requests may arrive for, and the requests being served. One thread owns it.

    Attributes:
        lanes: By ``Pipeline.door``.
        busy_s: Seconds of attention so far.
        parked: Requests that have waited for a watermark so far.
        parked_nbytes: Bytes of these requests.
    """

    def __init__(
        self,
        store: KvStore,
        puller: Puller,
        timeline: Timeline,
        channels: Mapping[str, Channel],
        pipeline: Pipeline,
        computes: Sequence[str],
        on_step_served: Callable[[], None],
    ) -> None:
        """``on_step_served`` is called after the last request of a step."""
        self._store, self._puller, self._timeline = store, puller, timeline
        self._on_step_served = on_step_served
        self.lanes: list[Lane] = []
        self.busy_s = 0.0
        self.parked = self.parked_nbytes = 0
        self.set_members(channels, pipeline, computes)

    def set_members(self, channels: Mapping[str, Channel], pipeline: Pipeline, computes: Sequence[str]) -> None:
        """Answer ``computes``, in the order of ``pipeline``, over ``channels`` from now on."""
        self._channels, self._pipeline, self._computes = channels, pipeline, tuple(computes)
        self.lanes += [Lane(number) for number in range(len(self.lanes), pipeline.door(pipeline.lanes, 0))]

    def ranks_of(self, lane: int) -> int:
        """Return the ranks of the replicas that run a lane."""
        return self._pipeline.shape_of(lane % self._pipeline.replicas).ranks

    def drop_steps(self) -> None:
        """Drop all steps and requests."""
        for lane in self.lanes:
            lane.drop()

    def add_steps(self, steps: Sequence[StepTables]) -> None:
        """Announce the parts of a step, by rank; parts without messages are ignored."""
        for step in steps:
            if not step.rows.empty:
                self.lanes[step.door].steps.append(step)

    def has_step(self, lane: int) -> bool:
        """Return whether a lane has a step. Lanes of a compute worker that has just joined may be unknown."""
        return lane < len(self.lanes) and len(self.lanes[lane].steps) > 0

    def admit(self, door: Door, request: Arrival) -> Lane:
        """Let a request at a door be served next in its lane, which has a step; ``begin`` follows. Return the lane.

        Raises WorkerError if the request is not for the lane's next attention.
        """
        lane = self.lanes[request.lane]
        turn = self._turn(lane)
        if request.turn != turn:
            raise WorkerError(
                self._store.worker,
                f"a request of {door.channel.name} is for attention {request.turn} of lane {lane.number}, whose next "
                f"is {turn}",
            )
        lane.door = door
        return lane

    def _turn(self, lane: Lane) -> int:
        """Return the turn of the first step's next attention."""
        return lane.steps[0].plan.turn + self._store.first + lane.layer

    def begun(self) -> tuple[Lane, Iterator[None]] | None:
        """Return the begun piece of the earliest step, for which later steps may wait; None if none was begun."""
        lanes = [(lane, lane.work) for lane in self.lanes if lane.work is not None]
        return min(lanes, key=lambda one: one[0].steps[0].plan.step) if lanes else None

    @property
    def working(self) -> list[int]:
        """Lanes, without ranks, of which a piece was begun."""
        return [lane.steps[0].plan.lane for lane in self.lanes if lane.work is not None]

    def begin(self, lane: Lane) -> None:
        """Serve the piece of a request that has arrived, or its first cut.

        A chunk that may wait for chunks of other lanes begins once all its pieces have arrived and those chunks are
        stored; until then its lane is parked.
        """
        step, door = lane.steps[0], lane.door
        if step.rows.pulled and step.pieces[lane.piece].keeps and door is not None and door.request is not None:
            self._pull(door.request, lane.layer, step)
        if not step.order.after:
            self.serve_cut(lane, self._start(lane, (lane.piece,)))
        elif lane.piece < len(step.pieces) - 1:
            self._advance(lane, answered=False)
        elif earlier := step.order.missing(lane.layer):
            if door is not None and door.request is not None:
                lane.door = door.set_aside()
            lane.parked, lane.parked_at = True, self._timeline.now()
            self.parked += 1
            self.parked_nbytes += 0 if lane.door is None else lane.door.body.nbytes
            for storing in earlier:
                self._puller.fetch_first(storing.door, storing.turn + self._store.first + lane.layer)
        else:
            self.serve_cut(lane, self._start(lane, range(len(step.pieces))))

    def unpark(self) -> None:
        """Begin parked requests whose earlier chunks are all stored."""
        for lane in self.lanes:
            if lane.parked and not lane.steps[0].order.missing(lane.layer):
                lane.parked = False
                self._timeline.record_span(PARKED, lane.number, lane.parked_at)
                self._start(lane, range(len(lane.steps[0].pieces)))

    def _start(self, lane: Lane, pieces: Sequence[int]) -> Iterator[None]:
        """Set the lane's work to serving ``pieces``, which have arrived, and return it."""
        step, queries = lane.steps[0], len(lane.steps[0].rows.queries)
        spec = self._store.attentions[lane.layer]
        shape = (queries, spec.query_heads, spec.v_dim)
        if 0 in pieces and not self._place(lane, shape) and lane.out.shape != shape:
            lane.out, lane.lse = self._store.device.results(queries, spec)
        body = lane.door.body if lane.door is not None else memoryview(b"")
        works = [self._store.serve(lane.layer, step, piece, body, lane.out, lane.lse) for piece in pieces]
        lane.work = work = works[0] if len(works) == 1 else itertools.chain.from_iterable(works)
        return work

    def _pull(self, request: Arrival, layer: int, step: StepTables) -> None:
        request.readers += 1

        def on_done() -> None:
            request.end_reading()
            self._store.watermarks.on_fetched(step.order, layer)
            self.unpark()

        self._puller.request_pull(request.channel.name, request.bulk_at, layer, step, on_done)

    def _place(self, lane: Lane, shape: tuple[int, int, int]) -> bool:
        """Let attention write the next reply directly into the receiver's slot; return whether it can.

        It can only if the reply is sent without a pause, since no other message may use the slot until then.
        """
        if not lane.steps[0].is_served_at_once:
            return False
        channel, count = self._channels.get(self._receiver(lane)), math.prod(shape)
        sums = math.prod(shape[:2])
        slot = channel.place(4 * (count + sums)) if channel is not None and count else None
        if channel is None or slot is None:
            return False
        out, lse = channel.bodies[slot].array[: 4 * count], channel.bodies[slot].array[4 * count : 4 * (count + sums)]
        lane.out, lane.lse = out.view(np.float32).reshape(shape), lse.view(np.float32).reshape(shape[:2])
        lane.slot = slot
        return True

    def _receiver(self, lane: Lane) -> str:
        plan = lane.steps[0].plan
        following = self._pipeline.stage(plan.lane, plan.turn, self._store.first + lane.layer + 1, plan.rotates)
        return self._computes[self._pipeline.worker_at(following, self._pipeline.rank_of(lane.number))]

    def serve_cut(self, lane: Lane, work: Iterator[None]) -> None:
        """Serve one cut of a piece; after the last cut of the request's last piece, reply."""
        start, span = time.monotonic(), self._timeline.now()
        done = next(work, _DONE) is _DONE
        self._timeline.record_span("attention", lane.number, span)
        last = done and lane.piece == len(lane.steps[0].pieces) - 1
        if last:
            self._finish(lane)
        self.busy_s += time.monotonic() - start
        if done:
            lane.work = None
            self._advance(lane, last)

    def _finish(self, lane: Lane) -> None:
        """Free a served request and reply to it; to a step's last one once all the step's K and V are stored."""
        step, door, turn = lane.steps[0], lane.door, self._turn(lane)
        if door is not None and door.request is not None:
            self._store.device.settle()
            door.request.free()
            door.request.end_reading()
            door.clear()
        if step.order.stores is not None:
            self._store.watermarks.on_attended(step.order, lane.layer)
            self.unpark()
        lane.door = None
        ends = lane.layer == len(self._store.attentions) - 1
        parts = [lane.out, lane.lse] if len(step.rows.queries) else []
        lane.reply = Reply(self._receiver(lane), parts, turn, turn if ends else -1, lane.slot)
        lane.leave_slot()
        self.answer(lane)

    def answer(self, lane: Lane) -> None:
        """Send the lane's reply, if it has one and the K and V that it waits for are stored."""
        reply = lane.reply
        if reply is None or not self._puller.is_done(lane.number, reply.pulled):
            return
        lane.reply = None
        channel = self._channels.get(reply.peer)
        if channel is None:
            return  # the receiver has exited: the engine ends or repeats its requests
        span = self._timeline.now()
        nbytes = sum(part.nbytes for part in reply.parts)
        number = self._pipeline.lane_of(lane.number)
        if reply.slot is not None or channel.post_apart is not None:
            channel.send_message(number, reply.turn, nbytes, reply.parts if reply.slot is None else (), reply.slot)
        else:  # queued without a copy: the lane's next request, which overwrites it, follows the reply
            channel.begin(number, reply.turn, nbytes, copies=False).send_piece(reply.parts)
        self._timeline.record_span("send", lane.number, span)

    def _advance(self, lane: Lane, answered: bool) -> None:
        if not answered:
            lane.piece += 1
            if lane.door is not None:
                lane.door.channel.open_slot(lane.door.slot)
            return
        lane.piece = lane.begin = 0
        lane.layer += 1
        if lane.layer == len(self._store.attentions):
            lane.layer = 0
            lane.steps.popleft()
            self._on_step_served()
