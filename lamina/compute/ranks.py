"""All-reduce between the tensor-parallel ranks of a stage on CPUs, and the common order in which ranks run slices.

Every rank writes its tensor into an arena slot of every other rank, and adds the received tensors in the order of the
ranks, so that all ranks get the same bits. Each peer has two slots, used alternately: a peer that has sent tensor n has
read tensor n - 2, so that no slot needs to be freed. A tensor larger than a slot is reduced in pieces.

If several lanes run on the stage, their messages may reach the ranks in different orders. So rank 0 announces each
slice before it runs the slice, and the other ranks run it next, once its messages have arrived.
"""

import collections
import struct
import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lamina.control.messages import EndEpoch, Recall, Step, Stop, ToWorker
from lamina.control.sockets import ControlClient
from lamina.core.errors import DeadlineError, PeerLostError
from lamina.dataplane.leases import ARRIVED, FETCHED, FREED, ORDER_NBYTES, SLOTS
from lamina.dataplane.slot import Outbox, Slot
from lamina.splitter import as_numpy
from lamina.splitter.parts import Rank
from lamina.transport.base import Arena, Target
from lamina.transport.endpoint import Wait
from lamina.worker.links import Links

TIMEOUT_S = 300.0  # longest wait for another rank, which may wait for the attention of a long prompt
SLICE_S = 0.05  # time between two checks for EndEpoch while a rank waits for another
_LANE = struct.Struct("<Q")  # format of an announcement
ANNOUNCED = ORDER_NBYTES // _LANE.size  # most unread announcements


class EpochEndingError(Exception):
    """The engine ended the epoch, or an engine ended, while this rank waited for another rank."""


class Meanwhile(Protocol):
    """What a rank does for other replicas while it waits for ranks of its own."""

    def targets_meanwhile(self) -> list[Target]:
        """Return the doorbells that call for ``serve_meanwhile``."""

    def serve_meanwhile(self) -> bool:
        """Serve some of what other replicas have requested; return whether there may be more. Raises PeerLostError."""

    def apply_meanwhile(self, step: Step) -> bool:
        """Apply a plan, which may be about a request. Returns False if it must wait until this rank waits no more."""


class RankWait:
    """Waits for doorbells of other ranks, and stops waiting when the engine ends the epoch.

    A peer that is lost before it is a member does not end the wait: nothing of the slice concerns it.

    Attributes:
        unread: Messages of the engine that arrived during waits, oldest first; the worker has yet to handle them.
    """

    def __init__(self, wait: Wait, control: ControlClient, links: Links, meanwhile: Meanwhile | None) -> None:
        self._wait, self._control, self._links, self._meanwhile = wait, control, links, meanwhile
        self.unread = collections.deque[ToWorker]()

    def __call__(self, targets: Sequence[Target], timeout_s: float) -> int:
        """Wait as ``Endpoint.wait`` does. Raises EpochEndingError, PeerLostError, DeadlineError."""
        deadline, meanwhile, busy = time.monotonic() + timeout_s, self._meanwhile, False
        while True:
            left = deadline - time.monotonic()
            others = [] if meanwhile is None else meanwhile.targets_meanwhile()
            slice_s = 0.0 if busy else SLICE_S
            try:
                index = self._wait([*targets, *others], min(left, slice_s))
                if index < len(targets):
                    return index
            except DeadlineError:
                if left <= slice_s:
                    raise
            except PeerLostError as error:
                if not self._links.drop_newcomer(error.peer):
                    raise
            self._read_control()
            busy = meanwhile is not None and meanwhile.serve_meanwhile()

    def _read_control(self) -> None:
        while (message := self._control.poll()) is not None:
            meanwhile = None if self.unread else self._meanwhile
            if meanwhile is not None and isinstance(message, Step) and meanwhile.apply_meanwhile(message):
                continue
            self.unread.append(message)
            if isinstance(message, EndEpoch | Recall | Stop):
                raise EpochEndingError


class _Peer:
    def __init__(self, links: Links, name: str) -> None:
        own, theirs = links.leases(name)
        self.name = name
        self.nbytes = min(own.slot_nbytes, theirs.slot_nbytes) - ORDER_NBYTES
        self._arena: Arena = links.arena
        self._places = [own.slot(number) for number in range(SLOTS)]
        self.bells = [own.doorbell + ARRIVED + number for number in range(SLOTS)]
        self.outboxes: list[Outbox] = [
            links.outbox(name, Slot(theirs.slot(number), self.nbytes, theirs.doorbell + ARRIVED + number))
            for number in range(SLOTS)
        ]

    def read(self, slot: int, like: Tensor) -> Tensor:
        """Return a view of the tensor that has arrived in a slot, with the type and size of ``like``."""
        return torch.frombuffer(self._arena.view(self._places[slot], like.nbytes), dtype=like.dtype)


