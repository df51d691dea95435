"""The header in front of a message in a slot."""

import struct

from lamina.protocol.leases import HEADER_NBYTES, SLOTS
from lamina.transport.base import Buffer

HEADER = struct.Struct(f"<HBxHHQQqQQ{SLOTS}Q")
"""Lane, ``IS_FETCHED`` and ``IS_BOOKED`` if they apply, low bits of the turn and of the number that announces the first
piece, turn, bytes of the body, where what is fetched lies (or -1), its number, regions fetched so far of those
announced to this receiver, uses given back of each of its slots.

The first word tells a message from all others of its slot, even while the next one is being written."""

IS_FETCHED = 1  # the body lies in the sender's arena
IS_BOOKED = 2  # the sender uses the slot for this lane alone until a message in it says otherwise
assert HEADER.size <= HEADER_NBYTES
_WORD = struct.Struct("Q")  # native: read at once
_LOW_BITS = 0xFFFF


def pack(first: int, lane: int, flags: int, turn: int, *others: int) -> bytes:
    """A header. ``first``: the number of the message's first piece; ``others``: what follows the turn."""
    return HEADER.pack(lane, flags, turn & _LOW_BITS, first & _LOW_BITS, turn, *others)


def pack_booked(first: int, lane: int, turn: int, nbytes: int) -> bytes:
    """The header of a message of one piece in a booked slot, without credits."""
    return pack(first, lane, IS_BOOKED, turn, nbytes, -1, 0, 0, *[0] * SLOTS)


def stamp(lane: int, turn: int) -> int:
    """The first word of a header without flags, as a little-endian number, without its highest 16 bits: those of the
    number."""
    return lane | (turn & _LOW_BITS) << 32


def lane_of(slot: Buffer, first: int) -> int | None:
    """The lane of the message in a slot, if ``first`` announced it."""
    (word,) = _WORD.unpack_from(slot)
    return int(word & _LOW_BITS) if word >> 48 == first & _LOW_BITS else None
