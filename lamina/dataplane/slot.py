"""The slots of a link: the header of a message, the credits to use a slot, and slots that a device reads or writes.

``dataplane.channel`` describes how messages use slots.
"""

import enum
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lamina._native import DOORBELL_NBYTES
from lamina._native import Arena as NativeArena
from lamina.dataplane.leases import ARRIVED, HEADER_NBYTES, SLOTS, Lease
from lamina.dataplane.wire import MOST_PIECES, slot_number
from lamina.transport.base import Buffer, Endpoint, Part, Peer
from lamina.transport.device import slots as device_slots
from lamina.transport.device.inboxes import Inbox
from lamina.transport.device.slots import Incoming, Outgoing, PolledSlots

HEADER = struct.Struct(f"<HBxHHQQqQQ{SLOTS}Q")
"""Fields: lane; place of the body (``Place``); low bits of the turn; low bits of the first piece's number; turn; bytes
of the body; offset of the region to fetch, or -1; number of the region; credits for the receiver: regions fetched, and
freed uses of each slot.

The first word identifies a message among all of its slot, even while the next message is being written."""

assert HEADER.size <= HEADER_NBYTES == 8 * device_slots.HEADER_WORDS and SLOTS == device_slots.SLOTS
_WORD = struct.Struct("Q")  # native: read at once
_LOW_BITS = 0xFFFF


class Place(enum.IntEnum):
    """Where the body of a message is."""

    SLOT = 0
    FETCHED = 1
    """In the sender's arena; the receiver fetches it."""
    INBOX = device_slots.IN_INBOX
    """In the receiver's inbox, in the part that belongs to the slot."""


def pack(first: int, lane: int, place: int, turn: int, *others: int) -> bytes:
    """Return a header. ``first`` is the number of the first piece, ``others`` are the fields after the turn."""
    return HEADER.pack(lane, place, turn & _LOW_BITS, first & _LOW_BITS, turn, *others)


def pack_alone(first: int, lane: int, place: Place, turn: int, nbytes: int) -> bytes:
    """Return the header of a message of one piece, without credits."""
    return pack(first, lane, place, turn, nbytes, -1, 0, 0, *[0] * SLOTS)


def stamp(lane: int, turn: int) -> int:
    """Return the first word of a header as a little-endian number, without ``Place`` and the first piece's number."""
    return lane | (turn & _LOW_BITS) << 32


def lane_of(slot: Buffer, first: int) -> int | None:
    """Return the lane of the message in a slot, if ``first`` announced it."""
    (word,) = _WORD.unpack_from(slot)
    return int(word & _LOW_BITS) if word >> 48 == first & _LOW_BITS else None


class SlotCredits:
    """Counts uses of a peer's slots from ``first`` on. A slot is free once it was freed as often as it was used.

    Attributes:
        used: by slot: how often it was used.
        freed: by slot: how often it was freed, as far as known.
    """

    def __init__(self, slots: int, first: int) -> None:
        self.used, self.freed = [first] * slots, [first] * slots
        self._booked: dict[int, int] = {}  # by slot: the lane that has booked it

    def record_freed(self, uses: Sequence[int]) -> None:
        """Record how often slots have been freed; an earlier number than known changes nothing."""
        for slot, known in enumerate(self.freed):
            if uses[slot] > known:
                self.freed[slot] = uses[slot]

    @property
    def outstanding(self) -> list[int]:
        """Slots in use."""
        return [slot for slot, used in enumerate(self.used) if used > self.freed[slot]]

    def find(self, read: Callable[[], None]) -> int | None:
        """Return a free slot, if possible one that no lane has booked; None if all are in use. ``read`` reads the
        credits that the peer has rung, and is called only if no slot is known to be free."""
        for slot, used in enumerate(self.used):
            if used == self.freed[slot] and slot not in self._booked:
                return slot
        read()
        free = [slot for slot, used in enumerate(self.used) if used == self.freed[slot]]
        found = next((slot for slot in free if slot not in self._booked), free[0] if free else None)
        if found is not None:
            self._booked.pop(found, None)
        return found

    def use(self, read: Callable[[], None]) -> int | None:
        """``find`` a slot and count its use."""
        slot = self.find(read)
        if slot is not None:
            self.used[slot] += 1
        return slot

    def book(self, lane: int, count: int) -> tuple[int, int] | None:
        """Reserve a slot for the next ``count`` messages of a lane, each sent once the message before has been freed.

        Returns the slot and how often it was used before; None if no slot is free. A lane keeps the slot that it has
        booked.
        """
        slot = next((slot for slot, owner in self._booked.items() if owner == lane), None)
        if slot is None:
            free = (slot for slot, used in enumerate(self.used) if used == self.freed[slot])
            slot = next((slot for slot in free if slot not in self._booked), None)
        if slot is None:
            return None
        self._booked[slot] = lane
        self.used[slot] += count
        return slot, self.used[slot] - count

    def unbook(self, lane: int) -> None:
        """End the booking of a lane, if it has one."""
        self._booked = {slot: owner for slot, owner in self._booked.items() if owner != lane}


