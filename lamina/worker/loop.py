"""The loop of compute and memory workers: it runs steps, and handles the engine's messages between them."""

import time
from collections.abc import Sequence

from lamina.control.messages import (
    Change,
    Changed,
    EndEpoch,
    Forget,
    Grant,
    Link,
    Observe,
    Observed,
    Recall,
    Release,
    Step,
    Stop,
    ToWorker,
    Traced,
)
from lamina.control.sockets import ControlClient
from lamina.control.timeline import Timeline
from lamina.core.errors import PeerLostError, WorkerError
from lamina.core.steps import StepPlan
from lamina.core.topology import Epoch, Topology
from lamina.worker.device_slots import DeviceSlots, Mapper
from lamina.worker.fence import Fence
from lamina.worker.links import Links, Newcomers


class WorkerLoop:
    """Runs steps until the engine sends ``Stop``, in one thread. A subclass implements what differs by role."""

    def __init__(self, control: ControlClient, links: Links, device: Mapper, epoch: Epoch, trace: bool) -> None:
        self._control, self._links, self._wait = control, links, links.close_unused_endpoints()
        self._slots, self._timeline = DeviceSlots(links, device), Timeline(trace)
        self._fence = Fence(control, links, epoch)
        self._newcomers = Newcomers(control, links)
        self._running = True

    def run(self) -> None:
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
            self._end_epoch(message)
        elif isinstance(message, Recall):
            self._recall()
        elif isinstance(message, Change):
            self._links.change_members(message.topology)
            self._change_members(message.topology)
            self._control.send(Changed(message.number))
        elif isinstance(message, Grant | Link | Forget):
            self._newcomers.handle_link_message(message)
        elif isinstance(message, Release):
            self._release(message.sequences)
        elif isinstance(message, Observe):
            self._control.send(Observed(time.monotonic_ns(), self._timeline.observe()))
        else:
            raise WorkerError(self._control.name, f"a worker cannot take {type(message).__name__} after set-up")
