"""When the next step of a lane is planned, if requests come to it from lanes that only run prompts."""

import heapq
import math
import random
from collections.abc import Callable

import pytest

from lamina.control.messages import StepDone
from lamina.core.pipeline import Pipeline
from lamina.core.steps import StepPlan
from lamina.core.topology import FIRST, Member, Topology
from lamina.kv.placement import Placement
from lamina.schedule.limits import Limits
from lamina.schedule.plan_times import FIRST_LEAD_S, LEAST_LEAD_S, PlanTimes
from lamina.schedule.turn import Turn
from tests.support.schedules import request

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=4000)
DECODE_S, PROMPT_S = 0.050, 0.120
SENT_S = 0.001  # from a plan until it reaches its workers
MEMORY = Member("memory0", "memory", "cpu", "a", 9000)


class Workers:
    """Virtual workers around a turn: each replica runs one step at a time, and a plan reaches it after ``SENT_S``.

    Attributes:
        begun: Time at which each step began, by number.
        ended: Time at which it ended.
        idle_s: Seconds that the last replica waited for plans between its first step and its last one.
        first: Time of a request's first token; ``second``: and of its second.
    """

    def __init__(self, pipeline: Pipeline, seconds: Callable[[StepPlan], float]) -> None:
        self.pipeline, self.seconds = pipeline, seconds
        self.turn = Turn(LIMITS, Placement({"memory0": 9000}), pipeline, attentions=2, kv_heads=2)
        self.now = self.idle_s = 0.0
        self.begun, self.ended = dict[int, float](), dict[int, float]()
        self.first, self.second = dict[str, float](), dict[str, float]()
        self._free = [math.nan] * pipeline.replicas
        self._running: list[tuple[float, int, float]] = []

    def _send(self) -> None:
        for plan in self.turn.plan(self.now):
            replica = self.pipeline.replica(plan.lane, 0)
            free = self._free[replica]
            came = self.now + SENT_S
            starved_s = max(0.0, came - free)  # 0 if ``free`` is nan
            if replica == self.pipeline.replicas - 1:
                self.idle_s += starved_s
            begin = came if math.isnan(free) else max(came, free)
            end = begin + (self.seconds(plan) if plan.runs else 0.0)
            self.begun[plan.step], self.ended[plan.step], self._free[replica] = begin, end, end
            heapq.heappush(self._running, (end, plan.step, starved_s))

    def run(self, until: float) -> None:
        self._send()
        while self.now < until:
            wake = min(until, self.turn.next_plan_at)
            if self._running and self._running[0][0] <= wake:
                self.now, step, starved_s = heapq.heappop(self._running)
                rows = len(self.turn.in_flight[step].sequences)
                for done in self.turn.in_order(StepDone(step, [], rows=rows, starved_s=starved_s)):
                    for group, completion in self.turn.complete(done).values():
                        name = group.request.request_id
                        times = self.second if name in self.first else self.first
                        times.setdefault(name, self.now)
                        completion.generated.append(7)
            else:
                self.now = wake
            self._send()


def run_prompts(pipeline: Pipeline, jitter: float, prompt_s: float = PROMPT_S, decode_s: float = DECODE_S) -> Workers:
    """Let prompts arrive at random times while a request decodes in steps of about ``decode_s``."""
    draw = random.Random(5)

    def seconds(plan: StepPlan) -> float:
        if plan.chunks:
            return prompt_s
        return decode_s * (1 + jitter * draw.uniform(-1, 1))

    workers = Workers(pipeline, seconds)
    workers.turn.scheduler.submit(request("running", 8, max_tokens=3000))
    workers.run(40 * decode_s)
    for number in range(60):
        workers.turn.scheduler.submit(request(str(number), 16, max_tokens=2))
        workers.run(workers.now + draw.uniform(6.0, 12.0) * decode_s)
        workers.turn.scheduler.abort(str(number))
    return workers


@pytest.mark.parametrize(
    ("prompt_s", "jitter", "decode_s", "share"),
    [
        (PROMPT_S, 0.0, DECODE_S, 0.9),
        (PROMPT_S, 0.2, DECODE_S, 0.75),
        (0.02, 0.0, DECODE_S, 0.9),
        (0.02, 0.2, DECODE_S, 0.75),
        (0.01, 0.05, 0.007, 0.75),
    ],
)
def test_a_request_decodes_in_the_next_step_that_begins_after_its_prompt(
    prompt_s: float, jitter: float, decode_s: float, share: float
) -> None:
    """Also if the prompt begins and ends within one step, and if steps are short."""
    workers = run_prompts(Pipeline(2, 2, prefill=1), jitter, prompt_s, decode_s)
    skipped = []
    for number in range(60):
        first, second = workers.first[str(number)], workers.second[str(number)]
        later = [step for step, begin in workers.begun.items() if begin > first and workers.ended[step] < second]
        skipped.append(len(later))
    assert sum(not one for one in skipped) >= share * len(skipped), skipped
    assert max(skipped) <= 1


