"""Which slots of a peer a sender may use. Pure."""

from collections.abc import Callable, Sequence


class SlotCredits:
    """Uses of a peer's slots: a slot is free once it has been given back as often as it has been used.

    Attributes:
        used: how often, by slot. given_back: how often, as far as known.
    """

    def __init__(self, slots: int, first: int) -> None:
        """Both numbers count from ``first``."""
        self.used, self.given_back = [first] * slots, [first] * slots
        self._booked: dict[int, int] = {}  # the lanes that use slots without credits

    def give_back(self, uses: Sequence[int]) -> None:
        """Take in how often slots have been given back; an earlier number than known changes nothing."""
        for slot, known in enumerate(self.given_back):
            if uses[slot] > known:
                self.given_back[slot] = uses[slot]

    @property
    def outstanding(self) -> list[int]:
        """Slots that have not been given back."""
        return [slot for slot, used in enumerate(self.used) if used > self.given_back[slot]]

    def find(self, read: Callable[[], None]) -> int | None:
        """A free slot, if possible one that no lane has booked; None without one. ``read`` takes in what the peer has
        rung, which is done only if no slot is known to be free."""
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
        """The slot of this lane, if it has one, is as any other from now on: free once it has been given back."""
        self._booked = {slot: owner for slot, owner in self._booked.items() if owner != lane}
