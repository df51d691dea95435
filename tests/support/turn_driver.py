"""Workers around one turn that answer in any order."""

import random
from collections import Counter
from typing import Any

from lamina.control.messages import StepDone
from lamina.core.heads import HeadShards
from lamina.core.pipeline import Arrangement, Pipeline
from lamina.core.steps import StepPlan
from lamina.core.topology import FIRST, Member, Role, Topology
from lamina.kv.placement import Placement
from lamina.kv.stripes import StripedPlacement
from lamina.schedule.turn import Turn
from tests.support.schedules import ATTENTIONS, LIMITS, client, request

FIXED = Pipeline(3, 1)
WHOLE = HeadShards(2)
CHOICES = Pipeline(4, 2, choices=(Arrangement(4), Arrangement(2), Arrangement(3, rotates=True)))
INSTANCES = Pipeline(4, 2, choices=(Arrangement(4), Arrangement(2)))
ENOUGH = 2000


class Driver:
    """Workers that answer in any order, and callers that come and go, around one turn; checks what it plans."""

    def __init__(
        self,
        pipeline: Pipeline,
        depth: int,
        chance: random.Random,
        longest: int | None = None,
        memories: tuple[str, str] = ("memory0", "memory1"),
        shards: HeadShards = WHOLE,
        clients: int = 1,
    ) -> None:
        self.depth, self.chance, self.clients = depth, chance, clients
        capacities = dict(zip(memories, (60, 40), strict=True))
        roles: list[Role] = ["compute" if name.startswith("compute") else "memory" for name in memories]
        members = (Member(name, role, "cpu", "", capacities[name]) for name, role in zip(memories, roles, strict=True))
        self.placement = (
            StripedPlacement(capacities, shards, longest)
            if shards.count > 1
            else Placement(capacities, longest, topology=Topology(FIRST, tuple(members), pipeline))
        )
        self.turn = Turn(
            LIMITS, self.placement, pipeline, attentions=ATTENTIONS, kv_heads=shards.heads, plan_ahead=depth > 1
        )
        self.unanswered: dict[int, StepPlan] = {}
        self.planned: dict[int, list[int]] = {}  # by lane: steps that run
        self.completed: dict[int, list[int]] = {}
        self.known: set[int] = set()  # sequences that workers keep
        self.ended = Counter[str]()
        self.live: dict[str, Any] = {}
        self.moves: list[int] = []
        self.now = 0.0
        self.pause_s = 1.0  # between rounds, at most

    def come(self, name: str) -> None:
        prompt, most, n = self.chance.randint(1, 20), self.chance.randint(1, 8), self.chance.randint(1, 3)
        asks = client(int(name), self.clients)
        self.live[name] = self.turn.scheduler.submit(request(name, prompt, asks, max_tokens=most, n=n))

    def go(self) -> None:
        """A caller gives up."""
        if self.live:
            name = self.chance.choice(list(self.live))
            self.turn.scheduler.abort(name)
            self.end(name)

    def end(self, name: str) -> None:
        self.ended[name] += 1
        del self.live[name]

    def answer(self) -> None:
        """Any step in flight ends, whichever began first."""
        if not self.unanswered:
            return
        plan = self.unanswered.pop(self.chance.choice(list(self.unanswered)))
        rows = sum(len(step.tokens) for step in plan.sequences)
        early = StepDone(plan.step, [], rows=rows, busy_s=self.chance.random(), waited_s=self.chance.random())
        for done in self.turn.in_order(early):
            if rows:
                self.completed.setdefault(self.turn.in_flight[done.step].lane, []).append(done.step)
            for group, completion in self.turn.complete(done).values():
                name = group.request.request_id
                assert name in self.live and not completion.finished, "a token for a request that has ended"
                completion.generated.append(7)
                assert len(completion.generated) <= group.max_tokens
                if len(completion.generated) == group.max_tokens or self.chance.random() < 0.1:
                    self.turn.scheduler.end_completion(group, completion)
                    if not group.alive:
                        self.end(name)

    def plan(self) -> None:
        self.now += self.pause_s * self.chance.random()
        in_flight = Counter(plan.lane for plan in self.turn.in_flight.values())
        for plan in self.turn.plan(self.now):
            assert in_flight[plan.lane] < self.depth, "a plan for a lane without room"
            in_flight[plan.lane] += 1
            self.unanswered[plan.step] = plan
            if plan.runs:
                self.planned.setdefault(plan.lane, []).append(plan.step)
            running = {step.sequence for other in self.turn.in_flight.values() for step in other.sequences}
            assert not running & set(plan.released), "slots of a step in flight are released"
            self.known.difference_update(plan.released)
            for admission in plan.admitted:
                self.known.update(range(admission.sequence, admission.sequence + admission.count))
            assert {step.sequence for step in plan.sequences} <= self.known
            owners, beyond = self.turn.scheduler.owners, self.placement.beyond(plan.lane)
            for step in plan.sequences:
                if step.sequence in owners:
                    assert beyond.isdisjoint(owners[step.sequence][0].workers), "KV out of the lane's reach"
            self.moves += [move.number for move in plan.moves]
            self.on_plan(plan)

    def on_plan(self, plan: StepPlan) -> None:
        """A plan has been checked and would be sent."""

    def turn_once(self) -> None:
        """What a round of the engine or the simulator does."""
        for _ in range(self.chance.randint(0, 3)):
            self.answer()
        if self.moves and self.chance.random() < 0.5:
            self.turn.scheduler.on_move_done(self.moves.pop(0))
        if self.turn.reviews_lanes:
            self.turn.note_attention("memory0", self.now * self.chance.random())
        self.plan()
