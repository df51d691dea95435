"""Serves requests of other replicas for KV in a compute worker's local memory, as a memory worker does for its slab.

A compute worker serves such requests between two slices, and in every wait: for replies to its own requests, and for
other ranks of its replica. Serving itself waits for nothing but the plan of the step, which these waits read too. So
replicas that attend for each other never wait for each other in a circle.

No request is parked (``lamina.memory.watermarks``), since all chunks of a prompt run in one lane with local memory.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.compute.mail import Mail, Request
from lamina.control.messages import REPORT_S, Connect, Working
from lamina.control.sockets import ControlClient
from lamina.control.timeline import Timeline
from lamina.core.errors import DeadlineError, WorkerError
from lamina.core.topology import Topology
from lamina.memory.pulls import Puller
from lamina.memory.served_lanes import Door
from lamina.memory.serving import PLAN_TIMEOUT_S, Serving
from lamina.memory.store import KvStore, StepTables


@dataclass(frozen=True)
class _Waiting:
    """A request that has not been begun. ``deadline``: when its plan must have arrived."""

    request: Request
    deadline: float


class Lender:
    """The steps of other replicas that attend to this worker's local memory. The worker's thread owns it."""

    def __init__(
        self, control: ControlClient, store: KvStore, puller: Puller, mail: Mail, timeline: Timeline, connect: Connect
    ) -> None:
        self._control, self._mail = control, mail
        self._serving = Serving(
            store, puller, timeline, mail.channels, connect.pipeline, connect.computes, lambda: None
        )
        self._waiting: list[_Waiting] = []
        self._reported = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a step of another replica needs this worker, or a request has arrived before its plan."""
        return bool(self._waiting or self._mail.requests) or any(
            lane.steps or lane.reply for lane in self._serving.lanes
        )

    def add_steps(self, steps: Sequence[StepTables]) -> None:
        """Announce the parts of another replica's step in this worker's memory, by rank."""
        self._serving.add_steps(steps)

    def end_epoch(self, topology: Topology) -> None:
        """Drop all steps and requests, after ``Mail.reset``."""
        self._waiting.clear()
        self._serving.drop_steps()
        self.change_members(topology)

    def change_members(self, topology: Topology) -> None:
        """Serve the replicas of ``topology``, after ``Mail.change_members``."""
        self._serving.change_members(self._mail.channels, topology.pipeline, topology.computes)

    def serve(self) -> bool:
        """Serve one cut of a request that ``Mail.receive`` has received; return whether there was one.

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
            return self._begin_next(now)
        if now - self._reported >= REPORT_S:
            self._reported = now
            self._control.send(Working(self._serving.working))
        self._serving.serve_cut(*begun)
        return True

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
