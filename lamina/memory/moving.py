"""Moves token ranges of segments between workers that hold KV while their sequences continue to decode.

Both ends learn of a move from the same plan and cut it into the same pieces, layer by layer. The source gathers a
piece into a staging slot of its arena and rings; the target fetches the piece, copies it into its slab and rings back,
which frees the staging slot. Both work in the gaps between messages (``lamina.memory.pulls``).

A source runs its moves one after another, in the order of their numbers, since they share its staging slots.
Several sources may send to one target at the same time.

Doorbells count the pieces of all moves between two workers in an epoch, beginning at ``first_use(epoch)``. The
moves' own numbers would not do: an engine that takes over running workers starts these at 1 again.

Both ends forget a sequence when they are told to release it. Pieces that arrive later are discarded, since other
sequences may own the slots. The staging slots of a discarded move are not freed: what overwrites them damages only
pieces that are discarded.
"""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lamina.core.steps import KvMove, StepPlan
from lamina.core.topology import Epoch
from lamina.dataplane.channel import first_use
from lamina.dataplane.fetching import FetchPiece
from lamina.dataplane.leases import STAGED, STAGING_SLOTS, TAKEN, ArenaPlan, Lease
from lamina.dataplane.slot import Outbox, Slot
from lamina.dataplane.wire import move_pieces
from lamina.memory.pulls import Puller
from lamina.memory.store import KvStore
from lamina.transport.base import Arena, Target

OpenOutbox = Callable[[str, Slot], Outbox]
"""Opens an outbox to a peer, with the arguments of ``Links.outbox``."""


@dataclass(eq=False)
class _Move:
    """A move from or to this worker.

    Attributes:
        before: Count of both doorbells before the move's first piece.
        next: The next piece to stage or fetch; ``len(pieces)`` at a source that waits for the last acknowledgement.
        arrived: Pieces that have arrived, at the target.
        wanted: False if arriving pieces are discarded.
    """

    move: KvMove
    before: int
    slots: npt.NDArray[np.int32]
    pieces: list[tuple[int, int, int]]
    next: int = 0
    arrived: int = 0
    wanted: bool = True


