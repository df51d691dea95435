"""A worker between two epochs: from the loss of a peer until no message of the old epoch can arrive any more.

A worker that has lost a peer stops its steps and tells the engine. The engine ends the epoch (``EndEpoch``): every
remaining worker drops what is in flight and rings every remaining peer, on each link after everything sent before.
Once all peers have rung, slots and doorbells may be used again. Nothing may arrive from a lost worker: links to it are
cut, and the engine ends its process before it ends the epoch.
"""

from lamina.control.messages import EpochEnded, PeerLost, ToWorker
from lamina.control.sockets import ControlClient
from lamina.core.errors import DeadlineError, PeerLostError
from lamina.core.topology import Epoch, Topology
from lamina.transport.endpoint import Wait
from lamina.worker.links import Links

SLICE_S = 0.05  # how long a control message may stay unread while rings are awaited
_INCARNATION_BITS = 32  # above the number of an epoch; both above the rounds of ``Links.link``


class Fence:
    """Says whether a worker may run steps, and reports lost peers and ended epochs to the engine.

    Attributes:
        epoch: the current epoch. The worker ignores plans of earlier ones.
    """

    def __init__(self, control: ControlClient, links: Links, epoch: Epoch) -> None:
        self._control, self._links = control, links
        self.epoch = epoch
        self._lost = False  # a peer is lost: no step may run before the epoch ends
        self._missing: list[str] = []  # peers whose messages of an earlier epoch may still arrive

    @property
    def open(self) -> bool:
        """True if steps may run."""
        return not self._lost and not self._missing

    def on_peer_lost(self, error: PeerLostError) -> None:
        """Cut the link to a lost peer and tell the engine. Steps stop until the epoch ends.

        A peer that has not become a member yet is only disconnected: the engine sees its process end.
        """
        if error.peer not in self._links.peers:
            self._links.disconnect(error.peer)
            return
        self._links.disconnect_for_good(error.peer)
        self._stop(error)

    def miss(self, peer: str) -> None:
        """Report that there is no link to a new member. Steps stop until the epoch ends."""
        self._stop(PeerLostError(peer, "it was lost while it joined"))

    def _stop(self, error: PeerLostError) -> None:
        self._lost = True
        self._control.send(PeerLost(error.peer, str(error)))

    def begin_epoch(self, topology: Topology) -> None:
        """Begin the epoch of ``topology``. The caller has dropped its steps and sends nothing more of them."""
        self.epoch, self._lost = topology.epoch, False
        self._links.apply_topology(topology)
        self._missing = list(self._links.peers)
        for peer in self._missing:
            self._links.ring(peer, _number(self.epoch))
        self._report()

    def stand_by(self, wait: Wait) -> ToWorker | None:
        """While not ``open``: wait for a ring or a control message. Returns the message, or None.

        Raises PeerLostError.
        """
        linked = [peer for peer in self._missing if self._links.has(peer)]
        if self._lost or not linked:
            return self._control.poll(SLICE_S)
        try:
            index = wait([(self._links.bell(peer), _number(self.epoch)) for peer in linked], SLICE_S)
        except DeadlineError:
            return self._control.poll()
        self._missing.remove(linked[index])
        if not self._missing:
            self._report()
        return None

    def _report(self) -> None:
        self._control.send(EpochEnded(self.epoch, list(self._missing)))


def _number(epoch: Epoch) -> int:
    return (epoch.incarnation << _INCARNATION_BITS) + epoch.number
