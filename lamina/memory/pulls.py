"""K and V that are fetched from other workers, piece by piece, in the gaps between messages.

A prompt chunk's K and V would hold up the messages of decoding sequences behind them. So they stay in the arena of the
compute worker that computed them, and the memory worker reads them when it has nothing else to do: a message that
arrives meanwhile waits for one small piece, and a piece for a few messages at most. Segments that move from another
memory worker arrive the same way (``lamina.memory.moving``).
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lamina.core.errors import DeadlineError
from lamina.dataplane.fetching import Fetcher, FetchFrom, Piece
from lamina.dataplane.leases import ArenaPlan
from lamina.dataplane.wire import pulled_pieces
from lamina.memory.store import KvStore, StepTables
from lamina.transport.base import Arena, Target

MOST_IN_A_ROW = 4  # requests served in a row while other work waits

Wait = Callable[[Sequence[Target], float], int]
"""Waits for messages, with the arguments and result of ``Endpoint.wait``."""


class GapWork(Protocol):
    """Other work for the gaps between messages, announced by doorbells."""

    @property
    def awaited(self) -> list[Target]:
        """Any of these allows some work, for ``Endpoint.wait``."""
        ...

    def serve(self, index: int) -> None:
        """Do the small task that number ``index`` of ``awaited`` allows."""
        ...


class Puller(Fetcher):
    """Fetches K and V for a store. The memory worker's thread owns it."""

    def __init__(self, fetch: FetchFrom, arena: Arena, plan: ArenaPlan, store: KvStore) -> None:
        super().__init__(fetch, arena, plan)
        self._store = store
        self._in_a_row = 0  # requests since the last gap

    def request_pull(self, peer: str, start: int, layer: int, step: StepTables, on_done: Callable[[], None]) -> None:
        """Pull the K and V of attention ``layer`` of a step, which lie from ``start`` on in the arena of the compute
        worker that has announced them; ``on_done`` is called once all are kept."""
        nbytes = self._store.attentions[layer].kv_bytes_per_token(self._store.dtype)
        pieces = list(pulled_pieces(step.rows.pulled, self.landing_nbytes // nbytes))
        left, first = len(pieces), 0

        def keep(slots: npt.NDArray[np.int32], content: memoryview) -> None:
            nonlocal left
            self._store.keep(layer, slots, content)
            left -= 1
            if left == 0:
                on_done()

        for piece in pieces:
            slots = step.pulled_slots[first : first + piece.rows]
            place = start + first * nbytes
            kept = functools.partial(keep, slots)
            self.add_piece(Piece(peer, place, piece.rows * nbytes, kept, step.door, step.plan.turn + layer))
            first += piece.rows

    def wait(
        self, wait: Wait, requests: Sequence[Target], timeout_s: float, others: GapWork, busy: bool = False
    ) -> tuple[int | None, int | None]:
        """Wait for one of the requests; in a gap, pull one piece or serve ``others`` once.

        A gap is when no request has arrived, or when several were served in a row while other work waited: pieces,
        ``others``, or the caller's own if it is ``busy``, which the caller does after a call that returns no request.

        Returns (index of a request that has arrived, lane of a piece that was kept); one of them is None, or both are,
        such as after ``timeout_s`` without a request and nothing to pull. Raises PeerLostError.
        """
        if self._in_a_row == MOST_IN_A_ROW:
            requests = ()
        coming, gaps = self.awaited, others.awaited
        targets = [*requests, *coming, *gaps]
        ready = None
        with contextlib.suppress(DeadlineError):
            ready = wait(targets, 0.0 if self.may_ask or not requests else timeout_s) if targets else None
        if ready is not None and ready < len(requests):
            self._in_a_row += bool(busy or self._waiting or self._urgent or coming or gaps)
            return ready, None
        self._in_a_row = 0
        if ready is None:
            if self.may_ask:
                self.ask()
            return None, None
        ready -= len(requests)
        if ready < len(coming):
            return None, self.keep(ready)
        others.serve(ready - len(coming))
        return None, None
