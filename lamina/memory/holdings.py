"""Applies step plans to a memory worker's slab: which segments it holds, and the slots of their tokens. Pure."""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lamina.core.errors import PlacementError
from lamina.core.heads import HeadShards
from lamina.core.segments import by_sequence, forked, grown, moved, overlaps
from lamina.core.steps import BLOCK, Fetch, Fork, KvMove, StepPlan, Switch
from lamina.core.types import Segment
from lamina.dataplane.wire import MessageRows, SegmentKey
from lamina.memory.device.windows import STEPS_KEPT
from lamina.memory.slab import Slab

Brought = tuple[SegmentKey, int]
"""A segment that gets tokens with a message, and how many."""


def brought(rows: MessageRows, key: Callable[[int, int, int], SegmentKey]) -> list[Brought]:
    """Return the tokens that a message brings for each segment, with tokens that must be fetched at the end.

    ``key``: Returns the key of (sequence, first token of the segment, shard).
    """
    return [*rows.kept, *((key(each.sequence, each.kv_start, each.shard), each.rows) for each in rows.pulled)]


def step_starts(
    messages: Iterable[tuple[MessageRows, list[Brought]]], end: Callable[[SegmentKey], int]
) -> dict[int, int]:
    """Return, by sequence, the first position that a step attends from or stores tokens at.

    ``end``: Returns the position after the last token of a segment, tokens of the step included.
    """
    first: dict[int, int] = {}
    for rows, brings in messages:
        attends = [(one.sequence, one.start) for one in (*rows.attends, *dict(rows.further).values())]
        for sequence, start in (*attends, *((key[0], end(key) - count) for key, count in brings)):
            first[sequence] = min(start, first.get(sequence, start))
    return first


Slots = npt.NDArray[np.int32]
_Held = tuple[int, int, SegmentKey, int]
"""Tokens [start, stop) that a key in the slab holds, and the first token of the key."""

Renew = Callable[[Slots, Slots, int], None]
"""Copies KV between slots, with the arguments of ``memory.device.base.Device.renew``."""


class Starts:
    """The positions at which a sequence's latest steps began, by lane: steps in flight attend from none before them."""

    def __init__(self, start: int) -> None:
        self._first: int | None = start
        self._lanes: dict[int, collections.deque[int]] = {}

    def add(self, lane: int, start: int) -> None:
        """Add a step.

        After three consecutive decode steps in this lane, all chunks of other lanes have completed: a lane plans its
        third step once its first has completed, and chunks complete in order.
        """
        own = self._lanes.setdefault(lane, collections.deque(maxlen=STEPS_KEPT))
        own.append(start)
        if self._first is not None and len(own) == STEPS_KEPT:
            self._first = None
        if len(self._lanes) > 1 and len(own) >= 3 and own[-1] - own[-3] == 2:
            self._lanes = {lane: own}

    @property
    def lowest(self) -> int:
        """Return the lowest position from which a step in flight may attend."""
        starts = [start for own in self._lanes.values() for start in own]
        return min(starts if self._first is None else [self._first, *starts])


