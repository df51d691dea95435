"""Simulates Lamina: the real turn, scheduler, placement and pipeline under a virtual clock; workers are models.

``Simulation`` drives the turn as ``Engine._step`` does. Tokens have no values; a request ends after the number of
tokens that its arrival specifies. Decisions take no virtual time (``Result.decisions`` has their CPU time), and the
control plane has no latency. The native virtual cluster models the times of workers and messages.
"""

import bisect
import collections
import functools
import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from lamina import _native
from lamina.cluster import sizing
from lamina.cluster.pool import CPU
from lamina.control.messages import StepDone
from lamina.control.timeline import Span
from lamina.core.errors import RequestError
from lamina.core.pipeline import Pipeline, Shape
from lamina.core.sampling import SamplingParams
from lamina.core.segments import grown, moved
from lamina.core.steps import StepPlan
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import Request, Segment
from lamina.kv.placement import Placement
from lamina.planning.plan.stages import stage_starts
from lamina.planning.simulate.repeats import Repeat, Repeats
from lamina.planning.simulate.result import Decisions, PoolUse, RequestLog, Result, State, Stops
from lamina.planning.simulate.scenario import (
    Arrivals,
    Deployment,
    Fault,
    Ints,
    config_of,
    holders_of,
    require_simulated,
    scratch_of,
)
from lamina.planning.simulate.sequences import Drawn, Numbers, requests_of
from lamina.planning.simulate.step_times import Lent, LocalStepModel, SplitSequence, StepModel
from lamina.schedule.limits import MAX_WAITING
from lamina.schedule.policy import find_policy
from lamina.schedule.roles import LOOK_S, RoleBalance, Targets, expected_times
from lamina.schedule.turn import Turn

TIMED = 8  # decisions are timed in one turn of this many: reading the CPU clock is a system call


