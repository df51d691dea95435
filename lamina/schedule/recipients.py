"""Selects the workers that get a step plan, and the part of the plan for each. Pure.

The compute workers that run the slices of a plan get all of it. A memory worker gets the part about sequences of which
it holds, gets or loses KV. No other worker gets anything: the cost depends on the sequences in the plan and on what has
changed since the lane's previous plan, not on the number of workers.

A worker that only has sequences to release gets them with its next part, or once they are overdue. A compute worker
gets a sequence's admission with the first plan in which it runs the sequence, which may be long after the admission if
requests change lanes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lamina.core.pipeline import Pipeline
from lamina.core.segments import for_sequence, forked, grown, moved
from lamina.core.steps import Admission, DecodeRows, Fork, StepPlan, Switch
from lamina.core.topology import Topology
from lamina.core.types import Segment

RELEASE_S = 0.05  # longest time before a worker without steps gets released sequences

_NOTHING: dict[str, Any] = {
    "forks": [],
    "released": [],
    "admitted": [],
    "chunks": [],
    "decoding": DecodeRows([], [], []),
    "moves": [],
    "histories": {},
    "grown": [],
    "switches": [],
    "spills": [],
    "fetches": [],
}

Addressed = tuple[tuple[str, ...], StepPlan]
"""Workers, and the plan or the part of a plan to send to them."""

Add = Callable[[Iterable[str], str, object], None]
"""Adds an item to a field of the parts for some workers."""


@dataclass(eq=False, slots=True)
class _Known:
    """A sequence that has not been released, and the workers that know it.

    Attributes:
        segments: Segments that hold, or will hold, its KV.
        homes: Memory workers with its segments. In the local memory of a replica, each stage is one.
        admission: Admission of its request; None for a cached prefix, and for the carrier of a move.
        computes: Compute workers that keep state for it.
        memories: Memory workers that keep state for it: its homes, and those that it moves between.
        carries: True for the carrier of a move.
    """

    segments: list[Segment]
    admission: Admission | None = None
    carries: bool = False
    homes: list[str] = field(default_factory=list)
    computes: set[str] = field(default_factory=set)
    memories: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.memories = set(self.homes)

    def place(self, segments: list[Segment], homes: list[str]) -> None:
        self.segments, self.homes = segments, homes


@dataclass(frozen=True, slots=True)
class _Decoding:
    """The sequences that decode in a lane, as of its latest plan.

    Attributes:
        sequences: The plan's list, which is the same object until a sequence joins or leaves.
        replicas: Compute workers that run the sequences.
        shares: By memory worker that is not in ``replicas``: its sequences, and their indices in the list.
        members: The sequences as a set.
    """

    sequences: list[int]
    replicas: tuple[str, ...]
    shares: dict[str, tuple[list[int], list[int]]]
    members: frozenset[int]


class Recipients:
    """Tracks which workers know which sequences. Plans must be passed in the order in which they are sent."""

    def __init__(self, computes: Sequence[str], pipeline: Pipeline) -> None:
        """``computes``: names of the compute workers, in the order of the pipeline's replicas."""
        self._follow_replicas(computes, pipeline)
        self._known: dict[int, _Known] = {}  # by sequence
        self._decoding: dict[int, _Decoding] = {}  # by lane
        self._to_forget: dict[str, tuple[float, list[int]]] = {}  # released sequences, and since when; oldest first

    def _follow_replicas(self, computes: Sequence[str], pipeline: Pipeline) -> None:
        self._computes, self._pipeline = tuple(computes), pipeline
        self._holders = pipeline.holders(computes)

    def _homes(self, segments: Iterable[Segment]) -> list[str]:
        """Return the workers with KV of some segments."""
        named = dict.fromkeys(segment.worker for segment in segments)
        if not self._holders:
            return list(named)
        return [worker for name in named for worker in self._holders.get(name, (name,))]

    def _place_on(self, known: _Known, segments: list[Segment]) -> None:
        known.place(segments, self._homes(segments))

    def end_epoch(self, topology: Topology, kept: Mapping[str, Mapping[int, int]]) -> None:
        """Begin an epoch, in which compute workers know no sequence. ``kept`` has tokens by worker and sequence.

        Requests and cached prefixes of which nothing is kept are forgotten. Completions that have not been forked yet
        hold no KV; they stay as long as the first completion of their request.
        """
        self._follow_replicas(topology.computes, topology.pipeline)
        self._decoding.clear()
        self._to_forget.clear()
        lengths = {sequence: tokens for sequences in kept.values() for sequence, tokens in sequences.items()}
        admissions = (known.admission for sequence, known in self._known.items() if sequence in lengths)
        alive = {admission.sequence for admission in admissions if admission is not None}
        before, self._known = self._known, {}
        for sequence, known in before.items():
            if known.admission is not None and sequence not in lengths:
                known.place([], [])
            elif known.admission is None and sequence in lengths and not topology.names.issuperset(known.homes):
                # A cached prefix ends where the first of its workers that was lost held tokens.
                self._place_on(known, forked(known.segments, sequence, lengths[sequence]))
            survives = not known.carries if known.admission is None else known.admission.sequence in alive
            if survives and topology.names.issuperset(known.homes):
                known.computes, known.memories = set(), set(known.homes)
                self._known[sequence] = known

    def recall(self, sequences: Mapping[int, list[Segment]]) -> None:
        """Follow sequences that memory workers have kept from an earlier engine: no request runs them."""
        self._known |= {sequence: self._new(segments) for sequence, segments in sequences.items()}

    def change_members(self, topology: Topology) -> None:
        """Adapt to other members within the epoch. Members that left hold no KV."""
        self._follow_replicas(topology.computes, topology.pipeline)
        self._to_forget = {worker: one for worker, one in self._to_forget.items() if worker in topology.names}
        for known in self._known.values():
            known.computes &= topology.names
            known.memories &= topology.names

    def select(self, plan: StepPlan, now: float) -> list[Addressed]:
        """Return the next plan for the compute workers that run it, and the parts of it for memory workers.

        ``now`` is in seconds of any monotonic clock.
        """
        numbers = self._pipeline.workers_of(plan.lane, plan.rotates)
        replicas = self._computes[numbers[0] : numbers[-1] + 1]
        parts: dict[str, dict[str, Any]] = {}

        def add(workers: Iterable[str], name: str, item: object) -> None:
            for worker in workers:
                parts.setdefault(worker, {}).setdefault(name, []).append(item)

        self._follow(plan, replicas, now, add)
        decoding = self._decoding.get(plan.lane)
        unknown = self._unknown(plan, replicas, decoding)
        if decoding is None or decoding.sequences is not plan.decoding.sequences or decoding.replicas != replicas:
            decoding = self._decoding[plan.lane] = self._share(plan.decoding.sequences, replicas)
        starts = plan.decoding.starts
        for worker, (sequences, places) in decoding.shares.items():
            rows = DecodeRows(sequences, [starts[place] for place in places], [])
            parts.setdefault(worker, {})["decoding"] = rows
        for chunk in plan.chunks:
            begun = self._homes(one for one in self._known[chunk.sequence].segments if one.tokens[0] < chunk.stop)
            add(begun, "chunks", chunk)
        for worker in parts.keys() & replicas:  # compute workers with local memory get the whole plan
            del parts[worker]
        for worker, part in parts.items():
            if worker in self._to_forget:
                part["released"] = [*self._to_forget.pop(worker)[1], *part.get("released", ())]
        addressed = [((worker,), msgspec.structs.replace(plan, **(_NOTHING | part))) for worker, part in parts.items()]
        return addressed + self._whole(plan, replicas, unknown, now)

    def overdue(self, now: float) -> Iterator[tuple[str, list[int]]]:
        """Yield workers and released sequences that have waited for ``RELEASE_S``; the caller sends them."""
        while self._to_forget:
            worker, (since, sequences) = next(iter(self._to_forget.items()))
            if now - since < RELEASE_S:
                return
            del self._to_forget[worker]
            yield worker, sequences

    # -- what a plan changes, in the order in which workers apply it --------------------------------------------

    def _follow(self, plan: StepPlan, replicas: tuple[str, ...], now: float, add: Add) -> None:
        """Apply a plan's changes to the tracked sequences, and ``add`` them to the parts of memory workers."""
        for switch in plan.switches:
            for worker, segments in self._switch(switch, replicas).items():
                add([worker], "switches", Switch(switch.carrier, segments))
        for fork in plan.forks:
            self._fork(fork, replicas, add)
            add(self._known[fork.child].homes, "forks", fork)
        for sequence in plan.released:
            self._release(sequence, replicas, now)
        for move in plan.moves:
            add((move.source, move.target), "moves", move)
            known = self._known.setdefault(move.sequence, _Known([], carries=True))
            known.memories |= {move.source, move.target}
        for admission in plan.admitted:
            self._admit(admission, replicas)
            add(self._known[admission.sequence].homes, "admitted", admission)
        for segment in plan.grown:
            known, (first, _) = self._known[segment.sequence], segment.tokens
            before = known.segments
            ended = [one for one in before if one.tokens[1] is None or one.tokens[1] > first]
            ran = [worker for worker in known.homes if worker in known.computes]  # must not run it as it was
            told = dict.fromkeys([*self._homes([*ended, segment]), *ran])
            add(told, "grown", segment)
            self._place(segment.sequence, grown(before, segment), replicas, add)
            known.computes -= told.keys() - replicas  # they run it no more, also if no segment is new
        if plan.grown or plan.switches:
            self._decoding.clear()  # of other lanes too: their replicas may have forgotten a sequence that comes back
        for spill in plan.spills:
            add((spill.worker,), "spills", spill)
        for fetch in plan.fetches:
            add((fetch.worker,), "fetches", fetch)
            if not fetch.start:  # else the plan forks it
                others = self._known[fetch.child].segments if fetch.child in self._known else []
                own = Segment(fetch.child, fetch.worker, fetch.heads, (0, None))
                self._known[fetch.child] = self._new([*others, own])

    def _release(self, sequence: int, replicas: tuple[str, ...], now: float) -> None:
        if (known := self._known.pop(sequence, None)) is not None:  # else ``end_epoch`` has forgotten the sequence
            for worker in (known.computes | known.memories).difference(replicas):  # these get the whole plan
                self._forget(worker, sequence, now)

    def _new(self, segments: list[Segment], admission: Admission | None = None) -> _Known:
        return _Known(segments, admission, homes=self._homes(segments))

    def _admit(self, admission: Admission, replicas: tuple[str, ...]) -> None:
        for sequence in range(admission.sequence, admission.sequence + admission.count):
            known = self._known[sequence] = self._new(for_sequence(sequence, admission.segments), admission)
            known.computes |= {*replicas}

    def _forget(self, worker: str, sequence: int, now: float) -> None:
        self._to_forget.setdefault(worker, (now, []))[1].append(sequence)

    def _place(self, sequence: int, segments: list[Segment], replicas: tuple[str, ...], add: Add) -> None:
        """Set the segments of a sequence, which the plan sends to the memory workers concerned. Compute workers that do
        not get the plan forget the sequence now: the next plan may move KV of it to their local memory."""
        known = self._known[sequence]
        if segments == known.segments:
            return
        told = {*replicas, *known.homes, *self._homes(segments)}
        add(sorted((known.computes | known.memories) - told), "released", sequence)
        self._place_on(known, segments)
        known.computes &= {*replicas}
        known.memories = set(known.homes)

    def _switch(self, switch: Switch, replicas: tuple[str, ...]) -> dict[str, list[Segment]]:
        """Apply a switch. Returns the moved segments by worker that must know them: workers that run the sequence and
        are not in ``replicas``, workers that lost a part of it, and the target."""
        told: dict[str, list[Segment]] = {}
        for new in switch.segments:
            known = self._known[new.sequence]
            after = moved(known.segments, new)
            sources = [one.worker for one in known.segments if one not in after]
            runs = [worker for worker in self._computes if worker in known.computes and worker not in replicas]
            for worker in dict.fromkeys([*sources, new.worker, *runs]):
                told.setdefault(worker, []).append(new)
            known.memories.difference_update(known.homes)
            self._place_on(known, after)
            known.memories.update(known.homes)
        return told

    def _fork(self, fork: Fork, replicas: tuple[str, ...], add: Add) -> None:
        segments = forked(self._known[fork.parent].segments, fork.child, fork.tokens)
        if (known := self._known.get(fork.child)) is not None:
            stale = known.computes.intersection(known.homes).difference(replicas)  # compute workers with local memory
            self._place(fork.child, segments, replicas, add)
            known.computes -= stale
            add(sorted(stale.difference(known.homes)), "released", fork.child)
        else:  # a cached prefix, or admitted with the same plan
            self._known[fork.child] = self._new(segments)

    # -- who gets what ------------------------------------------------------------------------------------------

    def _unknown(self, plan: StepPlan, replicas: tuple[str, ...], before: _Decoding | None) -> list[int]:
        """Return the sequences of the plan that some of ``replicas`` do not know."""
        named: Iterable[int] = plan.decoding.sequences
        if before is not None and before.replicas == replicas:
            same = before.sequences is named
            named = () if same else [sequence for sequence in named if sequence not in before.members]
        named = [*named, *(chunk.sequence for chunk in plan.chunks), *plan.histories]
        return [sequence for sequence in named if not self._known[sequence].computes.issuperset(replicas)]

    def _share(self, sequences: list[int], replicas: tuple[str, ...]) -> _Decoding:
        """Group decoding sequences by the memory workers that hold them and do not get the whole plan."""
        shares: dict[str, tuple[list[int], list[int]]] = {}
        for place, sequence in enumerate(sequences):
            for worker in self._known[sequence].homes:
                if worker not in replicas:
                    share = shares.setdefault(worker, ([], []))
                    share[0].append(sequence)
                    share[1].append(place)
        return _Decoding(sequences, replicas, shares, frozenset(sequences))

    def _whole(self, plan: StepPlan, replicas: tuple[str, ...], unknown: list[int], now: float) -> list[Addressed]:
        """Return the whole plan for ``replicas``, with the admissions and releases that each of them has missed."""
        if not unknown and self._to_forget.keys().isdisjoint(replicas):
            return [(replicas, plan)]
        addressed: list[Addressed] = []
        for replica in replicas:
            _, released = self._to_forget.pop(replica, (now, []))
            missed = [self._known[one] for one in unknown if replica not in self._known[one].computes]
            admissions = {one.admission.sequence: one.admission for one in missed if one.admission is not None}
            late = [self._present(admission) for admission in admissions.values()]
            whole = msgspec.structs.replace(
                plan, released=[*released, *plan.released], admitted=[*late, *plan.admitted]
            )
            addressed.append(((replica,), whole))
            for admission in admissions.values():  # of all completions, some of which may have been released
                for sequence in range(admission.sequence, admission.sequence + admission.count):
                    if sequence in self._known:
                        self._known[sequence].computes.add(replica)
                    else:
                        self._forget(replica, sequence, now)
        return addressed

    def _present(self, admission: Admission) -> Admission:
        sequences = range(admission.sequence, admission.sequence + admission.count)
        placed = {sequence: self._known[sequence].segments for sequence in sequences if sequence in self._known}
        if all(segments == for_sequence(sequence, admission.segments) for sequence, segments in placed.items()):
            return admission
        segments = [segment for each in placed.values() for segment in each]
        return msgspec.structs.replace(admission, segments=segments)