class Holdings:
    """Applies the deltas of plans to a slab.

    Attributes:
        worker: Name of the memory worker.
        shards: How heads are sharded.
        segments: The worker's segments, by sequence.
        slab: Slots; each holds one shard of a token.
    """

    def __init__(self, worker: str, shards: HeadShards, capacity: int) -> None:
        self.worker, self.shards = worker, shards
        self.slab = Slab[SegmentKey](capacity)
        self.segments: dict[int, list[Segment]] = {}
        self._starts: dict[int, Starts] = {}  # by sequence

    def apply(self, plan: StepPlan, renew: Renew) -> None:
        """Apply a plan's deltas, except slots for its step's tokens. Raises CapacityError, PlacementError."""
        for switch in plan.switches:
            self._switch(switch)
        for fork in plan.forks:
            self._fork(fork, renew)
        self.release(plan.released)
        for move in plan.moves:
            if move.target == self.worker:
                self._make_slots(move)
            elif move.source == self.worker:
                self._share_range(move)
        for admission in plan.admitted:
            for sequence, segments in by_sequence(admission.segments).items():
                self._open(sequence, [segment for segment in segments if segment.worker == self.worker])
        for segment in plan.grown:
            self._grow(segment)
        for fetch in plan.fetches:
            self._begin_fetch(fetch)

    def truncate(self, kept: Mapping[int, int]) -> None:
        """Keep the first ``kept[sequence]`` tokens of each sequence, and forget all sequences not in ``kept``.

        Sequences without a segment on this worker are ignored.
        """
        # Prefixes of sequences whose steps have completed may be cached with the next plan.
        self._starts = {one: Starts(max(0, tokens - STEPS_KEPT)) for one, tokens in kept.items()}
        for sequence in {sequence for sequence, *_ in self.slab.segments}:
            if sequence not in kept or sequence not in self.segments:
                self._forget(sequence)
        for segment in itertools.chain.from_iterable(self.segments.values()):
            start, stop = segment.tokens
            last = kept[segment.sequence] if stop is None else min(kept[segment.sequence], stop)
            for key in self.keys(segment):
                self.slab.truncate(key, max(0, last - start))

    @property
    def lengths(self) -> dict[int, list[tuple[int, int, int, int]]]:
        """By sequence: of each segment, its first token, its heads [first, stop), and how many tokens have slots."""
        return {
            sequence: [
                (one.tokens[0], *one.heads, min(len(self.slab.slots(key)) for key in self.keys(one)))
                for one in segments
            ]
            for sequence, segments in self.segments.items()
        }

    def release(self, sequences: Sequence[int]) -> None:
        """Forget sequences and free their slots. Unknown sequences are ignored."""
        for sequence in sequences:
            self._forget(sequence)

    def _open(self, sequence: int, segments: list[Segment]) -> None:
        if segments:
            self.segments[sequence] = segments
            for key in itertools.chain.from_iterable(map(self.keys, segments)):
                if key not in self.slab:  # else it begins as a fork of a cached prefix
                    self.slab.open(key)

    def keys(self, segment: Segment) -> list[SegmentKey]:
        """Return the key of each shard of a segment."""
        return [self.key(segment.sequence, segment.tokens[0], shard) for shard in self.shards.shards_of(segment.heads)]

    def key(self, sequence: int, first: int, shard: int) -> SegmentKey:
        """Return the key of one shard of a segment, by the segment's first token."""
        return sequence, first * self.shards.count + shard

    def _fork(self, fork: Fork, renew: Renew) -> None:
        """Let a child share the slots of its parent's first tokens on this worker.

        Windowed layers of slots that the child had before are copied from the parent's (``renew``).
        """
        segments = self.segments.get(fork.parent, [])
        if shared := forked(segments, fork.child, fork.tokens):
            self.segments[fork.child] = shared
            self._starts[fork.child] = Starts(fork.tokens)
        for segment in segments[: len(shared)]:
            start, stop = segment.tokens
            last = fork.tokens if stop is None else min(fork.tokens, stop)
            for key in self.keys(segment):
                child = self.key(fork.child, start, key[1] % self.shards.count)
                if child in self.slab:
                    begun, source = self.slab.slots(child), self.slab.slots(key)
                    both = min(len(begun), last - start)
                    renew(begun[:both], source[:both], fork.tokens - start)
                if child not in self.slab or len(self.slab.slots(child)) < last - start:
                    self.slab.fork(key, child, last - start)

    def _grow(self, new: Segment) -> None:
        """Let a sequence continue in a new segment, on this worker or another one."""
        sequence, segments = new.sequence, self.segments.pop(new.sequence, [])
        first, _ = new.tokens
        for segment in segments:
            if segment.tokens[0] >= first and overlaps(segment, new):
                for key in self.keys(segment):
                    self.slab.free(key)
        after = [segment for segment in grown(segments, new) if segment.worker == self.worker]
        for key in itertools.chain.from_iterable(map(self.keys, after)):
            if key not in self.slab:  # of the new one, unless the sequence has come back
                self.slab.open(key)
        if after:
            self.segments[sequence] = after

    def _forget(self, sequence: int) -> None:
        """Free the slots of a sequence, if it is on this worker or moving to it."""
        self._starts.pop(sequence, None)
        segments = self.segments.pop(sequence, ()) or [Segment(sequence, self.worker, self.shards.whole, (0, None))]
        for key in itertools.chain.from_iterable(map(self.keys, segments)):
            if key in self.slab:
                self.slab.free(key)

    def _make_slots(self, move: KvMove) -> None:
        """Allocate slots for tokens that move to this worker. Nothing attends to them before a plan's switch."""
        keys = self._carried(move)
        for key in keys:
            self.slab.open(key)
        self.slab.extend(keys, [move.stop - move.start] * len(keys))

    def _carried(self, move: KvMove) -> list[SegmentKey]:
        """Return the keys of the move's own segment (the carrier), one for each shard."""
        return [self.key(move.sequence, 0, shard) for shard in self.shards.shards_of(move.heads)]

    def _begin_fetch(self, fetch: Fetch) -> None:
        """Allocate slots for blocks fetched from the disk. The plan may have forked the tokens before them."""
        if fetch.worker == self.worker:
            segment = Segment(fetch.child, self.worker, fetch.heads, (0, None))
            if fetch.child not in self.segments:
                self._open(fetch.child, [segment])
            keys = self.keys(segment)
            self.slab.extend(keys, [len(fetch.blocks) // len(keys) * BLOCK] * len(keys))

    def slots_of(self, move: KvMove) -> Slots:
        """Return a copy of the slots that a move reads or writes on this worker: int32 [shards * (stop - start)]."""
        return np.concatenate([self.slab.slots(key) for key in self._carried(move)])

    def _share_range(self, move: KvMove) -> None:
        """Let the move's own segment (the carrier) share the slots of the tokens that it reads."""
        start, stop, segments = move.start, move.stop, self.segments.get(move.parent, [])
        held = {(key[1] % self.shards.count, one.tokens[0]): key for one in segments for key in self.keys(one)}
        shared: dict[SegmentKey, list[tuple[SegmentKey, int, int]]] = {}
        for carried in self._carried(move):
            for (shard, first), key in held.items():
                if shard == carried[1] and first <= start and stop <= first + len(self.slab.slots(key)):
                    shared[carried] = [(key, start - first, stop - first)]
            if carried not in shared:
                raise PlacementError(
                    f"tokens {start} to {stop} of sequence {move.parent} cannot move from {self.worker}",
                    f"of its segments here, {segments}, none has all of them",
                )
        self.slab.rearrange([], shared)

    def _switch(self, switch: Switch) -> None:
        """Let sequences hold a range at the target of its move instead of the source.

        Sequences that shared the range's slots at the source share the carrier's slots at the target.
        """
        for new in switch.segments:
            sequence, (first, last) = new.sequence, new.tokens
            before = self.segments.pop(sequence, [])
            after = [segment for segment in moved(before, new) if segment.worker == self.worker]
            shards, held = self.shards.shards_of(new.heads), collections.defaultdict[int, list[_Held]](list)
            for shard in shards if new.worker == self.worker else ():
                carried = self.key(switch.carrier, 0, shard)
                end = first + len(self.slab.slots(carried)) if last is None else last
                held[shard].append((first, end, carried, first))
                self._starts.setdefault(sequence, Starts(end))
            old = [(one.tokens[0], key) for one in before for key in self.keys(one)]
            for start, key in old:
                stop, shard = start + len(self.slab.slots(key)), key[1] % self.shards.count
                moves = shard in shards
                held[shard].append((start, min(stop, first) if moves else stop, key, start))
                if moves and last is not None:
                    held[shard].append((max(start, last), stop, key, start))
            keys = [(one, key) for one in after for key in self.keys(one)]
            parts = {key: _parts(one, sorted(held[key[1] % self.shards.count])) for one, key in keys}
            self.slab.rearrange([key for _, key in old], parts)
            if after:
                self.segments[sequence] = after

    def note_starts(self, lane: int, messages: Iterable[MessageRows]) -> None:
        """Record the first positions of a lane's step, so that no window drops tokens that a step in flight attends to.

        Steps of a lane complete in order, so that the steps in flight are its latest ones.
        """
        steps = [(rows, brought(rows, self.key)) for rows in messages]
        for sequence, start in step_starts(steps, self._end).items():
            self._starts.setdefault(sequence, Starts(start)).add(lane, start)

    def _end(self, key: SegmentKey) -> int:
        return key[1] // self.shards.count + len(self.slab.slots(key))

    def needed(self, window: int) -> Iterator[Slots]:
        """Yield the slots of tokens that layers with a window of ``window`` tokens may still attend to.

        These are all tokens of a sequence that has moved here and not run here yet.
        """
        for sequence, number in self.slab.segments:
            starts = self._starts.get(sequence)
            lowest = 0 if starts is None else starts.lowest - window + 1 - number // self.shards.count
            yield self.slab.slots((sequence, number))[max(lowest, 0) :]


def _parts(segment: Segment, held: Sequence[_Held]) -> list[tuple[SegmentKey, int, int]]:
    """Return the parts (key, first token, end) in the slab that hold one shard of a segment's tokens.

    ``held``: By ascending start.
    """
    low, high = segment.tokens
    ends = [stop if high is None else min(stop, high) for _, stop, _, _ in held]
    return [
        (key, max(start, low) - origin, stop - origin)
        for (start, _, key, origin), stop in zip(held, ends, strict=True)
        if max(start, low) < stop
    ]
