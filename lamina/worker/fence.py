"""Stops a worker's steps from the loss of a peer until no message of the old epoch can arrive any more.

A worker that has lost a peer stops its steps and tells the engine. The engine ends the epoch (``EndEpoch``): every
remaining worker drops its steps in flight, and then rings a doorbell of every remaining peer. A link keeps messages in
order, so once all peers have rung, slots and doorbells may be reused. Nothing can arrive from a lost worker: links to
it are cut, and the engine ends its process before it ends the epoch.
"""

from lamina.control.messages import EpochEnded, PeerLost, ToWorker
from lamina.control.sockets import ControlClient
from lamina.core.errors import DeadlineError, PeerLostError
from lamina.core.topology import Epoch, Topology
from lamina.transport.endpoint import Wait
from lamina.worker.links import Links

SLICE_S = 0.05  # between two polls for control messages while a worker waits for rings
_INCARNATION_BITS = 32  # the ring's value holds the incarnation above the epoch's number


class Fence:
    """Decides whether a worker may run steps, and reports lost peers and ended epochs to the engine.

    Attributes:
        epoch: Current epoch. The worker ignores plans of earlier epochs.
    """

    def __init__(self, control: ControlClient, links: Links, epoch: Epoch) -> None:
        self._control, self._links = control, links
        self.epoch = epoch
        self._lost = False  # a peer is lost: no step may run before the epoch ends
        self._missing: list[str] = []  # peers whose messages of an earlier epoch may still arrive

    @property
    def open(self) -> bool:
        """Whether steps may run."""
        return not self._lost and not self._missing

    def on_peer_lost(self, error: PeerLostError) -> None:
        """Cut the link to a lost peer and report the loss to the engine. Steps stop until the epoch ends.

        A peer that is not yet a member is only disconnected: the engine notices by itself that the process ends.
        """
        if error.peer not in self._links.peers:
            self._links.disconnect(error.peer)
            return
        self._links.disconnect_for_good(error.peer)
        self._stop(error)

    def on_newcomer_lost(self, peer: str) -> None:
        """Report to the engine that a new member was lost before it was linked. Steps stop until the epoch ends."""
        self._stop(PeerLostError(peer, "it was lost while it joined"))

    def _stop(self, error: PeerLostError) -> None:
        self._lost = True
        self._control.send(PeerLost(error.peer, str(error)))

    def begin_epoch(self, topology: Topology) -> None:
        """Begin the epoch of ``topology`` and ring all peers. The caller has dropped its steps in flight."""
        if topology.epoch.incarnation > self.epoch.incarnation:  # another engine, which has ended all other processes
            self._links.remove_leavers()
        self.epoch, self._lost = topology.epoch, False
        self._links.apply_topology(topology)
        self._missing = list(self._links.peers)
        for peer in self._missing:
            self._links.ring(peer, _ring_value(self.epoch))
        self._report()

    def stand_by(self, wait: Wait) -> ToWorker | None:
        """Wait up to ``SLICE_S`` for a ring or a control message, while not ``open``. Returns the message, or None.

        Raises PeerLostError.
        """
        linked = [peer for peer in self._missing if self._links.has(peer)]
        if self._lost or not linked:
            return self._control.poll(SLICE_S)
        try:
            index = wait([(self._links.bell(peer), _ring_value(self.epoch)) for peer in linked], SLICE_S)
        except DeadlineError:
            return self._control.poll()
        self._missing.remove(linked[index])
        if not self._missing:
            self._report()
        return None

    def _report(self) -> None:
        self._control.send(EpochEnded(self.epoch, list(self._missing)))


def _ring_value(epoch: Epoch) -> int:
    return (epoch.incarnation << _INCARNATION_BITS) + epoch.number
