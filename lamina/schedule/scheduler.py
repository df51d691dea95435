"""Continuous batching: ``Scheduler`` plans which tokens of which sequences run in the next step of a lane. Pure.

A request runs in one lane. Its states: waiting -> dealt to a lane (KV reserved) -> admitted (by the lane's next plan)
-> prompt chunks -> other completions forked -> one token a step -> finished -> released (workers forget the request and
its slots are free). A preempted request is released early and waits again; its prompt and generated tokens then run
like a prompt. A draw depends only on the logits, the request's seed, the completion and the index of the token, so the
request continues with the tokens that it would have drawn, up to the rounding of KV types.

Steps of a lane may be planned ahead: while a step runs, the plan of the next one assumes that every sequence continues.
The row of a sequence that has ended is discarded.

``lamina.schedule.admission`` selects the next request. If a segment is full or its worker runs out of slots, the
sequence continues on another memory worker (``lamina.schedule.growth``). Ranges of KV may move to another worker
(``lamina.schedule.moves``).
"""

import collections
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lamina.control.messages import Computed
from lamina.core.errors import RequestError
from lamina.core.pipeline import Pipeline
from lamina.core.requests import Completion, Drawn, Group, Owner
from lamina.core.sampling import SamplingParams
from lamina.core.steps import DecodeRows, StepPlan
from lamina.core.topology import Topology
from lamina.core.types import Request
from lamina.kv.balancing import Policy as BalancePolicy
from lamina.kv.disk import Disks
from lamina.kv.placement import Placement
from lamina.kv.prefix_cache import PrefixCache
from lamina.schedule.admission import Admissions, request_to_preempt
from lamina.schedule.balancing import Balancing
from lamina.schedule.batches import PromptBatch
from lamina.schedule.beam_search import Beams
from lamina.schedule.dealing import Dealer, Readiness
from lamina.schedule.growth import Growth, requeued, resumed
from lamina.schedule.lane import Lane, Planned, Remains, Residents, kept
from lamina.schedule.lane_times import LaneTimes
from lamina.schedule.limits import Limits
from lamina.schedule.moves import Moves
from lamina.schedule.pace import Pace
from lamina.schedule.policy import FIFO, HASTE, Policy, keep_deadlines, rank_of
from lamina.schedule.prefix_times import PrefixTimes
from lamina.schedule.recall import Recall
from lamina.schedule.scratch import Rooms
from lamina.schedule.short_prompts import ShortPrompts
from lamina.schedule.suspects import Hold, Holding


