"""A memory worker in this process, with a compute worker and an engine that are scripted."""

import collections
import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from lamina.compute.mail import Mail
from lamina.control.messages import (
    Connect,
    Grant,
    Granted,
    Link,
    Linked,
    LinkWay,
    MemorySetup,
    Register,
    Registered,
    Reserve,
    Step,
)
from lamina.core.errors import DeadlineError
from lamina.core.pipeline import Pipeline
from lamina.core.sampling import SamplingParams
from lamina.core.steps import Admission, DecodeRows, SequenceStep, StepPlan
from lamina.core.topology import FIRST
from lamina.core.types import AttentionSpec, DType, Overlap, Polling, Segment
from lamina.dataplane.fetching import Fetcher
from lamina.dataplane.leases import Messages
from lamina.dataplane.transport_choice import Transport
from lamina.memory import worker
from lamina.transport.device.inboxes import Inboxes
from lamina.worker.device_slots import DeviceSlots
from lamina.worker.links import Member, open_links
from tests.support.linked_workers import Device

SPEC = AttentionSpec(layer=0, query_heads=2, kv_heads=2, qk_dim=8, v_dim=8, scale=0.5)
NOBODY = DecodeRows([], [], [])
PREFIX, ROWS = 1000, 40
PER_TOKEN = SPEC.kv_bytes_per_token(DType.FLOAT32)
TIMEOUT_S = 20.0


class Control:
    """A worker's end of the control plane, in one process with the test."""

    name, local_address, data_secret = "memory0", "127.0.0.1", b"a secret of 16 bytes or more"
    device, shares_gpu = "cpu", False
    bind_address = local_address

    def __init__(self) -> None:
        self.inbox: collections.deque[Any] = collections.deque()
        self.sent: list[Any] = []
        self.changed = threading.Condition()

    def tell(self, message: Any) -> None:
        with self.changed:
            self.inbox.append(message)
            self.changed.notify_all()

    def hear(self, kind: type) -> Any:
        with self.changed:
            assert self.changed.wait_for(lambda: any(isinstance(each, kind) for each in self.sent), TIMEOUT_S)
            return next(each for each in self.sent if isinstance(each, kind))

    def send(self, message: Any) -> None:
        with self.changed:
            self.sent.append(message)
            self.changed.notify_all()

    def receive(self, timeout_s: float) -> Any:
        with self.changed:
            if not self.changed.wait_for(lambda: self.inbox, timeout_s):
                raise DeadlineError("no message")
            return self.inbox.popleft()

    def poll(self, timeout_s: float = 0.0) -> Any:
        return self.inbox.popleft() if self.inbox else None


