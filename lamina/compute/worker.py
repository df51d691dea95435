"""The compute worker: holds the weights and runs the slices.

One thread runs, of all slices whose messages have arrived, the one that is due first (``Pipeline.tick``). While no
slice can run, it reports completed steps to the engine, receives plans and prepares their steps.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from lamina.compute.constraints import Grammars
from lamina.compute.device import make
from lamina.compute.device.base import Device, Runner, Sums
from lamina.compute.exchange import StepExchange
from lamina.compute.lanes import Lane, Lanes
from lamina.compute.lending import Lender
from lamina.compute.loading import load, load_tokenizer
from lamina.compute.local_memory import LocalMemory, Scratch, Served
from lamina.compute.mail import Mail
from lamina.compute.ranks import EpochEndingError, RankWait, SliceOrder
from lamina.compute.sequences import Sequences
from lamina.compute.step import AHEAD_SLICE_S, Replica, StepRun
from lamina.control.messages import (
    REPORT_S,
    ComputeSetup,
    Connect,
    Connected,
    EndEpoch,
    Recalled,
    Step,
    StepDone,
    Working,
)
from lamina.control.sockets import Bootstrap, ControlClient, expect
from lamina.core.errors import DeadlineError
from lamina.core.heads import HeadShards
from lamina.core.steps import SequenceStep, StepPlan
from lamina.core.topology import Topology
from lamina.dataplane.channel import first_use
from lamina.dataplane.fetching import Fetcher
from lamina.dataplane.wire import check_placements
from lamina.lowering import Workspace
from lamina.memory.device import gpu_memory
from lamina.memory.pulls import Puller
from lamina.splitter.parts import Rank
from lamina.transport.base import Target
from lamina.worker.links import (
    LINKING_SLICE_S,
    Links,
    OpenEndpoint,
    open_endpoint,
    set_up_links,
)
from lamina.worker.loop import WorkerLoop
from lamina.worker.process import run_worker

IDLE_SLICE_S = 1.0
WAITING_SLICE_S = 0.05  # how long a worker that waits for messages may leave the end of an epoch unread
LENDING_SLICE_S = 0.001  # the same while other replicas need this worker, which itself may get a plan meanwhile


class ComputeWorker(WorkerLoop):
    """Runs plans until the engine says stop."""

    def __init__(
        self,
        control: ControlClient,
        setup: ComputeSetup,
        device: Device,
        sums: Sums,
        runner: Runner,
        shards: HeadShards,
        memory: LocalMemory | None,
        links: Links,
        connect: Connect,
        scratch: Scratch | None = None,
    ) -> None:
        """``sums``: all-reduce over the ranks of the stage. ``memory``: KV in the worker's own memory, if it has any.
        ``scratch``: K and V of running prompts.

        All ranks of a stage run the same slices and draw the same tokens; rank 0 reports to the engine.
        """
        super().__init__(control, links, device, connect.epoch, setup.trace)
        names, lanes = tuple(connect.computes), connect.pipeline.lanes
        numbers = connect.pipeline.ranks_at(names.index(control.name))
        own = names[numbers.start : numbers.stop]
        self._replica = Replica.linked(connect, control.name, runner, self._timeline, sums)
        self._runner = runner
        peers = [name for name in (*connect.memories, *names) if links.has(name) and name not in own]
        channels = {name: links.channel(name) for name in peers}
        self._slots.register_channels(channels.values())
        lends, spreads = connect.pipeline.lends, memory is not None and connect.pipeline.spreads
        may_wait = spreads or (memory is not None and connect.pipeline.most_stages > 1)  # for chunks in other lanes
        among_ranks = RankWait(self._wait, control, links, self if spreads else None)
        self._unread = among_ranks.unread
        sums.connect(links, among_ranks, own)
        announces = len(own) > 1 and connect.pipeline.announces
        self._order = order = SliceOrder(links, among_ranks, own) if announces else None
        may_run = None if order is None and not may_wait else self._may_run
        leased, lenders = (links.fetch, links.arena, links.plan), self._replica.others & channels.keys()
        puller = Puller(*leased, memory.store) if memory is not None and lends else None
        self._mail = Mail(links.hub, channels, puller or Fetcher(*leased), may_run, lenders)
        self._lanes = Lanes(self._mail, self._wait, order, lanes)
        self._lender: Lender | None = None
        if memory is not None and puller is not None:
            self._lender = Lender(
                control, memory.store, puller, self._mail, self._lanes, self._timeline, links, connect
            )
        grammars = Grammars(lambda: load_tokenizer(control, setup), setup.eos_token_ids)
        self._sequences = Sequences(grammars, setup.eos_token_ids, sums.agree)
        self._memory, self._scratch = memory, scratch
        alone = memory if setup.stages == 1 else None
        self._whole = None if alone is None else runner.recorded_steps(alone.store.device)
        if self._whole is not None:
            self._whole.reserve(min(setup.sequences, setup.rows))
        self._overlap = setup.overlap
        self._rank = sums.rank
        self._shards = shards
        self._done: list[StepDone] = []  # reports that have not been sent
        self._computing: Sequence[SequenceStep] = ()  # sequences of the step whose slice runs, or ran last
        self._recalled = False  # an engine has ended, and the next one waits for a report
        self._starved_s = 0.0  # that this worker has waited since its last step, without another one

    def _serve_once(self) -> None:
        with contextlib.suppress(EpochEndingError):  # its message is in ``_unread``
            self._run_due_slice()

    def _run_due_slice(self) -> None:
        """Run the slice that is due first, of those that can run; if none can, do other work or wait for messages."""
        while self._unread:
            self._handle(self._unread.popleft())
        while self._mail.lenders and self._fence.open and (message := self._control.poll()) is not None:
            self._handle(message)  # perhaps a plan that another replica's request waits for
        if self._recalled:
            self._report_computed()
        if not self._fence.open:
            if (message := self._fence.stand_by(self._wait)) is not None:
                self._handle(message)
            return
        served = self._lender is not None and self._lender.serve_requests()
        active = self._lanes.active
        ready = self._lanes.due(active)
        if ready is None:
            self._idle(active, served)
            return
        unsent = len(self._done)
        step = ready.steps[0]
        self._run_slice(ready)
        self._mail.flush()
        if unsent and not step.is_launched:  # reports wait for a pause, but for one slice at most
            self._answer()
        while len(active) == 1 and self._can_continue(ready, step):
            self._run_slice(ready)
            self._mail.flush()

    def _can_continue(self, lane: Lane, step: StepRun) -> bool:
        """Return whether the next slice of ``step`` can run at once: no epoch or member change is pending, and no other
        replica may need this worker."""
        same = bool(lane.steps) and lane.steps[0] is step and not (self._lender is not None and self._lender.is_needed)
        return same and self._lanes.can_run(lane) and self._fence.open and not self._newcomers.pending

    def _may_run(self, lane: int) -> bool:
        return self._lanes.may_run(lane)

    def targets_meanwhile(self) -> list[Target]:
        """Return the doorbells of other replicas' requests, and of what is needed to serve them."""
        return [] if self._lender is None else self._lender.targets

    def serve_meanwhile(self) -> bool:
        """Serve requests of other replicas during a slice; return whether there may be more."""
        served = self._lender is not None and self._lender.serve_requests()
        self._mail.flush()
        return served

    def apply_meanwhile(self, step: Step) -> bool:
        """Apply a plan during a slice, unless it must wait for the slice's end. Returns whether it was applied."""
        if self._must_wait(step.plan):
            return False
        self._handle(step)
        return True

    def _must_wait(self, plan: StepPlan) -> bool:
        """Return True if a plan releases sequences of the step that runs here, or tells their tokens.

        The engine has completed that step by rank 0's answer, and this rank has yet to draw.
        """
        told = {*plan.released, *plan.histories}
        return any(not told.isdisjoint((one.sequence, *one.draws)) for one in self._computing)

    def _recall(self) -> None:
        self._recalled = True
        if self._replica.sums.may_leave:
            for lane in self._lanes:
                lane.steps.clear()
        self._report_computed()

    def _report_computed(self) -> None:
        """Answer an engine that takes over, once no step runs here."""
        if any(lane.steps for lane in self._lanes):
            return
        self._recalled = False
        held = {} if self._memory is None else self._memory.store.held.lengths
        self._control.send(Recalled(self._sequences.computed(), held))

    def _end_epoch(self, message: EndEpoch) -> None:
        """Drop all steps and requests, and KV of incomplete steps; later plans admit continuing requests again."""
        topology = message.topology
        for lane in self._lanes:
            lane.drop_steps()
        self._mail.reset(topology)
        if self._lender is not None:
            self._lender.end_epoch(topology)
        self._replica.sums.reset(first_use(topology.epoch))
        if self._order is not None:
            self._order.reset(first_use(topology.epoch))
        self._slots.unmap_others(topology.names)
        self._done.clear()
        self._sequences.drop_all()
        self._recalled = False
        if self._memory is not None:
            self._memory.store.truncate(message.kept)
        if self._scratch is not None:
            self._scratch.end_epoch()
        self._replica = self._replica.within(topology, self._control.name)
        self._fence.begin_epoch(topology)

    def _change_members(self, topology: Topology) -> None:
        own = self._control.name
        peers = [member.name for member in topology.members if member.name != own]
        known = {*self._mail.channels, *topology.ranks_of(own)}
        new = [name for name in peers if name not in known and self._links.has(name)]
        joined = {name: self._links.channel(name) for name in new}
        self._slots.unmap_others(topology.names)
        self._slots.register_channels(joined.values())
        self._replica = self._replica.within(topology, own)
        self._mail.change_members(topology, joined, self._replica.others)
        if self._lender is not None:
            self._lender.set_members(topology)
        self._lanes.extend(topology.pipeline.lanes)

    def _run_slice(self, lane: Lane) -> None:
        step = lane.steps[0]
        self._computing = step.plan.sequences
        begun = time.monotonic()
        if self._order is not None:
            self._order.on_slice(lane.number)
        if step.is_pending:
            self._lanes.note_wait(lane)
        logits = step.run_slice(self._sequences.drawn)
        if step.take_news():
            self._sequences.append_tokens(step.plan, step.tokens)
        if step.is_launched:
            self._answer()  # the engine plans the next step while the device runs this one
            self._take_in_next()
            step.record_launched()
        last = step.index < 0
        if self._memory is not None and step.is_parked:
            self._memory.note_parked(step.pending_nbytes)
        done = self._draw(step, logits) if last and step.ends_here else None
        now = time.monotonic()
        lane.busy_s += now - begun
        if now - lane.reported >= REPORT_S:
            lane.reported = now
            self._control.send(Working([step.plan.lane]))
        if last:
            self._end_step(lane, step, done)
        self._lanes.count_slice()
        self._lanes.expect_next(lane)

    def _draw(self, step: StepRun, logits: torch.Tensor | None) -> StepDone:
        begun = self._timeline.now()
        done = self._sequences.draw(step.plan, logits)
        step.finish_last_slice(done)
        self._timeline.record_span("draw", step.plan.lane, begun)
        return done

    def _end_step(self, lane: Lane, step: StepRun, done: StepDone | None) -> None:
        if done is not None:
            attentions = len(self._runner.attentions)
            whole = lane.busy_s * step.shares
            waited = lane.waited_s * attentions / max(lane.waits, 1)
            times = {"busy_s": whole, "waited_s": waited, "starved_s": lane.starved_s}
            done = msgspec.structs.replace(done, rows=len(step.tokens), **times)
            self._queue_answer(done)
            self._sequences.on_step_done(step.plan)
        lane.steps.popleft()
        lane.reset_times()
        self._starved_s = 0.0

    def _take_in_next(self) -> None:
        """Prepare the next step, if its plan arrives, while the device runs all slices of this one."""
        while self._whole is not None and not self._unread and self._lanes.lacks_steps:
            message = self._control.poll()
            if isinstance(message, Step) and not self._must_wait(message.plan):
                self._handle(message)
                return
            if message is not None:
                self._unread.append(message)  # what ends an epoch or sequences waits until this step has ended
            elif self._whole.has_ended():
                return
            else:
                time.sleep(AHEAD_SLICE_S)

    def _queue_answer(self, done: StepDone) -> None:
        """Queue a report to the engine, if this is rank 0."""
        if self._rank.number == 0:
            self._done.append(done)

    def _answer(self) -> None:
        for done in self._done:
            self._control.send(done)
        self._done.clear()

    def _idle(self, active: list[Lane], served: bool) -> None:
        """Send reports and read one control message; without one, wait for a message that a slice needs.

        ``served``: Whether another replica may need this worker at once, so that it must not wait.
        """
        self._answer()
        if self._memory is not None:
            self._memory.report_usage(Served() if self._lender is None else self._lender.served)
        self._mail.flush()
        reads = self._lender is not None or self._lanes.lacks_steps
        if reads and (message := self._control.poll()) is not None:
            self._handle(message)
            return
        if served:
            return
        announcements: Sequence[Target] = ()
        if self._order is not None and active:
            if self._lanes.first_ready(active) is not None:  # announced since the last check
                return
            announcements = self._order.announcements
        peers, lends = self._lanes.missing(active), self._lender is not None and self._lender.is_busy
        early = self._lender is not None and self._lender.awaits_plan
        timeout_s = LENDING_SLICE_S if early or (lends and not peers) else WAITING_SLICE_S
        begun_s = time.monotonic()
        try:
            linking = self._newcomers.pending
            if not peers and not self._mail.is_waiting and not announcements and not lends:
                message = self._control.receive(LINKING_SLICE_S if linking else IDLE_SLICE_S)
                self._note_idle(active, begun_s)
                self._handle(message)
                return
            begun = self._timeline.now()
            awaited = {**peers, **dict.fromkeys(self._mail.lenders)}
            besides = [*announcements, *(self._lender.moving if self._lender is not None else ())]
            lane = self._lanes.receive_messages(awaited, LINKING_SLICE_S if linking else timeout_s, besides)
            if lane is not None:
                self._timeline.record_span("wait", lane.number, begun)
            self._note_idle(active, begun_s)
        except DeadlineError:  # only the engine ends a step that makes no progress
            self._note_idle(active, begun_s)
            if peers and (message := self._control.poll()) is not None:
                self._handle(message)

    def _note_idle(self, active: Sequence[Lane], begun_s: float) -> None:
        """Count a wait that began at ``begun_s``, if no lane had a step."""
        if not active:
            self._starved_s += time.monotonic() - begun_s

    def _drop_fetches(self, peers: Sequence[str]) -> None:
        self._mail.drop_fetches(peers)

    def _release(self, sequences: Sequence[int]) -> None:
        self._sequences.forget(sequences)
        for store in (one.store for one in (self._memory, self._scratch) if one is not None):
            store.release(sequences)
        if self._lender is not None:
            self._lender.end_moves(sequences)

    def _apply_plan(self, plan: StepPlan) -> None:
        """Apply the plan's deltas and prepare its step. Raises PlacementError, having changed nothing."""
        check_placements(plan, self._shards)
        if self._scratch is not None:
            self._scratch.store.release(plan.released)
        if self._lender is not None and self._memory is not None and not self._replica.runs(plan):
            self._lender.apply_plan(plan, self._memory.store.apply(plan, self._lender.ranks_of(plan)))
            self._sequences.apply_part(plan)
            return
        share = None if self._memory is None else self._memory.apply_plan(plan)
        kept = None if self._scratch is None else self._scratch.apply_plan(plan)
        if self._lender is not None:
            self._lender.apply_plan(plan)
        self._sequences.apply_plan(plan)
        if not plan.sequences:
            if plan.lane < len(self._lanes):  # else the engine has kept it from a time with more replicas
                self._lanes[plan.lane].workspace = Workspace(0)  # an empty lane needs no memory
            if self._replica.begins(plan):
                self._queue_answer(StepDone(plan.step, []))
            return
        if self._fence.lost:  # perhaps a new member, which has no channel although it is to hold KV of this step
            return
        lane = self._lanes[plan.lane]
        rows = self._runner.padded(plan.row_count)
        segments, shards, rank = self._sequences.segments, self._shards, self._rank
        door = self._replica.pipeline.door(plan.lane, rank.number)
        exchange = StepExchange(
            plan,
            segments,
            self._mail,
            self._overlap,
            self._runner,
            rows,
            shards,
            share,
            rank,
            kept,
            door,
            self._replica.lenders,
        )
        if lane.workspace.rows != rows:
            lane.workspace = Workspace(rows)
        lane.steps.append(StepRun(plan, self._replica, exchange, self._mail, lane.workspace, lane.follows, self._whole))
        lane.follows = True
        if len(lane.steps) == 1:
            lane.starved_s, self._starved_s = self._starved_s, 0.0
            self._lanes.expect_next(lane)


