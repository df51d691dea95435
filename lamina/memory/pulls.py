"""K and V of prompt chunks, pulled from compute workers in the gaps between messages.

A chunk's K and V would hold up the messages of decoding sequences behind them. So they stay where they are computed, in
a place of the compute worker's arena, and the memory worker reads them piece by piece when it has nothing else to do:
a message that arrives meanwhile waits for one small piece, and pieces for a few messages at most.
"""

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lamina.errors import DeadlineError
from lamina.kernels.attention import append
from lamina.memory.store import KvStore, StepTables
from lamina.transport.base import Arena
from lamina.transport.channel import Layout
from lamina.transport.wire import keys_values, pulled_pieces

MOST_IN_A_ROW = 4  # requests served while something is to be pulled

Fetch = Callable[[str, int, int, int, int, int], None]
"""Peer's name, then as ``Endpoint.fetch``."""
Wait = Callable[[Sequence[tuple[int, int]], float], int]
"""As ``Endpoint.wait``."""


@dataclass(frozen=True)
class _Piece:
    peer: str
    lane: int
    turn: int
    layer: int
    offset: int  # in the peer's arena
    slots: npt.NDArray[np.int32]


class Puller:
    """What is to be pulled, what is on its way, and where it goes. The memory worker's thread owns it."""

    def __init__(self, fetch: Fetch, arena: Arena, layout: Layout, store: KvStore) -> None:
        self._fetch, self._layout, self._store = fetch, layout, store
        places = [layout.landing(number) for number in range(layout.landings)]
        self._places = [(place, arena.view(place.offset, place.nbytes)) for place in places]
        self._free = list(range(layout.landings))
        self._sequences = [0] * layout.landings
        self._waiting: collections.deque[_Piece] = collections.deque()
        self._coming: list[tuple[_Piece, int]] = []  # and the number of its place, in the order of asking
        self._left: collections.Counter[tuple[int, int]] = collections.Counter()  # pieces by lane and turn
        self._in_a_row = 0  # requests since the last piece

    def add(self, peer: str, layer: int, step: StepTables) -> None:
        """Pull what attention ``layer`` of a step keeps, from the compute worker that has announced it."""
        lane, turn = step.plan.lane, step.plan.turn + layer
        nbytes = self._store.layers[layer].spec.kv_bytes_per_token(self._store.dtype)
        start = self._layout.bulk(lane, turn)
        first = 0
        for piece in pulled_pieces(step.rows.pulled, self._layout.landing_nbytes // nbytes):
            slots = step.pulled_slots[first : first + piece.rows]
            first += piece.rows
            self._waiting.append(_Piece(peer, lane, turn, layer, start + piece.row * nbytes, slots))
            self._left[lane, turn] += 1

    def is_done(self, lane: int, turn: int) -> bool:
        """True if nothing up to attention ``turn`` of the lane is left to pull."""
        return not any(left_lane == lane and left_turn <= turn for left_lane, left_turn in self._left)

    def wait(self, wait: Wait, requests: Sequence[tuple[int, int]], timeout_s: float) -> tuple[int | None, int | None]:
        """Wait for one of the requests, and pull by a piece at most if none is there or some have gone before.

        Returns (index of a request that is there, lane of a piece that was kept), one of them None or both. Raises
        DeadlineError if there is no request for ``timeout_s`` and nothing to pull; what ``wait`` and ``ask`` raise.
        """
        if self._in_a_row == MOST_IN_A_ROW:
            self._in_a_row = 0
            requests = ()
        targets = [*requests, *self.awaited]
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
            self._in_a_row += bool(self._waiting or self._coming)
            return ready, None
        self._in_a_row = 0
        return None, self.keep(ready - len(requests))

    @property
    def awaited(self) -> list[tuple[int, int]]:
        """Where what is on its way is announced, for ``Endpoint.wait``."""
        return [(self._places[number][0].doorbell, self._sequences[number]) for _, number in self._coming]

    @property
    def may_ask(self) -> bool:
        """True if there is something to ask for, and a place for it."""
        return bool(self._waiting and self._free)

    def ask(self) -> None:
        """Ask for the next piece. Raises PeerLostError."""
        piece, number = self._waiting.popleft(), self._free.pop()
        place, _ = self._places[number]
        self._sequences[number] += 1
        self._coming.append((piece, number))
        nbytes = len(piece.slots) * self._store.layers[piece.layer].spec.kv_bytes_per_token(self._store.dtype)
        self._fetch(piece.peer, piece.offset, nbytes, place.offset, place.doorbell, self._sequences[number])

    def keep(self, index: int) -> int:
        """Keep the piece whose arrival is number ``index`` of ``awaited``; the lane that it belongs to."""
        piece, number = self._coming.pop(index)
        cache = self._store.layers[piece.layer]
        k, v = keys_values(self._places[number][1], cache.spec, self._store.dtype, 0, len(piece.slots))
        append(cache.k, cache.v, k, v, piece.slots, self._store.threads)
        self._free.append(number)
        self._finish(piece)
        return piece.lane

    def forget(self, peer: str) -> None:
        """Pull nothing more from a peer that is disconnected: nothing of it can arrive."""
        for piece in [piece for piece in self._waiting if piece.peer == peer]:
            self._waiting.remove(piece)
            self._finish(piece)
        for piece, number in [coming for coming in self._coming if coming[0].peer == peer]:
            self._coming.remove((piece, number))
            self._free.append(number)
            self._finish(piece)

    def _finish(self, piece: _Piece) -> None:
        key = piece.lane, piece.turn
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key]
