"""Which workers are told of a plan, and of which part of it. Pure: no clock, no sockets.

A plan goes whole to the compute workers that run its slices. A memory worker gets the part about sequences that it
holds, is given or loses. Nobody else hears of it: the cost follows what the plan names and what has changed since the
lane's plan before, not the number of workers.

A worker that only has sequences to forget is told with its next part, or once it is overdue. A compute worker learns of
a sequence with the first plan in which it runs it, which may be long after the admission if lanes are dealt out again.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lamina.core.pipeline import Pipeline
from lamina.core.segments import for_sequence, forked, grown, moved
from lamina.core.steps import Admission, DecodeRows, Fork, StepPlan, Switch
from lamina.core.topology import Topology
from lamina.core.types import Segment

RELEASE_S = 0.05  # how long a worker may wait to be told of released sequences, while others have steps to run

_NOTHING: dict[str, Any] = {
    "forks": [],
    "released": [],
    "admitted": [],
    "chunks": [],
    "decoding": DecodeRows([], [], []),
    "migrations": [],
    "histories": {},
    "grown": [],
    "switches": [],
    "spills": [],
    "fetches": [],
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Decoding:
    """The sequences that decode in a lane, as of its latest plan.

    Attributes:
        sequences: the plan's own list, which is the same object until one joins or leaves.
        replicas: that run them.
        shares: by memory worker, but for the replicas, its sequences and their places in the list.
    """

    sequences: list[int]
    replicas: tuple[str, ...]
    shares: dict[str, tuple[list[int], list[int]]]
    members: frozenset[int]


class Recipients:
    """Follows plans in the order in which they are sent."""

    def __init__(self, computes: Sequence[str], pipeline: Pipeline) -> None:
        """``computes``: names of the compute workers, in the order of the pipeline's replicas."""
        self._computes = tuple(computes)
        self._pipeline = pipeline
        self._admissions: dict[int, Admission] = {}  # by sequence that has not been released
        self._segments: dict[int, list[Segment]] = {}
        self._homes: dict[int, list[str]] = {}  # the memory workers with its segments
        self._knowing: dict[int, set[str]] = {}  # by sequence: compute workers that keep state for it
        self._holding: dict[int, set[str]] = {}  # the memory workers that must, those that it moves to included
        self._decoding: dict[int, _Decoding] = {}  # by lane
        self._untold: dict[str, tuple[float, list[int]]] = {}  # released sequences, and since when; oldest first
        self._carriers = set[int]()  # of moves in progress

    def end_epoch(self, topology: Topology, kept: Mapping[str, Mapping[int, int]]) -> None:
        """A new epoch: compute workers know of no sequence any more, and requests of which nothing is ``kept`` (tokens
        by worker and sequence) are forgotten. Of cached prefixes, what is kept stays.

        Of a request, completions that have not been forked, or not again, hold nothing: they follow the first one.
        """
        self._computes, self._pipeline = topology.computes, topology.pipeline
        self._decoding.clear()
        self._untold.clear()
        self._shorten(topology, kept)
        held = {one for sequences in kept.values() for one in sequences}
        alive = {self._admissions[one].sequence for one in held if one in self._admissions}
        lost = {one for one, told in self._admissions.items() if told.sequence not in alive} | self._carriers
        self._carriers.clear()
        for one in self._admissions.keys() - held:
            self._segments[one], self._homes[one] = [], []
        lost |= {one for one, homes in self._homes.items() if not topology.names.issuperset(homes)}  # cached prefixes
        self._admissions = {one: told for one, told in self._admissions.items() if one not in lost}
        self._homes = {one: homes for one, homes in self._homes.items() if one not in lost}
        self._segments = {one: self._segments[one] for one in self._homes}
        self._knowing = {one: set() for one in self._homes}
        self._holding = {one: set(homes) for one, homes in self._homes.items()}

    def _shorten(self, topology: Topology, kept: Mapping[str, Mapping[int, int]]) -> None:
        """Cached prefixes end where the first of their workers that was lost held tokens."""
        lengths = {one: tokens for sequences in kept.values() for one, tokens in sequences.items()}
        for one, homes in self._homes.items():
            if one in lengths and one not in self._admissions and not topology.names.issuperset(homes):
                self._segments[one] = forked(self._segments[one], one, lengths[one])
                self._homes[one] = list(dict.fromkeys(segment.worker for segment in self._segments[one]))

    def change_members(self, topology: Topology) -> None:
        """The members are those of ``topology`` from now on, within the epoch. Those that left hold no KV any more."""
        self._computes, self._pipeline = topology.computes, topology.pipeline
        self._untold = {worker: untold for worker, untold in self._untold.items() if worker in topology.names}
        self._knowing = {one: workers & topology.names for one, workers in self._knowing.items()}
        self._holding = {one: workers & topology.names for one, workers in self._holding.items()}

    def select(self, plan: StepPlan, now: float) -> list[tuple[tuple[str, ...], StepPlan]]:
        """Return the workers to send something to, and what: the next plan, whole or the part that concerns them.

        ``now``: seconds of any monotonic clock.
        """
        replicas = tuple(self._computes[number] for number in self._pipeline.workers_of(plan.lane, plan.rotates))
        parts: dict[str, dict[str, Any]] = {}

        def add(workers: Iterable[str], name: str, item: object) -> None:
            for worker in workers:
                parts.setdefault(worker, {}).setdefault(name, []).append(item)

        self._place_all(plan, replicas, now, add)
        decoding = self._decoding.get(plan.lane)
        strange = self._strange(plan, replicas, decoding)
        if decoding is None or decoding.sequences is not plan.decoding.sequences or decoding.replicas != replicas:
            decoding = self._decoding[plan.lane] = self._share(plan.decoding.sequences, replicas)
        starts = plan.decoding.starts
        for worker, (sequences, places) in decoding.shares.items():
            rows = DecodeRows(sequences, [starts[place] for place in places], [])
            parts.setdefault(worker, {})["decoding"] = rows
        for chunk in plan.chunks:
            stop = chunk.start + len(chunk.tokens)
            begun = [segment.worker for segment in self._segments[chunk.sequence] if segment.tokens[0] < stop]
            add(dict.fromkeys(begun), "chunks", chunk)
        for worker in parts.keys() & replicas:  # compute workers with local memory get the whole plan
            del parts[worker]
        for worker, part in parts.items():
            if worker in self._untold:
                part["released"] = self._untold.pop(worker)[1]
        addressed = [((worker,), msgspec.structs.replace(plan, **(_NOTHING | part))) for worker, part in parts.items()]
        return addressed + self._whole(plan, replicas, strange, now)

    def _place_all(
        self, plan: StepPlan, replicas: tuple[str, ...], now: float, add: Callable[[Iterable[str], str, object], None]
    ) -> None:
        """Follow what a plan says of places, in the order in which workers apply it, and ``add`` it to their parts."""
        for switch in plan.switches:
            for worker, segments in self._switch(switch, replicas).items():
                add([worker], "switches", Switch(switch.carrier, segments))
        for fork in plan.forks:
            add(self._fork(fork, replicas, now), "forks", fork)
        self._release(plan, replicas, now)
        for migration in plan.migrations:
            add((migration.source, migration.target), "migrations", migration)
            self._begin(migration.sequence, [])
            self._carriers.add(migration.sequence)
            self._holding[migration.sequence] |= {migration.source, migration.target}
        for admission in plan.admitted:
            add(self._admit(admission, replicas), "admitted", admission)
        for segment in plan.grown:
            before, (first, _) = self._segments[segment.sequence], segment.tokens
            ended = [one.worker for one in before if one.tokens[1] is None or one.tokens[1] > first]
            add(dict.fromkeys([*ended, segment.worker]), "grown", segment)
            self._place(segment.sequence, grown(before, segment), replicas, now)
        if plan.grown:
            self._decoding.pop(plan.lane, None)
        if plan.switches:
            self._decoding.clear()
        self._transfer(plan, add)

    def _transfer(self, plan: StepPlan, add: Callable[[Iterable[str], str, object], None]) -> None:
        """Copies to disks and back, for the workers that have these."""
        for spill in plan.spills:
            add((spill.worker,), "spills", spill)
        for fetch in plan.fetches:
            add((fetch.worker,), "fetches", fetch)
            if not fetch.start:  # else the plan forks it
                self._begin(fetch.child, [Segment(fetch.child, fetch.worker, fetch.heads, (0, None))])

    def overdue(self, now: float) -> Iterator[tuple[str, list[int]]]:
        """Workers that have waited for ``RELEASE_S`` to be told of released sequences; the caller tells them."""
        while self._untold:
            worker, (since, sequences) = next(iter(self._untold.items()))
            if now - since < RELEASE_S:
                return
            del self._untold[worker]
            yield worker, sequences

    def _release(self, plan: StepPlan, replicas: tuple[str, ...], now: float) -> None:
        for sequence in plan.released:
            self._admissions.pop(sequence, None)  # a cached prefix has none
            self._carriers.discard(sequence)
            if sequence not in self._homes:  # it had ended, and an epoch has left nothing of its request
                continue
            del self._homes[sequence], self._segments[sequence]
            knowing = self._knowing.pop(sequence) | self._holding.pop(sequence)
            for worker in knowing.difference(replicas):  # these get the whole plan
                self._forget(worker, sequence, now)

    def _forget(self, worker: str, sequence: int, now: float) -> None:
        self._untold.setdefault(worker, (now, []))[1].append(sequence)

    def _place(self, sequence: int, segments: list[Segment], replicas: tuple[str, ...], now: float) -> None:
        """A sequence has these segments from now on. The memory workers concerned learn of it from the plan. Compute
        workers that do not get the plan forget the sequence."""
        if segments == self._segments[sequence]:
            return
        homes = list(dict.fromkeys(segment.worker for segment in segments))
        knowing = self._knowing[sequence]
        for worker in (knowing | self._holding[sequence]).difference(replicas, self._homes[sequence], homes):
            self._forget(worker, sequence, now)
        self._knowing[sequence], self._holding[sequence] = knowing.intersection(replicas), set(homes)
        self._segments[sequence], self._homes[sequence] = segments, homes

    def _switch(self, switch: Switch, replicas: tuple[str, ...]) -> dict[str, list[Segment]]:
        """Returns what has moved, by worker that is told: all that run the sequence, except these replicas, have lost
        some of it, or hold more of it now."""
        told: dict[str, list[Segment]] = {}
        for new in switch.segments:
            before = self._segments[new.sequence]
            after = moved(before, new)
            sources = [one.worker for one in before if one not in after]
            knowing = self._knowing[new.sequence]
            runs = [worker for worker in self._computes if worker in knowing and worker not in replicas]
            for worker in dict.fromkeys([*sources, new.worker, *runs]):
                told.setdefault(worker, []).append(new)
            homes = list(dict.fromkeys(segment.worker for segment in after))
            self._holding[new.sequence] = self._holding[new.sequence].difference(self._homes[new.sequence]).union(homes)
            self._segments[new.sequence], self._homes[new.sequence] = after, homes
        return told

    def _fork(self, fork: Fork, replicas: tuple[str, ...], now: float) -> list[str]:
        """Returns the memory workers with shared segments."""
        segments = forked(self._segments[fork.parent], fork.child, fork.tokens)
        if fork.child in self._homes:
            self._place(fork.child, segments, replicas, now)
        else:  # a cached prefix, or admitted with the same plan
            self._begin(fork.child, segments)
        return self._homes[fork.child]

    def _admit(self, admission: Admission, replicas: tuple[str, ...]) -> list[str]:
        """Returns the memory workers with its segments."""
        homes: list[str] = []
        for sequence in range(admission.sequence, admission.sequence + admission.count):
            self._admissions[sequence] = admission
            homes = self._begin(sequence, for_sequence(sequence, admission.segments))
            self._knowing[sequence] |= {*replicas}
        return homes

    def _begin(self, sequence: int, segments: list[Segment]) -> list[str]:
        """Record the segments of a sequence that no worker knows yet. Returns the memory workers that hold them."""
        homes = list(dict.fromkeys(segment.worker for segment in segments))
        self._segments[sequence], self._homes[sequence] = segments, homes
        self._knowing[sequence], self._holding[sequence] = set(), set(homes)
        return homes

    def _present(self, admission: Admission) -> Admission:
        """Return a request with the segments that it has by now."""
        known = range(admission.sequence, admission.sequence + admission.count)
        placed = {sequence: self._segments[sequence] for sequence in known if sequence in self._segments}
        if all(segments == for_sequence(sequence, admission.segments) for sequence, segments in placed.items()):
            return admission
        segments = [segment for each in placed.values() for segment in each]
        return msgspec.structs.replace(admission, segments=segments)

    def _strange(self, plan: StepPlan, replicas: tuple[str, ...], before: _Decoding | None) -> list[int]:
        """Return the sequences that the plan names and some of these replicas do not know."""
        named: Iterable[int] = plan.decoding.sequences
        if before is not None and before.replicas == replicas:
            same = before.sequences is named
            named = () if same else [sequence for sequence in named if sequence not in before.members]
        named = [*named, *(chunk.sequence for chunk in plan.chunks), *plan.histories]
        return [sequence for sequence in named if not self._knowing[sequence].issuperset(replicas)]

    def _share(self, sequences: list[int], replicas: tuple[str, ...]) -> _Decoding:
        shares: dict[str, tuple[list[int], list[int]]] = {}
        for place, sequence in enumerate(sequences):
            for worker in self._homes[sequence]:
                if worker in replicas:
                    continue  # it gets the whole plan
                share = shares.setdefault(worker, ([], []))
                share[0].append(sequence)
                share[1].append(place)
        return _Decoding(sequences, replicas, shares, frozenset(sequences))

    def _whole(
        self, plan: StepPlan, replicas: tuple[str, ...], strange: list[int], now: float
    ) -> list[tuple[tuple[str, ...], StepPlan]]:
        """Return the plan for the compute workers: the same for all, but for what some of them have missed."""
        if not strange and self._untold.keys().isdisjoint(replicas):
            return [(replicas, plan)]
        addressed: list[tuple[tuple[str, ...], StepPlan]] = []
        for replica in replicas:
            _, released = self._untold.pop(replica, (now, []))
            missed = [self._admissions[one] for one in strange if replica not in self._knowing[one]]
            by_request = {admission.sequence: admission for admission in missed}
            late = [self._present(admission) for admission in by_request.values()]
            whole = msgspec.structs.replace(
                plan, released=[*released, *plan.released], admitted=[*late, *plan.admitted]
            )
            addressed.append(((replica,), whole))
            for admission in by_request.values():
                self._learn(replica, admission, now)
        return addressed

    def _learn(self, replica: str, admission: Admission, now: float) -> None:
        """A compute worker is told of a request, with all its completions, of which some may have been released."""
        for sequence in range(admission.sequence, admission.sequence + admission.count):
            if sequence in self._knowing:
                self._knowing[sequence].add(replica)
            else:
                self._forget(replica, sequence, now)