class Scheduler:
    """Plans steps: decoding sequences first, then chunks of prompts in the remaining rows.

    The cost of planning a step depends on its sequences, not on the number of lanes, requests or memory workers.

    Attributes:
        rotates: Whether lanes rotate over the replicas.
        dropped: Number of preemptions so far.
        scratch: Scratch memory of the replicas for K and V of prompts.
        lane_policy: Decides which lanes run which prompts; None if the policy leaves it to the dealer.
    """

    def __init__(
        self,
        limits: Limits,
        placement: Placement,
        lanes: int,
        attentions: int,
        kv_heads: int,
        policy: Policy = FIFO,
        prefix_cache: bool = False,
        pace: Pace | None = None,
        overcommit: float = 1.0,
        window: int = 0,
        balance: BalancePolicy | None = None,
        pipeline: Pipeline | None = None,
        scratch: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Create a scheduler that uses all lanes at first.

        Args:
            attentions: Number of attentions of the model.
            kv_heads: Number of KV heads of a whole segment.
            policy: Order of the requests.
            prefix_cache: Whether KV is kept for other requests that begin with the same tokens.
            pace: Bounds the time of steps in which sequences decode.
            overcommit: Tokens of a memory worker and its disk together, as a multiple of its slots.
            window: The largest window of layers that drop the tokens before it; 0 if no layer does.
            balance: Proposes moves of KV between memory workers.
            pipeline: The replicas that run the lanes; None: one that does prompts and decoding.
            scratch: Scratch memory of the replicas, see ``Topology.scratch``.
        """
        self._pipeline = pipeline or Pipeline(lanes, 1)
        self.scratch = Rooms(scratch)
        self.dropped = 0
        self.limits = limits
        self.placement = placement
        self.rotates = False
        self._attentions = attentions
        self._kv_heads = kv_heads
        self._pace = pace
        self._policy = policy
        self.lane_policy = policy.lane_policy(limits.max_num_batched_tokens, attentions)
        self._now = 0.0  # seconds of the clock that ``Turn.plan`` uses
        self._arrived: list[Group] = []  # requests submitted since the last ``set_time``
        self._lanes = [self._new_lane(number) for number in range(lanes)]
        self._times = LaneTimes(self._lanes)
        self._ready = Readiness(lanes)
        self._deals_again = False  # once no step is in flight
        self._requests: dict[str, Group] = {}
        self._arrivals = itertools.count()
        self._sequences = itertools.count()
        self._steps = itertools.count(1)
        self._prefix_times = PrefixTimes()
        self._short = ShortPrompts(self._lanes, placement, limits.max_num_batched_tokens, policy.first_share)
        self.prefixes = PrefixCache(placement, self._sequences, prefix_cache, window, self._uses_prefix)
        self._recall = Recall(placement, self.prefixes, window > 0)
        self._residents = Residents(placement, self.prefixes, self._lanes)
        self._admissions = Admissions(limits, placement, self._residents, self.prefixes, policy, self._times)
        self._dealer = Dealer(
            limits,
            placement,
            self._lanes,
            self.prefixes,
            self._residents,
            self._admissions,
            self._ready,
            self._pipeline,
            self.lane_policy,
            self._short,
        )
        self.moves = Moves(placement, self.prefixes, self._residents, self._lanes, self._sequences, self._admissions)
        self.balancing = None if balance is None else Balancing(balance, self.moves, placement)
        rank = functools.partial(rank_of, policy)
        self._growth = Growth(placement, self._residents, self.moves, rank, self._lanes)
        self.beams = Beams(placement, self._residents, self._sequences, self._lanes, self._ready)
        self._holding = Holding(self._admissions)
        self.disks = Disks(placement, self.prefixes, self._sequences, overcommit)

    def _new_lane(self, number: int) -> Lane:
        policy = self._policy
        rank, lead = (None, None) if policy.fair else (functools.partial(rank_of, policy), self._lead)
        prompts = PromptBatch(policy.first_share, rank, lead)
        allowance = self.limits.max_num_batched_tokens
        lane = Lane(self.placement.longest, number, allowance=allowance, prompts=prompts)
        self._assign_replica(lane)
        return lane

    def _lead(self, owners: Mapping[Completion, Group]) -> tuple[Sequence[Completion], float]:
        """Return the prompts of a lane to run in order, and their share of its rows, see ``Lead``."""
        prompts = [*owners]
        due = [group.arrived_s + self._policy.due_s(group) - self._now for group in owners.values()]
        if not self._times.token_s or min(due) == math.inf:
            return prompts[:1], self._policy.first_share
        kept, share = keep_deadlines(
            [(one.left * self._times.token_s, left_s) for one, left_s in zip(prompts, due, strict=True)]
        )
        return [prompts[place] for place in kept] or prompts[:1], min(1.0, HASTE * share)

    def _assign_replica(self, lane: Lane) -> None:
        """Set what a lane has from the replica that runs it."""
        lane.role = self._pipeline.role(lane.number)
        lane.pace = None if lane.role == "prefill" else self._pace  # no sequence decodes in a prefill lane
        lane.scratch = self.scratch.of_lane(lane.number, self.rotates)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Number of requests not dealt to a lane yet."""
        return len(self._admissions) + len(self._holding) + len(self.disks.held)

    @property
    def running(self) -> int:
        """Number of requests dealt to lanes that have not finished."""
        return sum(len(lane.running) for lane in self._lanes)

    @property
    def handovers(self) -> int:
        """Number of requests that went from the lane of their prompt to one that decodes."""
        return self._dealer.handovers

    @property
    def runs_prompts_apart(self) -> bool:
        """True if a prefill lane has a request, which another lane will decode."""
        return any(own.running for own in self._lanes if own.role == "prefill")

    @property
    def full(self) -> bool:
        """True if no waiting request fits, and no slot or seat has been freed since the last attempt."""
        return self._admissions.full

    @property
    def sequences(self) -> int:
        """Number of sequences that would decode if all prompts were done, of requests that fit."""
        waiting = 0 if self.full else len(self._admissions)
        return min(self._dealer.seats.total + waiting, self.limits.max_sequences)

    @property
    def requests(self) -> list[Group]:
        """Requests that have not ended, in order of arrival."""
        return list(self._requests.values())

    @property
    def stranded(self) -> list[Group]:
        """Requests that may need more KV tokens than all memory workers together hold."""
        return [group for group in self.requests if group.tokens > self.placement.total]

    @property
    def _all_running(self) -> Iterator[Group]:
        return itertools.chain.from_iterable(own.running for own in self._lanes)

    @property
    def owners(self) -> dict[int, Owner]:
        """Running requests and completions, by sequence."""
        return {one.sequence: (group, one) for group in self._all_running for one in group.completions}

    def alive(self, request_id: str) -> list[int]:
        """Return the completions of a request that still draw tokens; none if it has ended."""
        return [one.index for one in self._requests[request_id].alive] if request_id in self._requests else []

    def in_flight(self, lane: int) -> int:
        """Return the number of planned steps of a lane that have not completed."""
        return len(self._lanes[lane].in_flight)

    # -- requests ------------------------------------------------------------------------------------------------

    def validate_request(self, prompt_length: int, params: SamplingParams) -> None:
        """Raise RequestError, with the numbers, for a request that can never be served."""
        self.limits.validate_request(prompt_length, params, self.placement)

    def submit(self, request: Request, drawn: Drawn | None = None) -> Group:
        """Queue a request, which continues after the tokens in ``drawn``. Raises RequestError if it can never be
        served, or if less memory is left than when these tokens were drawn."""
        length = len(request.prompt_token_ids)
        self.validate_request(length, request.params)
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use; give each request its own")
        begun = drawn or {index: list[int]() for index in range(request.params.n)}
        most = self.limits.most_tokens(length, request.params, self.placement)
        if (longest := max(map(len, begun.values()))) >= most:
            raise RequestError(
                f"an earlier engine has generated {longest} tokens, and a prompt of {length} tokens leaves room for "
                f"{most} in the memory workers that are left. Send the request again, or add memory workers"
            )
        completions = [resumed(next(self._sequences), index, [*tokens]) for index, tokens in begun.items()]
        heads, expand = (0, self._kv_heads), self.placement.expand
        group = Group(request, most, completions, next(self._arrivals), heads=heads, expand=expand)
        self._requests[request.request_id] = group
        self._arrived.append(group)
        self._recall.claim(request, drawn)
        if self.disks.fetch_for(group):
            self._ready.wake()
        else:
            self._holding.enqueue_unless_held(group)
        return group

    def recall(self, kept: Sequence[Computed]) -> None:
        """Reserve slots for what workers have kept of an earlier engine's requests. Precedes ``submit``."""
        before = max((one.sequence for one in kept), default=-1) + 1
        collections.deque(itertools.islice(self._sequences, before), maxlen=0)  # their numbers stay in use
        self._recall.keep(kept)

    def drop_recalled(self) -> None:
        """Release the KV of an earlier engine's requests that nobody has submitted again."""
        if self._recall:
            self._recall.drop()
            self._ready.wake()
            self._admissions.note_freed()

    def end_completion(self, group: Group, completion: Completion) -> None:
        """End a completion. After the last completion of a request, its id is free."""
        if self.lane_policy is not None:
            self.lane_policy.note_output(len(completion.generated))
        self._times.note_output(len(completion.generated))
        self._end(group, completion)
        if not group.alive and self._requests.get(group.request.request_id) is group:
            del self._requests[group.request.request_id]

    def abort(self, request_id: str, suspect: bool = False) -> None:
        """End a request in any state; its id is free at once. Does nothing if it has ended or is unknown.

        ``suspect``: its KV may be wrong, and must not enter the prefix cache.
        """
        group = self._requests.pop(request_id, None)
        if group is None:
            return
        group.suspect = suspect
        if group.lane < 0 and not self.disks.abandon(group):
            self._holding.remove(group)
        elif group.lane >= 0 and group in self._lanes[group.lane].dealt:
            self._dealer.undo_deal(group)
        for completion in group.completions:
            self._end(group, completion)

    def preempt(self, group: Group) -> None:
        """Drop the KV of a request, which waits again, ahead of all others. Does nothing if it waits or has ended.

        Tokens that are being drawn are discarded, and drawn again later. The slots are free once the steps in flight
        have completed and the next plan has been applied.
        """
        if group.lane >= 0 and group.alive:
            self._holding.put_back(self._drop_kv(group))

    def _preempt_each(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.preempt(group)

    def _drop_kv(self, group: Group) -> Group:
        """Drop the KV of a request. Returns the request to queue again."""
        if group in self._lanes[group.lane].dealt:
            self._dealer.undo_deal(group)
            return group
        successor = self._requests[group.request.request_id] = requeued(group, self._sequences)
        for completion in group.completions:
            self._end(group, completion)
        self.dropped += 1
        return successor

    def hold_back(self, hold: Hold) -> None:
        """Run only requests that ``hold`` allows. Requests that are allowed again run once no step is in flight. Call
        ``end_epoch`` to hold running requests."""
        known = [self._requests[one] for one in hold.held if one in self._requests]
        self._holding.use(hold, [group for group in known if group.lane < 0 and group not in self.disks.held])
        self._deals_again = True

    # -- members and lanes ---------------------------------------------------------------------------------------

    def use_lanes(self, active: int, rotates: bool = False) -> None:
        """Use the first ``active`` lanes, in rotational or fixed order. Requests are dealt out again once no step is in
        flight."""
        if (active, rotates) != (self._dealer.active, self.rotates):
            self._dealer.use_lanes(active)
            self.rotates = rotates
            self._deals_again = True

    def end_epoch(self, topology: Topology) -> Remains:
        """End the epoch: only the memory workers of ``topology`` hold KV from now on.

        Steps in flight and moves of KV are undone. Requests that have lost KV wait again, before all others; the other
        requests are dealt out again. Returns what workers keep of the requests.
        """
        owners = self.owners
        self._recall.drop()
        for own in self._lanes:
            own.withdraw(owners)
        for own in self._lanes:
            self._retire(own)
        self.moves.cancel()
        lost = self.placement.lost(topology)
        struck = [group for group in self._all_running if group.alive and not lost.isdisjoint(group.workers)]
        dropped = sorted(struck, key=lambda group: -group.arrival)
        recomputed = sum(group.computed for group in dropped)
        unknown = [group for own in self._lanes for group in own.dealt if not self._holding.may_run(group)]
        self._preempt_each(dict.fromkeys([*unknown, *dropped]))
        for own in self._lanes:
            own.shrink(self.placement)
            for owner in own.strike(lost):
                self._free_completion(*owner)
        self._pipeline, self.scratch = topology.pipeline, Rooms()
        self._follow(topology, ends_epoch=True)
        self._deal_again()
        remaining = kept(self._lanes, self.prefixes, self.placement.capacities)
        return Remains(self.placement.by_worker(remaining), len(dropped), recomputed)

    def change_members(self, topology: Topology, deal_again: bool) -> None:
        """Adapt to other members within the epoch.

        ``deal_again``: lanes run on other replicas now, while no step is in flight; requests are dealt out again.
        """
        self._deals_again = self._deals_again or deal_again
        self._pipeline = topology.pipeline
        self._follow(topology, ends_epoch=False)
        self._lanes += [self._new_lane(number) for number in range(len(self._lanes), topology.pipeline.lanes)]
        self._ready.extend(len(self._lanes))

    def _follow(self, topology: Topology, *, ends_epoch: bool) -> None:
        lost = self.placement.lost(topology)
        for group in self.disks.on_workers_lost(lost, ends_epoch=ends_epoch):
            self._holding.enqueue_unless_held(group)
        self.prefixes.on_workers_lost(lost)
        self.scratch.follow(topology.scratch)
        self.placement.apply_topology(topology)
        self.prefixes.on_places_changed()
        self.disks.on_places_changed()
        self._residents.on_places_changed()
        self._admissions.on_places_changed()

    def drain(self, worker: str) -> None:
        """Place no more KV on a memory worker, and move or drop the KV that it holds, plan by plan."""
        self.placement.close(worker)
        self._admissions.close(worker)
        self._ready.wake()

    def resume(self, worker: str) -> None:
        """Undo ``drain``: KV that has not moved stays."""
        self.placement.open(worker)
        self._admissions.note_freed()

    def is_drained(self, worker: str) -> bool:
        """True if a memory worker holds no KV."""
        return self._residents.is_empty(worker)

    def _deal_again(self) -> None:
        """Deal all requests out again, while no step is in flight."""
        self._deals_again = False
        for own in self._lanes:
            self._assign_replica(own)
        self._dealer.deal_again(self._pipeline, self._holding.may_run)
        self.scratch.on_dealt(lambda group: self._lanes[group.lane].scratch)
        self.moves.restart()
        self.placement.stalled.clear()

    # -- the next step -------------------------------------------------------------------------------------------

    def set_time(self, now: float) -> None:
        """Note when new requests have arrived, and move waiting requests that have become late to the end.

        ``now`` is in seconds of any monotonic clock.
        """
        for group in self._arrived:
            group.arrived_s = now
        self._arrived.clear()
        self._now = now
        self._admissions.expire(now, self._times.token_s)
        self._dealer.set_time(now)

    def plannable(self, depth: int) -> Iterator[int]:
        """Yield the lanes, in order, that may have something to plan and have fewer than ``depth`` steps in flight.

        Evaluated lazily, since a plan of one lane may add work for another lane.
        """
        if not self._deals_again:
            self._dealer.hand_over()
        lane = -1
        while after := [one for one in self._ready.candidates(self._deals_again, self._admissions.due) if one > lane]:
            lane = min(after)
            if self.in_flight(lane) < depth:
                yield lane
            if self.in_flight(lane) >= depth:
                self._ready.note_ahead(lane)

    def plan(self, lane: int) -> StepPlan | None:
        """Return the next step of ``lane``, behind those it has in flight; None if there is nothing to do now."""
        if self._deals_again:
            if any(own.in_flight for own in self._lanes):
                return None
            self._deal_again()
        own = self._lanes[lane]
        switches = self.moves.switches()
        self._recall.settle()
        if self.balancing is not None:
            self.balancing.begin_moves()
        if not switches and self._only_decodes(own) and self.placement.grow(own.decoding.workers):
            return self._decode_again(own)
        forks = own.forks(self._dealer.leaves)
        self._dealer.keep_prefixes(own)
        released = self._release(own)
        self._end_fetches()
        beams = self.beams.join_step(own)
        self._preempt_each(beams.preempted)
        self._find_room(own)
        admitted = beams.admitted + self._dealer.admit(own)
        fits = self.placement.grow(own.decoding.workers)
        disks = self.disks.changes()
        cached_forks, evicted = self.prefixes.changes()
        forks += [*beams.forks, *cached_forks, *disks.forks]
        released += [*beams.released, *evicted, *self.moves.released()]
        moves = self.moves.begun()
        rows, chunks, prompted = (
            own.rows(self.limits.max_num_batched_tokens) if fits else (DecodeRows([], [], []), [], {})
        )
        borrowed = self._dealer.borrow(own, rows, chunks, self.rotates) if fits else None
        own.allowance = self._dealer.rows_left(lane)
        grown, own.grown = self.placement.expand(own.grown), []
        changes = forks, released, admitted, moves, grown, switches, disks.spills, disks.fetches
        if not (any(changes) or chunks or rows.sequences):
            # Otherwise the lane stays ready: any plan may free slots, and its own next one those of ended requests.
            if fits and not own.has_ended:
                self._ready.note_nothing(lane)
            return None
        histories, own.histories = own.histories, {}
        plan = StepPlan(
            next(self._steps),
            lane,
            own.turn,
            forks,
            released,
            admitted,
            chunks,
            rows,
            moves,
            self.rotates,
            histories,
            grown,
            switches,
            disks.spills,
            disks.fetches,
        )
        return self._begin_step(own, plan, prompted, borrowed)

    def _begin_step(
        self, lane: Lane, plan: StepPlan, prompted: dict[int, Owner], borrowed: Group | None = None
    ) -> StepPlan:
        if plan.runs:
            lane.turn += self._attentions
            lane.decoding.count_steps(1)
        lane.in_flight.append(Planned(plan, lane.decoding.members, prompted, borrowed))
        return plan

    def _only_decodes(self, lane: Lane) -> bool:
        """Return whether the lane's next plan has nothing but a further token of each sequence, as nearly all have.

        Then all else that ``plan`` does would find nothing to do, except for evicting idle tokens.
        """
        placement, admissions = self.placement, self._admissions
        if placement.closed or placement.stalled or self.moves.pending or self.disks.exist:
            return False
        if admissions.due or admissions.may_share or self._holding.active:
            return False
        if not lane.only_decodes or self._dealer.may_borrow(lane):
            return False
        return lane.decoding.unchanged_steps > 0 and not placement.shortages(lane.decoding.workers)

    def _decode_again(self, lane: Lane) -> StepPlan:
        """Return the next step of a lane that ``_only_decodes``; the slots of its tokens have been reserved."""
        forks, evicted = self.prefixes.changes()
        lane.allowance = self._dealer.rows_left(lane.number)
        rows = lane.decoding_rows()
        plan = StepPlan(next(self._steps), lane.number, lane.turn, forks, evicted, [], [], rows, rotates=self.rotates)
        return self._begin_step(lane, plan, {})

    def _end_fetches(self) -> None:
        """Take over what disks have fetched, before requests are dealt to the slots that it frees."""
        if self.disks.has_arrivals:
            for group in self.disks.end_fetches():
                self._holding.enqueue_unless_held(group)
            self._admissions.note_freed()

    def _find_room(self, lane: Lane) -> None:
        """Find slots for the next tokens of a lane's sequences, then deal waiting requests.

        Preempts requests if no worker has slots, if their KV cannot move off a worker that leaves, or if their client
        has more than its share of the seats.
        """
        self._growth.end_segments(lane)
        self._preempt_each(itertools.chain(self._growth.drain(lane), self._growth.find_slots(lane)))
        if self._growth.note_stall(lane):
            self._admissions.note_freed()
        self._share_seats()
        self._dealer.deal()
        self._preempt_each(self._holding.blocking(self._all_running))

    def _share_seats(self) -> None:
        """Preempt a request of a client with most sequences if a client with fewer than its share waits."""
        if not self._admissions.may_share:
            return
        holders = self._admissions.share(self._dealer.seats)
        if (
            holders
            and (group := request_to_preempt(holders, filter(self._holding.may_run, self._all_running))) is not None
        ):
            successor = self._drop_kv(group)
            successor.gave_way = True
            self._holding.enqueue_unless_held(successor)

    # -- completed steps and moves -------------------------------------------------------------------------------

    def complete(self, lane: int, step: int | None = None) -> Mapping[int, Owner]:
        """Complete step ``step`` of ``lane`` (None: the oldest in flight). Steps with sequences complete in order.

        Returns, by sequence, the live completions that drew a token. Read-only; the same object as for the last step if
        no sequence has joined or left the lane since.

        The caller appends each token to ``generated`` and calls ``end_completion`` for completions that have ended.
        """
        own = self._lanes[lane]
        planned = own.pop_step(step)
        self._ready.note_completed(lane)
        if not planned.plan.runs:
            return {}
        own.completed += 1
        self._admissions.steps_completed(1)
        self.moves.steps_completed(1)
        if own.finished:
            self._retire(own)
        if (lender := planned.borrowed) is not None:
            lender.lent -= 1
            self._retire(self._lanes[lender.lane])
        return planned.drawn(own.decoding.members)

    def decoding(self, lane: int) -> Mapping[int, Owner]:
        """Return the owners of a lane's decoding sequences; the same object until one joins or leaves."""
        return self._lanes[lane].decoding.members

    def unchanged_steps(self, lane: int) -> int:
        """Return how many further steps of a lane would repeat its last one, if no request arrives and no other lane's
        plan changes its requests. Lanes that share a memory worker divide its free slots."""
        placement, own = self.placement, self._lanes[lane]
        if self.waiting or self._deals_again or self._recall or self.moves.in_progress:
            return 0
        if self._dealer.may_lend(self.rotates):
            return 0
        if placement.stalled or placement.closed or any(placement.idle.values()):
            return 0
        if not (steps := own.unchanged_steps):
            return 0
        return max(0, min(steps, placement.steps_of_room(own.decoding.workers) // len(self._lanes)))

    def repeat(self, lane: int, steps: int) -> None:
        """Record that ``steps`` of ``unchanged_steps`` were planned and have completed."""
        own = self._lanes[lane]
        if not self.placement.grow({worker: steps * rows for worker, rows in own.decoding.workers.items()}):
            raise AssertionError(f"{steps} steps of lane {lane} do not fit the memory workers")
        own.repeat(steps, self._attentions)
        self._admissions.steps_completed(steps)
        self.moves.steps_completed(steps)

    @property
    def prompts_s(self) -> float:
        """Seconds that one lane would take for all prompt tokens of known requests that have not been computed."""
        waiting = sum(group.to_run for group in self._requests.values() if group.lane < 0)
        begun = sum(one.left for group in self._all_running for one in group.completions if not one.finished)
        return self._times.token_s * (waiting + begun)

    def note_prompts(self, plan: StepPlan, busy_s: float, waited_s: float) -> None:
        """Record a completed step with prompt tokens: ``busy_s`` in slices, ``waited_s`` for attention."""
        self._short.learn_step(plan, busy_s + waited_s)
        if self._lanes[plan.lane].role != "decode":  # few prompts run there, beside sequences
            self._prefix_times.note_step(plan, busy_s, waited_s)
            self._times.add_step(plan, busy_s + waited_s)

    def note_decoding(self, plan: StepPlan, seconds: float) -> None:
        """Record a completed step without prompt tokens that took ``seconds``."""
        self._short.learn_step(plan, seconds)
        if self.compares_lanes:
            self._times.add_step(plan, seconds)

    @property
    def compares_lanes(self) -> bool:
        """True if requests choose between replicas by the times of steps: cached prefixes are in local memory."""
        return self.prefixes.enabled and any(map(self.placement.others, range(len(self._lanes))))

    def _uses_prefix(self, group: Group, hit: int) -> bool:
        """Return whether a request uses a cached prefix of ``hit`` tokens: always if its prompt would not fit scratch
        memory, since its chunks then ask memory workers in any case."""
        return group.completions[0].goal > self.scratch.most or self._prefix_times.pays(group, hit)

    def on_move_done(self, number: int) -> None:
        """Record that a part of move ``number`` has arrived. Does nothing if its sequence has ended."""
        if self.moves.arrive(number):
            self._ready.wake()

    def transferred(self, worker: str, number: int, complete: bool, error: str) -> None:
        """Record the end of a copy or fetch of a worker's disk. Arguments are those of ``Disks.on_stored``."""
        self.disks.on_stored(worker, number, complete, error)
        self._ready.wake()

    def _end(self, group: Group, completion: Completion) -> None:
        """End a completion, which is released once no step in flight runs it."""
        if completion.finished:
            return
        completion.finished = True
        completion.drawn = len(completion.generated)
        if group.lane >= 0:
            own = self._lanes[group.lane]
            own.remove_completion(group, completion)
            self._dealer.seats.note_ended()
            self.placement.remove_growing(completion.worker, 1)
            for worker, tokens in group.slots(completion, completion.own, alone=not group.alive).items():
                self.placement.will_release(worker, tokens)
            if not group.alive:
                self.prefixes.on_request_end(group)
            self._retire(own)

    def _retire(self, lane: Lane) -> None:
        """Let the next plan release finished completions that no step in flight runs."""
        for group in lane.retire():
            self._ready.note_change(group.lane)
            self._dealer.seats.free_ended(group.lane, group.request.client)
            self._admissions.note_freed()

    def _release(self, lane: Lane) -> list[int]:
        """Release finished completions; their slots are free once this plan is applied. Returns their sequences."""
        ending = lane.take_ended()
        for group, completion in ending:
            self.prefixes.keep_completion(group, completion)
            self._free_completion(group, completion)
        return [completion.sequence for _, completion in ending]

    def _free_completion(self, group: Group, completion: Completion) -> None:
        """Free the slots of a completion, and those of the shared prompt with the last completion of a request."""
        group.holders -= 1
        for worker, tokens in group.slots(completion, completion.own, alone=not group.holders).items():
            self.placement.free_slots(worker, tokens)
        completion.released = True
        self.moves.on_completion_released(group, completion)
        self._admissions.note_freed()
        if not group.holders:
            self.scratch.end(group)
            self.prefixes.release_request(group)
            self._residents.forget_request(group)
