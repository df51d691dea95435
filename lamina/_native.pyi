"""Native attention, elementwise kernels and transport of Lamina: types of the compiled module."""

import enum
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from lamina.transport.base import Part

# -- attention: see lamina.kernels.attention for the meaning of every argument

class AttentionPath(enum.Enum):
    PORTABLE = 0
    AVX2 = 1
    AVX512_BF16 = 2

def attention_paths() -> list[AttentionPath]: ...
def attention_partial(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    query_offsets: NDArray[Any],
    query_start: NDArray[Any],
    kv_offsets: NDArray[Any],
    kv_start: NDArray[Any],
    slots: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any],
    *,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    alibi_slopes: NDArray[Any] | None,
    threads: int,
    path: AttentionPath,
) -> None: ...
def attention_append(slab: NDArray[Any], rows: NDArray[Any], slots: NDArray[Any], threads: int) -> None: ...
def attention_merge(
    outs: list[NDArray[Any]],
    lses: list[NDArray[Any]],
    sinks: NDArray[Any] | None,
    out: NDArray[Any],
    lse: NDArray[Any] | None,
) -> None: ...
def read_memory(memory: NDArray[Any], threads: int) -> int: ...
def read_rows(rows: NDArray[Any], slots: NDArray[Any], threads: int) -> int: ...

# -- elementwise: see native/include/lamina/elementwise.h; tensors are given by address, strides in elements

class ElementType(enum.Enum):
    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2

class Activation(enum.Enum):
    SILU = 0
    GELU_TANH = 1

def rms_norm(
    type: ElementType,
    x: int,
    residual: int,
    weight: int,
    sum: int,
    out: int,
    rows: int,
    width: int,
    epsilon: float,
    offset: float,
    round_before_weight: bool,
    threads: int,
    path: AttentionPath,
    /,
) -> None: ...
def rotate(
    type: ElementType,
    x: int,
    row_stride: int,
    head_stride: int,
    cosines: int,
    sines: int,
    out: int,
    rows: int,
    heads: int,
    dim: int,
    rotary_dim: int,
    threads: int,
    path: AttentionPath,
    /,
) -> None: ...
def gate(
    type: ElementType,
    activation: Activation,
    gate: int,
    gate_stride: int,
    up: int,
    up_stride: int,
    out: int,
    rows: int,
    width: int,
    threads: int,
    path: AttentionPath,
    /,
) -> None: ...

# -- transport: shared-memory arenas and the wait on their doorbells

class ShmArena:
    """An arena mapped into this process; exports its data as a writable buffer."""

    @staticmethod
    def file_nbytes(nbytes: int, doorbells: int) -> int:
        """Bytes of a file that holds ``nbytes`` of data and that many doorbells."""

    @staticmethod
    def create(fd: int, nbytes: int, doorbells: int, identity: int) -> ShmArena:
        """Map a new, zero-filled file and make it an arena. Raises MemoryError."""

    @staticmethod
    def open(fd: int, identity: int) -> ShmArena:
        """Map the arena another process made with that identity. Raises ValueError if it is another, MemoryError."""

    @property
    def nbytes(self) -> int:
        """Bytes of data."""

    @property
    def doorbells(self) -> int:
        """Number of doorbells."""

    @property
    def gone(self) -> bool:
        """True once the owner has closed its endpoint or has been found dead."""

    def mark_gone(self) -> None:
        """Tell everybody who has mapped this arena that its owner is gone."""

    def nudge(self) -> None:
        """Wake the owner's wait without a message, so that it looks around."""

    def sequence(self, doorbell: int) -> int:
        """Where a doorbell stands. Raises ValueError for one that does not exist."""

    def write(self, offset: int, data: Part) -> None:
        """Copy ``data`` to ``offset``. Raises ValueError outside the arena, ConnectionResetError."""

    def ring(self, doorbell: int, sequence: int) -> None:
        """Set a doorbell after all earlier writes and wake whoever waits. Raises ValueError, ConnectionResetError."""

    def post(self, offset: int, nbytes: int, parts: Sequence[Part], doorbell: int, sequence: int) -> None:
        """Copy the parts one after another into [offset, offset + nbytes), then ring.

        Raises ValueError, before anything is written, if they do not fit; ConnectionResetError if the owner is gone.
        """

    def __buffer__(self, flags: int, /) -> memoryview: ...

class ShmWaiter:
    """Waits on the doorbells of one's own arena while watching over peers. One thread at a time."""

    def __init__(self, own: ShmArena) -> None: ...
    def watch(self, peer: ShmArena, pidfd: int) -> None:
        """Watch a peer's process and arena from now on; the pidfd stays the caller's."""

    def forget(self, index: int) -> None:
        """Forget the peer at this index; later ones move down by one."""

    def wait(self, targets: Sequence[tuple[int, int]], timeout_s: float, spin_s: float) -> int:
        """Wait until a target = (doorbell, sequence) is reached; its index. Releases the GIL.

        Raises TimeoutError; ConnectionResetError(index of the peer) if nothing is ready and a peer is gone.
        """