class KvMoves:
    """The moves from and to this worker, as ``lamina.memory.pulls.GapWork``. Its thread owns it."""

    def __init__(
        self,
        store: KvStore,
        puller: Puller,
        arena: Arena,
        plan: ArenaPlan,
        leases: Mapping[str, tuple[Lease, Lease]],
        outbox: OpenOutbox,
        on_done: Callable[[KvMove], None],
        epoch: Epoch,
    ) -> None:
        """``leases``: for each other memory worker, this worker's lease to it and its lease to this worker.

        ``on_done`` is called with every move to this worker whose last piece has arrived.
        """
        self._store, self._puller, self._plan, self._on_done = store, puller, plan, on_done
        self._own, self._outbox = store.worker, outbox
        self._staging = [
            arena.view(plan.staging(number), plan.landing_nbytes)
            for number in range(STAGING_SLOTS if plan.stages else 0)
        ]
        self.change(leases)
        self._outgoing: list[_Move] = []
        self._incoming: list[_Move] = []
        self._moving: set[int] = set()
        self._reached = _counts(epoch)

    def change(self, leases: Mapping[str, tuple[Lease, Lease]]) -> None:
        """Replace the other memory workers. No move from or to a removed worker may be active."""
        doorbells = {name: theirs.doorbell for name, (_, theirs) in leases.items()}
        self._staged = {name: self._outbox(name, Slot(0, 0, bell + STAGED)) for name, bell in doorbells.items()}
        self._taken = {name: self._outbox(name, Slot(0, 0, bell + TAKEN)) for name, bell in doorbells.items()}
        self._bells = {name: (own.doorbell + STAGED, own.doorbell + TAKEN) for name, (own, _) in leases.items()}

    @property
    def active(self) -> bool:
        """Whether a sequence is moving from or to this worker."""
        return bool(self._moving)

    def apply(self, plan: StepPlan) -> None:
        """Begin and end the moves of a plan, after the store has applied it."""
        self.release(plan.released)
        for move in plan.moves:
            if self._own in (move.source, move.target):
                self._begin(move)

    def release(self, sequences: Sequence[int]) -> None:
        """End the moves of these sequences, after the store has forgotten them."""
        for sequence in sequences:
            self._drop(sequence)

    def _drop(self, sequence: int) -> None:
        self._moving.discard(sequence)
        self._outgoing = [own for own in self._outgoing if own.move.sequence != sequence]
        for coming in self._incoming:
            coming.wanted = coming.wanted and coming.move.sequence != sequence
        self._incoming = [coming for coming in self._incoming if coming.wanted]

    def _begin(self, move: KvMove) -> None:
        self._moving.add(move.sequence)
        slots = self._store.held.slots_of(move)
        specs = self._store.attentions
        pieces = move_pieces(specs, self._store.element, len(slots), self._plan.landing_nbytes)
        pair = move.source, move.target
        before = self._reached[pair]
        self._reached[pair] += len(pieces)
        moves = self._outgoing if move.source == self._own else self._incoming
        moves.append(_Move(move, before, slots, pieces))

    @property
    def awaited(self) -> list[Target]:
        """Return the doorbells that allow the next piece of the first outgoing and of every incoming move."""
        return [self._free_slot_target(own) for own in self._outgoing[:1]] + [
            (self._bells[coming.move.source][0], coming.before + coming.next + 1)
            for coming in self._incoming
            if coming.next < len(coming.pieces)
        ]

    def _free_slot_target(self, own: _Move) -> Target:
        """Return the doorbell of acknowledged pieces, and its value once the next piece has a free staging slot.

        After the last piece, that is the value once all pieces have been acknowledged.
        """
        ended = own.next == len(own.pieces)
        doorbell, piece = self._bells[own.move.target][1], own.next - (1 if ended else STAGING_SLOTS)
        return doorbell, 0 if piece < 0 else own.before + piece + 1

    def serve(self, index: int) -> None:
        """Stage or fetch one piece, after doorbell ``index`` of ``awaited`` has rung. Raises PeerLostError."""
        leaving = self._outgoing[:1]
        if index < len(leaving):
            self._stage(leaving[0])
        else:
            unfetched = [coming for coming in self._incoming if coming.next < len(coming.pieces)]
            self._fetch(unfetched[index - len(leaving)])

    def _stage(self, own: _Move) -> None:
        if own.next == len(own.pieces):  # the next move may use the staging slots
            self._outgoing.remove(own)
            return
        layer, first, last = own.pieces[own.next]
        self._store.device.read(layer, own.slots[first:last], self._staging[own.next % STAGING_SLOTS])
        self._staged[own.move.target].write_and_ring([], own.before + own.next + 1)
        own.next += 1

    def _fetch(self, coming: _Move) -> None:
        layer, first, last = coming.pieces[coming.next]
        nbytes = (last - first) * self._store.attentions[layer].slab_bytes_per_token(self._store.element)
        keep = functools.partial(self._keep, coming, coming.next)
        self._puller.add_piece(FetchPiece(coming.move.source, self._plan.staging(coming.next), nbytes, keep))
        coming.next += 1

    def _keep(self, coming: _Move, number: int, content: memoryview) -> None:
        if not coming.wanted:
            return
        layer, first, last = coming.pieces[number]
        self._store.device.restore(layer, coming.slots[first:last], content)
        self._taken[coming.move.source].write_and_ring([], coming.before + number + 1)
        coming.arrived += 1
        if coming.arrived == len(coming.pieces):
            self._incoming.remove(coming)
            self._on_done(coming.move)

    def drop(self, epoch: Epoch) -> None:
        """Abort all moves, before ``epoch`` begins."""
        self._outgoing.clear()
        self._incoming.clear()
        self._moving.clear()
        self._reached = _counts(epoch)


def _counts(epoch: Epoch) -> collections.defaultdict[tuple[str, str], int]:
    """Return doorbell counts at the beginning of an epoch, by (source, target)."""
    first = first_use(epoch)
    return collections.defaultdict(lambda: first)
