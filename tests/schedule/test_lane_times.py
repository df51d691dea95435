"""On which replica with local memory a request runs whose prefix is cached on one of them."""

import pytest

from lamina.control.messages import Computed, StepDone
from lamina.core.pipeline import Pipeline
from lamina.core.steps import DecodeRows, SequenceStep, StepPlan
from lamina.core.topology import FIRST, Member, Topology
from lamina.core.types import Segment
from lamina.kv.placement import Placement
from lamina.schedule.lane_times import LaneTimes
from lamina.schedule.limits import Limits
from lamina.schedule.turn import Turn
from tests.support.schedules import request

PREFIX, OUTPUT = 512, 20
STEP_S, ROW_S = 0.010, 0.005  # of a step that decodes, and of each of its sequences


class Replicas:
    """A turn with two replicas, whose steps take times by formulas."""

    def __init__(self, token_s: float) -> None:
        """``token_s``: seconds of a prompt token."""
        members = tuple(Member(f"compute{number}", "compute", "cpu", "", 9000) for number in range(2))
        topology = Topology(FIRST, members, Pipeline(2, 2))
        limits = Limits(max_num_seqs=16, max_num_batched_tokens=1024, max_model_len=4000)
        placement = Placement(topology.capacities, topology=topology)
        self.turn = Turn(limits, placement, topology.pipeline, attentions=2, kv_heads=2, prefix_cache=True)
        self._token_s = token_s

    def _seconds(self, plan: StepPlan) -> float:
        tokens = sum(len(chunk.tokens) for chunk in plan.chunks)
        return self._token_s * tokens if tokens else STEP_S + ROW_S * len(plan.decoding.sequences)

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            plans = [*self.turn.in_flight.values()] or list(self.turn.plan(0.0))
            for plan in plans:
                done = StepDone(plan.step, [], rows=plan.runs and 1, busy_s=self._seconds(plan))
                for one in self.turn.in_order(done):
                    for group, completion in self.turn.complete(one).values():
                        completion.generated.append(7)
                        if len(completion.generated) == group.request.params.max_tokens:
                            self.turn.scheduler.end_completion(group, completion)
            list(self.turn.plan(0.0))

    def lane_of(self, name: str, prompt: int, output: int, salt: str = "") -> int:
        """Submit a request, let its prompt be computed, and return its lane."""
        group = self.turn.scheduler.submit(request(name, prompt, max_tokens=output, cache_salt=salt or name))
        self.run(4)
        return group.lane


@pytest.mark.parametrize("token_s", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("more", [1, 2, 4])
def test_a_request_runs_where_it_ends_first_wherever_its_prefix_lies(more: int, token_s: float) -> None:
    """By hand: the replica with the prefix saves PREFIX prompt tokens, and each step there has more sequences."""
    replicas = Replicas(token_s)
    holder = replicas.lane_of("first", PREFIX + 8, OUTPUT, "shared")
    replicas.run(2 * OUTPUT)
    lanes = [replicas.lane_of(str(number), 20, 2000) for number in range(2 * more + 2)]  # they take turns
    assert lanes.count(holder) == more + 1, "the times of steps with so many sequences are known"
    kept = [number for number, lane in enumerate(lanes) if lane == holder][:more]
    for number in {*range(len(lanes))}.difference(kept):
        replicas.turn.scheduler.abort(str(number))
    replicas.run(8)
    found = replicas.lane_of("second", PREFIX + 40, OUTPUT, "shared")
    saved_s, longer_s = token_s * PREFIX, OUTPUT * ROW_S * more
    assert abs(saved_s / longer_s - 1) > 0.1, "too close to call"
    assert found == (holder if saved_s > longer_s else 1 - holder)


def test_requests_that_come_again_after_a_restart_run_where_their_kv_is() -> None:
    """Nothing has been measured then."""
    replicas, names = Replicas(token_s=1e-3), [str(number) for number in range(4)]
    scheduler = replicas.turn.scheduler
    places = [Segment(number, f"compute{number % 3 and 1}", (0, 2), (0, None)) for number in range(4)]
    scheduler.recall([Computed(name, 0, one.sequence, PREFIX, [one]) for name, one in zip(names, places, strict=True)])
    groups = [scheduler.submit(request(name, PREFIX + 8, max_tokens=OUTPUT, cache_salt=name)) for name in names]
    list(replicas.turn.plan(0.0))
    assert [(group.lane, group.hit) for group in groups] == [(0, PREFIX), (1, PREFIX), (1, PREFIX), (0, PREFIX)]


def test_steps_count_by_their_prompt_tokens() -> None:
    """A short chunk takes longer per token than a long one, and says little about long prompts."""
    times = LaneTimes([])
    assert times.token_s == 0.0
    for step in range(100):
        tokens, seconds = (400, 0.4) if step % 2 else (1, 0.1)
        chunks = [SequenceStep(0, 0, [7] * tokens, [])]
        times.add_step(StepPlan(step, 0, 0, [], [], [], chunks, DecodeRows([], [], [])), seconds)
    assert times.token_s == pytest.approx(0.5 / 401, rel=0.15)
