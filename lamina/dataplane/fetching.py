"""Fetches bytes that peers have laid out in their arenas, piece by piece, a few at a time, into landing slots."""

import collections
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from lamina.dataplane.leases import LANDINGS, ArenaPlan
from lamina.transport.base import Arena, Fetch, Target

FetchFrom = Callable[[str, Fetch], None]
"""Starts a fetch from a peer, with the arguments of ``Links.fetch``."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Bytes [offset, offset + nbytes) of a peer's arena.

    Attributes:
        keep: called with the bytes once they have arrived.
        lane: of the attention whose K and V they are; -1: they are something else.
        turn: of that attention.
    """

    peer: str
    offset: int
    nbytes: int
    keep: Callable[[memoryview], None]
    lane: int = -1
    turn: int = 0


class Fetcher:
    """Fetches pieces into landing slots, and keeps those that wait and those in flight. The worker's thread owns it."""

    def __init__(self, fetch: FetchFrom, arena: Arena, plan: ArenaPlan) -> None:
        self._fetch = fetch
        self.landing_nbytes = plan.landing_nbytes
        self._places = [plan.landing(number) for number in range(LANDINGS)]
        self._views = [arena.view(place, plan.landing_nbytes) for place in self._places]
        self._free = list(range(LANDINGS))
        self._sequences = [0] * LANDINGS
        self._urgent: collections.deque[Piece] = collections.deque()
        self._waiting: collections.deque[Piece] = collections.deque()
        self._coming: list[tuple[Piece, int]] = []  # in flight, with its landing slot, in the order of fetching
        self._left: collections.Counter[tuple[int, int]] = collections.Counter()  # pieces by lane and turn

    def add_piece(self, piece: Piece) -> None:
        """Fetch a piece, after all that were added before."""
        self._waiting.append(piece)
        self._left[piece.lane, piece.turn] += 1

    def add_body(self, peer: str, offset: int, into: memoryview, on_done: Callable[[], None]) -> None:
        """Fetch ``len(into)`` bytes of a message before all pieces; ``on_done`` is called after the last byte."""
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
            self._urgent.append(Piece(peer, offset + at, nbytes, keep_at(at)))
            self._left[-1, 0] += 1

    def fetch_first(self, lane: int, turn: int) -> None:
        """Fetch the pieces of attention ``turn`` of a lane before all others."""
        chosen = [piece for piece in self._waiting if (piece.lane, piece.turn) == (lane, turn)]
        if chosen and len(chosen) < len(self._waiting):
            others = [piece for piece in self._waiting if (piece.lane, piece.turn) != (lane, turn)]
            self._waiting = collections.deque([*chosen, *others])

    def is_done(self, lane: int, turn: int) -> bool:
        """True if nothing up to attention ``turn`` of the lane is left to fetch."""
        return not any(left_lane == lane and left_turn <= turn for left_lane, left_turn in self._left)

    @property
    def awaited(self) -> list[Target]:
        """The doorbells of the pieces in flight, for ``Endpoint.wait``."""
        return [(number, self._sequences[number]) for _, number in self._coming]

    @property
    def may_ask(self) -> bool:
        """True if a piece waits to be fetched and a landing slot is free."""
        return bool((self._urgent or self._waiting) and self._free)

    def ask(self) -> None:
        """Begin to fetch the next piece. Raises PeerLostError."""
        piece, number = (self._urgent or self._waiting).popleft(), self._free.pop()
        self._sequences[number] += 1
        self._coming.append((piece, number))
        to, sequence = self._places[number], self._sequences[number]
        self._fetch(
            piece.peer, Fetch(offset=piece.offset, nbytes=piece.nbytes, to=to, doorbell=number, sequence=sequence)
        )

    def keep(self, index: int) -> int | None:
        """Keep the piece announced by number ``index`` of ``awaited``; returns the lane of its attention, if any."""
        piece, number = self._coming.pop(index)
        self._free.append(number)
        self._finish(piece)
        piece.keep(self._views[number])
        return piece.lane if piece.lane >= 0 else None

    def forget(self, peer: str) -> None:
        """Drop the pieces of a peer that is disconnected: they cannot arrive."""
        for queue in (self._urgent, self._waiting):
            for piece in [piece for piece in queue if piece.peer == peer]:
                queue.remove(piece)
                self._finish(piece)
        for piece, number in [coming for coming in self._coming if coming[0].peer == peer]:
            self._coming.remove((piece, number))
            self._free.append(number)
            self._finish(piece)

    def drop_all(self) -> None:
        """Drop all pieces. Pieces in flight occupy their landing slots until they arrive."""
        self._urgent.clear()
        self._waiting.clear()
        self._coming = [
            (dataclasses.replace(piece, keep=lambda content: None, lane=-1), number) for piece, number in self._coming
        ]
        self._left = collections.Counter((piece.lane, piece.turn) for piece, _ in self._coming)

    def _finish(self, piece: Piece) -> None:
        key = piece.lane, piece.turn
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key]
