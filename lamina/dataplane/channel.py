"""Messages over one link, in slots that the receiver leased to the sender, with credits.

Each side of a link has ``SLOTS`` slots for the other's messages. A sender uses a slot only when its receiver has given
it back, and knows that by a counter per slot: uses freed so far. The counters travel in the header of the next
message that goes the other way; they are rung (``Channel.flush``) only once the sender may know of no free slot. A
message without one is kept and sent when one is freed; it never blocks its worker.

The number of a slot's doorbell says how often the slot has been used and which piece of the message has arrived
(``wire.slot_number``); the header says which lane the message belongs to, so that any lane may use any slot.

A message that is larger than a slot, and K and V of prompt chunks, are laid out in a pooled region of the sender's own
arena and fetched by the receiver (``dataplane.fetching``), who counts what it has fetched. These regions are numbered
in the order in which they are announced, and released in that order.

Nothing deadlocks: a memory worker needs no credit to serve a request, which frees its slot; a compute worker needs none
to take a reply out of its slot (``compute.mail``); and both fetch without waiting for anybody. So every slot and
region is freed at some time, and every kept message is sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lamina.dataplane.hub import Hub, Target, buffer_of
from lamina.dataplane.leases import DOORBELLS, HEADER_NBYTES, SLOTS, Lease, aligned
from lamina.dataplane.slot import HEADER, Place, SlotCredits, lane_of, pack
from lamina.dataplane.wire import MOST_PIECES, slot_number
from lamina.transport.base import Arena, Buffer, Endpoint, Part, Peer, part_nbytes

# Doorbells of a lease, counted from its first. The owner of the arena waits on them, the peer rings.
PROOF = 0
ARRIVED = 1  # by slot: a piece of a message is in it
GIVEN_BACK = ARRIVED + SLOTS  # by slot of the peer's arena: uses freed
FETCHED = GIVEN_BACK + SLOTS  # regions fetched
assert FETCHED < DOORBELLS
SLOT, INBOX = int(Place.SLOT), int(Place.INBOX)  # compared for every message: members of an enum take five times longer


class Body(NamedTuple):
    """Where a device of this process writes the body of a message to a peer. ``array``: uint8, numpy's or the
    device's."""

    address: int
    array: Any


@dataclass(eq=False, slots=True)
class Arrival:
    """A message that has begun to arrive.

    Attributes:
        slot: -1 if it is in none any more.
        body: its bytes in the slot, or uint8 [nbytes] of the device in the inbox, until ``free``; None: to be fetched,
            ``nbytes`` from ``fetched_at`` on.
        fetched_at: where the region of this message lies in the sender's arena, -1 without one.
        bulk_at: where K and V of prompt chunks lie in it.
        number: of the region.
        readers: what still reads its region; the last one releases the region.
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
        """Where K and V of prompt chunks lie in the region."""
        return self.fetched_at + (0 if self.body is not None else aligned(self.nbytes))

    @property
    def whole(self) -> Buffer | Any:
        """The body, which must be here."""
        assert self.body is not None
        return self.body

    def set_aside(self) -> None:
        """Copy the body out of its slot, to the host."""
        if self.slot >= 0:
            body = self.whole
            self.body = memoryview(bytearray(body)) if isinstance(body, memoryview) else self.channel.copied(body)
            self.free()

    def free(self) -> None:
        """Give back the slot: the message has been read."""
        if self.slot >= 0:
            self.channel.free(self.slot)
            self.slot = -1

    def end_reading(self) -> None:
        """Release the message's region, if it has one, once every reader has called this."""
        self.readers -= 1
        if not self.readers and self.fetched_at >= 0:
            self.channel.fetched(self.number)


class Message:
    """A message to a peer: pieces sent one after another, at once if it has a slot, otherwise once it has one.

    Made by ``Channel.begin``.

    Attributes:
        slot: -1 while it is kept. region, number: where the bytes to be fetched lie, and which region it is.
        piece, at: of the body, to be sent next.
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
        """Put parts at byte ``at`` of the message's bulk, for its receiver to fetch."""
        if self.slot < 0:
            kept = self._kept(parts)
            self._later.append(lambda: self.lay_out(at, kept))
        else:
            self._channel.hub.write(self.region + self._bulk + at, parts)

    def send(self, parts: Sequence[Part]) -> None:
        """Send the next piece of the body. Raises PeerLostError."""
        if self.slot < 0:
            kept = self._kept(parts)
            self._later.append(lambda: self.send(kept))
            return
        self.at += sum(map(part_nbytes, self._sent))
        self._channel.post(self, parts)
        self.piece += 1
        self._sent = parts

    def _kept(self, parts: Sequence[Part]) -> Sequence[Part]:
        return [buffer_of(part).tobytes() for part in parts] if self._copies else parts

    def go_on(self) -> None:
        """Send what was kept, now that there is a slot."""
        later, self._later = self._later, []
        for action in later:
            action()


