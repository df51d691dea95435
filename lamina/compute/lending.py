"""Does for other workers what a memory worker does, with the KV in a compute worker's local memory.

It serves requests of other replicas, and moves segments from and to other workers.

A compute worker serves such requests between two slices, and in every wait: for replies to its own requests, and for
other ranks of its replica. Serving itself waits for nothing but the plan of the step, which these waits read too. So
replicas that attend for each other never wait for each other in a circle.

No request is parked (``lamina.memory.watermarks``), since all chunks of a prompt run in one lane with local memory.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lamina.compute.mail import Mail, Request
from lamina.control.messages import REPORT_S, Connect, Migrated, Working
from lamina.control.sockets import ControlClient
from lamina.control.timeline import Timeline
from lamina.core.errors import DeadlineError, WorkerError
from lamina.core.steps import StepPlan
from lamina.core.topology import Topology
from lamina.dataplane.leases import Lease
from lamina.memory.moving import Migrations
from lamina.memory.pulls import Puller
from lamina.memory.served_lanes import Door
from lamina.memory.serving import PLAN_TIMEOUT_S, Serving
from lamina.memory.store import KvStore, StepTables
from lamina.transport.base import Target
from lamina.worker.links import Links


@dataclass(frozen=True)
class _Waiting:
    """A request that has not been begun. ``deadline``: when its plan must have arrived."""

    request: Request
    deadline: float


class Lender:
    """The steps of other replicas that attend to this worker's local memory. The worker's thread owns it."""

    def __init__(
        self,
        control: ControlClient,
        store: KvStore,
        puller: Puller,
        mail: Mail,
        timeline: Timeline,
        links: Links,
        connect: Connect,
    ) -> None:
        self._control, self._mail, self._links = control, mail, links

        def on_moved(number: int) -> None:
            control.send(Migrated(number))

        others = self._others([*connect.memories, *connect.computes]) if connect.pipeline.moves_local else {}
        self._migrations = Migrations(
            store, puller, links.arena, links.plan, others, links.outbox, on_moved, connect.epoch
        )
        self._serving = Serving(
            store, puller, timeline, mail.channels, connect.pipeline, connect.computes, lambda: None
        )
        self._waiting: list[_Waiting] = []
        self._reported = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a step of another replica needs this worker, a request waits for its plan, or a segment moves."""
        waits = bool(self._waiting or self._mail.requests or self._migrations.active)
        return waits or any(lane.steps or lane.reply for lane in self._serving.lanes)

    @property
    def moving(self) -> list[Target]:
        """Doorbells of moving segments."""
        return self._migrations.awaited

    def _others(self, names: Iterable[str]) -> dict[str, tuple[Lease, Lease]]:
        return {name: self._links.leases(name) for name in names if self._links.has(name)}

    def apply_plan(self, plan: StepPlan, steps: Sequence[StepTables] = ()) -> None:
        """Begin and end what a plan says that moves, after the store has applied the plan.

        ``steps``: the parts of another replica's step in this worker's memory, by rank.
        """
        self._migrations.apply(plan)
        self._serving.add_steps(steps)

    def release(self, sequences: Sequence[int]) -> None:
        """End the moves of sequences, after the store has forgotten them."""
        self._migrations.release(sequences)

    def end_epoch(self, topology: Topology) -> None:
        """Drop all steps and requests, after ``Mail.reset``."""
        self._waiting.clear()
        self._serving.drop_steps()
        self._migrations.drop(topology.epoch)
        self._serving.change_members(self._mail.channels, topology.pipeline, topology.computes)

    def change_members(self, topology: Topology) -> None:
        """Serve the replicas of ``topology``, after ``Mail.change_members``."""
        holders = [*topology.memories, *topology.computes] if topology.pipeline.moves_local else []
        self._migrations.change(self._others(holders))
        self._serving.change_members(self._mail.channels, topology.pipeline, topology.computes)

    def serve(self) -> bool:
        """Serve one cut of a request that ``Mail.receive`` has received, or move one piece; return whether it did.

        Raises PeerLostError; DeadlineError if the plan of a request does not arrive.
        """
        now = time.monotonic()
        while self._mail.requests:
            self._waiting.append(_Waiting(self._mail.requests.popleft(), now + PLAN_TIMEOUT_S))
        for lane in self._serving.lanes:
            if lane.reply is not None:
                self._serving.answer(lane)
        begun = self._serving.begun()
        if begun is None:
            return self._begin_next(now) or self._move()
        if now - self._reported >= REPORT_S:
            self._reported = now
            self._control.send(Working(self._serving.working))
        self._serving.serve_cut(*begun)
        return True

    def _move(self) -> bool:
        for index, (doorbell, number) in enumerate(self._migrations.awaited):
            if self._links.arena.sequence(doorbell) >= number:
                self._migrations.serve(index)
                self._mail.request_pieces()
                return True
        return False

    def _begin_next(self, now: float) -> bool:
        for waiting in self._waiting:
            request = waiting.request
            if self._serving.has_step(request.arrival.lane):
                self._waiting.remove(waiting)
                self._begin(request)
                return True
            if now > waiting.deadline:
                raise DeadlineError(
                    f"no plan for a request of {request.arrival.channel.name} in lane {request.arrival.lane} within "
                    f"{PLAN_TIMEOUT_S:g} s"
                )
        return False

    def _begin(self, request: Request) -> None:
        arrival, lane = request.arrival, self._serving.lanes[request.arrival.lane]
        turn = lane.steps[0].plan.turn + lane.layer
        if arrival.turn != turn:
            raise WorkerError(
                self._control.name,
                f"a request of {arrival.channel.name} is for attention {arrival.turn} of lane {lane.number}, whose "
                f"next is {turn}",
            )
        lane.door = Door(arrival.channel, -1, arrival, request.body)
        self._serving.begin(lane)
        self._mail.request_pieces()  # of K and V of prompt chunks
