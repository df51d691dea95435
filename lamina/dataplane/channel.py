"""Messages over one link, in slots that the receiver leased to the sender, with credits.

Each side of a link has ``SLOTS`` slots for the other's messages. A credit is a counter per slot: how many of its uses
the receiver has freed. Credits travel in the header of the next message in the other direction; a doorbell is rung for
them (``Channel.flush``) only once the sender may know of no free slot. A message without a slot is kept and sent when a
slot is freed; it never blocks its worker.

The number of a slot's doorbell says how often the slot has been used and which piece of the message has arrived
(``wire.slot_number``). The header says which lane the message belongs to, so that any lane may use any slot.

A message that is larger than a slot, and K and V of prompt chunks, are laid out in a pooled region of the sender's
arena, and the receiver fetches them (``dataplane.fetching``). Regions are numbered in the order in which they are
announced, and released in that order.

There is no deadlock: without any credit, a memory worker can serve a request, which frees its slot, a compute worker
can copy a reply out of its slot (``compute.mail``), and both can fetch. So every slot and region is freed eventually,
and every kept message is sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lamina.core.topology import Epoch, Topology
from lamina.dataplane.leases import (
    ALIGNMENT,
    ARRIVED,
    FETCHED,
    FREED,
    HEADER_NBYTES,
    SLOTS,
    Lease,
    Space,
    aligned,
)
from lamina.dataplane.slot import HEADER, Body, Place, SlotCredits, lane_of, pack
from lamina.dataplane.wire import MOST_PIECES, slot_number
from lamina.transport.base import Arena, Buffer, Endpoint, Part, Peer, Target, part_nbytes

SLOT, INBOX = int(Place.SLOT), int(Place.INBOX)  # plain numbers, which compare five times faster than enum members


@dataclass(eq=False, slots=True)
class Arrival:
    """A message that has begun to arrive.

    Attributes:
        slot: slot of the message; -1 once it is freed.
        body: bytes of the body, in the slot or as uint8 [nbytes] in the device's inbox, valid until ``free``. None: the
            receiver must fetch ``nbytes`` from ``fetched_at`` on.
        fetched_at: offset of the message's region in the sender's arena; -1 without a region.
        number: number of the region.
        readers: how many still read the region; the last one releases it.
    """

    channel: "Channel"
    slot: int
    lane: int
    turn: int
    nbytes: int
    body: Buffer | Any
    fetched_at: int
    number: int
    readers: int = 1

    @property
    def bulk_at(self) -> int:
        """Offset of K and V of prompt chunks in the sender's arena."""
        return self.fetched_at + (0 if self.body is not None else aligned(self.nbytes))

    @property
    def whole(self) -> Buffer | Any:
        """The body, which must not need fetching."""
        assert self.body is not None
        return self.body

    def set_aside(self) -> None:
        """Copy the body out of its slot into host memory, and free the slot."""
        if self.slot >= 0:
            body = self.whole
            self.body = memoryview(bytearray(body)) if isinstance(body, memoryview) else self.channel.copied(body)
            self.free()

    def free(self) -> None:
        """Free the slot: the message has been read."""
        if self.slot >= 0:
            self.channel.free(self.slot)
            self.slot = -1

    def end_reading(self) -> None:
        """Release the message's region, if it has one, once every reader has called this."""
        self.readers -= 1
        if not self.readers and self.fetched_at >= 0:
            self.channel.fetched(self.number)


