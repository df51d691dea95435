"""Links that a worker makes and ends while it serves: for workers that join, and after those that have left."""

from lamina.protocol.control import ControlClient
from lamina.protocol.links import Links
from lamina.protocol.messages import Forget, Grant, Link

LINKING_SLICE_S = 0.002  # how long a worker may wait for other things while the proof of a newcomer may arrive


class Newcomers:
    """Answers the engine's requests about links without holding up steps: proofs are looked for, not waited for."""

    def __init__(self, control: ControlClient, links: Links) -> None:
        self._control, self._links = control, links

    def take(self, message: Grant | Link | Forget) -> None:
        """Do what the engine asks. Connecting to a peer may take a while, if its host does not answer."""
        if isinstance(message, Grant):
            self._control.send(self._links.grant(message))
        elif isinstance(message, Link):
            self._links.begin(message)
        else:
            self._links.forget(message.workers)

    @property
    def pending(self) -> bool:
        """True while a proof is awaited: call ``look`` every ``LINKING_SLICE_S``."""
        return self._links.is_linking

    def look(self) -> None:
        """Answer the engine if all proofs have arrived, or are late. Raises PeerLostError."""
        if self.pending and (linked := self._links.linked(0.0)) is not None:
            self._control.send(linked)
