"""Finds the request that makes workers die, and limits which requests run meanwhile. Pure.

A request that makes workers die, *poison*, is found by bisection. When a worker dies, the requests that ran on it are
suspects. One half is *on trial* and the other half waits. If a worker dies again, the half on trial is halved. A
suspect is cleared once it has run the tokens that it was running at the death; once a half is cleared, the next half is
on trial. From the second death on, only requests on trial run. A request is poison if it ran alone when workers died
``DEATHS_ALONE`` times.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from lamina.core.requests import Group, Owner
from lamina.core.steps import StepPlan
from lamina.schedule.admission import Admissions

Positions: TypeAlias = dict[int, int]
"""By index of a completion: the position after its last token in flight."""

DEATHS_ALONE = 2  # deaths that make a request poison


@dataclass(frozen=True)
class Deaths:
    """Workers whose processes have ended by themselves.

    Attributes:
        memories: Names of memory workers.
        replicas: Numbers of replicas that have lost a compute worker.
    """

    memories: Collection[str] = ()
    replicas: Collection[int] = ()


NO_DEATHS = Deaths()


@dataclass(frozen=True)
class Hold:
    """Requests that may not run for now.

    Attributes:
        held: Ids of requests that may not run.
        only: Ids of the requests that alone may run; None: all others may.
    """

    held: frozenset[str] = frozenset()
    only: frozenset[str] | None = None

    @property
    def active(self) -> bool:
        """True if some request may not run."""
        return bool(self.held) or self.only is not None

    def may_run(self, request_id: str) -> bool:
        """Return whether steps may run this request."""
        return request_id not in self.held and (self.only is None or request_id in self.only)


@dataclass
class Suspects:
    """The search for a poison request, from death to death."""

    _halves: list[list[str]] = field(default_factory=list)  # the last half is on trial, the others wait
    _only: set[str] | None = None  # requests that may run; None: all but waiting suspects
    _to_run: dict[str, Positions] = field(default_factory=dict)  # by suspect: positions to run to be cleared
    _deaths_alone: dict[str, int] = field(default_factory=dict)  # by last suspect: deaths while it ran alone

    @property
    def searching(self) -> bool:
        return bool(self._halves)

    @property
    def hold(self) -> Hold:
        """The requests that may not run now. Between two deaths, their number only decreases."""
        if self._only is not None:
            return Hold(only=frozenset(self._only))
        return Hold(frozenset(one for half in self._halves[:-1] for one in half))

    def note_death(self, exposed: Mapping[str, Positions], running: Collection[str]) -> str | None:
        """Record that a worker has died. Returns the poison request if this death proves it.

        Args:
            exposed: Requests that steps in flight ran on the dead worker, with what they ran.
            running: All requests that steps in flight ran.
        """
        if not exposed:
            return None
        again, trial = self.searching, self._halves[-1] if self._halves else []
        blamed = [one for one in trial if one in exposed]
        if self._only is None or not blamed:
            blamed += [one for one in exposed if one not in blamed]
        self._remove(blamed)
        self._to_run |= {one: dict(exposed[one]) for one in blamed}
        middle = (len(blamed) + 1) // 2
        self._halves += [half for half in (blamed[middle:], blamed[:middle]) if half]
        poison = self._note_alone(blamed[0], running) if len(blamed) == 1 else None
        self._only = set(self._halves[-1]) if again and self._halves else None
        return poison

    def _note_alone(self, last: str, running: Collection[str]) -> str | None:
        """Count a death for the last suspect. Returns it if it was alone often enough."""
        self._deaths_alone[last] = self._deaths_alone.get(last, 0) + (set(running) == {last})
        if self._deaths_alone[last] < DEATHS_ALONE:
            return None
        self._clear(last)
        return last

    def note_run(self, ran: Iterable[tuple[str, int, int]]) -> None:
        """Record what a completed step ran: request, index of a completion, and the position behind its tokens."""
        for request_id, index, position in ran:
            left = self._to_run.get(request_id)
            if left is not None and position >= left.get(index, position + 1):
                del left[index]
                if not left:
                    self._clear(request_id)

    def prune(self, alive: Callable[[str], Collection[int]]) -> None:
        """Clear suspects that have ended. ``alive`` returns the completions of a request that still draw tokens."""
        for request_id, left in list(self._to_run.items()):
            for index in left.keys() - set(alive(request_id)):
                del left[index]
            if not left:
                self._clear(request_id)

    def _clear(self, request_id: str) -> None:
        self._to_run.pop(request_id, None)
        self._deaths_alone.pop(request_id, None)
        self._remove([request_id])
        if not self._halves:
            self._only = None
        elif self._only is not None:
            self._only |= set(self._halves[-1])

    def _remove(self, requests: Collection[str]) -> None:
        halves = [[one for one in half if one not in requests] for half in self._halves]
        self._halves = [half for half in halves if half]


def at_work(plans: Iterable[StepPlan], owners: Mapping[int, Owner]) -> set[str]:
    """Return the requests with rows in these steps. ``owners`` maps sequences to their requests."""
    sequences = (sequence for plan in plans for sequence, _ in rows(plan))
    return {owners[sequence][0].request.request_id for sequence in sequences if sequence in owners}


def exposed(
    plans: Iterable[StepPlan],
    owners: Mapping[int, Owner],
    deaths: Deaths,
    replicas_of: Callable[[StepPlan], Collection[int]],
) -> dict[str, Positions]:
    """Return the requests that steps in flight ran on workers that died: all requests of a step that a dead replica
    ran, and requests with KV on a dead memory worker.

    Args:
        owners: Owners of sequences.
        replicas_of: Returns the replicas that run a step.
    """
    found: dict[str, Positions] = {}
    for plan in plans:
        everyone = not set(deaths.replicas).isdisjoint(replicas_of(plan))
        for sequence, position in rows(plan):
            owner = owners.get(sequence)
            if owner is not None and (everyone or not owner[0].workers.isdisjoint(deaths.memories)):
                group, completion = owner
                left = found.setdefault(group.request.request_id, {})
                left[completion.index] = max(left.get(completion.index, 0), position)
    return found


def rows(plan: StepPlan) -> Iterable[tuple[int, int]]:
    """Yield the sequences that a step runs, each with the position after its tokens."""
    decoding = plan.decoding
    yield from ((sequence, start + 1) for sequence, start in zip(decoding.sequences, decoding.starts, strict=True))
    yield from ((chunk.sequence, chunk.stop) for chunk in plan.chunks)


class Holding:
    """Keeps held requests out of the queue. Held requests with KV keep it, and their seats, while others fit."""

    def __init__(self, admissions: Admissions) -> None:
        self._admissions = admissions
        self._hold = Hold()
        self._waiting: dict[Group, None] = {}  # held requests without KV

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> bool:
        """True if some request may not run."""
        return self._hold.active

    def may_run(self, group: Group) -> bool:
        return self._hold.may_run(group.request.request_id)

    def use(self, hold: Hold, waiting: Iterable[Group]) -> None:
        """Hold requests by ``hold`` from now on. ``waiting`` are the held requests that wait to be admitted.

        Requests with KV that may run again do so once requests are dealt out again.
        """
        self._hold = hold
        self._admissions.restrict(hold.only)
        for group in [one for one in waiting if one not in self._waiting]:
            self._admissions.remove(group)
            self._waiting[group] = None
        for group in [one for one in self._waiting if self.may_run(one)]:
            del self._waiting[group]
            self._admissions.put_back(group)

    def enqueue_unless_held(self, group: Group) -> None:
        """Queue a request, unless it has the id of a held one."""
        if group.request.request_id in self._hold.held:
            self._waiting[group] = None
        else:
            self._admissions.enqueue(group)

    def put_back(self, group: Group) -> None:
        """Queue a preempted request ahead of all others, unless it is held."""
        if self._hold.active and not self.may_run(group):
            self._waiting[group] = None
        else:
            self._admissions.put_back(group)

    def remove(self, group: Group) -> None:
        """Remove a waiting request, which has ended."""
        if group in self._waiting:
            del self._waiting[group]
        else:
            self._admissions.remove(group)

    def blocking(self, running: Iterable[Group]) -> list[Group]:
        """Return the held requests among those ``running``, if nothing can run because of their KV."""
        if not self._hold.active or not self._admissions.full:
            return []
        alive = [group for group in running if group.alive]
        return [] if any(map(self.may_run, alive)) else alive
