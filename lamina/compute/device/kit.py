"""What differs between a card and the emulation of one for tests; all other code for GPUs runs on both."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lamina.lowering.gpu_slices import Main
from lamina.transport.device.inboxes import Maker

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of rows that slices are recorded for; decode steps have few. A product of so few rows takes about as long as
reading its weight, so that padding costs little; larger steps run operator by operator."""

MULTIPLE = 64  # of the rows of larger steps


def padded_rows(rows: int) -> int:
    """Return the number of rows that a step of ``rows`` runs with."""
    return next((size for size in ROWS if size >= rows), -(-rows // MULTIPLE) * MULTIPLE)


Replay = Callable[[], None]


class Kit(Protocol):
    """What a card can do that torch does not offer on every device alike.

    Attributes:
        place: where tensors are.
        backend: of torch.distributed, by which ranks add up.
        grouped: torch's grouped product of bfloat16 runs without the host, so that it can be recorded.
        name: of this kind of card, under which measurements are kept.
    """

    place: torch.device
    backend: str
    grouped: bool
    name: str

    def capture(self, work: Callable[[], object]) -> Replay:
        """Record what ``work`` runs, which must not depend on values, and return how to run it again, on the same
        memory. ``work`` may be called more than once."""

    def compiled(self, graph: Main) -> Main | None:
        """Return the graph with its operators fused, for all numbers of rows: compiles when it is called, which raises
        RuntimeError for what cannot be fused. None: nothing is fused here."""

    def time_replay(self, replay: Replay) -> float:
        """Return how many seconds a recording takes."""

    def fused(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
        """Return the attention of a chunk to itself; None if the card has no fused kernel for this element type."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host that the card reads and writes without the host."""

    def limit(self, share: float) -> None:
        """Limit the share of the card's memory that this process may use."""

    def register_own(self, memory: memoryview) -> None:
        """Make memory that peers write into quick to copy from."""

    def map_peer(self, peer: str, memory: memoryview) -> bool:
        """Let programs of the card write into a peer's memory, until ``unmap_peer``. False if they will not."""

    def unmap_peer(self, peer: str) -> None:
        """Stop writing into a peer's memory."""

    def inbox_maker(self) -> Maker | None:
        """Return the maker of inboxes in the card's memory; None if the card can share no memory."""

    def write_rows(self, source: Tensor, table: Tensor, bodies: Tensor, lead: int) -> None:
        """Write rows of ``source`` [S, h, D] into messages. Can be recorded.

        Column i of ``table``, int32 [4, N], says which row, to which message, as number ``p`` of its rows of this kind,
        and the number ``n`` of rows of each kind in front of it: from byte ``bodies[message] + n * lead + p * row`` on,
        where ``row`` is the bytes of one. Message -1: none. ``bodies`` int64 is ``pinned``, and holds addresses of
        ``pinned`` or mapped memory, or in inboxes of peers.
        """

    def lent(self, tensor: Tensor) -> Any:
        """Return a contiguous tensor as an array with the same memory, see ``Carrier.lent``."""

    def borrowed(self, array: Any) -> Tensor:
        """Return an array of the card as a tensor over the same memory."""

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy from the host's memory, which must not change before ``synchronize``."""

    def synchronize(self) -> None:
        """Wait until everything started here has been done."""
