"""``Turn``: takes completed steps, and returns the plans of the next ones. Pure; engine and simulator share it."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from lamina.control.messages import StepDone
from lamina.core.pipeline import Pipeline
from lamina.core.requests import Owner
from lamina.core.steps import StepPlan
from lamina.core.topology import Topology
from lamina.core.types import Balance
from lamina.kv.balancing import POLICIES
from lamina.kv.placement import Placement
from lamina.schedule.lane import Remains
from lamina.schedule.lane_choice import chooser
from lamina.schedule.limits import Limits
from lamina.schedule.pace import LEARN, Pace
from lamina.schedule.plan_times import PlanTimes
from lamina.schedule.policy import FIFO, Policy
from lamina.schedule.scheduler import Scheduler
from lamina.schedule.suspects import NO_DEATHS, Deaths, Suspects, at_work, exposed, rows


class Answers:
    """Puts answers to steps in order.

    Consecutive steps of a lane may end on different replicas, so the answer to a step may arrive before that to the
    previous step, whose tokens come first. Chunks of a prompt in several lanes may be answered out of order too.
    """

    def __init__(self) -> None:
        self._awaited: dict[int, collections.deque[int]] = {}  # steps with sequences, by lane and by ``~sequence``
        self._early: dict[int, tuple[StepPlan, StepDone]] = {}  # by step

    def expect(self, plan: StepPlan) -> None:
        """Await the answer to a step that is about to be sent to its workers."""
        if plan.runs:
            for order in _orders(plan):
                self._awaited.setdefault(order, collections.deque()).append(plan.step)

    def pop_ready(self, plan: StepPlan, done: StepDone) -> list[StepDone]:
        """Return the answers that can be completed now that ``done`` has arrived for ``plan``, in order.

        A step without sequences neither waits for other steps nor delays them.
        """
        if not plan.runs:
            return [done]
        if not self._early and not plan.chunks and self._awaited[plan.lane][0] == done.step:  # nearly always
            self._awaited[plan.lane].popleft()
            return [done]
        self._early[done.step] = plan, done
        ready = []
        while first := next((one for one in self._early.values() if self._is_first(one[0])), None):
            ready.append(self._pop(*first))
        return ready

    def _is_first(self, plan: StepPlan) -> bool:
        return all(self._awaited[order][0] == plan.step for order in _orders(plan))

    def _pop(self, plan: StepPlan, done: StepDone) -> StepDone:
        del self._early[plan.step]
        for order in _orders(plan):
            self._awaited[order].popleft()
            if not self._awaited[order]:
                del self._awaited[order]
        return done


def _orders(plan: StepPlan) -> list[int]:
    """Return the keys of the orders that a step is part of: that of its lane, and one for each prompt with a chunk."""
    return [plan.lane, *(~chunk.sequence for chunk in plan.chunks)]


DEPTH = 2  # most steps in flight in one lane: the next is planned while one runs


class Turn:
    """Completes steps in order, and plans steps for lanes with fewer than ``DEPTH`` in flight.

    A round of its driver:

        for done in turn.in_order(answer):
            drawn = turn.complete(done)  # tokens go to these; turn.scheduler.end_completion for those that end
        for plan in turn.plan(now):
            ...  # send it

    If workers are lost, call ``end_epoch``; no step is planned until ``begin_epoch``.

    If workers join, or leave after they were drained, call ``change_members``. If that changes the replicas, call
    ``pause`` first, and wait until no step is in flight.

    Attributes:
        scheduler: The requests. The driver calls ``validate_request``, ``submit``, ``end_completion``, ``abort`` and
            ``on_move_done``; the turn calls all other methods.
        in_flight: Plans by step, until ``complete``.
        is_paused: Whether no step is planned, see ``pause``.
        busy_s: Seconds that compute workers have spent in slices so far.
        prefill_busy_s: Those of replicas that only run prompts.
        between_s: Seconds between the ends of two steps of a lane in which sequences decode, lately.
        next_plan_at: When to call ``plan`` again although nothing has happened; inf: not before something happens.
    """

    def __init__(
        self,
        limits: Limits,
        placement: Placement,
        pipeline: Pipeline,
        *,
        attentions: int,
        kv_heads: int,
        plan_ahead: bool = True,
        policy: Policy = FIFO,
        prefix_cache: bool = False,
        step_bound_s: float | None = None,
        balance: Balance = "off",
        overcommit: float = 1.0,
        window: int = 0,
        scratch: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Create a turn; other arguments are those of ``Scheduler``.

        Args:
            plan_ahead: Whether a lane may have its next step planned before the tokens of the running one are known.
            step_bound_s: Longest time of a step with decoding sequences, kept by small chunks of prompts.
            balance: Policy that moves KV between memory workers.
        """
        self._pace = None if step_bound_s is None else Pace(step_bound_s, pipeline.decoding_stages)
        self.scheduler = Scheduler(
            limits,
            placement,
            pipeline.lanes,
            attentions,
            kv_heads,
            policy,
            prefix_cache,
            self._pace,
            overcommit,
            window,
            POLICIES[balance]() if balance in POLICIES and placement.moves else None,
            pipeline,
            scratch,
        )
        self.in_flight: dict[int, StepPlan] = {}
        self.busy_s = self.prefill_busy_s = self.between_s = 0.0
        self._pipeline = pipeline
        self._epoch_ends = False  # True from the end of an epoch until the next one begins
        self.is_paused = False
        self._serves = True  # both roles have a worker
        self._depth = DEPTH if plan_ahead else 1
        self._times = PlanTimes()  # when lanes plan that take requests over from prefill lanes
        self.next_plan_at = math.inf
        self._answers = Answers()
        self._suspects = Suspects()
        self._chooser = chooser(pipeline)
        self._balancing = self.scheduler.balancing
        self._sequences = 0  # ``Scheduler.sequences`` before the last step completed
        self.scheduler.use_lanes(pipeline.first_arrangement.lanes, pipeline.first_arrangement.rotates)

    def end_epoch(self, topology: Topology, deaths: Deaths = NO_DEATHS) -> Remains:
        """End the epoch: only members of ``topology`` take part from now on, and no step in flight will complete.

        ``deaths`` are workers that have died, maybe because of a request. Returns what workers keep.
        """
        self._epoch_ends = True
        plans, owners = list(self.in_flight.values()), self.scheduler.owners
        struck = exposed(plans, owners, deaths, lambda plan: self._pipeline.replicas_of(plan.lane, plan.rotates))
        on_trial = self._suspects.searching and bool(struck)
        poison = self._suspects.note_death(struck, at_work(plans, owners))
        self.scheduler.hold_back(self._suspects.hold)
        self.in_flight.clear()
        self._answers = Answers()
        self._times = PlanTimes()
        self._follow(topology)
        return dataclasses.replace(self.scheduler.end_epoch(topology), poison=poison, on_trial=on_trial)

    def _clear_suspects(self, ran: StepPlan | None = None) -> None:
        """Clear suspects by step ``ran`` and by their end, and let more requests run if possible."""
        before = self._suspects.hold
        if ran is not None:
            owners = self.scheduler.owners
            found = [(owners[sequence], position) for sequence, position in rows(ran) if sequence in owners]
            self._suspects.note_run((group.request.request_id, one.index, at) for (group, one), at in found)
        self._suspects.prune(self.scheduler.alive)
        if self._suspects.hold != before:
            self.scheduler.hold_back(self._suspects.hold)

    def _follow(self, topology: Topology) -> None:
        self._serves = topology.serves
        if self._pace is not None:
            self._pace.set_replicas(topology.pipeline.decoding_stages)
        if topology.pipeline != self._pipeline:
            self._pipeline = topology.pipeline
            self._chooser = chooser(self._pipeline)
            self.scheduler.use_lanes(self._pipeline.first_arrangement.lanes, self._pipeline.first_arrangement.rotates)
        elif self._chooser is not None:
            self._chooser.set_memory_workers(topology.capacities)

    def pause(self) -> None:
        """Plan no step until ``resume`` or ``change_members``. Steps in flight complete."""
        self.is_paused = True

    def resume(self) -> None:
        """Plan steps again."""
        self.is_paused = False

    def change_members(self, topology: Topology) -> None:
        """Adapt to other members within the epoch. Workers that leave must hold no KV.

        Raises ValueError if the replicas change while a step is in flight.
        """
        if self.in_flight and topology.pipeline != self._pipeline:
            raise ValueError(f"the replicas cannot change: {len(self.in_flight)} steps are in flight")
        self.is_paused = False
        replaced = topology.pipeline != self._pipeline
        self._follow(topology)
        self.scheduler.change_members(topology, deal_again=replaced)

    def begin_epoch(self) -> None:
        """Plan steps again: all members are ready for the next epoch."""
        self._epoch_ends = self.is_paused = False

    def in_order(self, answer: StepDone) -> list[StepDone]:
        """Return the answers to pass to ``complete`` now that ``answer`` has arrived: none while an earlier answer is
        missing, or if the step's epoch has ended."""
        if answer.step not in self.in_flight:
            return []
        return self._answers.pop_ready(self.in_flight[answer.step], answer)

    def complete(self, done: StepDone) -> Mapping[int, Owner]:
        """Complete a step. Returns the completions that drew a token, by sequence, as ``Scheduler.complete`` does.

        The caller appends each token to ``generated`` and ends completions before the next call.
        """
        plan = self.in_flight.pop(done.step)
        self.busy_s += done.busy_s
        role = self._pipeline.role(plan.lane)
        if role == "decode" and plan.runs:
            self._times.on_step_done(plan.lane, plan.step, done.starved_s)
        if role == "prefill":
            self.prefill_busy_s += done.busy_s
        elif plan.decoding.sequences and done.rows:
            latest_s = max(done.busy_s + done.waited_s, done.busy_s * self._sharers(plan.lane))
            self.between_s += (LEARN if self.between_s else 1.0) * (latest_s - self.between_s)
        if self._pace is not None and done.rows and role != "prefill":
            self._pace.on_step_done(plan, done.busy_s, done.waited_s)
        if plan.chunks and done.rows:
            self.scheduler.note_prompts(plan, done.busy_s, done.waited_s)
        elif done.rows:
            self.scheduler.note_decoding(plan, done.busy_s + done.waited_s)
        if self.scheduler.lane_policy is not None and done.rows:
            self.scheduler.lane_policy.note_step(plan, done.rows, done.busy_s, done.waited_s)
        if self._suspects.searching:
            self._clear_suspects(plan)
        if self._balancing is not None and done.rows:
            self._balancing.note_step(plan.lane, done.rows, done.busy_s)
        if self._chooser is not None and done.rows:
            self._sequences = self.scheduler.sequences
            self._chooser.note_step(done.rows, len(plan.decoding.sequences), done.busy_s, done.waited_s)
        return self.scheduler.complete(plan.lane, plan.step)

    def unchanged_steps(self, lane: int) -> int:
        """Return how many further steps of a lane, behind ``DEPTH`` in flight, would only be its last one again until
        a request arrives or another lane's step completes. 0 if the times of steps are learned from."""
        learning = self._pace, self._balancing, self._chooser, self.scheduler.lane_policy
        learns = any(one is not None for one in learning) or self.scheduler.compares_lanes
        if learns or self._suspects.searching or self.is_paused or self._pipeline.role(lane) != "both":
            return 0
        return self.scheduler.unchanged_steps(lane) if self.scheduler.in_flight(lane) == DEPTH else 0

    def repeat(self, lane: int, steps: int, busy_s: float) -> None:
        """Record ``steps`` of ``unchanged_steps`` of a lane without their plans. Steps in flight stand for those that
        are in flight now. ``busy_s``: seconds that compute workers have spent in their slices."""
        self.busy_s += busy_s
        self.scheduler.repeat(lane, steps)

    def _sharers(self, lane: int) -> int:
        """Return the number of decode lanes, ``lane`` included, whose slices one replica runs in turn."""
        replicas = self._pipeline.replicas
        if self._pipeline.role(lane) != "decode":
            return 1
        others = {plan.lane for plan in self.in_flight.values() if plan.decoding.sequences}
        return len({one for one in others if one % replicas == lane % replicas} | {lane})

    @property
    def reviews_lanes(self) -> bool:
        """True if the next ``plan`` chooses lanes or moves, and needs ``note_attention`` before."""
        return any(one is not None and one.due for one in (self._balancing, self._chooser))

    def note_attention(self, worker: str, seconds: float) -> None:
        """Record that a memory worker, or local memory, has spent ``seconds`` on attention so far."""
        if self._balancing is not None:
            self._balancing.note_attention(worker, seconds)
        if self._chooser is not None and worker not in self.scheduler.placement.local:
            self._chooser.note_attention(worker, seconds)

    def plan(self, now: float) -> Iterator[StepPlan]:
        """Yield the steps to send now; each is in flight once it is yielded. ``now`` is in seconds of any monotonic
        clock."""
        self._times.set_time(now)
        if self._pace is not None:
            self._pace.set_time(now)
        self.next_plan_at = math.inf
        if self._epoch_ends or self.is_paused or not self._serves:
            return
        if self._suspects.searching:
            self._clear_suspects()
        if self._chooser is not None and self._chooser.due:
            chosen = self._chooser.choose(self._sequences, now)
            self.scheduler.use_lanes(chosen.lanes, chosen.rotates)
        scheduler, depth = self.scheduler, self._depth
        handovers = scheduler.handovers
        scheduler.set_time(now)
        for steps in range(1, depth + 1):  # one step for each lane before a second one: lanes may share a prompt
            for lane in scheduler.plannable(depth):
                if scheduler.in_flight(lane) >= steps or self._is_early(lane, now):
                    continue
                if (plan := scheduler.plan(lane)) is not None:
                    self._answers.expect(plan)
                    self.in_flight[plan.step] = plan
                    if plan.runs and self._pipeline.role(lane) == "decode":
                        self._times.on_planned(lane, plan.step, now)
                    if self._pace is not None and scheduler.in_flight(lane) == 1:
                        self._pace.on_lane_begins(lane, now)
                    yield plan
        if scheduler.handovers > handovers:
            self._times.on_handover()

    def _is_early(self, lane: int, now: float) -> bool:
        """Return True if requests may still join the next step of a lane although the plan is made later."""
        if self._pipeline.role(lane) != "decode":
            return False
        if not (self.scheduler.runs_prompts_apart or self._times.expects_request(lane)):
            return False
        if (due := self._times.put_off(lane, now)) is None:
            return False
        self.next_plan_at = min(self.next_plan_at, due)
        return True