class Message:
    """A message to a peer, made by ``Channel.begin``. Its pieces are sent at once if it has a slot, else later.

    Attributes:
        slot: slot in the peer's arena; -1 while the message is kept.
        region: offset of the bytes that the peer fetches.
        number: number of the region.
        piece: which piece of the body is sent next.
        at: byte of the body at which that piece begins.
    """

    slot = region = -1
    number = piece = at = 0
    _sent: Sequence[Part] = ()  # the piece before

    def __init__(self, channel: "Channel", lane: int, turn: int, nbytes: int, bulk_nbytes: int, copies: bool) -> None:
        self.lane, self.turn, self.nbytes = lane, turn, nbytes
        self.is_fetched = nbytes > channel.most_nbytes
        self._bulk = aligned(nbytes) if self.is_fetched else 0
        self.region_nbytes = self._bulk + bulk_nbytes
        self._channel, self._copies = channel, copies
        self._later: list[Callable[[], None]] = []

    def lay_out(self, at: int, parts: Sequence[Part]) -> None:
        """Write parts at byte ``at`` of the bulk data, which the receiver fetches."""
        if self.slot < 0:
            kept = self._kept(parts)
            self._later.append(lambda: self.lay_out(at, kept))
        else:
            self._channel.hub.write(self.region + self._bulk + at, parts)

    def send_piece(self, parts: Sequence[Part]) -> None:
        """Send the next piece of the body. Raises PeerLostError."""
        if self.slot < 0:
            kept = self._kept(parts)
            self._later.append(lambda: self.send_piece(kept))
            return
        self.at += sum(map(part_nbytes, self._sent))
        self._channel.post_piece(self, parts)
        self.piece += 1
        self._sent = parts

    def _kept(self, parts: Sequence[Part]) -> Sequence[Part]:
        return [_buffer(part).tobytes() for part in parts] if self._copies else parts

    def send_kept(self) -> None:
        """Send the kept pieces, now that the message has a slot."""
        later, self._later = self._later, []
        for action in later:
            action()


