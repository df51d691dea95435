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
    """May be sent once everything up to attention ``pulled`` of its lane has been pulled. ``slot``: the parts are in it
    already."""

    peer: str
    parts: list[Floats]
    turn: int
    pulled: int
    slot: int | None


@dataclass(eq=False)
class Door:
    """One slot for requests.

    Attributes:
        request: the message in it, until its last piece has been served.
        body: its bytes, wherever they are, see ``Arrival.body``.
    """

    channel: Channel
    slot: int
    request: Arrival | None = None
    body: Any = field(default_factory=lambda: memoryview(b""))

    def set_aside(self) -> "Door":
        """Free the slot, whose request has arrived as a whole. Returns where that is from now on."""
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
        layer, piece: of the first step, to be served next.
        begin: byte at which that piece begins, of a request that is fetched.
        out, lse: what the request's rows have so far.
        slot: of the receiver, that they are in; None: none.
        work: what is left of a piece that was begun, of the request behind ``door``.
        parked: the request behind ``door`` is here, and waits for K and V of earlier chunks.
        reply: finished, not sent yet.
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
        """What it writes next is elsewhere."""
        if self.slot is not None:
            self.out, self.lse = np.empty((0, 0, 0), np.float32), np.empty((0, 0), np.float32)
            self.slot = None

    @property
    def is_idle(self) -> bool:
        """True if nothing of the first step has been served, and the last reply has been sent."""
        return self.layer == self.piece == 0 and self.work is None and self.door is None and self.reply is None
