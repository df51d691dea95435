"""The loop of compute and memory workers: it runs steps, and handles the engine's messages between them.

``Fence`` stops the steps from the loss of a peer until no message of the old epoch can arrive any more. A worker that
has lost a peer stops its steps and tells the engine. The engine ends the epoch (``EndEpoch``): every remaining worker
drops its steps in flight, and then rings a doorbell of every remaining peer. A link keeps messages in order, so once
all peers have rung, slots and doorbells may be reused. Nothing can arrive from a lost worker: links to it are cut, and
the engine ends its process before it ends the epoch.
"""

import time
from collections.abc import Sequence

from lamina.control.messages import (
    Change,
    Changed,
    EndEpoch,
    EpochEnded,
    Forget,
    Grant,
    Link,
    Observe,
    Observed,
    PeerLost,
    Recall,
    Release,
    Step,
    Stop,
    ToWorker,
    Traced,
)
from lamina.control.sockets import ControlClient
from lamina.control.timeline import Timeline
from lamina.core.errors import DeadlineError, PeerLostError, WorkerError
from lamina.core.steps import StepPlan
from lamina.core.topology import Epoch, Topology
from lamina.transport.endpoint import Wait
from lamina.worker.device_slots import DeviceSlots, Mapper
from lamina.worker.links import Links, Newcomers

SLICE_S = 0.05  # time between two polls for control messages while a worker waits for rings
_INCARNATION_BITS = 32  # the ring's value holds the incarnation above the epoch's number


class Fence:
    """Decides whether a worker may run steps, and reports lost peers and ended epochs to the engine.

    Attributes:
        epoch: Current epoch. The worker ignores plans of earlier epochs.
        lost: Whether a member is lost: no step of the epoch may run any more.
    """

    def __init__(self, control: ControlClient, links: Links, epoch: Epoch) -> None:
        self._control, self._links = control, links
        self.epoch = epoch
        self.lost = False
        self._missing: list[str] = []  # peers whose messages of an earlier epoch may still arrive

    @property
    def open(self) -> bool:
        """Whether steps may run."""
        return not self.lost and not self._missing

    def on_peer_lost(self, error: PeerLostError) -> None:
        """Cut the link to a lost peer and report the loss to the engine. Steps stop until the epoch ends.

        A peer that is not yet a member is only disconnected: the engine notices by itself that the process ends.
        """
        if self._links.drop_newcomer(error.peer):
            return
        self._links.disconnect_for_good(error.peer)
        self._stop(error)

    def check_links(self) -> None:
        """Report to the engine the members whose links were cut before they joined. Steps stop until the epoch ends."""
        for peer in self._links.peers:
            if not self._links.has(peer):
                self._stop(PeerLostError(peer, "it was lost while it joined"))

    def _stop(self, error: PeerLostError) -> None:
        self.lost = True
        self._control.send(PeerLost(error.peer, str(error)))

    def begin_epoch(self, topology: Topology) -> None:
        """Begin the epoch of ``topology`` and ring all peers. The caller has dropped its steps in flight."""
        if topology.epoch.incarnation > self.epoch.incarnation:  # another engine, which has ended all other processes
            self._links.remove_leavers()
        self.epoch, self.lost = topology.epoch, False
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
        if self.lost or not linked:
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


class WorkerLoop:
    """Runs steps until the engine sends ``Stop``, in one thread. A subclass implements what differs by role."""

    def __init__(self, control: ControlClient, links: Links, device: Mapper, epoch: Epoch, trace: bool) -> None:
        self._control, self._links, self._wait = control, links, links.close_unused_endpoints()
        self._slots, self._timeline = DeviceSlots(links, device), Timeline(trace)
        self._fence = Fence(control, links, epoch)
        self._newcomers = Newcomers(control, links)
        self._running = True

    def serve_until_closed(self) -> None:
        """Serve until the engine sends ``Stop``."""
        while self._running:
            try:
                self._serve_once()
                self._newcomers.poll()
            except PeerLostError as error:
                self._fence.on_peer_lost(error)
        if self._timeline.enabled:
            self._control.send(Traced(list(self._timeline.spans)))

    def _serve_once(self) -> None:
        """Do what is due, or wait for it briefly. Raises PeerLostError."""
        raise NotImplementedError

    def _apply_plan(self, plan: StepPlan) -> None:
        """Apply a plan's deltas and prepare its step."""
        raise NotImplementedError

    def _end_epoch(self, message: EndEpoch) -> None:
        """Drop every step in flight with its state, and begin the next epoch by ``self._fence``."""
        raise NotImplementedError

    def _recall(self) -> None:
        """Run no step of the engine that has ended, and report what its steps have left."""
        raise NotImplementedError

    def _change_members(self, topology: Topology) -> None:
        """Continue with other members. No message in flight concerns a member that has left."""
        raise NotImplementedError

    def _drop_fetches(self, peers: Sequence[str]) -> None:
        """Drop what is fetched from peers whose processes have ended: it would occupy landing slots for ever."""
        raise NotImplementedError

    def _release(self, sequences: Sequence[int]) -> None:
        """Forget sequences. Those not known here are ignored."""
        raise NotImplementedError

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, Stop):
            self._running = False
        elif isinstance(message, Step):
            if message.epoch >= self._fence.epoch:
                self._apply_plan(message.plan)
        elif isinstance(message, EndEpoch):
            if message.topology.epoch.incarnation > self._fence.epoch.incarnation:
                self._drop_fetches(self._links.left)  # another engine, which has ended all other processes
            self._end_epoch(message)
        elif isinstance(message, Recall):
            self._recall()
        elif isinstance(message, Change):
            self._links.change_members(message.topology)
            self._fence.check_links()
            self._change_members(message.topology)
            self._control.send(Changed(message.number))
        elif isinstance(message, Forget):
            self._drop_fetches(message.workers)
            self._links.remove_peers(message.workers)
        elif isinstance(message, Grant | Link):
            self._newcomers.handle_link_message(message)
        elif isinstance(message, Release):
            self._release(message.sequences)
        elif isinstance(message, Observe):
            self._control.send(Observed(time.monotonic_ns(), self._timeline.observe()))
        else:
            raise WorkerError(self._control.name, f"a worker cannot take {type(message).__name__} after set-up")
