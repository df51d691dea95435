"""Moves ranges of KV between memory workers while sequences decode, as ``lamina.schedule.balancing`` proposes. Pure.

A range of tokens on one worker belongs to a node of the prefix cache, which several requests may share, to a request's
prompt, which its completions share, or to one completion.

1. ``try_move`` reserves slots on the target, or rejects the move. The next plan creates a *carrier*, a sequence that is
   never run. At the source, the carrier shares the slots of the range; at the target, it gets new slots, which the
   target fills (``steps.KvMove``).
2. When all KV has arrived, the next plan of any lane lets all sequences that share the range use the target
   (``steps.Switch``). Steps planned earlier still read the range at the source, which the carrier keeps.
3. Once these steps have completed, a plan releases the carrier, and so the slots at the source.

Until the switch, nothing depends on the move: if a worker is lost, or the owner ends, the move is cancelled. The
``try_move`` of rManagers and the limit on tokens moved per step are Infinite-LLM's (sections 6.2, 7.4).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lamina.core.requests import Completion, Group
from lamina.core.segments import moved, overlaps
from lamina.core.steps import KvMove, Switch
from lamina.core.types import Segment
from lamina.kv.placement import AHEAD, Placement
from lamina.kv.prefix_cache import PrefixCache
from lamina.kv.prefix_tree import Node, PrefixTree
from lamina.schedule.admission import Admissions
from lamina.schedule.lane import Lane, Residents

TOKENS_PER_STEP = 16  # average tokens moved per step, which does not slow decoding (Infinite-LLM, Figure 12)
MOST_TOKENS = 256  # tokens of one move: smaller moves have more overhead, larger moves hold two copies for longer


@dataclass(frozen=True, slots=True)
class Range:
    """Stored tokens [start, stop) of a request on one worker. They belong to ``node`` of the prefix cache, to
    ``completion``, or else to the prompt of all completions."""

    start: int
    stop: int
    node: Node | None = None
    completion: Completion | None = None


@dataclass(eq=False, slots=True)
class Move:
    """A move in progress of a range of ``group``.

    Attributes:
        number: number of the move.
        carrier: number of the carrier's sequence.
        completion: the completion that owns the range, if one does.
        tree: the tree of the prefix cache that owns the range, if one does.
        node: the node of ``tree`` that ends the range, pinned for the move.
        awaited: workers of the target whose KV has not arrived.
        passed: by lane: steps planned before the switch; None before the switch.
    """

    number: int
    carrier: int
    group: Group
    source: str
    target: str
    start: int
    stop: int
    completion: Completion | None = None
    tree: PrefixTree | None = None
    node: Node | None = None
    awaited: int = 1
    passed: list[int] | None = None

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass
class Moved:
    """Counters of moves."""

    moves: int = 0  # moves that have switched
    tokens: int = 0  # tokens of these moves
    refused: int = 0  # moves rejected for lack of slots at the target
    cancelled: int = 0
    by_worker: dict[str, int] = field(default_factory=dict)  # by target: tokens with all heads whose KV it could hold


class Moves:
    """The moves in progress."""

    def __init__(
        self,
        placement: Placement,
        prefixes: PrefixCache,
        residents: Residents,
        lanes: Sequence[Lane],
        sequences: Iterator[int],
        admissions: Admissions,
    ) -> None:
        """``lanes`` is extended when lanes are added. ``sequences`` yields numbers of carriers. ``admissions`` is
        notified of freed slots."""
        self.counts = Moved()
        self._placement = placement
        self._prefixes = prefixes
        self._admissions = admissions
        self._residents = residents
        self.lanes = lanes
        self._sequences, self._numbers = sequences, itertools.count(1)
        self._credit = float(TOKENS_PER_STEP)
        self._moves: dict[int, Move] = {}  # by number, until the switch
        self._switched: list[Move] = []  # switched, but the carrier still has slots at the source
        self._begun: list[Move] = []
        self._released: list[int] = []

    @property
    def numbers(self) -> list[int]:
        """Numbers of the moves whose KV has not arrived."""
        return [move.number for move in self._moves.values() if move.awaited]

    @property
    def in_progress(self) -> list[Move]:
        """All moves that hold slots on two workers."""
        return [*self._moves.values(), *self._switched]

    @property
    def pending(self) -> bool:
        """Whether a plan may have to begin, switch or release a move."""
        return bool(self._moves or self._switched or self._released)

    def touches(self, group: Group) -> bool:
        """True if some tokens of a request are moving."""
        if not self._moves:
            return False
        own = any(move.group is group for move in self._moves.values())
        return own or self._prefixes.is_moving(self._prefixes.path(group))

    # -- begin --------------------------------------------------------------------------------------------------

    def steps_completed(self, steps: int) -> None:
        """Add the tokens of completed steps to the move budget, which never exceeds one move."""
        self._credit = min(self._credit + steps * TOKENS_PER_STEP, MOST_TOKENS)

    def may_begin(self, source: str) -> bool:
        """True if the budget allows another move. It does not apply while nothing runs, or if the source is closed."""
        idle = not any(lane.in_flight for lane in self.lanes)
        return self._credit > 0 or idle or source in self._placement.closed

    def try_move(self, group: Group, source: str, target: str, tokens: int) -> int:
        """Start to move up to ``tokens`` of a request's tokens on ``source``, from the first movable one on.

        Returns how many move. 0: the budget is used up, no token can move now, or the target lacks slots; try again
        later. Moves off a closed worker do not use the budget.
        """
        placement = self._placement
        takes = target in placement.capacities and target not in placement.closed
        if not placement.moves or source == target or not takes:
            return 0
        if not placement.fixed.isdisjoint((source, target)) or not self.may_begin(source):
            return 0
        part = self.movable(group, source)
        if part is None or group.searches:
            return 0
        room = self._placement.left(target) - AHEAD * (self._placement.sequences[target] + 1)
        most = tokens if source in placement.closed else min(tokens, MOST_TOKENS)
        count = min(part.stop - part.start, most)
        if count > room:
            self.counts.refused += 1
            return 0
        self._begin(group, source, target, part, part.start + count)
        return count

    def movable(self, group: Group, source: str) -> Range | None:
        """Return the first range of a request's tokens on a worker that can move now; None if no range can."""
        lane = self.lanes[group.lane]
        busy = group.searches or self.touches(group)
        if group.lane < 0 or busy or not group.alive or not lane.is_settled(group):
            return None
        for node in self._prefixes.path(group):
            if node.worker == source and not node.fixed:
                return Range(node.start, node.stop, node=node)
        if group.unshared:
            first = next(one for one in group.completions if not one.released)
            begin = group.base - group.unshared
            if (found := _on(source, first.segments, begin, group.prompt_length)) is not None:
                return Range(*found)
        for completion in group.alive:
            exist = lane.exist(group, completion)
            if (found := _on(source, completion.segments, group.base, exist)) is not None:
                return Range(*found, completion=completion)
        return None

    def _begin(self, group: Group, source: str, target: str, part: Range, stop: int) -> None:
        numbers = next(self._numbers), next(self._sequences)
        move = Move(*numbers, group, source, target, part.start, stop, part.completion)
        if part.node is not None:
            move.tree, move.node = self._prefixes.begin_move(group, part.node, stop)
        self._placement.reserve_on(target, move.tokens)
        self._moves[move.number] = move
        self._begun.append(move)
        if source not in self._placement.closed:
            self._credit -= move.tokens

    def begun(self) -> list[KvMove]:
        """Return the moves that the next plan begins, each once. Call this last: the plan must not release the
        sequence whose slots a carrier shares."""
        begun, self._begun = self._begun, []
        return [part for move in begun for part in self._parts(move)]

    def _parts(self, move: Move) -> list[KvMove]:
        """Return a part of a move for each pair of workers of its source and its target with heads in common."""
        here, there = (
            self._placement.expand([Segment(move.carrier, place, move.group.heads, (move.start, move.stop))])
            for place in (move.source, move.target)
        )
        pairs = [(one, other) for one in here for other in there if overlaps(one, other)]
        move.awaited, parent = len(pairs), _parent(move)
        return [
            KvMove(
                move.number,
                move.carrier,
                one.worker,
                other.worker,
                move.start,
                move.stop,
                parent,
                (max(one.heads[0], other.heads[0]), min(one.heads[1], other.heads[1])),
            )
            for one, other in pairs
        ]

    # -- switch to the target -----------------------------------------------------------------------------------

    def arrive(self, number: int) -> bool:
        """Record that all tokens of a part of a move are at their target. False if it was cancelled."""
        if number in self._moves:
            self._moves[number].awaited -= 1
        return number in self._moves

    def switches(self) -> list[Switch]:
        """Return the switches for the plan that begins now. Call this before anything else is planned."""
        switches = []
        for move in [one for one in self._moves.values() if not one.awaited]:
            if self._is_pointless(move):
                self._cancel(move)
                continue
            del self._moves[move.number]
            switches.append(Switch(move.carrier, self._placement.expand(self._switch(move))))
            move.passed = [lane.decoding.steps for lane in self.lanes]
            self._switched.append(move)
            self.counts.moves += 1
            self.counts.tokens += move.tokens
            for worker, tokens in self._placement.on_workers({move.target: move.tokens}).items():
                self.counts.by_worker[worker] = self.counts.by_worker.get(worker, 0) + tokens
        return switches

    def _is_pointless(self, move: Move) -> bool:
        """True if the KV is about to be freed, or belongs to a beam search, whose beams are replaced every step."""
        if move.tree is not None and move.node is not None:
            groups, _ = self._prefixes.sharers(move.tree, move.node, move.start)
            return any(group.searches for group in groups)
        return not move.group.alive if move.completion is None else move.completion.finished

    def _switch(self, move: Move) -> list[Segment]:
        """Record that the sequences that share a range use the target. Returns their segments on it."""
        groups, cached = {move.group: move.stop}, dict[int, int | None]()
        if move.tree is not None and move.node is not None:
            groups, cached = self._prefixes.end_move(move.tree, move.node, move.target)
        told = [Segment(one, move.target, move.group.heads, (move.start, stop)) for one, stop in cached.items()]
        for group, stop in groups.items():
            known = group.completions if group.forked else group.completions[:1]
            if group in self.lanes[group.lane].dealt:
                known = []
            for completion in group.completions if move.completion is None else [move.completion]:
                if completion.released:
                    continue
                segment = Segment(completion.sequence, move.target, group.heads, (move.start, stop))
                completion.segments = moved(completion.segments, segment)
                if completion in known:
                    told.append(segment)
            self._residents.update(group)
        return told

    # -- release the source -------------------------------------------------------------------------------------

    def _is_past(self, move: Move) -> bool:
        """True if no step in flight reads the range at its source."""
        return all(lane.completed >= steps for lane, steps in zip(self.lanes, move.passed or (), strict=False))

    def restart(self) -> None:
        """Adapt to lanes that count their steps from 0 again, while no step is in flight."""
        for move in self._switched:
            move.passed = []

    def released(self) -> list[int]:
        """Return the carriers that the next plan releases."""
        for move in [one for one in self._switched if self._is_past(one)]:
            self._end(move)
        released, self._released = self._released, []
        return released

    def _end(self, move: Move) -> None:
        self._switched.remove(move)
        self._forget(move, move.source)
        self._released.append(move.carrier)

    def _forget(self, move: Move, worker: str) -> None:
        self._admissions.note_freed()
        self._placement.will_release(worker, move.tokens)
        self._placement.free_slots(worker, move.tokens)
        if move.tree is not None and move.node is not None:
            self._prefixes.unpin(move.tree, move.node)

    def on_completion_released(self, group: Group, completion: Completion) -> None:
        """End or cancel the moves of ranges that only this completion used, which the plan being made releases.

        Call ``released`` for the same plan afterwards.
        """
        for move in self.in_progress:
            last = move.completion is None and move.node is None and not group.holders
            if move.group is group and (move.completion is completion or last):
                if move.passed is None:
                    self._cancel(move)
                else:
                    self._end(move)

    def _cancel(self, move: Move) -> None:
        del self._moves[move.number]
        if move.node is not None:
            self._prefixes.cancel_move(move.node)
        self._forget(move, move.target)
        self.counts.cancelled += 1
        if move in self._begun:
            self._begun.remove(move)
        else:
            self._released.append(move.carrier)

    def cancel(self) -> None:
        """Cancel all moves at the end of an epoch, in which workers drop all carriers."""
        for move in list(self._moves.values()):
            self._cancel(move)
        for move in self._switched:
            self._forget(move, move.source)
        self._switched.clear()
        self._released.clear()


def _parent(move: Move) -> int:
    """Return a sequence that keeps the moved range at its source until the next plan."""
    if move.node is not None:
        return move.node.any_sequence
    return (move.completion or next(one for one in move.group.completions if not one.released)).sequence


def _on(worker: str, segments: Sequence[Segment], begin: int, end: int) -> tuple[int, int] | None:
    """Return the first run of tokens [begin, end) that one segment on ``worker`` holds."""
    for segment in segments:
        start, stop = segment.tokens
        low, high = max(start, begin), end if stop is None else min(stop, end)
        if segment.worker == worker and low < high:
            return low, high
    return None