class Simulation:
    """One run. ``simulate`` is called once."""

    def __init__(self, deployment: Deployment, arrivals: Arrivals, faults: Sequence[Fault], recorded: int) -> None:
        """Raise ConfigError for an impossible deployment."""
        self._deployment = deployment
        self._arrivals = arrivals
        self._asked = arrivals.asked
        self._shares = deployment.prefix_cache and len(arrivals.contents) > 0
        self._arrival_s: list[float] = arrivals.arrival_s.tolist()
        self._faults = sorted(faults, key=lambda fault: fault.at_s)
        require_simulated(deployment)
        self._holders = holders_of(deployment)
        self._lent = Lent()
        self._model, self._prompts_model = (self._model_of(each) for each in (deployment, self._holders[0]))
        self._config = config_of(deployment)
        self._pipeline = self._make_pipeline()
        self._memories = [f"memory{index}" for index in range(deployment.memory_workers)]
        self._longest = 1 + int((arrivals.prompt + self._asked).max(initial=2))
        self._scratch = scratch_of(self._config, self._pipeline, deployment, self._holders, self._longest)
        self._places = [*(self._topology.computes if deployment.local else self._topology.memories)]
        bounds = deployment.prefill_bounds
        group = deployment.shape.workers
        self._roles = None if bounds is None else RoleBalance(*(workers // group for workers in bounds))
        self._look_at = math.inf if bounds is None else 0.0
        self._turned: Pipeline | None = None  # replaces the pipeline once no step is in flight
        self._role_changes = 0
        self._numbers = {name: index for index, name in enumerate(self._places)}
        self._turn = self._make_turn()
        self._scheduler = self._turn.scheduler
        self._cluster = _native.VirtualCluster(
            self._stages, len(self._places), self._pipeline.lanes, self._model.latency_s, recorded
        )
        self._replicas = {rotates: self._orders(rotates) for rotates in (False, True)}
        self._log = RequestLog(arrivals)
        self._live = set[int]()  # requests with the scheduler
        self._segments: dict[int, list[Segment]] = {}  # by sequence
        self._homes: dict[int, int] = {}  # the number of the worker with its last segment
        self._split: dict[int, SplitSequence] = {}  # those with several segments
        lanes = range(self._pipeline.lanes)
        self._requests = [Numbers(requests_of) for _ in lanes]
        self._decoding = [Numbers(self._homes_of) for _ in lanes]
        self._in_flight = [collections.deque[tuple[StepPlan, int]]() for _ in lanes]  # by lane: steps and their rows
        self._repeats = Repeats(self._turn, self._pipeline.lanes)
        self._latest_chunks: dict[int, int] = {}  # by sequence: the step of its latest chunk
        self._moves: list[tuple[float, int]] = []  # a heap: when they end, and their numbers
        self._sources: dict[str, float] = {}  # when each worker has sent all that leaves it
        self._queued_s = self._refused_s = 0.0
        self._steps = self._next = self._next_fault = 0  # the next arrival, the next fault
        self._dead = False
        self._clock: Callable[[], float] = _stopped
        self._decisions = Decisions(seconds={"add": 0.0, "plan": 0.0, "complete": 0.0})

    def _make_pipeline(self) -> Pipeline:
        deployment, local = self._deployment, self._deployment.local
        stages = sum(holder.shape.stages for holder in self._holders)
        pipeline = sizing.pipeline(self._config, stages, shared=local, local=local)
        early, late = pipeline.prefill_shape, self._divided(pipeline.shape)
        early = early and self._divided(early)
        return replace(pipeline, lends=deployment.lends, one_way=deployment.one_way, shape=late, prefill_shape=early)

    def _divided(self, shape: Shape) -> Shape:
        return replace(shape, starts=stage_starts(self._deployment.model, shape.stages)) if shape.stages > 1 else shape

    @property
    def _stages(self) -> int:
        """Stages of all replicas, which the virtual cluster calls replicas."""
        return self._pipeline.stage_count

    def _make_turn(self) -> Turn:
        deployment, shape = self._deployment, self._deployment.model
        topology = self._topology
        return Turn(
            sizing.step_limits(self._config, self._pipeline, self._longest),
            Placement(topology.capacities, deployment.kv_tokens_per_worker, topology=topology),
            self._pipeline,
            attentions=shape.layers,
            kv_heads=shape.kv_heads,
            plan_ahead=self._config.plan_ahead,
            policy=find_policy(deployment.policy, deployment.slo_ttft_ms, deployment.slo_tbt_ms),
            step_bound_s=None if deployment.slo_tbt_ms is None else deployment.slo_tbt_ms / 1e3,
            prefix_cache=self._shares,
            balance=deployment.balance,
            scratch=topology.scratch,
        )

    def _model_of(self, deployment: Deployment) -> StepModel | LocalStepModel:
        if not deployment.local:
            return StepModel(deployment)
        return LocalStepModel(deployment, self._holders, self._lent)

    def _orders(self, rotates: bool) -> list[list[list[int]]]:
        """Return the stages of a step's slices, in order, by lane and by the first turn of the step."""
        pipeline, slices = self._pipeline, self._deployment.model.layers + 1
        period = pipeline.replicas if rotates else 1
        return [
            [pipeline.stages_of(lane, turn, slices, rotates) for turn in range(period)]
            for lane in range(pipeline.lanes)
        ]

    def simulate(self, on_progress: Callable[[int], None] | None = None, stops: Stops | None = None) -> Result:
        """Run the simulation; the arguments are those of ``simulate``."""
        now, turns = 0.0, 0
        while self._log.ended < len(self._arrivals):
            before, queued, refused = now, self._scheduler.waiting > 0, self._scheduler.full
            self._clock = time.process_time if turns % TIMED == 0 else _stopped
            finished = self._cluster.advance(self._next_from_outside())
            if finished is not None and (repeat := self._repeats.current(finished[1])) is not None:
                now, lane, _, busy, _ = finished
                self._log.draw(now, repeat.requests)
                self._give(repeat.plan, now, repeat.next_times(busy), repeat.behind)
            else:
                self._repeats.tell_turn()
                if finished is not None:
                    now, lane, _, busy, waited = finished
                    plan, rows = self._in_flight[lane].popleft()
                    self._lent.end(plan.step)
                    self._take(now, lane, StepDone(plan.step, [], rows=rows, busy_s=busy, waited_s=waited))
                else:
                    now = self._next_from_outside()
                    assert now < math.inf, f"{self._scheduler.waiting} requests wait and nothing runs"
                    self._happen(now)
                self._launch(now)
                self._repeat_steps()
            self._queued_s += now - before if queued else 0.0
            self._refused_s += now - before if refused else 0.0
            turns += 1
            if turns % 64 == 0:
                if on_progress is not None:
                    on_progress(self._log.ended)
                if stops is not None and stops(self._log, now):
                    break
        return self._result(now)

    def _next_from_outside(self) -> float:
        arrival = fault = math.inf
        if self._next < len(self._arrival_s) and self._scheduler.waiting < MAX_WAITING:
            arrival = self._arrival_s[self._next]
        if self._next_fault < len(self._faults):
            fault = self._faults[self._next_fault].at_s
        moved = self._moves[0][0] if self._moves else math.inf
        first = min(arrival, fault, moved, self._turn.next_plan_at)
        return min(first, self._look_at) if first < math.inf or self._turn.in_flight else math.inf

    # -- what happens -------------------------------------------------------------------------------------------

    def _happen(self, now: float) -> None:
        while self._next_fault < len(self._faults) and self._faults[self._next_fault].at_s <= now:
            self._strike(self._faults[self._next_fault], now)
            self._next_fault += 1
        while self._moves and self._moves[0][0] <= now:
            self._scheduler.on_move_done(heapq.heappop(self._moves)[1])
        while (
            self._next < len(self._arrival_s)
            and self._arrival_s[self._next] <= now
            and self._scheduler.waiting < MAX_WAITING
            and not self._dead
        ):
            self._arrive(self._next)
            self._next += 1

    def _arrive(self, index: int) -> None:
        prompt, params = int(self._arrivals.prompt[index]), SamplingParams(max_tokens=int(self._asked[index]))
        try:
            self._scheduler.validate_request(prompt, params)  # before making its tokens, which may exceed the memory
        except RequestError:
            self._log.end(index, State.REFUSED, self._arrival_s[index])
            return
        request = Request(str(index), None, self._prompt(index, prompt), params)
        begun = self._clock()
        group = self._scheduler.submit(request)
        self._decisions.seconds["add"] += self._clock() - begun
        (completion,) = group.completions
        completion.generated = Drawn(self._log, index, self._answer(index))
        self._live.add(index)

    def _prompt(self, index: int, tokens: int) -> list[int]:
        """Return token ids of a prompt, equal to those of other prompts exactly where their contents are equal."""
        content = self._arrivals.contents[index] if self._shares else ()
        return list(itertools.chain.from_iterable([one] * run for one, run in content)) or [-2 * index - 1] * tokens

    def _answer(self, index: int) -> int:
        named = self._arrivals.answers[index] if self._shares else None
        return -2 * index - 2 if named is None else named

    def _homes_of(self, sequences: list[int]) -> list[int]:
        return [self._homes[sequence] for sequence in sequences]

    def _place(self, sequence: int, segments: list[Segment]) -> None:
        self._segments[sequence] = segments
        self._homes[sequence] = self._numbers[segments[-1].worker]
        self._split.pop(sequence, None)
        if len(segments) > 1:
            places = [(self._numbers[each.worker], *each.tokens) for each in segments]
            self._split[sequence] = SplitSequence(places)

    def _strike(self, fault: Fault, now: float) -> None:
        if fault.factor is None:
            self._die(now)
        elif fault.role == "compute":
            before = self._pipeline.prefill * self._pipeline.shapes[0].stages
            self._cluster.slow_replica(before + fault.worker // self._deployment.shape.ranks, fault.factor)
        else:
            self._cluster.slow_memory(fault.worker, fault.factor)

    def _die(self, now: float) -> None:
        self._dead = True
        come = max(self._next, bisect.bisect_left(self._arrival_s, now))
        for index in (*self._live, *range(self._next, come)):
            self._log.end(index, State.ERROR, now)
        for index in range(come, len(self._arrivals)):
            self._log.end(index, State.REFUSED, self._arrival_s[index])
        self._live.clear()

    # -- the engine's turn --------------------------------------------------------------------------------------

    def _take(self, now: float, lane: int, answer: StepDone) -> None:
        for done in self._turn.in_order(answer):
            begun = self._clock()
            drawn = self._turn.complete(done)
            self._decisions.seconds["complete"] += self._clock() - begun
            if drawn and (ended := self._log.draw(now, self._requests[lane].numbers_of(drawn))):
                owners = list(drawn.values())
                for place in ended:
                    group, completion = owners[place]
                    self._scheduler.end_completion(group, completion)
                    index = int(group.request.request_id)
                    self._live.remove(index)
                    self._log.end(index, State.FINISHED, now)

    def _balance_roles(self, now: float) -> None:
        """Let a replica change its role if a target is missed, as ``Scaling`` does in the engine."""
        if self._roles is not None and now >= self._look_at:
            self._look_at = now + LOOK_S
            deployment, replicas, prefill = self._deployment, self._pipeline.replicas, self._pipeline.prefill
            assert deployment.slo_ttft_ms is not None and deployment.slo_tbt_ms is not None
            targets = Targets(deployment.slo_ttft_ms / 1e3, deployment.slo_tbt_ms / 1e3)
            times = expected_times(self._turn, targets, prefill or replicas)
            if change := self._roles.decide(times, prefill, replicas - prefill, now):
                self._turned = self._pipeline.with_replicas(replicas, prefill + change)
                self._look_at = math.inf  # until the steps in flight have ended
                self._turn.pause()
        if self._turned is not None and not self._turn.in_flight:
            self._pipeline, self._turned = self._turned, None
            self._turn.change_members(self._topology)
            self._role_changes += 1
            self._look_at = now + LOOK_S

    @property
    def _topology(self) -> Topology:
        """The stages of the replicas, each as one worker, and the memory workers."""
        pipeline = self._pipeline
        without = pipeline.prefill if pipeline.one_way else 0
        slots = [
            holder.kv_tokens - scratch if holder.local and replica >= without else 0
            for replica, (holder, scratch) in enumerate(zip(self._holders, self._scratch, strict=True))
        ]
        members = []
        for index in range(self._stages):
            replica = pipeline.replica_at(index)
            held = 0 if pipeline.place(index) else slots[replica]
            members.append(Member(f"compute{index}", "compute", CPU, "", held, self._scratch[replica]))
        capacity = self._deployment.kv_tokens if self._memories else 0
        members += [Member(name, "memory", CPU, "", capacity) for name in self._memories]
        return Topology(FIRST, tuple(members), self._pipeline)

    def _launch(self, now: float) -> None:
        if self._dead:
            return
        self._balance_roles(now)
        if self._turn.reviews_lanes:
            for index, name in enumerate(self._memories):
                self._turn.note_attention(name, self._cluster.memory_work(index)[0])
        begun = self._clock()
        planned = list(self._turn.plan(now))
        self._decisions.seconds["plan"] += self._clock() - begun
        for plan in planned:
            self._submit(plan, now)
        empty = [plan for plan in planned if not plan.runs]
        for plan in empty:
            self._take(now, plan.lane, StepDone(plan.step, []))
        if empty:
            self._launch(now)

    def _repeat_steps(self) -> None:
        """Let lanes repeat their steps if these are certain to be alike."""
        if self._dead or self._roles is not None or self._lent:
            return
        for lane, steps in enumerate(self._in_flight):
            if steps:
                last = steps[-1][0]
                homes = self._decoding[lane].numbers_of(last.decoding.sequences)
                self._repeats.begin_repeating(lane, last, homes, functools.partial(self._repeat, last, homes))

    def _repeat(self, plan: StepPlan, homes: Ints) -> Repeat | None:
        model, lane = self._model, plan.lane
        if isinstance(model, LocalStepModel):
            after = model.repeated(plan, homes, self._split, self._replicas[plan.rotates][lane][0][0])
        else:
            after = model.repeated(plan, homes, self._split)
        requests = self._requests[lane].numbers_of(self._scheduler.decoding(lane))
        continue_for = int((self._arrivals.output - self._log.drawn)[requests].min()) - 1
        return None if after is None else Repeat(plan, homes, requests, after, continue_for)

    def _submit(self, plan: StepPlan, now: float) -> None:
        for segment in (segment for switch in plan.switches for segment in switch.segments):
            if segment.sequence in self._segments:  # otherwise it is only a cached prefix
                self._place(segment.sequence, moved(self._segments[segment.sequence], segment))
        if plan.switches:
            for numbers in self._decoding:
                numbers.forget_numbers()
        for sequence in plan.released:
            self._latest_chunks.pop(sequence, None)
            if self._homes.pop(sequence, None) is not None:  # otherwise it was only a cached prefix, or a carrier
                del self._segments[sequence]
                self._split.pop(sequence, None)
        for move in plan.moves:  # a source serves one at a time; it may have been cancelled meanwhile
            seconds = self._model.move_seconds(move.stop - move.start)
            end = self._sources[move.source] = max(now, self._sources.get(move.source, 0.0)) + seconds
            heapq.heappush(self._moves, (end, move.number))
        for admission in plan.admitted:
            self._place(admission.sequence, admission.segments)
        for segment in plan.grown:
            self._place(segment.sequence, grown(self._segments[segment.sequence], segment))
            self._decoding[plan.lane].forget_numbers()
        if not plan.runs:
            return
        self._decisions.steps += 1
        self._decisions.rows += len(plan.decoding.sequences) + len(plan.chunks)
        decoding = self._decoding[plan.lane].numbers_of(plan.decoding.sequences)
        chunk_homes = [self._homes[chunk.sequence] for chunk in plan.chunks]
        model = self._prompts_model if self._pipeline.role(plan.lane) == "prefill" else self._model
        if isinstance(model, LocalStepModel):
            own = self._replicas[plan.rotates][plan.lane][0][0]
            rows, times = model.times(plan, decoding, chunk_homes, self._split, own)
        else:
            rows, times = model.times(plan, decoding, chunk_homes, self._split)
        self._in_flight[plan.lane].append((plan, rows))
        self._give(plan, now, times)

    def _give(self, plan: StepPlan, now: float, times: _native.StepTimes, behind: int = 0) -> None:
        """Give the cluster a step, or one that repeats it ``behind`` steps later."""
        self._steps += 1
        turn = plan.turn + behind * self._deployment.model.layers
        orders = self._replicas[plan.rotates][plan.lane]
        tick = self._pipeline.tick(plan.lane, turn)
        ticks = self._pipeline.tick(plan.lane, turn, 1) - tick
        number, before = (~plan.lane, list[int]()) if behind else (plan.step, self._chunks_before(plan))
        self._cluster.submit(plan.lane, now, number, orders[turn % len(orders)], tick, ticks, times, before)

    def _chunks_before(self, plan: StepPlan) -> list[int]:
        """Return the steps in flight that run the chunks before those of ``plan``."""
        before = [self._latest_chunks.get(chunk.sequence) for chunk in plan.chunks if chunk.start]
        self._latest_chunks |= {chunk.sequence: plan.step for chunk in plan.chunks}
        return [step for step in before if step is not None and step in self._turn.in_flight]

    # -- the end ------------------------------------------------------------------------------------------------

    def _result(self, now: float) -> Result:
        deployment = self._deployment
        self._decisions.seconds = {what: TIMED * spent for what, spent in self._decisions.seconds.items()}
        replicas = [self._cluster.replica_work(index) for index in range(self._stages)]
        prefill = self._pipeline.prefill * self._pipeline.shapes[0].stages
        memories = [self._cluster.memory_work(index) for index in range(deployment.memory_workers)]
        if self._roles is not None:  # every replica may have had both roles
            workers = deployment.compute_workers + deployment.prefill_workers
            pools = [_use("compute", deployment.compute.kind, workers, replicas, now)]
        else:
            pools = [_use("compute", deployment.compute.kind, deployment.compute_workers, replicas[prefill:], now)]
        if deployment.prefill is not None and self._roles is None:
            kind, workers = deployment.prefill.kind, deployment.prefill_workers
            pools.insert(0, _use("prefill", kind, workers, replicas[:prefill], now))
        if not deployment.local:
            kind = deployment.memory_cost.hardware.kind
            pools.append(_use("memory", kind, deployment.memory_workers, memories, now))
        return Result(
            system="lamina",
            log=self._log,
            seconds=now,
            pools=tuple(pools),
            usd_per_hour=deployment.usd_per_hour,
            queued=self._queued_s / now if now else 0.0,
            refused=self._refused_s / now if now else 0.0,
            steps=self._steps,
            preempted=self._scheduler.dropped,
            role_changes=self._role_changes,
            prefix_queried=self._scheduler.prefixes.queried,
            prefix_hit=self._scheduler.prefixes.hit,
            decisions=self._decisions,
            spans=self._spans(),
        )

    def _spans(self) -> dict[str, list[Span]]:
        spans: dict[str, list[Span]] = {f"compute{index}": [] for index in range(self._stages)}
        spans |= {name: [] for name in self._memories}
        for stage, worker, lane, begin, end in self._cluster.spans():
            name = self._places[worker] if stage == "attention" else f"compute{worker}"
            spans[name].append(Span(stage, lane, round(begin * 1e9), round(end * 1e9)))
        return spans


def _stopped() -> float:
    return 0.0


def _use(name: str, kind: str, workers: int, work: list[tuple[float, float, float]], seconds: float) -> PoolUse:
    busy = [own[0] / seconds for own in work] if seconds else [0.0]
    network = max((max(own[1:]) / seconds for own in work), default=0.0) if seconds else 0.0
    return PoolUse(name, kind, workers, sum(busy) / len(busy), max(busy), network)
