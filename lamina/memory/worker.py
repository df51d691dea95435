"""The memory worker: holds KV in a slab, runs attention over it, answers compute workers. Runs without torch.

One thread does everything. Doorbells drive it; control messages are read when it is idle or when a message arrives
whose plan is still on its way. Slab changes happen in the order the engine sent the plans.
"""

import collections
import logging
import time
from dataclasses import dataclass, field

from lamina.errors import DeadlineError, PeerLostError, WorkerError
from lamina.memory.store import KvStore, StepTables
from lamina.transport.base import Peer
from lamina.transport.channel import Responder
from lamina.transport.control import ControlClient, expect
from lamina.transport.messages import (
    Connect,
    Connected,
    MemorySetup,
    Register,
    Registered,
    SlabReady,
    SlabUsage,
    Step,
    Stop,
    ToWorker,
)
from lamina.transport.process import run_worker
from lamina.transport.shm import ShmEndpoint
from lamina.transport.wire import read_request

log = logging.getLogger(__name__)

IDLE_SLICE_S = 0.05  # how long an idle worker may leave a control message unread
PLAN_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 30.0


@dataclass
class ComputeChannel:
    """The channel to one compute worker with the steps announced for it and the layer it is at."""

    peer: Peer
    responder: Responder
    steps: collections.deque[StepTables] = field(default_factory=collections.deque)
    layer: int = 0


class MemoryWorker:
    """Serves its channels until the engine says stop."""

    def __init__(self, control: ControlClient) -> None:
        self.name = control.name
        self._control = control
        self._endpoint = ShmEndpoint(control.name)
        self._channels: dict[str, ComputeChannel] = {}
        self._running = True

    def run(self) -> None:
        """Set up as the engine tells, then serve."""
        self._set_up()
        while self._running:
            try:
                self._serve_once()
            except PeerLostError as error:
                self._forget(error.peer)

    def close(self) -> None:
        """Leave the data plane. Idempotent."""
        self._endpoint.close()

    def _set_up(self) -> None:
        setup = expect(self._control, MemorySetup)
        self._dtype = setup.dtype
        self._store = KvStore(self.name, setup.attentions, setup.dtype, setup.capacity, setup.threads)
        self._control.send(SlabReady(setup.capacity))
        register = expect(self._control, Register)
        arena = self._endpoint.register(register.nbytes, register.doorbells)
        self._control.send(Registered(self._endpoint.descriptor()))
        connect = expect(self._control, Connect)
        for channel in connect.channels:
            peer = self._endpoint.connect(connect.descriptors[channel.compute], CONNECT_TIMEOUT_S)
            responder = Responder(self._endpoint, arena, peer, channel.layout, **channel.places)
            self._channels[channel.compute] = ComputeChannel(peer, responder)
        self._control.send(Connected())

    def _serve_once(self) -> None:
        channels = list(self._channels.values())
        if not channels:  # every compute worker is gone, and the engine ends without them
            self._handle(self._control.receive(PLAN_TIMEOUT_S))
            return
        try:
            ready = self._endpoint.wait([channel.responder.target for channel in channels], IDLE_SLICE_S)
        except DeadlineError:
            self._read_control()
            return
        channel = channels[ready]
        self._channels[channel.peer.name] = self._channels.pop(channel.peer.name)  # to the end: others come first
        deadline = time.monotonic() + PLAN_TIMEOUT_S
        while self._running and not channel.steps:  # the data overtook its plan
            self._handle(self._control.receive(deadline - time.monotonic()))
        if self._running:
            self._serve_layer(channel)

    def _serve_layer(self, channel: ComputeChannel) -> None:
        """Answer one request: one attention of one step."""
        tables = channel.steps[0]
        spec = self._store.layers[channel.layer].spec
        request = channel.responder.receive(PLAN_TIMEOUT_S)
        q, k, v = read_request(request, spec, self._dtype, len(tables.rows.queries), len(tables.rows.appends))
        out, lse = self._store.attend(channel.layer, tables, q, k, v)
        channel.responder.reply([out, lse])
        channel.layer += 1
        if channel.layer == len(self._store.layers):
            channel.layer = 0
            channel.steps.popleft()

    def _read_control(self) -> None:
        while self._running and (message := self._control.poll()) is not None:
            self._handle(message)

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, Stop):
            self._running = False
        elif isinstance(message, Step):
            tables = self._store.apply(message.plan)
            if not tables.rows.empty:
                self._announce(message.plan.compute, tables)
            self._control.send(SlabUsage(message.plan.step, self._store.slab.used, self._store.sequences))
        else:
            raise WorkerError(self.name, f"a memory worker that serves cannot take a {type(message).__name__}")

    def _announce(self, compute: str, tables: StepTables) -> None:
        channel = self._channels.get(compute)
        if channel is not None:  # else it is gone, and nobody waits for this step
            channel.steps.append(tables)

    def _forget(self, compute: str) -> None:
        """A compute worker is gone: its steps end here; the engine decides what becomes of their requests."""
        log.info("%s: compute worker %s is gone", self.name, compute)
        channel = self._channels.pop(compute)
        self._endpoint.disconnect(channel.peer)


def main() -> None:
    """Entry point of the process."""
    run_worker(MemoryWorker)


if __name__ == "__main__":
    main()
