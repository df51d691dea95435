"""Links whose messages a device of this process reads or writes itself: where their slots and doorbells are.

Only links over shared memory: both arenas are mapped here. What a message looks like, and which slot it may be in,
``dataplane.channel`` says.
"""

import struct
from dataclasses import dataclass

import numpy as np

from lamina._native import DOORBELL_NBYTES
from lamina._native import Arena as NativeArena
from lamina.dataplane.channel import ARRIVED, Body, Channel
from lamina.dataplane.leases import HEADER_NBYTES, SLOTS, Lease
from lamina.dataplane.slot import Place, pack_alone, stamp
from lamina.dataplane.wire import MOST_PIECES, slot_number
from lamina.transport.device import slots as device_slots
from lamina.transport.device.inboxes import Inbox
from lamina.transport.device.slots import Incoming, Outgoing, PolledSlots

assert SLOTS == device_slots.SLOTS and HEADER_NBYTES == 8 * device_slots.HEADER_WORDS


@dataclass(frozen=True)
class Direct:
    """Both arenas of a link, and what each side may write into the other's: ``own`` by the peer, ``theirs`` by us.

    Attributes:
        own_inbox, their_inbox: where devices write bodies, if they can.
    """

    own_arena: NativeArena
    their_arena: NativeArena
    own: Lease
    theirs: Lease
    own_inbox: Inbox | None = None
    their_inbox: Inbox | None = None

    @property
    def request_nbytes(self) -> int:
        """Most bytes of a message's body here."""
        return self.own.body_nbytes

    @property
    def reply_nbytes(self) -> int:
        """Most bytes of a message's body in the peer's slots."""
        return self.theirs.body_nbytes

    @property
    def their_memory(self) -> memoryview:
        """What may be written there."""
        return memoryview(self.their_arena)[self.theirs.offset : self.theirs.offset + self.theirs.nbytes]

    @property
    def bodies(self) -> tuple[Body, ...]:
        """By slot there, where the body of a message is that a device writes: in the inbox, if there is one."""
        inbox, stride = self.their_inbox, self.reply_nbytes
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

    def incoming(self, channel: Channel, lane: int, turn: int) -> Incoming:
        """Return the message for an attention of a lane, which comes over ``channel``, this link's."""
        first = _doorbell(self.own_arena, self.own)
        return Incoming(
            tuple(self.own_arena.data_address + self.own.slot(number) for number in range(SLOTS)),
            tuple(self.own_inbox.address + at if self.own_inbox else 0 for at in _places(self.request_nbytes)),
            tuple(first + number * DOORBELL_NBYTES for number in range(SLOTS)),
            tuple(channel.unread),
            stamp(lane, turn),
            MOST_PIECES,
        )

    def outgoing(self, lane: int, turn: int, nbytes: int, slot: int, uses: int) -> Outgoing:
        """Return a message of one piece into a booked slot, which has been used ``uses`` times."""
        number, start = slot_number(uses, 0), self.their_arena.data_address + self.theirs.slot(slot)
        place, body = Place.SLOT, start + HEADER_NBYTES
        if self.their_inbox is not None:
            place, body = Place.INBOX, self.their_inbox.address + slot * self.reply_nbytes
        header = struct.unpack(f"={device_slots.HEADER_WORDS}Q", pack_alone(number, lane, place, turn, nbytes))
        return Outgoing(
            start,
            body,
            _doorbell(self.their_arena, self.theirs) + slot * DOORBELL_NBYTES,
            number,
            header[: device_slots.CREDIT_WORD],
        )

    def wake(self) -> None:
        """Wake the peer if it sleeps: a device that rings does not."""
        self.their_arena.nudge()


def _places(stride: int) -> range:
    """By slot, where a body is in an inbox."""
    return range(0, SLOTS * stride, stride)


def _doorbell(arena: NativeArena, lease: Lease) -> int:
    """Address of the doorbell of a lease's first slot."""
    return arena.doorbells_address + (lease.doorbell + ARRIVED) * DOORBELL_NBYTES
