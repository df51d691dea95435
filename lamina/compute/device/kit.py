"""Interface of the operations that differ between a GPU and its emulation in tests (``Kit``)."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lamina.lowering.gpu_slices import Main
from lamina.transport.device.inboxes import Maker

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of rows for which slices are captured as graphs. Decode steps are padded to one of them.

A product of so few rows takes about as long as reading its weight, so padding costs little. Larger steps run operator
by operator.
"""

MULTIPLE = 64  # larger steps are padded to a multiple of so many rows


def padded_rows(rows: int) -> int:
    """Return the number of rows to which a step of ``rows`` rows is padded."""
    return next((size for size in ROWS if size >= rows), -(-rows // MULTIPLE) * MULTIPLE)


Replay = Callable[[], None]


class Kit(Protocol):
    """Operations of a GPU ("card") that torch does not offer equally on every device.

    Attributes:
        place: Device of tensors.
        backend: Backend of torch.distributed with which ranks all-reduce.
        grouped: Whether torch's grouped product of bfloat16 runs without the host, so that it can be captured.
        name: Name of the kind of card, under which measurements are cached.
    """

    place: torch.device
    backend: str
    grouped: bool
    name: str

    def capture(self, work: Callable[[], object]) -> Replay:
        """Capture the kernels that ``work`` launches, and return a function that replays them on the same memory.

        ``work`` must not depend on values of tensors, and may be called more than once.
        """

    def compiled(self, graph: Main) -> Main | None:
        """Return the graph with its operators fused, for any number of rows; None if this device fuses nothing.

        The result is compiled when it is called, which raises RuntimeError if it cannot be fused.
        """

    def time_replay(self, replay: Replay) -> float:
        """Return the seconds that a replay takes on the device."""

    def fused(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
        """Return the attention of a chunk to itself; None if the card has no fused kernel for this element type."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return page-locked host memory that the card accesses directly."""

    def limit(self, share: float) -> None:
        """Limit the share of the card's memory that this process may use."""

    def register_own(self, memory: memoryview) -> None:
        """Register memory that peers write into, for fast copies to the card."""

    def map_peer(self, peer: str, memory: memoryview) -> bool:
        """Let kernels write into a peer's memory until ``unmap_peer``; return whether they can."""

    def unmap_peer(self, peer: str) -> None:
        """Stop writing into a peer's memory."""

    def inbox_maker(self) -> Maker | None:
        """Return the maker of inboxes in the card's memory; None if the card can share no memory."""

    def write_rows(self, source: Tensor, table: Tensor, bodies: Tensor, lead: int) -> None:
        """Write rows of ``source`` [S, h, D] into messages. Can be recorded.

        Args:
            source: Rows of one kind: q, k or v.
            table: int32 [4, N]. Column i has: row of ``source``; message (-1: none); index ``p`` of the row in the
                message's rows of this kind; number ``n`` of rows of the kinds before it. The row is written to byte
                ``bodies[message] + n * lead + p * nbytes``, where ``nbytes`` is the size of a row.
            bodies: int64 in ``pinned`` memory: addresses of pinned or mapped memory or of peers' inboxes.
            lead: Bytes of a row of the kinds before this one.
        """

    def lent(self, tensor: Tensor) -> Any:
        """Return a contiguous tensor as an array with the same memory, see ``Carrier.lent``."""

    def borrowed(self, array: Any) -> Tensor:
        """Return an array of the card as a tensor over the same memory."""

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy ``source``, in host memory, to ``target``. ``source`` must not change before ``synchronize``."""

    def has_ended(self) -> bool:
        """Return whether all work launched on the card has completed."""

    def synchronize(self) -> None:
        """Wait until all work launched on the card has completed."""
