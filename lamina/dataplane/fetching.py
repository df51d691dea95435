"""Fetches bytes from the arenas of peers into landing slots, in pieces, with a bounded number in flight."""

import collections
import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass

from lamina.dataplane.leases import LANDINGS, ArenaPlan
from lamina.transport.base import Arena, Fetch, Target

FetchFrom = Callable[[str, Fetch], None]
"""Starts a fetch from the named peer."""


@dataclass(frozen=True, eq=False)
class FetchPiece:
    """Bytes [offset, offset + nbytes) of a peer's arena, to be fetched at once.

    Attributes:
        keep: Called with the bytes once they have arrived; it copies them out of the landing slot.
        lane: Lane of the attention that reads these K and V; -1 if the bytes are not K and V.
        turn: Number of that attention, counted over all steps of the lane.
    """

    peer: str
    offset: int
    nbytes: int
    keep: Callable[[memoryview], None]
    lane: int = -1
    turn: int = 0


class Fetcher:
    """Queues pieces, and fetches one into each free landing slot. The worker's thread owns it."""

    def __init__(self, fetch: FetchFrom, arena: Arena, plan: ArenaPlan) -> None:
        self._fetch = fetch
        self.landing_nbytes = plan.landing_nbytes
        self._places = [plan.landing(number) for number in range(LANDINGS)]
        self._views = [arena.view(place, plan.landing_nbytes) for place in self._places]
        self._free = list(range(LANDINGS))
        self._sequences = [0] * LANDINGS
        self._urgent: collections.deque[FetchPiece] = collections.deque()
        self._waiting: collections.deque[FetchPiece] = collections.deque()
        self._in_flight: list[tuple[FetchPiece, int]] = []  # pieces with their landing slots, oldest first
        self._unfinished = collections.Counter[tuple[int, int]]()  # pieces by lane and turn

    def add_piece(self, piece: FetchPiece) -> None:
        """Queue a piece behind all pieces queued earlier."""
        self._waiting.append(piece)
        self._unfinished[piece.lane, piece.turn] += 1

    def add_body(self, peer: str, offset: int, into: memoryview, on_done: Callable[[], None]) -> None:
        """Queue the ``len(into)`` bytes of a message ahead of all K and V; call ``on_done`` after the last byte."""
        left = len(into)

        def keep_at(at: int) -> Callable[[memoryview], None]:
            def keep(content: memoryview) -> None:
                nonlocal left
                nbytes = min(self.landing_nbytes, len(into) - at)
                into[at : at + nbytes] = content[:nbytes]
                left -= nbytes
                if left == 0:
                    on_done()

            return keep

        for at in range(0, len(into), self.landing_nbytes):
            nbytes = min(self.landing_nbytes, len(into) - at)
            self._urgent.append(FetchPiece(peer, offset + at, nbytes, keep_at(at)))
            self._unfinished[-1, 0] += 1

    def fetch_first(self, lane: int, turn: int) -> None:
        """Move the pieces of attention ``turn`` of a lane to the front of the queue."""
        chosen = [piece for piece in self._waiting if (piece.lane, piece.turn) == (lane, turn)]
        if chosen and len(chosen) < len(self._waiting):
            others = [piece for piece in self._waiting if (piece.lane, piece.turn) != (lane, turn)]
            self._waiting = collections.deque([*chosen, *others])

    def is_done(self, lane: int, turn: int) -> bool:
        """Return whether all pieces of the lane, up to attention ``turn``, have arrived."""
        return not any(left_lane == lane and left_turn <= turn for left_lane, left_turn in self._unfinished)

    @property
    def awaited(self) -> list[Target]:
        """Doorbells of the pieces in flight and the values they will have, oldest first, for ``Endpoint.wait``."""
        return [(number, self._sequences[number]) for _, number in self._in_flight]

    @property
    def can_start(self) -> bool:
        """Whether a piece is queued and a landing slot is free."""
        return bool((self._urgent or self._waiting) and self._free)

    def start_next(self) -> None:
        """Start to fetch the next queued piece. Raises PeerLostError."""
        piece, number = (self._urgent or self._waiting).popleft(), self._free.pop()
        self._sequences[number] += 1
        self._in_flight.append((piece, number))
        to, sequence = self._places[number], self._sequences[number]
        self._fetch(
            piece.peer, Fetch(offset=piece.offset, nbytes=piece.nbytes, to=to, doorbell=number, sequence=sequence)
        )

    def finish(self, index: int) -> int | None:
        """Pass on the bytes of the piece whose doorbell is ``awaited[index]``, and free its landing slot.

        Returns:
            The lane of the attention that reads them; None if they are not K and V.
        """
        piece, number = self._in_flight.pop(index)
        self._free.append(number)
        self._forget(piece)
        piece.keep(self._views[number])
        return piece.lane if piece.lane >= 0 else None

    def forget(self, peer: str) -> None:
        """Drop the pieces of a disconnected peer, from which nothing arrives any more."""
        for queue in (self._urgent, self._waiting):
            for piece in [piece for piece in queue if piece.peer == peer]:
                queue.remove(piece)
                self._forget(piece)
        for piece, number in [coming for coming in self._in_flight if coming[0].peer == peer]:
            self._in_flight.remove((piece, number))
            self._free.append(number)
            self._forget(piece)

    def drop_queued(self, members: Collection[str]) -> None:
        """Drop the queued pieces of peers that are not in ``members``: they have left.

        Nobody needs these pieces. Those in flight may still arrive, and occupy their landing slots until then, or until
        ``forget``.
        """
        for queue in (self._urgent, self._waiting):
            for piece in [piece for piece in queue if piece.peer not in members]:
                queue.remove(piece)
                self._forget(piece)

    def drop_all(self) -> None:
        """Drop all pieces. Pieces in flight occupy their landing slots until they arrive."""
        self._urgent.clear()
        self._waiting.clear()
        self._in_flight = [
            (dataclasses.replace(piece, keep=lambda content: None, lane=-1), number)
            for piece, number in self._in_flight
        ]
        self._unfinished = collections.Counter((piece.lane, piece.turn) for piece, _ in self._in_flight)

    def _forget(self, piece: FetchPiece) -> None:
        key = piece.lane, piece.turn
        self._unfinished[key] -= 1
        if not self._unfinished[key]:
            del self._unfinished[key]
