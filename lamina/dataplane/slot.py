"""One slot of a message: its header, the credit to use it, sending without credits."""

import enum
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lamina.dataplane.leases import HEADER_NBYTES, SLOTS
from lamina.transport.base import Buffer, Endpoint, Part, Peer
from lamina.transport.device import slots as device_slots

HEADER = struct.Struct(f"<HBxHHQQqQQ{SLOTS}Q")
"""Lane, where the body is (``Place``), low bits of the turn and of the number that announces the first piece, turn,
bytes of the body, where what is fetched lies (or -1), its number, regions fetched so far of those announced to this
receiver, uses freed of each of its slots.

The first word tells a message from all others of its slot, even while the next one is being written."""

assert HEADER.size <= HEADER_NBYTES
_WORD = struct.Struct("Q")  # native: read at once
_LOW_BITS = 0xFFFF


class Place(enum.IntEnum):
    """Where the body of a message is."""

    SLOT = 0
    FETCHED = 1
    """In the sender's arena, from where it is to be fetched."""
    INBOX = device_slots.IN_INBOX
    """In the receiver's inbox, at the place of the slot."""


def pack(first: int, lane: int, place: int, turn: int, *others: int) -> bytes:
    """Return a header. ``first``: the number of the message's first piece. ``place``: see ``Place``. ``others``: what
    follows the turn."""
    return HEADER.pack(lane, place, turn & _LOW_BITS, first & _LOW_BITS, turn, *others)


def pack_alone(first: int, lane: int, place: Place, turn: int, nbytes: int) -> bytes:
    """Return the header of a message of one piece, without credits."""
    return pack(first, lane, place, turn, nbytes, -1, 0, 0, *[0] * SLOTS)


def stamp(lane: int, turn: int) -> int:
    """Return the first word of the header of a message in a slot, as a little-endian number, without the number's bits,
    the highest 16, and without where the body is."""
    return lane | (turn & _LOW_BITS) << 32


def lane_of(slot: Buffer, first: int) -> int | None:
    """Return the lane of the message in a slot, if ``first`` announced it."""
    (word,) = _WORD.unpack_from(slot)
    return int(word & _LOW_BITS) if word >> 48 == first & _LOW_BITS else None


class SlotCredits:
    """Uses of a peer's slots: a slot is free once it has been freed as often as it has been used.

    Attributes:
        used: how often, by slot.
        given_back: how often, as far as known.
    """

    def __init__(self, slots: int, first: int) -> None:
        """Both numbers count from ``first``."""
        self.used, self.given_back = [first] * slots, [first] * slots
        self._booked: dict[int, int] = {}  # the lanes that use slots without credits

    def give_back(self, uses: Sequence[int]) -> None:
        """Take in how often slots have been freed; an earlier number than known changes nothing."""
        for slot, known in enumerate(self.given_back):
            if uses[slot] > known:
                self.given_back[slot] = uses[slot]

    @property
    def outstanding(self) -> list[int]:
        """Slots that have not been given back."""
        return [slot for slot, used in enumerate(self.used) if used > self.given_back[slot]]

    def find(self, read: Callable[[], None]) -> int | None:
        """Return a free slot, if possible one that no lane has booked; None without one. ``read`` takes in what the
        peer has rung, which is done only if no slot is known to be free."""
        for slot, used in enumerate(self.used):
            if used == self.given_back[slot] and slot not in self._booked:
                return slot
        read()
        free = [slot for slot, used in enumerate(self.used) if used == self.given_back[slot]]
        found = next((slot for slot in free if slot not in self._booked), free[0] if free else None)
        if found is not None:
            self._booked.pop(found, None)
        return found

    def book(self, lane: int, count: int) -> tuple[int, int] | None:
        """Reserve a slot for the next ``count`` messages of a lane, each of which is sent once the one before has been
        given back. Returns the slot and how often it was used before; None without a free one. A lane keeps the slot
        that it has booked.
        """
        slot = next((slot for slot, owner in self._booked.items() if owner == lane), None)
        if slot is None:
            free = (slot for slot, used in enumerate(self.used) if used == self.given_back[slot])
            slot = next((slot for slot in free if slot not in self._booked), None)
        if slot is None:
            return None
        self._booked[slot] = lane
        self.used[slot] += count
        return slot, self.used[slot] - count

    def unbook(self, lane: int) -> None:
        """The slot of this lane, if it has one, is as any other from now on: free once it has been freed."""
        self._booked = {slot: owner for slot, owner in self._booked.items() if owner != lane}


@dataclass(frozen=True)
class Slot:
    """A message's place in an arena, and the number of the doorbell that announces it."""

    offset: int
    nbytes: int
    doorbell: int


class Outbox:
    """Sends into one slot, for a sender that knows when it is free."""

    def __init__(self, endpoint: Endpoint, peer: Peer, slot: Slot) -> None:
        self._endpoint = endpoint
        self._peer = peer
        self._slot = slot

    def send(self, parts: Sequence[Part], sequence: int, at: int = 0) -> None:
        """Write the parts one after another from byte ``at`` of the slot on, then ring ``sequence``.

        Raises ValueError, before anything is written, if they do not fit; PeerLostError.
        """
        slot = self._slot
        self._endpoint.post(self._peer, slot.offset + at, slot.nbytes - at, parts, slot.doorbell, sequence)
