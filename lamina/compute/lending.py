"""Does for other workers what a memory worker does, with the KV in a compute worker's local memory.

It serves requests of other replicas, and moves segments from and to other workers.

A compute worker serves such requests between two slices, and in every wait: for replies to its own requests, and for
other ranks of its replica. It reads plans there too, and a request waits for nothing else. So replicas that attend for
each other never wait for each other in a circle.
"""

import contextlib
import time
from collections.abc import Sequence

from lamina.compute.lanes import Lanes
from lamina.compute.local_memory import Served
from lamina.compute.mail import Mail, Request
from lamina.control.messages import REPORT_S, Connect, KvMoved, Working
from lamina.control.sockets import ControlClient
from lamina.control.timeline import Timeline
from lamina.core.errors import DeadlineError
from lamina.core.steps import StepPlan
from lamina.core.topology import Topology
from lamina.memory.moving import KvMoves
from lamina.memory.pulls import Puller
from lamina.memory.serving import Door, Serving
from lamina.memory.store import KvStore, StepTables
from lamina.transport.base import Target
from lamina.worker.links import Links

LENT_S = 0.002  # most time between two slices for what other replicas have requested


class Lender:
    """The steps of other replicas that attend to this worker's local memory. The worker's thread owns it."""

    def __init__(
        self,
        control: ControlClient,
        store: KvStore,
        puller: Puller,
        mail: Mail,
        lanes: Lanes,
        timeline: Timeline,
        links: Links,
        connect: Connect,
    ) -> None:
        self._control, self._mail, self._lanes, self._links, self._store = control, mail, lanes, links, store

        holders = [*connect.memories, *connect.computes] if connect.pipeline.moves_local else []
        self._moves = KvMoves(
            store,
            puller,
            links.arena,
            links.plan,
            links.leases_of(holders),
            links.outbox,
            lambda move: control.send(KvMoved(move.number, move.source)),
            connect.epoch,
        )
        self._serving = Serving(
            store, puller, timeline, mail.channels, connect.pipeline, connect.computes, lambda: None
        )
        self._waiting: list[Request] = []  # requests whose plans have not arrived
        self._reported = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a step of another replica needs this worker, a request waits for its plan, or a segment moves."""
        waits = bool(self._waiting or self._mail.requests or self._moves.active)
        return waits or any(lane.steps or lane.reply for lane in self._serving.lanes)

    @property
    def is_needed(self) -> bool:
        """Whether a replica may request something at any time, or this worker is busy for one."""
        return bool(self._mail.lenders) or self.is_busy

    @property
    def served(self) -> Served:
        """Attention for other replicas so far."""
        return Served(self._serving.busy_s, self._serving.parked, self._serving.parked_nbytes)

    @property
    def awaits_plan(self) -> bool:
        """Whether a request has arrived before the plan of its step."""
        return bool(self._waiting)

    @property
    def moving(self) -> list[Target]:
        """Doorbells of moving segments."""
        return self._moves.awaited

    @property
    def targets(self) -> list[Target]:
        """Doorbells of other replicas' requests, and of what is needed to serve them."""
        return [*self._mail.awaited(self._mail.lenders), *self.moving]

    def ranks_of(self, plan: StepPlan) -> int:
        """Return the ranks of the replica that runs a plan."""
        return self._serving.ranks_of(plan.lane)

    def apply_plan(self, plan: StepPlan, steps: Sequence[StepTables] = ()) -> None:
        """Begin and end what a plan says that moves, after the store has applied the plan.

        ``steps``: the parts of another replica's step in this worker's memory, by rank. A stage without attention has
        such parts, but gets no requests for them.
        """
        self._moves.apply(plan)
        if self._store.watermarks.layers:
            self._serving.add_steps(steps)

    def end_moves(self, sequences: Sequence[int]) -> None:
        """End the moves of sequences, after the store has forgotten them."""
        self._moves.release(sequences)

    def end_epoch(self, topology: Topology) -> None:
        """Drop all steps and requests, after ``Mail.reset``."""
        self._waiting.clear()
        self._serving.drop_steps()
        self._moves.drop(topology.epoch)
        self._serving.set_members(self._mail.channels, topology.pipeline, topology.computes)

    def set_members(self, topology: Topology) -> None:
        """Serve the replicas of ``topology``, after ``Mail.change_members``."""
        holders = [*topology.memories, *topology.computes] if topology.pipeline.moves_local else []
        self._moves.change(self._links.leases_of(holders))
        self._serving.set_members(self._mail.channels, topology.pipeline, topology.computes)

    def serve_requests(self) -> bool:
        """Serve what other replicas have requested, for ``LENT_S`` at most; return whether there may be more.

        Raises PeerLostError.
        """
        if not self.is_needed:
            return False
        end = time.monotonic() + LENT_S
        while self._receive() or self._serve_one():
            if time.monotonic() > end:
                return True
        return False

    def _receive(self) -> bool:
        """Receive what has arrived from other replicas; return whether there was something."""
        with contextlib.suppress(DeadlineError):
            self._lanes.receive_messages(self._mail.lenders, 0.0)
            return True
        return False

    def _serve_one(self) -> bool:
        """Serve one cut of a request that ``Mail.receive`` has received, or move one piece; return whether it did.

        Requests begin while others have cuts left, so that they do not wait for a long chunk.
        """
        self._waiting += self._mail.requests
        self._mail.requests.clear()
        self._serving.unpark()  # this worker's own steps may have stored chunks
        for lane in self._serving.lanes:
            if lane.reply is not None:
                self._serving.answer(lane)
        if self._begin_next():
            return True
        begun = self._serving.begun()
        if begun is None:
            return self._move()
        if (now := time.monotonic()) - self._reported >= REPORT_S:
            self._reported = now
            self._control.send(Working(self._serving.working))
        self._serving.serve_cut(*begun)
        return True

    def _move(self) -> bool:
        for index, (doorbell, number) in enumerate(self._moves.awaited):
            if self._links.arena.sequence(doorbell) >= number:
                self._moves.serve(index)
                self._mail.request_pieces()
                return True
        return False

    def _begin_next(self) -> bool:
        for request in self._waiting:
            if self._serving.has_step(request.arrival.lane):
                self._waiting.remove(request)
                self._begin(request)
                return True
        return False

    def _begin(self, request: Request) -> None:
        arrival = request.arrival
        self._serving.begin(self._serving.admit(Door(arrival.channel, -1, arrival, request.body), arrival))
        self._mail.request_pieces()  # of K and V of prompt chunks