class Pair:
    """A memory worker, whose turns the test counts, and its peer."""

    def __init__(
        self,
        device: str = "cpu",
        polling: Polling = "host",
        specs: Sequence[AttentionSpec] = (SPEC,),
        lanes: int = 2,
        inboxes: Inboxes | None = None,
    ) -> None:
        """``inboxes``: of the compute worker's device."""
        connect = Connect(["compute0"], ["memory0"], Pipeline(lanes, 1))
        sizes = Messages(
            request=64 + 4096,
            reply=64 + 4096,
            context=0,
            landing=100 * PER_TOKEN,
            fetched_from_compute=PREFIX * PER_TOKEN + 64,
            fetched_from_memory=4096,
            slot_rows=ROWS,
        )
        self.specs = specs
        self.control = Control()
        self.control.device = device
        self.resources = contextlib.ExitStack()
        pool = self.resources.enter_context(ThreadPoolExecutor(1))
        building = pool.submit(worker.build, self.control, self.resources)  # type: ignore[arg-type]
        setup = MemorySetup(list(specs), DType.FLOAT32, 3000, 1, Overlap(), trace=False, polling=polling)
        self.control.tell(Reserve(setup, ROWS, 2, 2 * lanes, ROWS, lanes))
        self.control.tell(setup)
        self.control.tell(Register(sizes.memory_arena(1, 1), [Transport.SHM], 0.0))
        offer = self.control.hear(Registered).offer
        member = Member("compute0", self.control.data_secret, "127.0.0.1")
        self.links = open_links(member, Register(sizes.compute_arena(1, 1), [Transport.SHM], 0.0), inboxes)
        self.control.tell(Grant({"compute0": sizes.request}, ["compute0"] if inboxes else []))
        theirs = self.control.hear(Granted).leases["compute0"]
        own = self.links.grant(Grant({"memory0": sizes.reply}, ["memory0"] if inboxes else [])).leases["memory0"]
        self.control.tell(
            Link(1, {"compute0": LinkWay(Transport.SHM, self.links.offer.descriptors[Transport.SHM], own)})
        )
        self.links.link(Link(1, {"memory0": LinkWay(Transport.SHM, offer.descriptors[Transport.SHM], theirs)}))
        assert not self.control.hear(Linked).failures
        self.control.tell(connect)
        self.worker = building.result(TIMEOUT_S)
        self.wait = self.links.close_unused_endpoints()
        channels = {"memory0": self.links.channel("memory0")}
        if inboxes is not None:
            DeviceSlots(self.links, Device(inboxes=inboxes)).register_channels(channels.values())
        fetcher = Fetcher(self.links.fetch, self.links.arena, self.links.plan)
        self.mail = Mail(self.links.hub, channels, fetcher)
        self.turns = [0] * lanes
        self.epoch = FIRST

    def plan(self, lane: int, admitted: int = 0, chunk: tuple[int, int] = (0, 0), decode_at: int = -1) -> None:
        """Sequence ``lane`` is admitted, runs tokens ``chunk`` of its prompt, or decodes."""
        start, stop = chunk
        segment = Segment(lane, "memory0", (0, 2), (0, None))
        admissions = [Admission(lane, 1, admitted, [segment], SamplingParams(), 0)] if admitted else []
        chunks = [SequenceStep(lane, start, [0] * (stop - start), [])] if stop else []
        decoding = NOBODY if decode_at < 0 else DecodeRows([lane], [decode_at], [])
        plan = StepPlan(0, lane, self.turns[lane], [], [], admissions, chunks, decoding)
        self.control.tell(Step(plan, self.epoch))

    def send(self, lane: int, *parts: np.ndarray, bulk: Sequence[np.ndarray] = ()) -> None:
        nbytes = sum(part.nbytes for part in parts)
        channel = self.mail.channels["memory0"]
        slot = None if bulk else channel.place(nbytes)
        if slot is not None:
            channel.bodies[slot].array[:nbytes] = np.frombuffer(b"".join(part.tobytes() for part in parts), np.uint8)
            channel.send_message(lane, self.turns[lane], nbytes, (), slot)
            self.mail.expect(lane, ["memory0"])
            return
        message = channel.begin(lane, self.turns[lane], nbytes, sum(part.nbytes for part in bulk))
        message.lay_out(0, bulk)
        message.send_piece(list(parts))
        self.mail.expect(lane, ["memory0"])

    def answered(self, lane: int) -> bool:
        with contextlib.suppress(DeadlineError):
            while True:
                self.mail.receive(self.wait, ["memory0"], 0.0)
        if self.mail.missing[lane]:
            return False
        letter = self.mail.pop_message(lane, "memory0")
        self.reply = bytes(letter.whole)
        letter.free()
        self.mail.flush()
        self.turns[lane] += 1
        return True

    def serve_until_answered(self, lane: int) -> int:
        """How many turns of the worker that took."""
        deadline = time.monotonic() + TIMEOUT_S
        for turn in itertools.count(1):
            self.worker._serve_once()
            if self.answered(lane):
                return turn
            assert time.monotonic() < deadline, f"lane {lane} is not answered"
        raise AssertionError
