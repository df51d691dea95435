"""What a memory worker knows of the lanes that it serves, and of the slots in which their requests arrive."""

import collections
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
        pulled: attention of the lane up to which all K and V must have been pulled before the reply is sent.
        slot: the receiver's slot that the parts have been written to; None: none.
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
        """Free the slot, whose request has arrived as a whole, and return a door that holds the request outside."""
        assert self.request is not None
        request, body = self.request, self.body
        if request.body is None:  # it was fetched
            request.free()
        else:
            request.set_aside()
            body = request.body
        self.clear()
        return Door(self.channel, -1, request, body)

    def clear(self) -> None:
        """Forget the request."""
        self.request, self.body = None, memoryview(b"")


@dataclass
class Lane:
    """The steps announced for one lane, and how far the first of them is.

    Where several ranks share a replica, what each of them sends is served as a lane of its own, with its own share of
    the lane's steps: lane * ranks + rank.

    Attributes:
        layer: the attention of the first step to be served next.
        piece: the piece of that attention's request to be served next.
        begin: byte at which that piece begins, if the request is fetched.
        out: float32 [R, Hq, Dv] of the request's rows so far.
        lse: float32 [R, Hq] of the request's rows so far.
        slot: the receiver's slot that ``out`` and ``lse`` are in; None: none.
        work: the rest of a piece that was begun, of the request behind ``door``.
        parked: the request behind ``door`` waits for K and V of earlier chunks.
        reply: the finished reply that has not been sent.
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
    reply: Reply | None = None

    def drop(self) -> None:
        """Forget all steps."""
        self.steps.clear()
        self.layer = self.piece = self.begin = 0
        self.work = self.door = self.reply = None
        self.parked = False
        self.leave_slot()

    def leave_slot(self) -> None:
        """Write the next results elsewhere than in a receiver's slot."""
        if self.slot is not None:
            self.out, self.lse = np.empty((0, 0, 0), np.float32), np.empty((0, 0), np.float32)
            self.slot = None

    @property
    def is_idle(self) -> bool:
        """True if nothing of the first step has been served, and the last reply has been sent."""
        return self.layer == self.piece == 0 and self.work is None and self.door is None and self.reply is None
