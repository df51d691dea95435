"""Fetches K and V of prompt chunks from compute workers, piece by piece, in the gaps between messages.

If a prompt chunk's K and V were sent in messages, they would delay decode messages behind them. Instead they stay in
the compute worker's arena, and the memory worker reads them when it is idle: a message waits for one small piece at
most, a piece for ``MOST_IN_A_ROW`` messages. Segments move between memory workers in the same way
(``lamina.memory.moving``).
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from lamina.core.errors import DeadlineError
from lamina.dataplane.fetching import Fetcher, FetchFrom, FetchPiece
from lamina.dataplane.leases import ArenaPlan
from lamina.dataplane.wire import pulled_pieces
from lamina.memory.device.base import Slots
from lamina.memory.store import KvStore, StepTables
from lamina.transport.base import Arena, Target
from lamina.transport.endpoint import Wait

MOST_IN_A_ROW = 4  # requests served in a row while other work waits


class GapWork(Protocol):
    """Work for the gaps between messages, announced by doorbells."""

    @property
    def awaited(self) -> list[Target]:
        """Return the doorbells, any of which allows some work."""
        ...

    def serve(self, index: int) -> None:
        """Do the small task that doorbell ``index`` of ``awaited`` allows."""
        ...


class Puller(Fetcher):
    """Fetches K and V for a store. The memory worker's thread owns it."""

    def __init__(self, fetch: FetchFrom, arena: Arena, plan: ArenaPlan, store: KvStore) -> None:
        super().__init__(fetch, arena, plan)
        self._store = store
        self._in_a_row = 0  # requests since the last gap

    def request_pull(self, peer: str, start: int, layer: int, step: StepTables, on_done: Callable[[], None]) -> None:
        """Queue the fetch of a step's K and V of attention ``layer`` from offset ``start`` of a compute worker's arena.

        ``on_done`` is called once all are stored.
        """
        nbytes = self._store.attentions[layer].kv_bytes_per_token(self._store.dtype)
        pieces = list(pulled_pieces(step.rows.pulled, self.landing_nbytes // nbytes))
        left, first, turn = len(pieces), 0, step.plan.turn + self._store.first + layer

        def keep(slots: Slots, content: memoryview) -> None:
            nonlocal left
            self._store.keep(layer, slots, content)
            left -= 1
            if left == 0:
                on_done()

        for piece in pieces:
            slots = step.pulled_slots[first : first + piece.rows]
            place = start + first * nbytes
            kept = functools.partial(keep, slots)
            self.add_piece(FetchPiece(peer, place, piece.rows * nbytes, kept, step.door, turn))
            first += piece.rows

    def wait(
        self, wait: Wait, requests: Sequence[Target], timeout_s: float, others: GapWork, busy: bool = False
    ) -> tuple[int | None, int | None]:
        """Wait for one of the requests; in a gap, fetch one piece or serve ``others`` once.

        A gap is when no request has arrived, or when ``MOST_IN_A_ROW`` were served in a row while other work waited.

        Args:
            wait: Waits for doorbells.
            requests: Doorbells of requests.
            timeout_s: Longest wait for a request if there is nothing to fetch.
            others: Other work for gaps.
            busy: Whether the caller has work of its own, which it does after a call that returns no request.

        Returns (index of a request that has arrived, lane whose piece was stored), of which at least one is None.
        Raises PeerLostError.
        """
        if self._in_a_row == MOST_IN_A_ROW:
            requests = ()
        coming, gaps = self.awaited, others.awaited
        targets = [*requests, *coming, *gaps]
        ready = None
        with contextlib.suppress(DeadlineError):
            ready = wait(targets, 0.0 if self.can_start or not requests else timeout_s) if targets else None
        if ready is not None and ready < len(requests):
            self._in_a_row += bool(busy or self._waiting or self._urgent or coming or gaps)
            return ready, None
        self._in_a_row = 0
        if ready is None:
            if self.can_start:
                self.start_next()
            return None, None
        ready -= len(requests)
        if ready < len(coming):
            return None, self.finish(ready)
        others.serve(ready - len(coming))
        return None, None
