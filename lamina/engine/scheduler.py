"""Continuous batching: which tokens of which sequences run in the next step of a lane.

A pure object: its state changes only by ``add``, ``plan``, ``complete``, ``finish``, ``abort`` and ``use_lanes``, in
the order they are called. It holds no clock, socket or tensor, so a simulator can drive it as the engine does.

A request runs in one lane. Its life: waiting -> admitted (KV reserved) -> prompt chunks -> its other completions forked
-> one token a step -> finished -> released (the workers forget it and its slots are free).

A lane's steps may be planned ahead: while a step runs, the next one assumes that every sequence goes on, with a token
that is still being drawn. Where it has ended, its row is computed in vain and nobody hears of it.
"""

import collections
import itertools
from dataclasses import dataclass, field

from lamina.engine.placement import Placement
from lamina.errors import RequestError
from lamina.types import LAST_DRAWN, Admission, Fork, Request, SamplingParams, Segment, SequenceStep, StepPlan


@dataclass(frozen=True)
class Limits:
    """Bounds of one request, of one step, and of the sequences that all lanes together decode at once."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(eq=False)
class Completion:
    """One sequence: its place in the batch and what it has drawn."""

    sequence: int
    index: int
    cached: int = 0  # tokens whose K and V are on the memory worker, or will be once the planned steps have run
    generated: list[int] = field(default_factory=list)
    drawing: int = 0  # tokens that planned steps are to draw
    finished: bool = False
    retired: bool = False  # given up for release


@dataclass(eq=False)
class Group:
    """A request with its completions."""

    request: Request
    max_tokens: int
    completions: list[Completion]
    lane: int = -1  # not admitted
    memory: str = ""
    heads: tuple[int, int] = (0, 0)
    in_flight: int = 0  # planned steps that have not completed
    forked: bool = False
    holders: int = 0  # completions whose KV reservation stands

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def own_tokens(self) -> int:
        """Most KV tokens one completion keeps besides the prompt: the last token drawn is never kept."""
        return self.max_tokens - 1

    @property
    def tokens(self) -> int:
        """Most KV tokens the request keeps; the prompt is shared by its completions."""
        return self.prompt_length + len(self.completions) * self.own_tokens

    @property
    def prompt_done(self) -> bool:
        """True when the KV of the whole prompt is kept."""
        return self.completions[0].cached >= self.prompt_length

    @property
    def alive(self) -> list[Completion]:
        """The completions that still draw tokens."""
        return [completion for completion in self.completions if not completion.finished]


class Scheduler:
    """First in, first out; decode before prompts; a prompt is cut into chunks that fill what a step has left."""

    def __init__(
        self,
        limits: Limits,
        placement: Placement,
        lanes: int,
        attentions: int,
        kv_heads: int,
        active: int | None = None,
    ) -> None:
        """``attentions`` of the model, ``kv_heads`` of a whole segment; ``active`` of the lanes are used at first."""
        self.limits = limits
        self.placement = placement
        self.active = lanes if active is None else active
        self._attentions = attentions
        self._kv_heads = kv_heads
        self._waiting: collections.deque[Group] = collections.deque()
        self._running: list[list[Group]] = [[] for _ in range(lanes)]
        self._ending: list[list[tuple[Group, Completion]]] = [[] for _ in range(lanes)]
        self._in_flight: list[collections.deque[StepPlan]] = [collections.deque() for _ in range(lanes)]
        self._turns = [0] * lanes
        self._moving = False
        self._requests: dict[str, Group] = {}
        self._owners: dict[int, tuple[Group, Completion]] = {}
        self._sequences = itertools.count()
        self._steps = itertools.count(1)

    @property
    def waiting(self) -> int:
        """Requests not admitted yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests admitted and not finished."""
        return sum(map(len, self._running))

    @property
    def idle(self) -> bool:
        """True when nothing waits, runs, is in flight or is still to be released."""
        return not (self._waiting or any(self._in_flight) or self.running or any(self._ending))

    def in_flight(self, lane: int) -> int:
        """Planned steps of a lane that have not completed."""
        return len(self._in_flight[lane])

    def check(self, prompt_length: int, params: SamplingParams) -> None:
        """Refuse what can never be served. Raises RequestError with the figures."""
        limit = self.limits.max_model_len
        if prompt_length == 0:
            raise RequestError("the prompt is empty; give at least one token")
        if prompt_length >= limit:
            raise RequestError(
                f"the prompt has {prompt_length} tokens; this runtime takes at most {limit - 1} "
                f"(max_model_len {limit}, one left for the answer). Shorten the prompt or raise max_model_len"
            )
        if params.n > self.limits.max_num_seqs:
            raise RequestError(f"n is {params.n}; this runtime decodes {self.limits.max_num_seqs} sequences at once")
        room = self._max_tokens(prompt_length, params)
        if params.min_tokens > room:
            raise RequestError(
                f"min_tokens is {params.min_tokens}; a prompt of {prompt_length} tokens leaves room for {room} "
                f"(max_model_len {limit}). Lower min_tokens or shorten the prompt"
            )
        self.placement.require_possible(prompt_length + params.n * (room - 1))

    def _max_tokens(self, prompt_length: int, params: SamplingParams) -> int:
        room = self.limits.max_model_len - prompt_length
        if params.max_tokens is not None:
            return min(params.max_tokens, room)
        # As many as can be kept at all: the last token drawn is not.
        return max(1, min(room, (self.placement.largest - prompt_length) // params.n + 1))

    def add(self, request: Request) -> Group:
        """Queue a request. Raises RequestError if it can never be served."""
        length = len(request.prompt_token_ids)
        self.check(length, request.params)
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use; give each request its own")
        completions = [Completion(next(self._sequences), index) for index in range(request.params.n)]
        group = Group(request, self._max_tokens(length, request.params), completions, heads=(0, self._kv_heads))
        self._requests[request.request_id] = group
        self._owners.update((completion.sequence, (group, completion)) for completion in completions)
        self._waiting.append(group)
        return group

    def use_lanes(self, active: int) -> None:
        """Spread all requests over the first ``active`` lanes, as soon as no step is in flight."""
        if active != self.active:
            self.active = active
            self._moving = True

    def _move(self) -> None:
        """Deal the requests out anew, those with many sequences first."""
        self._moving = False
        groups = sorted(itertools.chain(*self._running), key=lambda group: -len(group.completions))
        self._running = [[] for _ in self._running]
        for group in groups:
            group.lane = min(range(self.active), key=self._seats_taken)
            self._running[group.lane].append(group)

    def plan(self, lane: int) -> StepPlan | None:
        """The next step of ``lane``, behind those it has in flight; None if there is nothing to do now."""
        if self._moving:
            if any(self._in_flight):
                return None
            self._move()
        forks = [fork for group in self._running[lane] for fork in self._forks(group)]
        released = self._release(lane)
        admitted = self._admit(lane)
        steps = self._steps_of(lane)
        if not (forks or released or admitted or steps):
            return None
        plan = StepPlan(next(self._steps), lane, self._turns[lane], forks, released, admitted, steps)
        self._turns[lane] += self._attentions if steps else 0
        self._in_flight[lane].append(plan)
        for step in steps:
            group, completion = self._owners[step.sequence]
            group.in_flight += 1
            completion.cached = step.stop
            for sequence in step.draws:
                self._owners[sequence][1].drawing += 1
        return plan

    def _forks(self, group: Group) -> list[Fork]:
        if group.forked or not group.prompt_done:
            return []
        group.forked = True
        first, *others = group.completions
        for other in others:
            other.cached = group.prompt_length
        return [Fork(first.sequence, other.sequence, group.prompt_length) for other in others if not other.finished]

    def _release(self, lane: int) -> list[int]:
        """Let go of finished completions, whose own slots are free once this plan is applied."""
        ending, self._ending[lane] = self._ending[lane], []
        for group, _ in ending:
            group.holders -= 1
            prompt = 0 if group.holders else group.prompt_length  # shared: the last one gives it back
            self.placement.release(group.memory, group.own_tokens + prompt)
        return [completion.sequence for _, completion in ending]

    def _admit(self, lane: int) -> list[Admission]:
        admitted = []
        budget = self.limits.max_num_batched_tokens - self._seats_taken(lane)
        while self._waiting and budget > 0 and self._is_least_loaded(lane):
            group = self._waiting[0]
            if (
                sum(map(self._seats_taken, range(len(self._running)))) + len(group.completions)
                > self.limits.max_num_seqs
            ):
                break
            memory = self.placement.reserve(group.tokens)
            if memory is None:
                break
            self._waiting.popleft()
            group.lane, group.memory, group.holders = lane, memory, len(group.completions)
            self._running[lane].append(group)
            admitted.append(self._admission(group))
            budget -= group.prompt_length
        return admitted

    def _seats_taken(self, lane: int) -> int:
        return sum(len(group.completions) for group in self._running[lane])

    def _is_least_loaded(self, lane: int) -> bool:
        return lane < self.active and self._seats_taken(lane) <= min(map(self._seats_taken, range(self.active)))

    def _admission(self, group: Group) -> Admission:
        params, first = group.request.params, group.completions[0].sequence
        segment = Segment(first, group.memory, group.heads, (0, None))
        prompt = group.request.prompt_token_ids if params.repetition_penalty != 1.0 else []
        return Admission(
            first, len(group.completions), group.prompt_length, [segment], params, group.request.seed, prompt
        )

    def _steps_of(self, lane: int) -> list[SequenceStep]:
        groups = self._running[lane]
        steps = [
            self._decode(completion)
            for group in groups
            if group.prompt_done
            for completion in group.alive
            if len(completion.generated) + completion.drawing < group.max_tokens
        ]
        budget = self.limits.max_num_batched_tokens - len(steps)
        for group in groups:
            if budget <= 0:
                break
            if not group.prompt_done:
                steps.append(self._chunk(group, budget))
                budget -= len(steps[-1].tokens)
        return steps

    @staticmethod
    def _decode(completion: Completion) -> SequenceStep:
        token = LAST_DRAWN if completion.drawing else completion.generated[-1]
        return SequenceStep(completion.sequence, completion.cached, [token], [completion.sequence])

    @staticmethod
    def _chunk(group: Group, budget: int) -> SequenceStep:
        first = group.completions[0]
        stop = min(group.prompt_length, first.cached + budget)
        last = stop == group.prompt_length
        draws = [completion.sequence for completion in group.alive] if last else []
        return SequenceStep(first.sequence, first.cached, group.request.prompt_token_ids[first.cached : stop], draws)

    def complete(self, lane: int, step: int | None = None) -> dict[int, tuple[Group, Completion]]:
        """Step ``step`` of ``lane`` has run (None: the oldest in flight): one without sequences may overtake others.

        Returns, by sequence, the completions that drew a token and live.

        The caller appends each token to ``generated`` and calls ``finish`` for completions that have ended.
        """
        in_flight = self._in_flight[lane]
        plan = in_flight[0] if step is None else next(plan for plan in in_flight if plan.step == step)
        in_flight.remove(plan)
        drawn: dict[int, tuple[Group, Completion]] = {}
        groups: dict[int, Group] = {}
        for part in plan.sequences:
            group, _ = self._owners[part.sequence]
            group.in_flight -= 1
            groups[id(group)] = group
            for sequence in part.draws:
                owner = self._owners[sequence]
                owner[1].drawing -= 1
                if not owner[1].finished:
                    drawn[sequence] = owner
        for group in groups.values():
            self._retire(group)
        return drawn

    def finish(self, group: Group, completion: Completion) -> None:
        """A completion has ended, by itself or by its caller's wish."""
        completion.finished = True
        self._retire(group)

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; its id is free at once. Nothing happens if it is not known (any more)."""
        group = self._requests.pop(request_id, None)
        if group is None:
            return
        for completion in group.completions:
            completion.finished = True
        if group.lane >= 0:
            self._retire(group)
        else:
            self._waiting.remove(group)
            self._forget(group)

    def _retire(self, group: Group) -> None:
        """Hand finished completions, once no step uses their group, to the next plan for release."""
        if group.in_flight:
            return
        ending = [completion for completion in group.completions if completion.finished and not completion.retired]
        for completion in ending:
            completion.retired = True
            self._ending[group.lane].append((group, completion))
        if ending and not group.alive:
            self._running[group.lane].remove(group)
            self._forget(group)

    def _forget(self, group: Group) -> None:
        if self._requests.get(group.request.request_id) is group:
            del self._requests[group.request.request_id]
        for completion in group.completions:
            del self._owners[completion.sequence]
