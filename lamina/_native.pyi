"""Native attention, dense kernels, transport and simulation of Lamina: types of the compiled module."""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
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
def attention_partial_tasks(
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
    first: int,
    last: int,
    adds: bool,
) -> None: ...
def attention_count_tasks(query_offsets: NDArray[Any], query_heads: int, kv_heads: int) -> int: ...
def attention_append(slab: NDArray[Any], rows: NDArray[Any], slots: NDArray[Any], threads: int) -> None: ...
def attention_merge(
    outs: list[NDArray[Any]],
    lses: list[NDArray[Any]],
    sinks: NDArray[Any] | None,
    out: NDArray[Any],
    lse: NDArray[Any] | None,
    threads: int,
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
def largest(
    type: ElementType,
    x: int,
    stride: int,
    values: int,
    indices: int,
    rows: int,
    width: int,
    threads: int,
    path: AttentionPath,
    /,
) -> None: ...

# -- linear layers: see native/include/lamina/linear.h; tensors are given by address, strides in elements

def linear_available() -> bool: ...
def linear_packed_pairs(outputs: int, inputs: int, /) -> int: ...
def linear_pack(weight: int, outputs: int, inputs: int, packed: int, threads: int, /) -> None: ...
def linear(
    x: int,
    x_stride: int,
    packed: int,
    bias: int,
    out: int,
    rows: int,
    inputs: int,
    outputs: int,
    threads: int,
    /,
) -> None: ...

# -- programs: see native/include/lamina/program.h; an operand is (matrix, column)

class Program:
    """Steps over numbered matrices of bfloat16."""

    def __init__(self, widths: Sequence[int], given: int, path: AttentionPath, /) -> None:
        """The first ``given`` matrices are the caller's, the others scratch."""

    def add_products(
        self, x: tuple[int, int], inputs: int, products: Sequence[tuple[int, int, tuple[int, int], int]], /
    ) -> None:
        """Linear layers of one x: (packed weight, bias or 0, out, outputs) of each. Like all steps: raises ValueError
        for operands outside their matrices or not laid out as the kernel expects."""

    def add_norm(
        self,
        x: tuple[int, int],
        residual: tuple[int, int],
        weight: int,
        sum: tuple[int, int],
        out: tuple[int, int],
        groups: int,
        width: int,
        epsilon: float,
        offset: float,
        round_before_weight: bool,
        /,
    ) -> None:
        """Of each of ``groups`` parts of a row. Without residual and sum: (-1, 0)."""

    def add_rotation(
        self,
        x: tuple[int, int],
        cosines: tuple[int, int],
        sines: tuple[int, int],
        out: tuple[int, int],
        heads: int,
        dim: int,
        rotary_dim: int,
        /,
    ) -> None:
        """Of the first ``rotary_dim`` elements of each head; the others are copied."""

    def add_gate(
        self,
        activation: Activation,
        gate: tuple[int, int],
        up: tuple[int, int],
        out: tuple[int, int],
        width: int,
        /,
    ) -> None:
        """activation(gate) * up."""

    @property
    def steps(self) -> int:
        """How many there are."""

    def scratch_elements(self, rows: int, /) -> int:
        """How many elements scratch must hold."""

    def run(self, first: int, last: int, rows: int, matrices: Sequence[int], scratch: int, threads: int, /) -> None:
        """Steps [first, last) for so many rows, given the addresses of matrices and scratch. Releases the GIL."""

# -- transport: arenas, and the waits on their doorbells

DOORBELL_NBYTES: int  # from one doorbell of an arena to the next; its number is the first eight bytes

class Arena:
    """An arena mapped into this process; exports its data as a writable buffer."""

    @staticmethod
    def file_nbytes(nbytes: int, doorbells: int) -> int:
        """Bytes of a file that holds ``nbytes`` of data and that many doorbells."""

    @staticmethod
    def create(fd: int, nbytes: int, doorbells: int, identity: int) -> Arena:
        """Map a new, zero-filled file and make it an arena. Raises MemoryError."""

    @staticmethod
    def open(fd: int, identity: int) -> Arena:
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

    @property
    def data_address(self) -> int:
        """Where the data begins in this process's memory; after the doorbells."""

    @property
    def doorbells_address(self) -> int:
        """Where the doorbells begin in this process's memory."""

    def watch(self, targets: Sequence[tuple[int, int]], timeout_s: float, spin_s: float) -> int | None:
        """Look at doorbells that hardware writes until a target is reached (its index) or the time is over (None).

        Looks without pause for ``spin_s``, then between short naps. Releases the GIL. Raises ValueError.
        """

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

    def __init__(self, own: Arena) -> None: ...
    def watch(self, peer: Arena, pidfd: int) -> None:
        """Watch a peer's process and arena from now on; the pidfd stays the caller's."""

    def forget(self, index: int) -> None:
        """Forget the peer at this index; later ones move down by one."""

    def wait(self, targets: Sequence[tuple[int, int]], timeout_s: float, spin_s: float) -> int:
        """Wait until a target = (doorbell, sequence) is reached; its index. Releases the GIL.

        Raises TimeoutError; ConnectionResetError(index of the peer) if nothing is ready and a peer is gone.
        """

def tls_obstacle() -> str:
    """Why TLS cannot be used in this process; empty if it can."""

class Connection:
    """A connected socket, owned, until something takes it over."""

    def __init__(self, fd: int) -> None: ...
    @staticmethod
    def tls(fd: int, key: bytes, listens: bool, timeout_s: float) -> Connection:
        """TLS 1.3 over a connected socket, taken over, with a key of 32 bytes that both sides have.

        Releases the GIL. Raises RuntimeError if OpenSSL is not there or the two sides have not agreed in time.
        """

class TcpSender:
    """The stream to one peer, and what reads from the same peer."""

    @property
    def is_broken(self) -> bool:
        """True while the stream has no connection and may get another."""

    @property
    def is_lost(self) -> bool:
        """True once nothing can be sent any more."""

    def reopen(self, connection: Connection, position: int) -> None:
        """Go on over another connection, taking it over, from the byte that the receiver wants next.

        Raises ValueError if that byte is not kept any more or not written yet.
        """

    def reopen_fetches(self, connection: Connection) -> None:
        """Read from the peer over this connection, taking it over: what has not arrived is asked for again."""

    def lose(self) -> None:
        """Close the connection for good."""

# Called when a sender's connection is broken or lost, with the seconds the caller has left: mends it, or raises.
Mend = Callable[[TcpSender, float], None]

class TcpEndpoint:
    """The TCP streams of one endpoint. One thread owns it; expect() and accept() are for any thread."""

    def __init__(self, arena: Arena) -> None: ...
    def connect(self, connection: Connection, identity: int, nbytes: int, doorbells: int) -> TcpSender:
        """The sender over a connection, which it takes over, to the peer of that identity and arena."""

    def disconnect(self, sender: TcpSender) -> None:
        """Close a sender and forget it."""

    def expect(self, stream: int, identity: int, is_new: bool) -> tuple[int, int] | None:
        """Make ready for another connection of a stream: (the byte of it wanted next, number for accept()).

        None if the stream was refused, or is neither new nor known.
        """

    def accept(self, stream: int, number: int, connection: Connection) -> None:
        """Take over a connection that carries the stream; closes it if another is expected by now."""

    def serve(self, connection: Connection) -> None:
        """Take over a connection over which a peer reads the arena, served in a thread without the GIL."""

    def fetch(self, sender: TcpSender, offset: int, nbytes: int, to: int, doorbell: int, sequence: int) -> None:
        """Ask for a range of the peer's arena, to lie at ``to`` of this one; rings a doorbell of this one then.

        Raises ValueError outside an arena or for nothing.
        """

    def write(self, sender: TcpSender, offset: int, data: Part, stall_s: float, mend: Mend) -> None:
        """Send a frame that only writes. Raises like post()."""

    def ring(self, sender: TcpSender, doorbell: int, sequence: int, stall_s: float, mend: Mend) -> None:
        """Send a frame that only rings. Raises like post()."""

    def post(
        self,
        sender: TcpSender,
        offset: int,
        nbytes: int,
        parts: Sequence[Part],
        doorbell: int,
        sequence: int,
        stall_s: float,
        mend: Mend,
    ) -> None:
        """Send a frame that writes, then rings. Releases the GIL when it would block, and receives meanwhile.

        Raises ValueError, before anything is sent, if it does not fit; TimeoutError if the peer takes in nothing for
        ``stall_s``; what ``mend`` raises.
        """

    def wait(
        self,
        targets: Sequence[tuple[int, int]],
        timeout_s: float,
        spin_s: float,
        mend: Mend,
        refused: Callable[[str], None],
    ) -> int:
        """Receive until a target = (doorbell, sequence) is reached; its index. Releases the GIL.

        ``refused`` is called with the reason when a stream is refused for one of its frames. Raises TimeoutError; what
        ``mend`` raises.
        """

    def close(self) -> None:
        """Close all sockets. Idempotent."""

# -- simulation: see native/include/lamina/virtual_cluster.h

class VirtualCluster:
    """Compute and memory workers in virtual time: when the slices and attentions of steps begin and end."""

    def __init__(self, replicas: int, memories: int, lanes: int, latency_s: float, recorded: int = 0) -> None: ...
    def submit(
        self,
        lane: int,
        now_s: float,
        number: int,
        replicas: Sequence[int],
        tick: int,
        ticks: int,
        first_s: float,
        inner_s: float,
        last_s: float,
        chunks_s: float,
        send_s: float,
        receive_s: float,
        context_s: float,
        shares: Shares,
        /,
    ) -> None:
        """The lane's next step, behind those it has. Raises ValueError."""

    def advance(self, until_s: float, /) -> tuple[float, int, int, float, float] | None:
        """Play on until a step ends: (time, lane, number, busy_s, waited_s); None if none ends up to ``until_s``.

        ``waited_s``: between slices, by those that an idle replica was waiting for; 0 if there were none.
        """

    def slow_replica(self, replica: int, factor: float, /) -> None:
        """Slices that begin from now on take ``factor`` times as long."""

    def slow_memory(self, memory: int, factor: float, /) -> None:
        """Attentions that begin from now on take ``factor`` times as long."""

    def replica_work(self, replica: int, /) -> tuple[float, float, float]:
        """Seconds so far in which it computed, and in which its network card sent and received."""

    def memory_work(self, memory: int, /) -> tuple[float, float, float]:
        """Seconds so far in which it attended, and in which its network card sent and received."""

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        """What was recorded last: (stage, worker, lane, begin_s, end_s)."""

class Shares:
    """Memory workers' parts in each attention of a step, every worker once: (worker, receiving, attending, sending), in
    seconds."""

    def __init__(self, tuples: Sequence[tuple[int, float, float, float]], /) -> None: ...
    def tuples(self) -> list[tuple[int, float, float, float]]: ...

class DecodeShares:
    """What a decode step asks of every memory worker in one attention: see native/include/lamina/decode_shares.h."""

    def __init__(
        self,
        memories: int,
        receive_row_s: float,
        send_row_s: float,
        token_s: float,
        attend_s: Sequence[float],
        /,
    ) -> None:
        """Seconds of a memory worker: its network card's for a row, in and out, and of attention for each token that
        rows see and, ``attend_s``, for any number of rows."""

    def of(
        self, homes: NDArray[np.int64], tokens: Sequence[int], more: Sequence[tuple[int, float, float, float]], /
    ) -> Shares:
        """Of rows whose KV is on workers ``homes`` and that see ``tokens`` besides themselves, with ``more`` added.

        Raises ValueError or IndexError.
        """

class TokenTimes:
    """When requests get their tokens: see native/include/lamina/token_times.h."""

    def __init__(self, tokens: Sequence[int], /) -> None:
        """By request: how many it is to get."""

    def draw(self, now_s: float, requests: NDArray[np.int64], /) -> list[int]:
        """Each of these requests gets its next token. Returns the places in ``requests`` of those it is the last for.

        Raises IndexError for one that does not exist, ValueError for one that has all its tokens.
        """

    def drawn(self) -> NDArray[np.int64]:
        """By request: tokens so far."""

    def first_s(self) -> NDArray[np.float64]:
        """By request: when its first token came; NaN if none has."""

    def longest_gap_s(self) -> NDArray[np.float64]:
        """By request: the longest time between two of its tokens; NaN if there are no two."""

    def gaps(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """All times between two tokens of a request, with how often they came; some come several times."""
