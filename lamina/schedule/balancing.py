"""Begins the moves of KV that a balancing policy proposes (``lamina.kv.balancing``), from times that workers report.
Pure."""

import dataclasses
from collections.abc import Mapping, Sequence

from lamina.core.requests import Group
from lamina.core.segments import by_worker
from lamina.kv.balancing import ByBandwidth, HeldTokens, Load, Policy, Proposal, View
from lamina.kv.placement import AHEAD, Placement
from lamina.schedule.lane_choice import StepTable
from lamina.schedule.moves import Moves

LOOK_STEPS = 32  # completed steps between two calls of the policy
# Completed steps before tokens of a request may move back to a worker that they have left. Returns of lent slots
# (``Proposal.returns``) do not wait.
BACK_STEPS = 256
LEARN = 0.3  # weight of the latest measurement


class Balancing:
    """Begins the moves that a balancing policy proposes."""

    def __init__(self, policy: Policy, moves: Moves, placement: Placement) -> None:
        self._policy, self._moves, self._placement, self._lanes = policy, moves, placement, moves.lanes
        self._steps = 0
        self._looked = 0
        self._proposals: list[tuple[Proposal, Group]] = []
        self._left_at: dict[tuple[str, str], int] = {}  # by request and source: steps completed at the latest move
        self._reads: dict[str, float] = {}  # by worker: tokens that one step of each lane reads
        self._token_s: dict[str, float] = {}  # by worker: measured seconds to read a token
        self._busy: dict[str, tuple[int, float]] = {}  # by worker: steps and seconds at the previous report
        self._dense = StepTable()  # seconds of a step in slices
        self._step_s: dict[str, float] = {}  # by worker with local memory: seconds of its steps, attention included
        self._own_s: dict[str, float] = {}  # by worker with local memory: part of it that is attention, 0 if unknown

    def note_step(self, lane: int, rows: int, busy_s: float) -> None:
        """Record a completed step of a lane, which spent ``busy_s`` in slices and in attention to local memory."""
        self._steps += 1
        if busy_s <= 0:
            return
        own_s = 0.0
        for worker in self._placement.local - self._placement.others(lane):
            known = self._step_s.get(worker, busy_s)
            self._step_s[worker] = known + LEARN * (busy_s - known)
            own_s = self._own_s.get(worker, 0.0)
        self._dense.note(rows, max(busy_s - own_s, 0.0))

    def note_attention(self, worker: str, seconds: float) -> None:
        """Record that a worker has spent ``seconds`` on attention to its KV so far; 0: it does not measure them."""
        steps, before = self._busy.get(worker, (self._steps, seconds))
        active = sum(bool(lane.running) for lane in self._lanes)
        for place in self._placement.places_on(worker):
            read = self._reads.get(place, 0.0) * (self._steps - steps) / max(active, 1)
            if steps < self._steps and read > 0 and seconds > before:
                known = self._token_s.get(place, (seconds - before) / read)
                self._token_s[place] = known + LEARN * ((seconds - before) / read - known)
        self._busy[worker] = self._steps, seconds

    @property
    def due(self) -> bool:
        """True if ``begin_moves`` will call the policy again."""
        return self._steps >= self._looked + LOOK_STEPS

    def begin_moves(self) -> None:
        if self.due:
            self._looked = self._steps
            self._look()
        while self._proposals:
            proposal, group = self._proposals[0]
            if not self._moves.may_begin(proposal.source) or self._moves.touches(group):
                return
            moved = next(
                (
                    (target, tokens)
                    for target in proposal.targets
                    if (tokens := self._moves.try_move(group, proposal.source, target, proposal.tokens))
                ),
                None,
            )
            self._proposals.pop(0)
            if moved is not None:
                target, tokens = moved
                self._left_at[proposal.request, proposal.source] = self._steps
                if proposal.tokens > tokens:
                    rest = dataclasses.replace(proposal, targets=(target,), tokens=proposal.tokens - tokens)
                    self._proposals.insert(0, (rest, group))

    def _look(self) -> None:
        self._left_at = {key: step for key, step in self._left_at.items() if self._steps < step + BACK_STEPS}
        groups = {group.request.request_id: group for lane in self._lanes for group in lane.running if group.alive}
        view = self.view(list(groups.values()))
        self._reads = {worker: float(load.reads) for worker, load in view.loads.items()}
        self._note_own_attention(view)
        known = self._token_s.keys() >= view.loads.keys() and len(view.loads) == len(self._placement.capacities)
        self._placement.set_speeds({worker: self._token_s[worker] for worker in view.loads} if known else {})
        self._proposals = []
        for proposal in self._policy.propose(view):
            left = {one for request, one in self._left_at if request == proposal.request and not proposal.returns}
            if targets := tuple(one for one in proposal.targets if one not in left):
                kept = dataclasses.replace(proposal, targets=targets)
                self._proposals.append((kept, groups[proposal.request]))

    def view(self, groups: Sequence[Group]) -> View:
        """Return the state of the memory pool, with ``groups``, for the policy."""
        placement = self._placement
        # Local memory is read by steps that also run slices, and this policy compares attention alone.
        left_out = placement.local if isinstance(self._policy, ByBandwidth) else placement.fixed
        reads = dict.fromkeys(placement.capacities, 0)
        held: list[HeldTokens] = []
        for group in groups:
            lane = self._lanes[group.lane]
            if group in lane.dealt:
                continue
            for completion in group.alive:
                exist = lane.exist(group, completion)
                for worker, tokens in by_worker(completion.segments, 0, exist).items():
                    reads[worker] += tokens
            first = group.alive[0]
            for worker, tokens in by_worker(first.segments, 0, lane.exist(group, first)).items():
                held.append(HeldTokens(group.request.request_id, worker, first.worker, tokens, len(group.alive)))
        moving = self._arriving()
        loads = {
            worker: Load(
                capacity,
                max(0, placement.left(worker) - AHEAD * (placement.sequences[worker] + 1)),
                placement.sequences[worker],
                max(0, reads[worker] + moving.get(worker, 0)),
                self._token_s.get(worker) or _mean(self._token_s),
                worker not in placement.closed,
                self._step_s.get(worker, 0.0) if worker in self._token_s else 0.0,
                placement.hosts.get(next(iter(placement.workers_at(worker)), ""), ""),
            )
            for worker, capacity in placement.capacities.items()
            if worker not in left_out
        }
        return View(loads, [one for one in held if one.worker in loads], self._dense.at)

    def _lanes_on(self, worker: str) -> int:
        """Return the number of lanes with requests that run on a worker with local memory, at least 1."""
        others = self._placement.others
        return max(1, sum(bool(lane.running) and worker not in others(lane.number) for lane in self._lanes))

    def _note_own_attention(self, view: View) -> None:
        """Compute how long one step of each worker with local memory attends to what it holds of its own requests."""
        lent = dict.fromkeys(view.loads, 0)
        for held in view.held:
            if held.worker != held.home:
                lent[held.worker] += held.tokens * held.readers
        self._own_s = {
            worker: (view.loads[worker].reads - lent[worker]) * self._token_s[worker] / self._lanes_on(worker)
            for worker in self._step_s
            if worker in self._token_s and worker in view.loads
        }

    def _arriving(self) -> Mapping[str, int]:
        """Return, by worker, how many tokens it gains (or loses, < 0) when all moves in progress have ended."""
        moving: dict[str, int] = {}
        for move in self._moves.in_progress:
            if move.passed is None:
                moving[move.target] = moving.get(move.target, 0) + move.tokens
                moving[move.source] = moving.get(move.source, 0) - move.tokens
        return moving


def _mean(seconds: Mapping[str, float]) -> float:
    return sum(seconds.values()) / len(seconds) if seconds else 1.0