@pytest.mark.parametrize("prompt_s", [PROMPT_S, 0.02])
@pytest.mark.parametrize(("jitter", "share"), [(0.0, 0.001), (0.2, 0.01)])
def test_the_decoding_replica_hardly_ever_waits_for_a_plan(jitter: float, share: float, prompt_s: float) -> None:
    workers = run_prompts(Pipeline(2, 2, prefill=1), jitter, prompt_s)
    assert workers.idle_s < share * workers.now


def test_no_plan_is_late_while_no_prompt_runs() -> None:
    workers = run_prompts(Pipeline(2, 2, prefill=1), 0.2)
    workers.run(workers.now + 1.0)
    idle_s, begun = workers.idle_s, workers.now
    workers.run(begun + 2.0)
    assert workers.idle_s == idle_s and workers.turn.next_plan_at == math.inf
    assert len(workers.turn.in_flight) == 2


def test_plans_are_made_as_early_as_the_worker_needs_them() -> None:
    """Steps take 0.1 s. A worker needs a plan some time before its step, and reports what it lacked of that."""
    leads = list[float]()
    for needed_s in (0.0, 0.005, 0.050):
        times, now, starved_s = PlanTimes(), 0.0, 0.0
        times.on_planned(0, 0, now)
        for step in range(200):
            due = times.put_off(0, now) or now
            times.on_planned(0, step + 1, due)
            times.on_step_done(0, step, starved_s)
            starved_s = max(0.0, due + needed_s - now - 0.1)
            now += 0.1
            times.set_time(now)
        leads.append(now + 0.1 - (times.put_off(0, now) or now))
    assert leads[0] == pytest.approx(LEAST_LEAD_S)
    assert leads[1:] == [pytest.approx(0.005, rel=0.2), pytest.approx(0.050, rel=0.2)]


def test_plans_are_put_off_again_once_steps_are_shorter_than_a_late_plan_was_late() -> None:
    """One plan comes 0.1 s late, in steps of 0.1 s; then steps take about 0.02 s."""
    draw, times, now = random.Random(3), PlanTimes(), 0.0
    times.on_planned(0, 0, now)
    for step in range(1000):
        starved_s = 0.1 if step == 20 else 0.0
        times.on_planned(0, step + 1, times.put_off(0, now) or now)
        times.on_step_done(0, step, starved_s)
        now += 0.1 if step < 30 else 0.02 * draw.uniform(0.9, 1.1)
        times.set_time(now)
    due = times.put_off(0, now)
    assert due is not None and due > now + 0.01


def test_a_lane_without_work_has_not_waited_for_its_plan() -> None:
    times = PlanTimes()
    for step in range(50):
        begun = float(step)
        times.on_planned(0, 2 * step, begun)
        times.put_off(0, begun)
        times.on_step_done(0, 2 * step, starved_s=0.9)
        times.set_time(begun + 0.1)  # nothing to run until ``begun + 1``
    times.on_planned(0, 1, 50.0)
    assert times.put_off(0, 50.0) == pytest.approx(50.1 - FIRST_LEAD_S)


def test_lanes_that_run_their_own_prompts_plan_their_next_step_at_once() -> None:
    workers = run_prompts(Pipeline(2, 2), 0.0)
    assert workers.turn.next_plan_at == math.inf
    assert [plan.lane for plan in workers.turn.in_flight.values()] == [0, 0]


def test_a_new_epoch_plans_its_first_steps_at_once() -> None:
    workers = run_prompts(Pipeline(2, 2, prefill=1), 0.0)
    topology = Topology(FIRST, (Member("compute1", "compute", "cpu", "a"), MEMORY), Pipeline(1, 1))
    workers.turn.end_epoch(topology)
    assert list(workers.turn.plan(workers.now)) == [] and workers.turn.next_plan_at == math.inf
    workers.turn.begin_epoch()
    assert sum(plan.runs for plan in workers.turn.plan(workers.now)) == 2