@dataclass(frozen=True)
class Slot:
    """Bytes of an arena for one message, and the doorbell that announces it."""

    offset: int
    nbytes: int
    doorbell: int


class Outbox:
    """Sends into one slot without credits, for a sender that knows when the slot is free."""

    def __init__(self, endpoint: Endpoint, peer: Peer, slot: Slot) -> None:
        self._endpoint, self._peer, self._slot = endpoint, peer, slot

    def write_and_ring(self, parts: Sequence[Part], sequence: int, at: int = 0) -> None:
        """Write the parts one after another from byte ``at`` of the slot on, then ring ``sequence``.

        Raises ValueError, before anything is written, if the parts do not fit; PeerLostError.
        """
        slot = self._slot
        self._endpoint.post(self._peer, slot.offset + at, slot.nbytes - at, parts, slot.doorbell, sequence)


class Body(NamedTuple):
    """Memory of a peer into which a device of this process writes the body of a message.

    Attributes:
        address: address of the first byte.
        array: the memory as uint8, an array of numpy or of the device.
    """

    address: int
    array: Any


@dataclass(frozen=True)
class Direct:
    """The memory of a link on one host, whose messages a device of this process reads and writes itself.

    Attributes:
        own: the peer's lease of this arena.
        theirs: this side's lease of the peer's arena.
        own_inbox: where the peer's device writes bodies; None if it cannot.
        their_inbox: where this side's device writes bodies; None if it cannot.
    """

    own_arena: NativeArena
    their_arena: NativeArena
    own: Lease
    theirs: Lease
    own_inbox: Inbox | None = None
    their_inbox: Inbox | None = None

    @property
    def their_memory(self) -> memoryview:
        """The part of the peer's arena that this side may write into."""
        return memoryview(self.their_arena)[self.theirs.offset : self.theirs.offset + self.theirs.nbytes]

    @property
    def bodies(self) -> tuple[Body, ...]:
        """By slot of the peer: where a device writes the body of a message; in the inbox, if there is one."""
        inbox, stride = self.their_inbox, self.theirs.body_nbytes
        if inbox is not None:
            parts = zip(_places(stride), inbox.parts(SLOTS), strict=True)
            return tuple(Body(inbox.address + at, part) for at, part in parts)
        memory = np.frombuffer(memoryview(self.their_arena), np.uint8)
        starts = [self.theirs.slot(number) + HEADER_NBYTES for number in range(SLOTS)]
        return tuple(Body(self.their_arena.data_address + start, memory[start : start + stride]) for start in starts)

    def map(self, slots: PolledSlots) -> None:
        """Let a device use the slots and doorbells of both sides. Raises TransportError if it cannot."""
        for arena, lease in ((self.own_arena, self.own), (self.their_arena, self.theirs)):
            doorbells = _doorbell(arena, lease), SLOTS * DOORBELL_NBYTES
            slots.map_ranges(arena, [doorbells, (arena.data_address + lease.offset, lease.nbytes)])

    def incoming(self, unread: Sequence[int], lane: int, turn: int) -> Incoming:
        """Return the incoming message for an attention of a lane. ``unread`` is ``Channel.unread`` of the link."""
        first = _doorbell(self.own_arena, self.own)
        return Incoming(
            tuple(self.own_arena.data_address + self.own.slot(number) for number in range(SLOTS)),
            tuple(self.own_inbox.address + at if self.own_inbox else 0 for at in _places(self.own.body_nbytes)),
            tuple(first + number * DOORBELL_NBYTES for number in range(SLOTS)),
            tuple(unread),
            stamp(lane, turn),
            MOST_PIECES,
        )

    def outgoing(self, lane: int, turn: int, nbytes: int, slot: int, uses: int) -> Outgoing:
        """Return an outgoing message of one piece for a booked slot, which was used ``uses`` times before."""
        number, start = slot_number(uses, 0), self.their_arena.data_address + self.theirs.slot(slot)
        place, body = Place.SLOT, start + HEADER_NBYTES
        if self.their_inbox is not None:
            place, body = Place.INBOX, self.their_inbox.address + slot * self.theirs.body_nbytes
        header = struct.unpack(f"={device_slots.HEADER_WORDS}Q", pack_alone(number, lane, place, turn, nbytes))
        return Outgoing(
            start,
            body,
            _doorbell(self.their_arena, self.theirs) + slot * DOORBELL_NBYTES,
            number,
            header[: device_slots.CREDIT_WORD],
        )


def _places(stride: int) -> range:
    return range(0, SLOTS * stride, stride)


def _doorbell(arena: NativeArena, lease: Lease) -> int:
    return arena.doorbells_address + (lease.doorbell + ARRIVED) * DOORBELL_NBYTES