class Ranks:
    """Implements ``Sums``, an all-reduce, on CPUs. The compute worker's thread owns it."""

    may_leave = True

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._peers: list[_Peer] = []
        self._number = 0

    def connect(self, links: Links, wait: Wait, names: Sequence[str]) -> None:
        """Connect to the ranks ``names``, in order, this worker included. Must precede the first sum."""
        self._wait = wait
        self._peers = [_Peer(links, name) for name in names if name != links.name]

    def reset(self, first: int) -> None:
        self._number = first

    def meet(self) -> None:
        if self.rank.count > 1:
            self.reduce(torch.ones(1))

    def agree(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens unchanged: the same program draws the same tokens from the same bits."""
        return list(tokens)

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all ranks, added in the order of the ranks; overwrites ``x``.

        Raises PeerLostError, DeadlineError.
        """
        x = x.contiguous()
        flat = x.view(-1)
        step = min(peer.nbytes for peer in self._peers) // x.element_size()
        for start in range(0, len(flat), step):
            self._add(flat[start : start + step])
        return x

    def _add(self, piece: Tensor) -> None:
        self._number += 1
        slot, number = self._number % SLOTS, self._number
        own = as_numpy(piece)
        for peer in self._peers:
            peer.outboxes[slot].write_and_ring([own], number)
        deadline = time.monotonic() + TIMEOUT_S
        for peer in self._peers:
            try:
                self._wait([(peer.bells[slot], number)], deadline - time.monotonic())
            except DeadlineError as error:
                raise DeadlineError(
                    f"{peer.name} has not sent its part of a sum within {TIMEOUT_S:g} s: the ranks of a replica must "
                    "run the same slices"
                ) from error
        parts = [peer.read(slot, piece) for peer in self._peers]
        if self.rank.number == 0 or len(parts) == 1:  # a sum of two is the same in either order
            total = piece
        else:
            parts.insert(self.rank.number, piece.clone())
            total = piece.copy_(parts.pop(0))
        for part in parts:
            total += part


class SliceOrder:
    """Makes all ranks of a stage run slices of several lanes in the order of rank 0. The worker's thread owns it.

    Links between ranks carry no messages with credits, so doorbells for credits are free for announcements:
    ``FREED`` counts announcements sent, ``FETCHED`` announcements read. They are at the end of the first slot.
    """

    def __init__(self, links: Links, wait: Wait, names: Sequence[str]) -> None:
        """``names``: All ranks of the stage, in order, this worker included."""
        self._wait, self._arena = wait, links.arena
        self._first = self._count = 0  # number of the first slice of the epoch, and of the latest one
        leader, *others = names
        self.leads = leader == links.name
        self._followers: list[tuple[str, Outbox, int]] = []
        for name in others if self.leads else ():
            own, theirs = links.leases(name)
            place = Slot(theirs.slot(1) - ORDER_NBYTES, ORDER_NBYTES, theirs.doorbell + FREED)
            self._followers.append((name, links.outbox(name, place), own.doorbell + FETCHED))
        if not self.leads:
            own, theirs = links.leases(leader)
            self._bell, self._at = own.doorbell + FREED, own.slot(1) - ORDER_NBYTES
            self._leader = links.outbox(leader, Slot(theirs.slot(0), 0, theirs.doorbell + FETCHED))

    def reset(self, first: int) -> None:
        """Begin another epoch, whose slices are numbered from ``first`` on."""
        self._first = self._count = first

    def may_run(self, lane: int) -> bool:
        """Return whether a slice of ``lane`` may run: on rank 0 always, else if it is announced next."""
        if self.leads:
            return True
        number = self._count + 1
        if self._arena.sequence(self._bell) < number:
            return False
        at = self._at + number % ANNOUNCED * _LANE.size
        return _LANE.unpack(self._arena.view(at, _LANE.size)) == (lane,)

    @property
    def announcements(self) -> Sequence[Target]:
        """Doorbell of the next announcement, to wait for besides messages; empty if it has arrived, and for rank 0."""
        if self.leads or self._arena.sequence(self._bell) > self._count:
            return ()
        return ((self._bell, self._count + 1),)

    def on_slice(self, lane: int) -> None:
        """Record that a slice of ``lane`` runs now, after ``may_run`` was True; rank 0 announces it.

        Raises PeerLostError, DeadlineError.
        """
        number = self._count = self._count + 1
        if not self.leads:
            if number % (ANNOUNCED // 4) == 0:
                self._leader.write_and_ring([], number)
            return
        for name, outbox, bell in self._followers:
            if number > self._first + ANNOUNCED:
                try:
                    self._wait([(bell, number - ANNOUNCED)], TIMEOUT_S)
                except DeadlineError as error:
                    raise DeadlineError(
                        f"{name} has run none of the last {ANNOUNCED} slices within {TIMEOUT_S:g} s"
                    ) from error
            outbox.write_and_ring([_LANE.pack(lane)], number, number % ANNOUNCED * _LANE.size)