class Channel:
    """One end of a link.

    Attributes:
        name: name of the peer.
        most_nbytes: most bytes of a message's body in a slot.
        slots: memory into which the peer writes messages.
        awaited: by slot in which a piece may arrive: the doorbell and the number that announce it.
        bodies: by slot of the peer: where a device of this process writes the body; empty if it cannot.
        writes_inbox: True if ``bodies`` are in the peer's inbox.
        post_apart: writes the body to the peer's inbox and the header to a slot (``SharesMemory.post_apart``); None:
            both go into a slot.
        inbox: by slot of this side: where else bodies may arrive; empty without an inbox.
        settle_inbox: called before a body in the inbox is read.
        copied: copies a body from the inbox to the host.
    """

    def __init__(self, endpoint: Endpoint, peer: Peer, arena: Arena, hub: "Hub", own: Lease, theirs: Lease) -> None:
        """``own`` is the peer's lease of this arena, ``theirs`` is this side's lease of the peer's arena."""
        self.name = peer.name
        self.hub = hub
        hub.channels.append(self)
        self.most_nbytes = theirs.body_nbytes
        self._there = [theirs.doorbell + ARRIVED + number for number in range(SLOTS)]
        self._endpoint, self._peer, self._arena = endpoint, peer, arena
        self._own, self._theirs = own, theirs
        nbytes = own.slot_nbytes
        self.slots = [arena.view(own.slot(number), nbytes) for number in range(SLOTS if nbytes > 0 else 0)]
        self._bells = [own.doorbell + ARRIVED + number for number in range(SLOTS)]
        self._places = [theirs.slot(number) for number in range(SLOTS)]
        self.bodies: Sequence[Body] = ()
        self.writes_inbox = False
        self.inbox: Sequence[Any] = ()
        self.settle_inbox: Callable[[], None] = lambda: None
        self.copied: Callable[[Any], Buffer] = memoryview
        self.post_apart: Callable[[int, Sequence[Part], int, bytes, int, int], None] | None = None
        self._regions: list[tuple[int, int]] = []  # announced and not fetched yet
        self._kept: list[Message] = []
        self._has_ended = False
        self.restart(0)

    def restart(self, first: int) -> None:
        """Drop all messages; both ends count uses of slots and regions from ``first`` on."""
        self._drop_messages()
        # Outgoing: credits for the peer's slots; regions announced, and regions fetched.
        self._slots_there = SlotCredits(SLOTS, first)
        self._announced, self._fetched_there = first, first
        # Incoming: freed uses of each slot, and the next piece in each slot.
        self._freed, self._piece = [first] * SLOTS, [0] * SLOTS
        self.awaited: dict[int, Target] = {slot: self._target(slot) for slot in range(len(self.slots))}
        self._fetched, self._finished = first, set[int]()
        self._told = [first] * SLOTS, first  # freed uses by slot, and regions fetched, that the peer was told of
        self._untold, self._known = 0, SLOTS  # free slots that the peer was not told of, and most others it may use

    # Sending

    def begin(self, lane: int, turn: int, nbytes: int, bulk_nbytes: int = 0, *, copies: bool = True) -> Message:
        """Begin a message whose body has ``nbytes``, with ``bulk_nbytes`` beside it to be fetched.

        If the message has to be kept, its parts are copied, unless they stay as they are (``copies=False``).
        """
        message = Message(self, lane, turn, nbytes, bulk_nbytes, copies)
        if message.region_nbytes > self.hub.nbytes:
            raise ValueError(f"{message.region_nbytes} bytes do not fit into a pool of {self.hub.nbytes} bytes")
        if self.hub.keeping:
            self.hub.send_kept()  # kept messages come first
        if not self._admit(message):
            self._kept.append(message)
            self.hub.keeping[self] = None
            self.hub.send_kept()
        return message

    def place(self, nbytes: int) -> int | None:
        """Use a slot for a message that a device writes to ``bodies`` before it is sent; None if that cannot be."""
        if self.hub.keeping or nbytes > self.most_nbytes or not self.bodies:
            return None
        return self._slots_there.use(self._read_slots)

    def send_message(self, lane: int, turn: int, nbytes: int, parts: Sequence[Part], slot: int | None = None) -> None:
        """Send a message of a single piece, in half the time of ``begin`` and ``send_piece``. Raises PeerLostError.

        ``slot``: result of ``place``, if the body was written there; then there are no ``parts``.
        """
        assert slot is None or not parts
        place = INBOX if self.post_apart or (slot is not None and self.writes_inbox) else SLOT
        if slot is None and not self.hub.keeping and nbytes <= self.most_nbytes:
            slot = self._slots_there.use(self._read_slots)
        if slot is None:
            self.begin(lane, turn, nbytes).send_piece(parts)
            return
        number = slot_number(self._slots_there.used[slot] - 1, 0)
        header = self._header(number, lane, place, turn, nbytes, -1, 0)
        if self.post_apart is not None:
            self.post_apart(slot * self.most_nbytes, parts, self._places[slot], header, self._there[slot], number)
            return
        room = self.most_nbytes + HEADER_NBYTES
        self._endpoint.post(self._peer, self._places[slot], room, (header, *parts), self._there[slot], number)

    def _header(self, first: int, lane: int, place: int, turn: int, nbytes: int, region: int, number: int) -> bytes:
        """Return the header of a message, with credits for the peer. ``first`` is the number of its first piece."""
        header = pack(first, lane, place, turn, nbytes, region, number, self._fetched, *self._freed)
        if self._untold or self in self.hub.owing:
            self._tell()
        return header

    def post_piece(self, message: Message, parts: Sequence[Part]) -> None:
        """Write a message's next piece, and ring. Called by ``Message``."""
        slot, at = message.slot, message.at
        offset, nbytes = self._places[slot] + HEADER_NBYTES + at, self.most_nbytes - at
        if message.is_fetched:
            self.hub.write(message.region + at, parts)
            offset, nbytes, parts = self._places[slot] + HEADER_NBYTES, 0, ()
        number = slot_number(self._slots_there.used[slot] - 1, message.piece)
        if message.piece == 0:
            content = message.turn, message.nbytes, message.region, message.number
            place = Place.FETCHED if message.is_fetched else SLOT
            header = self._header(number, message.lane, place, *content)
            offset, nbytes, parts = offset - HEADER_NBYTES, nbytes + HEADER_NBYTES, [header, *parts]
        self._endpoint.post(self._peer, offset, nbytes, parts, self._there[slot], number)

    def _admit(self, message: Message) -> bool:
        """Give a message a slot, and a region if it needs one, if they are free."""
        slot = self._slots_there.find(self._read_slots)
        if slot is None:
            return False
        if message.region_nbytes:
            region = self.hub.regions.allocate(message.region_nbytes)
            if region is None:
                return False
            self._announced += 1
            self._regions.append((region, message.region_nbytes))
            message.region, message.number = region, self._announced
        self._slots_there.used[slot] += 1
        message.slot = slot
        return True

    def book(self, lane: int, count: int) -> tuple[int, int] | None:
        """Book a slot for the next ``count`` messages of ``lane`` (``SlotCredits.book``).

        Returns None if no slot is free or other messages wait for a slot.
        """
        self._read_slots()
        return None if self in self.hub.keeping else self._slots_there.book(lane, count)

    def unbook(self, lane: int) -> None:
        self._slots_there.unbook(lane)

    def read_credits(self) -> None:
        """Read the credits that the peer has rung. ``Hub.send_kept`` must follow."""
        self._read_slots()
        self._release_regions(self._arena.sequence(self._own.doorbell + FETCHED))

    def _read_slots(self) -> None:
        bell = self._own.doorbell + FREED
        self._slots_there.record_freed([self._arena.sequence(bell + slot) for slot in range(SLOTS)])

    def _release_regions(self, fetched: int) -> None:
        while self._fetched_there < fetched:
            self._fetched_there += 1
            self.hub.regions.deallocate(*self._regions.pop(0))

    @property
    def credits(self) -> list[Target]:
        """Doorbells to wait for, each of which frees a slot or a region."""
        bell = self._own.doorbell
        there = self._slots_there
        targets = [(bell + FREED + slot, there.freed[slot] + 1) for slot in there.outstanding]
        return targets + ([(bell + FETCHED, self._fetched_there + 1)] if self._regions else [])

    def send_kept(self) -> None:
        """Send the kept messages that can be sent now. Raises PeerLostError."""
        for message in list(self._kept):
            if self._admit(message):
                self._kept.remove(message)
                message.send_kept()
        if not self._kept:
            self.hub.keeping.pop(self, None)

    def end(self) -> None:
        """Drop kept messages, and release all regions. Called by ``Hub.forget``."""
        self._has_ended = True
        self._drop_messages()

    def _drop_messages(self) -> None:
        self._kept.clear()
        while self._regions:
            self.hub.regions.deallocate(*self._regions.pop())

    # Receiving

    def _target(self, slot: int) -> Target:
        return self._bells[slot], slot_number(self._freed[slot], self._piece[slot])

    def close_slot(self, slot: int) -> None:
        """Await nothing more in a slot before ``free`` or ``open_slot``."""
        del self.awaited[slot]

    def open_slot(self, slot: int) -> None:
        """Await the next piece of the message in this slot."""
        self._piece[slot] += 1
        self.awaited[slot] = self._target(slot)

    def read(self, slot: int) -> Arrival:
        """Return the message whose first piece has arrived in a slot, and read its credits. ``Hub.send_kept`` must
        follow."""
        view = self.slots[slot]
        lane, place, _, _, turn, nbytes, at, number, fetched, *freed = HEADER.unpack_from(view)
        self._slots_there.record_freed(freed)
        self._release_regions(fetched)
        self._known -= 1
        if self._untold and not self._known:
            self._owe()
        body: Buffer | Any = None
        if place == SLOT:
            body = view[HEADER_NBYTES : HEADER_NBYTES + nbytes]
        elif place == INBOX:
            self.settle_inbox()
            body = self.inbox[slot][:nbytes]
        return Arrival(self, slot, lane, turn, nbytes, body, at, number)

    def lane_at(self, slot: int) -> int | None:
        """Return the lane of the message whose first piece is awaited in a slot; None before it has arrived."""
        doorbell, number = self._target(slot)
        return lane_of(self.slots[slot], number) if self._arena.sequence(doorbell) >= number else None

    def settle(self, slot: int, number: int, header: bytes) -> None:
        """Record that a device has read a message and freed its slot. ``Hub.send_kept`` must follow.

        Args:
            slot: slot of the message.
            number: number of the slot's doorbell.
            header: header of the message.
        """
        fetched, *freed = HEADER.unpack(header)[-1 - SLOTS :]
        self._slots_there.record_freed(freed)
        self._release_regions(fetched)
        uses = (number - 1) // MOST_PIECES + 1
        if uses > self._freed[slot]:
            self._freed[slot] = self._told[0][slot] = uses
            self._piece[slot] = 0
            self.awaited[slot] = self._target(slot)

    @property
    def unread(self) -> list[int]:
        """By slot: the lowest doorbell number that announces a message not yet freed."""
        return [slot_number(freed, 0) for freed in self._freed]

    def free(self, slot: int) -> None:
        """Free a slot: its message has been read."""
        self._freed[slot] += 1
        self._piece[slot] = 0
        self.awaited[slot] = self._target(slot)
        self._untold += 1
        if not self._known:
            self._owe()

    def fetched(self, number: int) -> None:
        """Record that all of region ``number`` of the peer has been fetched."""
        self._finished.add(number)
        while self._fetched + 1 in self._finished:
            self._fetched += 1
            self._finished.remove(self._fetched)
            self._owe()

    def flush(self) -> None:
        """Ring the credits that the peer does not know of. Raises PeerLostError."""
        (freed, fetched), bell = self._told, self._theirs.doorbell
        self._tell()
        for slot in range(SLOTS):
            if freed[slot] < self._freed[slot]:
                self._endpoint.ring(self._peer, bell + FREED + slot, self._freed[slot])
        if fetched < self._fetched:
            self._endpoint.ring(self._peer, bell + FETCHED, self._fetched)

    def _owe(self) -> None:
        if not self._has_ended:
            self.hub.owing[self] = None

    def _tell(self) -> None:
        self._told = list(self._freed), self._fetched
        self._known += self._untold
        self._untold = 0
        self.hub.owing.pop(self, None)


