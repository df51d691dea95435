"""Sending into one slot of a peer's arena, without credits."""

from collections.abc import Sequence
from dataclasses import dataclass

from lamina.transport.base import Endpoint, Part, Peer


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
