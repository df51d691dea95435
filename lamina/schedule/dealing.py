"""Assigns requests to lanes (*deals* them), and moves them between lanes; selects the lanes to plan for. Pure."""

from collections.abc import Callable, Iterable, Sequence

from lamina.core.pipeline import Pipeline
from lamina.core.requests import Group
from lamina.core.steps import Admission, DecodeRows, SequenceStep
from lamina.kv.placement import Placement
from lamina.kv.prefix_cache import PrefixCache
from lamina.schedule.admission import Admissions, Seats
from lamina.schedule.batches import SMALLEST
from lamina.schedule.lane import Lane, Residents, ran
from lamina.schedule.limits import Limits
from lamina.schedule.loongserve import UNBOUNDED, LaneLoad, lane_to_decode
from lamina.schedule.policy import LanePolicy
from lamina.schedule.short_prompts import ShortPrompts

MOST_DEALT = 32  # requests that a lane policy looks at each time, besides those that did not fit


class Readiness:
    """Selects the lanes to plan for.

    Every lane is in one of three states: changed (it may have something to plan), ahead (it has as many steps in flight
    as allowed), or resting (it had nothing to plan last time).
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._changed = set(range(lanes))
        self._ahead = set[int]()
        self._resting = set[int]()

    def extend(self, lanes: int) -> None:
        """Add resting lanes, up to ``lanes`` in all."""
        self._resting.update(range(self._lanes, lanes))
        self._lanes = max(self._lanes, lanes)

    def wake(self) -> None:
        """Mark all resting lanes as changed."""
        self._changed |= self._resting
        self._resting.clear()

    def restart(self) -> None:
        """Mark all lanes as changed, while none has a step in flight."""
        self._changed, self._ahead, self._resting = set(range(self._lanes)), set(), set()

    def note_change(self, lane: int) -> None:
        """Record that a lane may have something to plan."""
        self._changed.add(lane)
        self._resting.discard(lane)

    def note_completed(self, lane: int) -> None:
        """Record that a step of a lane has completed."""
        self._ahead.discard(lane)
        self.note_change(lane)

    def note_ahead(self, lane: int) -> None:
        """Record that a lane has as many steps in flight as allowed."""
        self._ahead.add(lane)
        self._changed.discard(lane)
        self._resting.discard(lane)

    def note_nothing(self, lane: int) -> None:
        """Record that a lane had nothing to plan."""
        self._changed.discard(lane)
        self._resting.add(lane)

    def candidates(self, moving: bool, dealing: bool) -> set[int]:
        """Return the lanes to plan for.

        Args:
            moving: True if all requests are about to be dealt out again.
            dealing: True if waiting requests may be admitted.
        """
        if moving:
            return set(range(self._lanes)) - self._ahead
        if dealing and self._resting:  # the first lane planned deals to all of them
            return self._changed | {min(self._resting)}
        return self._changed


class Dealer:
    """Assigns each request its lane.

    Attributes:
        active: Number of lanes in use.
        handovers: Requests that went from the lane of their prompt to one that decodes.
        seats: Numbers of sequences by lane and by client.
    """

    def __init__(
        self,
        limits: Limits,
        placement: Placement,
        lanes: Sequence[Lane],
        prefixes: PrefixCache,
        residents: Residents,
        admissions: Admissions,
        ready: Readiness,
        pipeline: Pipeline,
        policy: LanePolicy | None,
        short: ShortPrompts,
    ) -> None:
        """Use all lanes at first. ``lanes`` is extended when lanes are added."""
        self.active = len(lanes)
        self.handovers = 0
        self.seats = Seats(self.active, pipeline.role)
        self._pipeline = pipeline
        self._lenders: dict[int, Lane] = {}  # by number: lanes with prompts left at their latest plan
        self._rows = limits.max_num_batched_tokens
        self._placement = placement
        self._lanes = lanes
        self._prefixes = prefixes
        self._residents = residents
        self._admissions = admissions
        self._ready = ready
        self._policy, self._short = policy, short
        self._now = 0.0  # seconds of the clock that ``Turn.plan`` uses

    def set_time(self, now: float) -> None:
        """Set the time for the policy. Arguments are those of ``Scheduler.set_time``."""
        self._now = now

    def use_lanes(self, active: int) -> None:
        """Use the first ``active`` lanes. The caller must call ``deal_again`` before the next plan."""
        self.active = active

    def rows_left(self, lane: int) -> int:
        """Return the rows of a step of a lane that are left for prompts when all its sequences decode."""
        return self._rows - (self.seats.taken[lane] if lane < self.active else 0)

    def deal(self) -> None:
        """Deal waiting requests as the policy says, or else to the emptiest lane, as many as its next step can run.

        If some lanes only run prompts, prompts that would wait there may run in a lane that decodes.

        Each lane admits its requests with its next plan.
        """
        homes, seats = self._homes(), self.seats
        load = None
        if homes is None and self._pipeline.prefill and self._admissions.due:
            load = self._short.load(seats.lanes(False), seats.lanes(True), seats.taken, self._pipeline.replicas)
        for group in self._admissions.deal(seats, lambda lane: self._lanes[lane].allowance > 0, homes, load):
            own = self._lanes[group.lane]
            own.running[group] = own.dealt[group] = None
            own.allowance -= group.to_run
            self.seats.add_sequences(group.lane, group.seats, group.request.client)
            self._ready.note_change(group.lane)

    def _homes(self) -> dict[Group, int | None] | None:
        """Return the requests to admit now, and their lanes; None if no policy chooses them."""
        if self._policy is None or not self._admissions.due or self._admissions.is_restricted:
            return None
        waiting = self._admissions.upcoming(MOST_DEALT)
        fit = [one for one in waiting if not one.searches and self._placement.fitting(one.to_run, len(one.completions))]
        loads = [self._load(self._lanes[lane]) for lane in self.seats.lanes(decode=False) if self.rows_left(lane) > 0]
        spreads = self._policy.deal([one.to_run for one in fit], loads, self._now) if fit and loads else ()
        dealt = dict(zip(fit, spreads, strict=False))  # the other fitting requests wait on
        homes = dict[Group, int | None]()
        for group in waiting:  # in this order, since a request that does not fit may hold up those behind it
            if (spread := dealt.get(group)) is not None:
                homes[group], group.allocated = spread.home, spread.lanes
            elif group not in fit:
                homes[group] = None  # a replica may have room for it beside a cached prefix
        return homes

    def _load(self, lane: Lane) -> LaneLoad:
        """Return what a lane runs."""
        outputs, prompts = list[int](), list[int]()
        for group in lane.running:
            if not group.alive:
                continue
            if not group.forked and (left := group.completions[0].left):
                prompts.append(left)
            elif group.forked or not self.leaves(group):
                outputs += [len(one.generated) for one in group.alive]
        others = self._placement.others(lane.number)
        rooms = (self._placement.room(worker) for worker in self._placement.capacities if worker not in others)
        return LaneLoad(lane.number, outputs, prompts, max(0, sum(rooms)) if others else UNBOUNDED)

    def undo_deal(self, group: Group) -> None:
        """Undo ``deal`` for a request that no plan has admitted yet."""
        own = self._lanes[group.lane]
        del own.dealt[group], own.running[group]
        own.allowance += group.to_run
        self.seats.add_sequences(group.lane, -group.seats, group.request.client)
        for worker, tokens in own.held(group).items():
            self._placement.will_release(worker, tokens)
            self._placement.free_slots(worker, tokens)
        for completion in group.completions:
            self._placement.remove_growing(completion.worker, 1)
        self._prefixes.on_request_end(group)
        self._prefixes.release_request(group)
        group.share(0)
        self._residents.forget_request(group)
        self._admissions.note_freed()
        group.lane = -1

    def admit(self, lane: Lane) -> list[Admission]:
        """Return the admissions of the requests dealt to a lane, for the plan that is being made."""
        admitted = [group.admission for group in lane.dealt]
        for group in lane.dealt:
            self._prefixes.admit(group)
            lane.prompts.add(group, group.completions[0])
        lane.dealt.clear()
        return admitted

    def deal_again(self, pipeline: Pipeline, may_run: Callable[[Group], bool]) -> None:
        """Deal all requests out again to the lanes of ``pipeline``, those with most sequences first, while no step is
        in flight.

        Requests that ``may_run`` excludes keep their KV, but do not run.
        """
        lanes = self._lanes
        self._pipeline = pipeline
        self.seats = Seats(self.active, pipeline.role)
        self._lenders.clear()
        groups = sorted((group for own in lanes for group in own.running), key=lambda group: -len(group.completions))
        dealt = {group for own in lanes for group in own.dealt}
        ending = [owner for own in lanes for owner in own.ending]
        prompts_run = {group for own in lanes for group in own.prompts_run}
        for own in lanes:
            own.clear()
        for group in groups:
            group.lane, group.until = self._lane_again(group), 0
            self.seats.add_sequences(group.lane, group.seats, group.request.client)
            own = lanes[group.lane]
            own.take_over(group, group in dealt, not may_run(group))
            if group in prompts_run:
                own.prompts_run.append(group)
        for owner in ending:  # released by the lane of its request, which may still fork from it
            lanes[owner[0].lane].ending.append(owner)
        self._ready.restart()
        self._admissions.note_freed()
        for own in lanes:
            own.allowance = self.rows_left(own.number)

    def _lane_again(self, group: Group) -> int:
        """Return the emptiest lane whose replica needs no KV of a request that is in other replicas' local memory.

        Return the emptiest of all lanes if every lane needs such KV: its replica then attends to it by the others.
        """
        decodes = bool(group.searches or group.forked)
        emptiest = self.seats.emptiest_to_decode if decodes else self.seats.emptiest
        return self._near(group, decodes, emptiest)

    def _near(self, group: Group, decode: bool, emptiest: int) -> int:
        others = self._placement.others
        if not others(emptiest):
            return emptiest
        near = [lane for lane in self.seats.lanes(decode) if others(lane).isdisjoint(group.workers)]
        return min(near, key=self.seats.taken.__getitem__, default=emptiest)

    def _lane_to_decode(self, group: Group) -> int:
        """Return the lane that should decode a request: one with its KV in local memory. If that lane has no room, and
        replicas attend for each other, return the emptiest. A policy may prefer the fullest lane."""
        if self._policy is not None and self._lanes[group.lane].role == "both":
            return self._fullest_to_decode(group, self._policy.memory_bound_rows)
        emptiest = self.seats.emptiest_to_decode
        near = self._near(group, True, emptiest)
        return emptiest if self._placement.lends and group.seats > self.rows_left(near) else near

    def _fullest_to_decode(self, group: Group, most: int) -> int:
        """Return the lane with most sequences, and at most ``most`` with the request's, that can decode a request."""
        own = self._lanes[group.lane]
        if group.searches or group.forked or group in own.received or not group.alive:
            return own.number
        able = [
            (lane, len(self._lanes[lane].decoding.members))
            for lane in self.seats.lanes(decode=True)
            if lane == own.number
            or (group.seats <= self.rows_left(lane) and self._placement.others(lane).isdisjoint(group.workers))
        ]
        return lane_to_decode(own.number, able, group.seats, most)

    def leaves(self, group: Group) -> bool:
        """Return whether a request whose prompt is in planned steps will decode in another lane."""
        role = self._lanes[group.lane].role
        if role == "prefill" or self._policy is None:
            return role == "prefill"
        return role == "both" and self._lane_to_decode(group) != group.lane

    def keep_prefixes(self, lane: Lane) -> None:
        """Add the prompts that the completed steps of a lane have computed to the prefix cache."""
        self._prefixes.keep_computed(lane.number, lane.prompts_computed(), lambda one: ran(self._lanes, one))

    def hand_over(self) -> None:
        """Move requests whose prompts have been computed from prefill lanes to lanes that decode, or from any lane as
        the policy says."""
        if self._policy is None and not self._pipeline.prefill:
            return
        for own in self._lanes[: self.active]:
            if not own.prompted or (own.role != "prefill" and self._policy is None):
                continue
            if own.role == "both":
                self._ready.note_change(own.number)  # requests that stay may begin to decode
            for group, first in own.pop_computed(self._fits_to_decode):
                client, lane = group.request.client, self._lane_to_decode(group)
                if lane == own.number:  # other requests have filled the other lanes meanwhile
                    own.continue_request(group, first)
                    continue
                self.seats.add_sequences(own.number, -group.seats, client)
                self.seats.add_sequences(lane, group.seats, client)
                group.lane, group.until = lane, 0
                self._lanes[lane].ending += [owner for owner in own.ending if owner[0] is group]
                own.ending = [owner for owner in own.ending if owner[0] is not group]
                if group in own.prompts_run:  # no plan has added its prompt to the prefix cache
                    own.prompts_run.remove(group)
                    self._lanes[lane].prompts_run.append(group)
                self._lanes[lane].continue_request(group, first)
                self.handovers += 1
                self._ready.note_change(lane)
                self._admissions.note_freed()

    def _fits_to_decode(self, group: Group) -> bool:
        own = self._lanes[group.lane]
        if own.role != "prefill":
            return group in own.leaving or self.leaves(group)
        return group.seats <= self.rows_left(self._lane_to_decode(group))

    def may_lend(self, rotates: bool) -> bool:
        """Return whether a lane in which sequences decode may run a chunk of another lane's prompt next, without a
        pace. ``rotates``: whether lanes rotate over the replicas."""
        return bool(self._lenders) and (rotates or self._pipeline.most_stages > 1)

    def may_borrow(self, lane: Lane) -> bool:
        """Return whether ``borrow`` has more to do for a lane without prompts of its own than to return None."""
        return bool(self._lenders) and lane.role != "decode"

    def borrow(self, lane: Lane, rows: DecodeRows, chunks: list[SequenceStep], rotates: bool) -> Group | None:
        """Let a lane run a chunk of another lane's prompt in the rows that its own sequences leave.

        A lane with requests does so while a stage of its replicas has no chunk: otherwise, the chunk would only make
        the lane's steps longer. Without a pace, a lane in which sequences decode runs no chunk of another replica's
        prompt, which does not delay them otherwise. A lane that has chunks to lend wakes lanes without requests.

        With local memory, a prompt's chunks run on the replicas that hold its KV, in one lane of each stage.

        Args:
            rows: The decoding rows of the lane's next step.
            chunks: The chunks of that step; the chunk of another lane is added.
            rotates: Whether lanes rotate over the replicas.

        Returns:
            The request whose chunk was added; None if no lane lends a chunk.
        """
        alone = self._placement.in_one_lane and not self._placement.lends
        if self.active == 1 or alone or lane.role == "decode":
            return None
        if lane.prompts:
            self._lenders[lane.number] = lane
            if chunks and lane.lendable(self._rows) is not None:
                self._ready.wake()
            return None
        if self._lenders:
            self._lenders.pop(lane.number, None)
        if not self._lenders or lane.number >= self.active:
            return None
        left = self._rows - len(rows.sequences) - sum(len(chunk.tokens) for chunk in chunks)
        is_small, needs_stage = left < min(SMALLEST, self._rows // 2), lane.running or self._placement.local
        if (lane.running and is_small) or (needs_stage and not self._has_idle_stage(lane, rotates)):
            return None
        lenders: Iterable[Lane] = self._lenders.values()
        if self._policy is not None:
            lenders = self._worth(self._policy, lane, left)
        keeps = bool(self._placement.local) and not self._placement.lends  # no other replica attends to a prompt's KV
        if keeps or (self._policy is None and rows.sequences and lane.pace is None):
            replicas = self._pipeline.replicas_of(lane.number, rotates)
            lenders = [one for one in lenders if one.number % self._pipeline.replicas in replicas]
        others = self._placement.others(lane.number)
        if (found := lane.borrow(lenders, left, chunks, others, decodes=bool(rows.sequences))) is None:
            return None
        chunk, lender = found
        chunks.append(chunk)
        return lender

    def _has_idle_stage(self, lane: Lane, rotates: bool) -> bool:
        """Return whether fewer other lanes run chunks on the replicas of a lane than these have stages."""
        pipeline = self._pipeline
        replicas = pipeline.replicas_of(lane.number, rotates)
        others = (one for one in self._lanes[: self.active] if one.number % pipeline.replicas in replicas)
        busy = sum(one is not lane and one.runs_chunks for one in others)
        return busy < len(replicas) * pipeline.shape_of(replicas[0]).stages

    def _worth(self, policy: LanePolicy, lane: Lane, most: int) -> list[Lane]:
        """Return the lanes of which ``lane`` should run a chunk of ``most`` tokens, the first choice first."""
        worth, load = dict[Lane, int](), self._load(lane)
        for lender in self._lenders.values():
            if (owner := lender.lendable(most)) is not None:
                group, completion = owner
                degree = 1 + (group.lent + 1) // 2  # a lane has up to two steps in flight
                worth[lender] = policy.worth(load, group.allocated, completion.left, degree)
        return sorted((one for one, value in worth.items() if value), key=lambda one: -worth[one])