class Hub:
    """What all channels of a worker share: the pool of regions that peers fetch from, and the channels with work to do.

    Attributes:
        channels: all channels.
        keeping: channels with messages that wait for a slot or a region.
        owing: channels whose peer may wait for credits that were not sent yet.
        regions: allocator of the pool.
        nbytes: bytes of the pool.
        sequence: returns the number with which a doorbell of this worker was last rung.
    """

    def __init__(self, arena: Arena, pool: tuple[int, int]) -> None:
        """``pool``: bytes [start, stop) of the arena."""
        self.channels: list[Channel] = []
        self.keeping: dict[Channel, None] = {}  # ordered sets: those of Python order channels by their addresses
        self.owing: dict[Channel, None] = {}
        self.sequence = arena.sequence
        self._arena = arena
        self.regions = Space(*pool, ALIGNMENT)
        self.nbytes = pool[1] - pool[0]

    def flush(self) -> None:
        """Ring the credits that peers may wait for. Raises PeerLostError."""
        while self.owing:
            next(iter(self.owing)).flush()

    @property
    def credits(self) -> list[Target]:
        """Doorbells to wait for, each of which may let a kept message be sent; empty if none is kept."""
        # A region fetched by one peer frees memory for a message to any other peer.
        return [target for channel in self.channels for target in channel.credits] if self.keeping else []

    def send_kept(self) -> None:
        """Read credits and send the kept messages that can be sent now. Raises PeerLostError."""
        if not self.keeping:
            return
        for channel in self.channels:
            channel.read_credits()
        for channel in [channel for channel in self.channels if channel in self.keeping]:
            channel.send_kept()

    def forget(self, channel: Channel) -> None:
        """End a channel: drop its kept messages, and release the regions that its peer has not fetched."""
        self.channels.remove(channel)
        self.keeping.pop(channel, None)
        self.owing.pop(channel, None)
        channel.end()

    def restart(self, topology: Topology) -> None:
        """Begin an epoch: drop all messages, count from ``first_use`` on, and end the channels to lost peers."""
        self.keeping.clear()
        self.owing.clear()
        for channel in list(self.channels):
            if channel.name in topology.names:
                channel.restart(first_use(topology.epoch))
            else:
                self.forget(channel)

    def write(self, offset: int, parts: Sequence[Part]) -> None:
        """Copy parts to ``offset`` of the arena, one after another."""
        for part in parts:
            if nbytes := part_nbytes(part):
                self._arena.view(offset, nbytes)[:] = _buffer(part).cast("B")
                offset += nbytes


def first_use(epoch: Epoch) -> int:
    """Return the count of uses at which an epoch begins. It leaves 2^40 uses of a slot to each epoch; a doorbell's 64
    bits are enough for 500,000 epochs."""
    return epoch.number << 40


def _buffer(part: Any) -> memoryview:  # Any: numpy declares its buffer protocol from Python 3.12 on only
    return memoryview(part)
