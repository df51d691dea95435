"""``PolledSlots``, the interface of a device that receives messages from slots and answers them without the host.

For every message, the host launches three things ahead: a wait that finds the message and copies its body to the
device, the work, and a kernel that writes the answer into the peer's slot, rings, and writes a record. The host only
reads the records. Slots, doorbells and records are in host memory that the device reads and writes directly.

A wait ends when its message has arrived, when the host aborts it, or when the host has not called ``beat`` for
``SILENCE_S``: so the host decides how long a peer may take, and a hung host does not leave a device waiting. After a
wait has ended without a message, all later launches in the same stream do nothing until ``reset``.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lamina._native import Arena as NativeArena

SLOTS = 2  # slots of a link
HEADER_WORDS = 8  # words of 8 bytes of a header, in front of the body
CREDIT_WORD = 6  # index of the first of SLOTS words of an answer's header: freed uses of each slot of this side
PLACE_SHIFT, IN_INBOX = 16, 2  # byte of a header's first word with the place of the body, and its value for the inbox
SILENCE_S = 60.0
DRAIN_S = 5.0  # time for launched work to end after an abort

RECORD = np.dtype(
    [("header", np.uint64, HEADER_WORDS)]
    + [(name, np.uint64) for name in ("number", "slot", "found_ns", "done_ns")]
    + [("unused", np.uint64, 4)]
)
"""A record for the host: the message's header, the doorbell's number, the slot; when the message was found and, written
last and never 0, when it was answered, in nanoseconds of the device's clock."""

Records = npt.NDArray[Any]


class Outcome(enum.IntEnum):
    """Outcome of the waits of a stream. After any outcome but READY, later launches do nothing."""

    READY = 0
    EXPIRED = 1
    ABORTED = 2


class Incoming(NamedTuple):
    """An awaited message.

    It has arrived once the doorbell of a slot has reached its floor and the slot's first word is ``stamp``, plus the
    low 16 bits of the doorbell's number as its highest bits, plus the place of the body (``PLACE_SHIFT``): behind the
    header or in the inbox.

    Attributes:
        slots: addresses of the slots in which the message may arrive, in host memory.
        inbox: by slot: address of the body in device memory; 0 without an inbox.
        doorbells: by slot: address of the doorbell, in host memory.
        floors: by slot: the least doorbell number that announces the message.
        stamp: the header's first word, without the doorbell's number and the place.
        pieces: increment of a doorbell's number with each use.
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
        slot: address of the answer's slot.
        body: address of the answer's body.
        doorbell: address of the doorbell to ring.
        number: number to ring.
        header: words of the header, without credits.
    """

    slot: int
    body: int
    doorbell: int
    number: int
    header: tuple[int, ...]


class SlotStream(Protocol):
    """Work of a device for one lane, in order. One thread of the host owns it.

    Attributes:
        records: array of ``RECORD`` in host memory. The host clears a record before it launches the answer.
    """

    records: Records

    def order_after_host(self) -> None:
        """Let later launches wait for all work that the host has started on the device so far."""

    def launch(self, work: Callable[[], None]) -> None:
        """Run ``work``, which calls ``receive``, computes on the device, then calls ``answer``. May use a thread."""

    def receive(self, incoming: Incoming, into: Any, nbytes: int) -> None:
        """Wait for a message, and copy the first ``nbytes`` of its body to ``into``, uint8 on the device."""

    def answer(self, outgoing: Outgoing, parts: Sequence[Any], record: int, pieces: int) -> None:
        """Send ``parts``, arrays on the device, as the body, free the received message's slot, and write the record.
        ``pieces`` is that of the ``Incoming``."""

    def beat(self) -> None:
        """Tell waits that the host is alive."""

    def abort(self) -> None:
        """End every wait, soon."""

    def raise_failure(self) -> None:
        """Raise the failure of a launch, if any, without waiting: DeadlineError after a wait that has expired."""

    def drain(self) -> None:
        """Wait until everything launched has ended. Raises TransportError after ``DRAIN_S``."""

    def reset(self) -> None:
        """Clear an abort. Only after ``drain``."""

    def close(self) -> None:
        """Abort waits, and end the stream. Idempotent."""


class PolledSlots(Protocol):
    """A device that reads and writes slots in host memory."""

    def map_ranges(self, arena: NativeArena, ranges: Sequence[tuple[int, int]]) -> None:
        """Let the device use these ranges (address, bytes) of an arena, which stays mapped until ``unmap``.

        Raises TransportError if it cannot."""

    def unmap(self, arena: NativeArena) -> None:
        """End the device's use of an arena, if it was mapped. No stream may be waiting."""

    def stream(self, records: int) -> SlotStream:
        """Return a new stream with so many records."""
