"""K and V that are fetched from other workers, piece by piece, in the gaps between messages.

A prompt chunk's K and V would hold up the messages of decoding sequences behind them. So they stay in the arena of the
compute worker that computed them, and the memory worker reads them when it has nothing else to do: a message that
arrives meanwhile waits for one small piece, and a piece for a few messages at most. Segments that move from another
memory worker arrive the same way (``lamina.memory.migrations``).
"""

import collections
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lamina.errors import DeadlineError
from lamina.memory.store import KvStore, StepTables
from lamina.protocol.channel import Layout
from lamina.protocol.wire import pulled_pieces
from lamina.transport.base import Arena, Fetch

MOST_IN_A_ROW = 4  # requests served in a row while pieces wait to be pulled

Target = tuple[int, int]
"""A doorbell and the number that it has to reach."""
FetchFrom = Callable[[str, Fetch], None]
"""As ``Links.fetch``."""
Wait = Callable[[Sequence[Target], float], int]
"""As ``Endpoint.wait``."""


@dataclass(frozen=True)
class Piece:
    """Bytes [offset, offset + nbytes) of a peer's arena.

    Attributes:
        keep: called with the bytes once they have arrived.
        lane, turn: of the attention that they belong to; lane -1: they belong to none.
    """

    peer: str
    offset: int
    nbytes: int
    keep: Callable[[memoryview], None]
    lane: int = -1
    turn: int = 0


class GapWork(Protocol):
    """Other work for the gaps between messages, announced by doorbells."""

    @property
    def awaited(self) -> list[Target]:
        """Any of these allows some work, for ``Endpoint.wait``."""
        ...

    def serve(self, index: int) -> None:
        """Do the small task that number ``index`` of ``awaited`` allows."""
        ...


class Puller:
    """The pieces to pull, those in flight, and where they go. The memory worker's thread owns it."""

    def __init__(self, fetch: FetchFrom, arena: Arena, layout: Layout, store: KvStore) -> None:
        self._fetch, self._layout, self._store = fetch, layout, store
        places = [layout.landing(number) for number in range(layout.landings)]
        self._places = [(place, arena.view(place.offset, place.nbytes)) for place in places]
        self._free = list(range(layout.landings))
        self._sequences = [0] * layout.landings
        self._waiting: collections.deque[Piece] = collections.deque()
        self._coming: list[tuple[Piece, int]] = []  # with the number of its place, in the order of fetching
        self._left: collections.Counter[tuple[int, int]] = collections.Counter()  # pieces by lane and turn
        self._in_a_row = 0  # requests since the last piece

    def add(self, peer: str, layer: int, step: StepTables) -> None:
        """Pull the K and V of attention ``layer`` of a step, from the compute worker that has announced them."""
        lane, turn = step.plan.lane, step.plan.turn + layer
        nbytes = self._store.layers[layer].spec.kv_bytes_per_token(self._store.dtype)
        start = self._layout.bulk(lane, turn)
        first = 0
        for piece in pulled_pieces(step.rows.pulled, self._layout.landing_nbytes // nbytes):
            slots: npt.NDArray[np.int32] = step.pulled_slots[first : first + piece.rows]
            first += piece.rows
            keep = functools.partial(self._store.keep, layer, slots)
            place = start + piece.row * nbytes
            self.add_piece(Piece(peer, place, piece.rows * nbytes, keep, lane=lane, turn=turn))

    def add_piece(self, piece: Piece) -> None:
        """Pull this piece, after all that were added before."""
        self._waiting.append(piece)
        self._left[piece.lane, piece.turn] += 1

    def is_done(self, lane: int, turn: int) -> bool:
        """True if nothing up to attention ``turn`` of the lane is left to pull."""
        return not any(left_lane == lane and left_turn <= turn for left_lane, left_turn in self._left)

    def wait(
        self, wait: Wait, requests: Sequence[Target], timeout_s: float, others: GapWork
    ) -> tuple[int | None, int | None]:
        """Wait for one of the requests; if none has arrived, or several were served in a row, pull one piece or serve
        ``others`` once.

        Returns (index of a request that has arrived, lane of a piece that was kept); one of them is None, or both are.
        Raises DeadlineError without a request for ``timeout_s`` and nothing to pull; what ``wait`` and ``ask`` raise.
        """
        if self._in_a_row == MOST_IN_A_ROW:
            self._in_a_row = 0
            requests = ()
        coming, gaps = self.awaited, others.awaited
        targets = [*requests, *coming, *gaps]
        try:
            ready = wait(targets, 0.0 if self.may_ask or not requests else timeout_s) if targets else len(requests)
        except DeadlineError:
            if requests and not self.may_ask:
                raise
            ready = None
        if ready is None or ready >= len(targets):
            if self.may_ask:
                self.ask()
            return None, None
        if ready < len(requests):
            self._in_a_row += bool(self._waiting or coming or gaps)
            return ready, None
        self._in_a_row = 0
        ready -= len(requests)
        if ready < len(coming):
            return None, self.keep(ready)
        others.serve(ready - len(coming))
        return None, None

    @property
    def awaited(self) -> list[Target]:
        """The doorbells of the pieces in flight, for ``Endpoint.wait``."""
        return [(self._places[number][0].doorbell, self._sequences[number]) for _, number in self._coming]

    @property
    def may_ask(self) -> bool:
        """True if a piece waits to be fetched and a place is free."""
        return bool(self._waiting and self._free)

    def ask(self) -> None:
        """Begin to fetch the next piece. Raises PeerLostError."""
        piece, number = self._waiting.popleft(), self._free.pop()
        place, _ = self._places[number]
        self._sequences[number] += 1
        self._coming.append((piece, number))
        fetch = Fetch(
            offset=piece.offset,
            nbytes=piece.nbytes,
            to=place.offset,
            doorbell=place.doorbell,
            sequence=self._sequences[number],
        )
        self._fetch(piece.peer, fetch)

    def keep(self, index: int) -> int | None:
        """Keep the piece announced by number ``index`` of ``awaited``; returns the lane that it belongs to, if any."""
        piece, number = self._coming.pop(index)
        self._free.append(number)
        self._finish(piece)
        piece.keep(self._places[number][1])
        return piece.lane if piece.lane >= 0 else None

    def forget(self, peer: str) -> None:
        """Drop the pieces of a peer that is disconnected: they cannot arrive."""
        for piece in [piece for piece in self._waiting if piece.peer == peer]:
            self._waiting.remove(piece)
            self._finish(piece)
        for piece, number in [coming for coming in self._coming if coming[0].peer == peer]:
            self._coming.remove((piece, number))
            self._free.append(number)
            self._finish(piece)

    def _finish(self, piece: Piece) -> None:
        key = piece.lane, piece.turn
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key]
