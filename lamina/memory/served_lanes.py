"""State of the lanes that a memory worker serves, and of the slots in which their requests arrive."""

import collections
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lamina.dataplane.channel import Arrival, Channel
from lamina.memory.device.base import Floats
from lamina.memory.store import StepTables


@dataclass(frozen=True)
class Reply:
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

    With several ranks, each rank's requests are served as a lane of their own, with number lane * ranks + rank.

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