Load = Callable[[ControlClient, ComputeSetup, Device, Sums], tuple[Runner, HeadShards]]
"""Loads a model, with the arguments and result of ``loading.load``."""


def build(
    control: ControlClient,
    resources: contextlib.ExitStack,
    load: Load = load,
    open_endpoint: OpenEndpoint = open_endpoint,
) -> ComputeWorker:
    """Load the model and link to the peers as the engine directs; ``resources`` closes the links."""
    setup = expect(control, ComputeSetup)
    torch.set_num_threads(setup.threads)
    device = make(control.device)
    ranks = device.sums(Rank(setup.rank, setup.ranks), setup.meeting)
    runner, shards = load(control, setup, device, ranks)
    scratch = Scratch.allocate(control, runner) if setup.scratch else None
    memory = LocalMemory(control, Rank(setup.rank, setup.ranks)) if setup.local else None
    links, connect = set_up_links(control, resources, device.inboxes, open_endpoint)
    if not ranks.may_leave:  # its peers would wait until it receives, and it might wait for them in a circle
        links.receive_always()
    worker = ComputeWorker(control, setup, device, ranks, runner, shards, memory, links, connect, scratch)
    control.send(Connected())
    return worker


def main(bootstrap: Bootstrap) -> None:
    """Body of the process."""

    def build_and_collect(control: ControlClient, resources: contextlib.ExitStack) -> ComputeWorker:
        worker = build(control, resources)
        gc.freeze()  # splitting a model leaves little garbage
        gc.enable()
        return worker

    run_worker(build_and_collect, gpu_memory, bootstrap)