class Channel:
    """One end of a link.

    Attributes:
        name: the peer's.
        most_nbytes: of a message's body in a slot.
        slots: memory that the peer writes messages into.
        awaited: the slots that a piece may arrive in, each with what announces it.
        bodies: of messages in the peer's slots, if a device of this process writes there; else empty.
        writes_inbox: they are in the peer's inbox.
        post_apart: posts the body to the peer's inbox, and the header to a slot, see ``SharesMemory.post_apart``; None:
            both go into a slot.
        inbox: by slot here, where bodies may arrive besides; empty without one.
        settle_inbox: to call before one is read.
        copied: brings one to the host.
    """

    def __init__(self, endpoint: Endpoint, peer: Peer, arena: Arena, hub: Hub, own: Lease, theirs: Lease) -> None:
        """``own``: what the peer may write into here; ``theirs``: what this side may write into there."""
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
        self.settle_inbox: Callable[[], None] = _nothing
        self.copied: Callable[[Any], Buffer] = memoryview
        self.post_apart: Callable[[int, Sequence[Part], int, bytes, int, int], None] | None = None
        self.awaited: dict[int, Target] = {}
        self._regions: list[tuple[int, int]] = []  # announced and not fetched yet
        self._kept: list[Message] = []
        self._has_ended = False
        self.restart(0)

    def restart(self, first: int) -> None:
        """Drop all messages; both ends count uses of slots and regions from ``first`` on."""
        self._drop_messages()
        # Outgoing: the peer's slots; regions announced, and those fetched.
        self._slots_there = SlotCredits(SLOTS, first)
        self._announced, self._fetched_there = first, first
        # Incoming: uses of the own slots freed, and the next piece of each slot.
        self._freed, self._piece = [first] * SLOTS, [0] * SLOTS
        self.awaited = {slot: self._target(slot) for slot in range(len(self.slots))}
        self._fetched, self._finished = first, set[int]()
        self._told = [first] * SLOTS, first  # what the peer knows of both
        self._untold, self._known = 0, SLOTS  # free slots that it does not know of, and that it may know of

    # Sending

    def begin(self, lane: int, turn: int, nbytes: int, bulk_nbytes: int = 0, *, copies: bool = True) -> Message:
        """Begin a message whose body has ``nbytes``, with ``bulk_nbytes`` beside it to be fetched.

        If it has to be kept, its parts are copied, unless they stay as they are (``copies=False``).
        """
        message = Message(self, lane, turn, nbytes, bulk_nbytes, copies)
        if message.region_nbytes > self.hub.nbytes:
            raise ValueError(f"{message.region_nbytes} bytes do not fit into a pool of {self.hub.nbytes} bytes")
        if self.hub.keeping:
            self.hub.go_on()  # those that were kept come first
        if not self._admit(message):
            self._kept.append(message)
            self.hub.keeping.add(self)
            self.hub.go_on()
        return message

    def place(self, nbytes: int) -> int | None:
        """Take a slot for a message that is written there, to ``bodies``, before it is sent; None if it cannot be."""
        if self.hub.keeping or nbytes > self.most_nbytes or not self.bodies:
            return None
        slot = self._free_slot()
        if slot is not None:
            self._slots_there.used[slot] += 1
        return slot

    def send(self, lane: int, turn: int, nbytes: int, parts: Sequence[Part], slot: int | None = None) -> None:
        """Send a message of a single piece: ``begin`` and ``Message.send`` in one call, for half of their time.

        ``slot``: it has been written there, see ``place``, and has no parts. Raises PeerLostError.
        """
        assert slot is None or not parts
        place = INBOX if self.post_apart or (slot is not None and self.writes_inbox) else SLOT
        used = self._slots_there.used
        if slot is None and not self.hub.keeping and nbytes <= self.most_nbytes:
            slot = self._free_slot()
            if slot is not None:
                used[slot] += 1
        if slot is None:
            self.begin(lane, turn, nbytes).send(parts)
            return
        number = slot_number(used[slot] - 1, 0)
        header = self._header(number, lane, place, turn, nbytes, -1, 0)
        if self.post_apart is not None:
            self.post_apart(slot * self.most_nbytes, parts, self._places[slot], header, self._there[slot], number)
            return
        room = self.most_nbytes + HEADER_NBYTES
        self._endpoint.post(self._peer, self._places[slot], room, (header, *parts), self._there[slot], number)

    def _header(self, first: int, lane: int, place: int, turn: int, nbytes: int, region: int, number: int) -> bytes:
        """Return the header of a message, which tells the peer what it is owed. ``first``: the number of its first
        piece."""
        header = pack(first, lane, place, turn, nbytes, region, number, self._fetched, *self._freed)
        if self._untold or self in self.hub.owing:
            self._tell()
        return header

    def post(self, message: Message, parts: Sequence[Part]) -> None:
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
        slot = self._free_slot()
        if slot is None:
            return False
        if message.region_nbytes:
            region = self.hub.take(message.region_nbytes)
            if region is None:
                return False
            self._announced += 1
            self._regions.append((region, message.region_nbytes))
            message.region, message.number = region, self._announced
        self._slots_there.used[slot] += 1
        message.slot = slot
        return True

    def _free_slot(self) -> int | None:
        return self._slots_there.find(self._read_slots)

    def book(self, lane: int, count: int) -> tuple[int, int] | None:
        """Book a slot for a message of ``lane``; None if none is free or other messages wait for one."""
        self._read_slots()
        return None if self in self.hub.keeping else self._slots_there.book(lane, count)

    def unbook(self, lane: int) -> None:
        self._slots_there.unbook(lane)

    def read_credits(self) -> None:
        """Take in what the peer has rung. ``Hub.go_on`` must follow: a region may be what another message waits for."""
        self._read_slots()
        self._release(self._arena.sequence(self._own.doorbell + FETCHED))

    def _read_slots(self) -> None:
        bell = self._own.doorbell + GIVEN_BACK
        self._slots_there.give_back([self._arena.sequence(bell + slot) for slot in range(SLOTS)])

    def _release(self, fetched: int) -> None:
        while self._fetched_there < fetched:
            self._fetched_there += 1
            self.hub.give(*self._regions.pop(0))

    @property
    def credits(self) -> list[Target]:
        """Each of these gives back a slot or a region."""
        bell = self._own.doorbell
        there = self._slots_there
        targets = [(bell + GIVEN_BACK + slot, there.given_back[slot] + 1) for slot in there.outstanding]
        return targets + ([(bell + FETCHED, self._fetched_there + 1)] if self._regions else [])

    def go_on(self) -> None:
        """Send the kept messages that can be sent now. Raises PeerLostError."""
        for message in list(self._kept):
            if self._admit(message):
                self._kept.remove(message)
                message.go_on()
        if not self._kept:
            self.hub.keeping.discard(self)

    def drop(self) -> None:
        """Drop what was kept, and release all regions. Called by ``Hub.forget``."""
        self._has_ended = True
        self._drop_messages()

    def _drop_messages(self) -> None:
        self._kept.clear()
        while self._regions:
            self.hub.give(*self._regions.pop())

    # Receiving

    def _target(self, slot: int) -> Target:
        return self._bells[slot], slot_number(self._freed[slot], self._piece[slot])

    def close_slot(self, slot: int) -> None:
        """Nothing more is awaited in a slot before ``free`` or ``open_slot``."""
        del self.awaited[slot]

    def open_slot(self, slot: int) -> None:
        """The next piece of the message in this slot is awaited."""
        self._piece[slot] += 1
        self.awaited[slot] = self._target(slot)

    def read(self, slot: int) -> Arrival:
        """Return the message whose first piece has arrived in a slot. ``Hub.go_on`` must follow: it may bring
        credits."""
        view = self.slots[slot]
        lane, place, _, _, turn, nbytes, at, number, fetched, *given_back = HEADER.unpack_from(view)
        self._slots_there.give_back(given_back)
        if fetched > self._fetched_there:
            self._release(fetched)
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
        """Return the lane of the message whose first piece is awaited in a slot; None before it is there."""
        doorbell, number = self._target(slot)
        return lane_of(self.slots[slot], number) if self._arena.sequence(doorbell) >= number else None

    def settle(self, slot: int, number: int, header: bytes) -> None:
        """A message was read, and its slot freed, without this object. ``header`` is the message's, ``number`` its
        doorbell's. ``Hub.go_on`` must follow."""
        fetched, *given_back = HEADER.unpack(header)[-1 - SLOTS :]
        self._slots_there.give_back(given_back)
        self._release(fetched)
        uses = (number - 1) // MOST_PIECES + 1
        if uses > self._freed[slot]:
            self._freed[slot] = self._told[0][slot] = uses
            self._piece[slot] = 0
            self.awaited[slot] = self._target(slot)

    @property
    def unread(self) -> list[int]:
        """By slot: the lowest number that announces a message that has not been given back."""
        return [slot_number(freed, 0) for freed in self._freed]

    def free(self, slot: int) -> None:
        """Give back a slot: its message has been read."""
        self._freed[slot] += 1
        self._piece[slot] = 0
        self.awaited[slot] = self._target(slot)
        self._untold += 1
        if not self._known:
            self._owe()

    def fetched(self, number: int) -> None:
        """All of a message's region has been fetched."""
        self._finished.add(number)
        while self._fetched + 1 in self._finished:
            self._fetched += 1
            self._finished.remove(self._fetched)
            self._owe()

    def flush(self) -> None:
        """Ring what the peer has not been told of slots freed and regions fetched. Raises PeerLostError."""
        (freed, fetched), bell = self._told, self._theirs.doorbell
        self._tell()
        for slot in range(SLOTS):
            if freed[slot] < self._freed[slot]:
                self._endpoint.ring(self._peer, bell + GIVEN_BACK + slot, self._freed[slot])
        if fetched < self._fetched:
            self._endpoint.ring(self._peer, bell + FETCHED, self._fetched)

    def _owe(self) -> None:
        if not self._has_ended:
            self.hub.owing.add(self)

    def _tell(self) -> None:
        self._told = list(self._freed), self._fetched
        self._known += self._untold
        self._untold = 0
        self.hub.owing.discard(self)


def _nothing() -> None:
    pass
