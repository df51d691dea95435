"""The lanes of a compute worker: their unfinished steps, and which of them has all messages for its next slice."""

import collections
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from lamina.compute.mail import Mail
from lamina.compute.ranks import SliceOrder
from lamina.compute.step import StepRun
from lamina.core.errors import DeadlineError
from lamina.lowering import Workspace
from lamina.transport.base import Target
from lamina.transport.endpoint import Wait


@dataclass
class Lane:
    """The unfinished steps of one lane on this worker, with times of the first step.

    Attributes:
        number: Number of the lane.
        workspace: Memory of the latest step, reused by a next step with as many rows; has no rows in an empty lane.
        steps: Unfinished steps, oldest first.
        follows: Whether the lane has had a step in this epoch.
        since: When the lane began to wait for its next messages.
        reported: When progress of the lane was last reported to the engine.
        busy_s: Seconds in slices of the first step.
        watched: Number of slices that this worker had run when it last found a message of the lane missing.
        waited_s: Seconds that slices of the first step waited for messages, as far as measured.
        waits: Number of waits in ``waited_s``.
        starved_s: Seconds that the worker had nothing to run before the first step's plan came.
    """

    number: int
    workspace: Workspace = field(default_factory=lambda: Workspace(0))
    steps: collections.deque[StepRun] = field(default_factory=collections.deque)
    follows: bool = False
    since: float = 0.0
    reported: float = 0.0
    busy_s: float = 0.0
    watched: int = 0
    waited_s: float = 0.0
    waits: int = 0
    starved_s: float = 0.0

    def drop_steps(self) -> None:
        """Forget all steps."""
        self.steps.clear()
        self.follows = False
        self.reset_times()

    def reset_times(self) -> None:
        """Begin to measure the next step."""
        self.busy_s, self.waited_s, self.waits, self.starved_s = 0.0, 0.0, 0, 0.0


class Lanes:
    """All lanes of a compute worker. Its thread owns them."""

    def __init__(self, mail: Mail, wait: Wait, order: SliceOrder | None, count: int) -> None:
        """``order``: If given, says which lane's slice rank 0 has announced."""
        self._mail, self._wait, self._order = mail, wait, order
        self._all = [Lane(number) for number in range(count)]
        self._slices = 0  # run so far

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._all)

    def __getitem__(self, number: int) -> Lane:
        return self._all[number]

    def __len__(self) -> int:
        return len(self._all)

    def extend(self, count: int) -> None:
        """Have at least ``count`` lanes."""
        self._all += [Lane(number) for number in range(len(self._all), count)]

    @property
    def active(self) -> list[Lane]:
        """Lanes with steps, in the order in which their slices are due (``Pipeline.tick``)."""
        active = [lane for lane in self._all if lane.steps]
        if len(active) > 1:
            active.sort(key=lambda lane: lane.steps[0].tick)
        return active

    @property
    def lacks_steps(self) -> bool:
        """Whether some lane has fewer than two steps, and so needs a plan soon."""
        return any(len(lane.steps) < 2 for lane in self._all)

    def can_run(self, lane: Lane) -> bool:
        """Return whether all messages for a lane's next slice have arrived, and ``may_run`` is true."""
        return not self._mail.missing[lane.number] and self.may_run(lane.number)

    def may_run(self, lane: int) -> bool:
        """Return whether rank 0 has announced a lane's next slice, and the lane's step is not parked."""
        return not self._all[lane].steps[0].is_parked and (self._order is None or self._order.may_run(lane))

    def first_ready(self, active: Sequence[Lane]) -> Lane | None:
        """Return the first of these lanes whose next slice can run."""
        return next((lane for lane in active if self.can_run(lane)), None)

    def due(self, active: Sequence[Lane]) -> Lane | None:
        """Return the first of these lanes whose next slice can run, once messages that have arrived are received.

        Of a single lane, no message is received: a wait for it follows anyway.
        """
        ready = self.first_ready(active)
        if len(active) > 1 and ready is not active[0]:
            self._receive_arrived(active if ready is None else active[: active.index(ready)])
            ready = self.first_ready(active)
        return ready

    def expect_next(self, lane: Lane) -> None:
        """Begin to wait for the messages of the next slice of a lane."""
        self._mail.expect(lane.number, lane.steps[0].awaited() if lane.steps else None)
        lane.since, lane.watched = time.monotonic(), self._slices

    def count_slice(self) -> None:
        """Record that a slice has run."""
        self._slices += 1

    def missing(self, lanes: Sequence[Lane]) -> dict[str, None]:
        """Return the peers whose messages the next slices of these lanes wait for."""
        return {peer: None for lane in lanes for peer in self._mail.missing[lane.number]}

    def receive_messages(self, peers: Collection[str], timeout_s: float, besides: Sequence[Target] = ()) -> Lane | None:
        """Wait for messages or a doorbell of ``besides``; return the lane of the last message. Raises DeadlineError.

        Messages of lanes that this worker does not know yet only arrive.
        """
        received = self._mail.receive(self._wait, peers, timeout_s, besides)
        lanes = [self._all[number] for number in dict.fromkeys(received) if number < len(self._all)]
        for lane in lanes:
            if lane.steps and not self._mail.missing[lane.number] and not lane.steps[0].is_pending:
                self.note_wait(lane)
        return lanes[-1] if lanes else None

    def _receive_arrived(self, lanes: Sequence[Lane]) -> None:
        while peers := self.missing(lanes):
            try:
                self.receive_messages(peers, 0.0)
            except DeadlineError:
                break
        for lane in lanes:
            if self._mail.missing[lane.number]:
                lane.watched = self._slices

    def note_wait(self, lane: Lane) -> None:
        """Measure how long a lane's slice has waited, unless another slice ran meanwhile."""
        if lane.watched == self._slices and not lane.steps[0].moved_here:
            lane.waited_s += time.monotonic() - lane.since
            lane.waits += 1
