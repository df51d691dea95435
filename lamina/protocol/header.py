"""The header in front of a message in a slot."""

import enum
import struct

from lamina.protocol.leases import HEADER_NBYTES, SLOTS
from lamina.transport.base import Buffer
from lamina.transport.device import slots as device_slots

HEADER = struct.Struct(f"<HBxHHQQqQQ{SLOTS}Q")
"""Lane, where the body is (``Place``), low bits of the turn and of the number that announces the first piece, turn,
bytes of the body, where what is fetched lies (or -1), its number, regions fetched so far of those announced to this
receiver, uses given back of each of its slots.

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
    """A header. ``first``: the number of the message's first piece. ``place``: see ``Place``. ``others``: what follows
    the turn."""
    return HEADER.pack(lane, place, turn & _LOW_BITS, first & _LOW_BITS, turn, *others)


def pack_alone(first: int, lane: int, place: Place, turn: int, nbytes: int) -> bytes:
    """The header of a message of one piece, without credits."""
    return pack(first, lane, place, turn, nbytes, -1, 0, 0, *[0] * SLOTS)


def stamp(lane: int, turn: int) -> int:
    """The first word of the header of a message in a slot, as a little-endian number, without the number's bits, the
    highest 16, and without where the body is."""
    return lane | (turn & _LOW_BITS) << 32


def lane_of(slot: Buffer, first: int) -> int | None:
    """The lane of the message in a slot, if ``first`` announced it."""
    (word,) = _WORD.unpack_from(slot)
    return int(word & _LOW_BITS) if word >> 48 == first & _LOW_BITS else None
