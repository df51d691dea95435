"""Messages that a device of this process reads from slots and answers itself, in the order of launches.

For every message, the host launches ahead: a wait that finds the message and copies its body to the device, the work,
and a kernel that writes the answer into the peer's slot, rings, and writes a record for the host. The host only follows
the records. Slots, doorbells and records are in host memory that the device reads and writes directly.

A wait ends when its message has arrived, when the host aborts it, or when the host has given no sign of life for
``SILENCE_S``: the host decides how long a peer may take, and a host that hangs never leaves a device waiting. After a
wait has ended without a message, everything later in the same stream does nothing until ``reset``.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lamina._native import Arena as NativeArena

SLOTS = 2  # that a message may be in
HEADER_WORDS = 8  # of 8 bytes, in front of the body
CREDIT_WORD = 6  # of an answer's header, first of SLOTS: how often each of the own slots has been freed
PLACE_SHIFT, IN_INBOX = 16, 2  # the byte of a header's first word that says where the body is: this means in the inbox
SILENCE_S = 60.0
DRAIN_S = 5.0  # for what was launched to end after an abort

RECORD = np.dtype(
    [("header", np.uint64, HEADER_WORDS)]
    + [(name, np.uint64) for name in ("number", "slot", "found_ns", "done_ns")]
    + [("unused", np.uint64, 4)]
)
"""What the device writes for the host: the message's header, its doorbell's number and its slot; when the message was
found and, written last and never 0, when it was answered, in nanoseconds of the device's clock."""

Records = npt.NDArray[Any]


class Outcome(enum.IntEnum):
    """How the waits of a stream have ended; after anything but READY, all later ones do nothing."""

    READY = 0
    EXPIRED = 1
    ABORTED = 2


class Incoming(NamedTuple):
    """A message that is awaited.

    It has arrived once the doorbell of a slot is at its floor or above and the slot's first word is ``stamp``, with the
    low 16 bits of the doorbell's number on top. The word's byte at ``PLACE_SHIFT``, which ``stamp`` lacks, says whether
    the body is behind the header or in the inbox.

    Attributes:
        slots: addresses of the slots that the message may be in, in host memory.
        inbox: by slot, address of the body in the device's memory; 0 without an inbox.
        doorbells: by slot, address of the doorbell, in host memory.
        floors: by slot, the least number of the doorbell that announces the message.
        stamp: the header's first word, see above.
        pieces: by how much a doorbell's number grows with each use.
    """

    slots: tuple[int, ...]
    inbox: tuple[int, ...]
    doorbells: tuple[int, ...]
    floors: tuple[int, ...]
    stamp: int
    pieces: int


class Outgoing(NamedTuple):
    """An answer.

    Attributes:
        slot: address of its slot.
        body: address of its body.
        doorbell: address of the doorbell to ring.
        number: to ring.
        header: without credits.
    """

    slot: int
    body: int
    doorbell: int
    number: int
    header: tuple[int, ...]


class SlotStream(Protocol):
    """What a device does for one lane, in order. One thread of the host owns it.

    Attributes:
        records: ``RECORD``, in host memory. The host clears one before it launches what writes it.
    """

    records: Records

    def order_after_host(self) -> None:
        """Order later launches after all work that the host has given to the device so far."""

    def launch(self, work: Callable[[], None]) -> None:
        """Run ``work``, which calls ``receive``, computes on the device, then calls ``answer``; maybe in a thread."""

    def receive(self, incoming: Incoming, into: Any, nbytes: int) -> None:
        """Wait for a message, and copy the first ``nbytes`` of its body to ``into``, uint8 on the device."""

    def answer(self, outgoing: Outgoing, parts: Sequence[Any], record: int, pieces: int) -> None:
        """Send ``parts``, arrays on the device, as the body, and free the received message's slot; then write the
        record. ``pieces``: of the ``Incoming``."""

    def beat(self) -> None:
        """Show the waits that the host is alive."""

    def abort(self) -> None:
        """End every wait, soon."""

    def raise_failure(self) -> None:
        """Raise the failure of a launch, if any, without waiting: DeadlineError after a wait that has expired."""

    def drain(self) -> None:
        """Wait until everything launched has ended. Raises TransportError after ``DRAIN_S``."""

    def reset(self) -> None:
        """Clear an abort. Only after ``drain``."""

    def close(self) -> None:
        """Abort, and end. Idempotent."""


class PolledSlots(Protocol):
    """A device that reads and writes slots in host memory."""

    def map_ranges(self, arena: NativeArena, ranges: Sequence[tuple[int, int]]) -> None:
        """Let the device use these ranges (address, bytes) of an arena, which stays mapped until ``unmap``.

        Raises TransportError if it cannot."""

    def unmap(self, arena: NativeArena) -> None:
        """End the device's use of an arena, if it was mapped. No stream may be waiting."""

    def stream(self, records: int) -> SlotStream:
        """Return a new stream with so many records."""
