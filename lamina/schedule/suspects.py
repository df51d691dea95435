"""Which requests may have made a worker die, and which may run until that is known. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from lamina.core.requests import Group, Owner
from lamina.core.steps import StepPlan
from lamina.schedule.admission import Admissions

Positions: TypeAlias = dict[int, int]
"""By index of a completion: the position behind its last token in flight."""

DEATHS_ALONE = 2  # that make a request poison


@dataclass(frozen=True)
class Deaths:
    """Workers whose processes have ended by themselves, by name and, for compute workers, number."""

    memories: Collection[str] = ()
    replicas: Collection[int] = ()


NONE = Deaths()


@dataclass(frozen=True)
class Hold:
    """Requests that may not run for now: those ``held``, and all but those that ``only`` names, if it is given."""

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

    _trials: list[list[str]] = field(default_factory=list)  # the last one is on trial, the others wait
    _only: set[str] | None = None  # who may run; None: all but those that wait
    _left: dict[str, Positions] = field(default_factory=dict)  # by suspect: what it has to run to be cleared
    _alone: dict[str, int] = field(default_factory=dict)  # deaths with it alone, of those that were the last suspect

    @property
    def searching(self) -> bool:
        """True if there are suspects."""
        return bool(self._trials)

    @property
    def hold(self) -> Hold:
        """Who may not run now. Between two deaths, this only lets more of them run."""
        if self._only is not None:
            return Hold(only=frozenset(self._only))
        return Hold(frozenset(one for group in self._trials[:-1] for one in group))

    def note_death(self, exposed: Mapping[str, Positions], running: Collection[str]) -> str | None:
        """A worker has died with these requests ``exposed`` to it, of all that steps ran. Returns the poison request,
        if this death proves one."""
        if not exposed:
            return None
        again, trial = self.searching, self._trials[-1] if self._trials else []
        blamed = [one for one in trial if one in exposed]
        if self._only is None or not blamed:
            blamed += [one for one in exposed if one not in blamed]
        self._remove(blamed)
        self._left |= {one: dict(exposed[one]) for one in blamed}
        middle = (len(blamed) + 1) // 2
        self._trials += [half for half in (blamed[middle:], blamed[:middle]) if half]
        poison = self._note_alone(blamed[0], running) if len(blamed) == 1 else None
        self._only = set(self._trials[-1]) if again and self._trials else None
        return poison

    def _note_alone(self, last: str, running: Collection[str]) -> str | None:
        """Only this request is left. Returns it if that has been so, with nothing else running, often enough."""
        self._alone[last] = self._alone.get(last, 0) + (set(running) == {last})
        if self._alone[last] < DEATHS_ALONE:
            return None
        self._clear(last)
        return last

    def note_run(self, ran: Iterable[tuple[str, int, int]]) -> None:
        """A step has completed that ran requests, each with a completion's index and the position behind its tokens."""
        for request_id, index, position in ran:
            left = self._left.get(request_id)
            if left is not None and position >= left.get(index, position + 1):
                del left[index]
                if not left:
                    self._clear(request_id)

    def prune(self, alive: Callable[[str], Collection[int]]) -> None:
        """Clear suspects that have ended. ``alive``: the completions of a request that still draw tokens."""
        for request_id, left in list(self._left.items()):
            for index in left.keys() - set(alive(request_id)):
                del left[index]
            if not left:
                self._clear(request_id)

    def _clear(self, request_id: str) -> None:
        self._left.pop(request_id, None)
        self._alone.pop(request_id, None)
        self._remove([request_id])
        if not self._trials:
            self._only = None
        elif self._only is not None:
            self._only |= set(self._trials[-1])

    def _remove(self, requests: Collection[str]) -> None:
        trials = [[one for one in group if one not in requests] for group in self._trials]
        self._trials = [group for group in trials if group]


def at_work(plans: Iterable[StepPlan], owners: Mapping[int, Owner]) -> set[str]:
    """Return the requests with rows in these steps. ``owners``: of sequences."""
    sequences = (sequence for plan in plans for sequence, _ in rows(plan))
    return {owners[sequence][0].request.request_id for sequence in sequences if sequence in owners}


def exposed(
    plans: Iterable[StepPlan],
    owners: Mapping[int, Owner],
    deaths: Deaths,
    replicas_of: Callable[[StepPlan], Collection[int]],
) -> dict[str, Positions]:
    """Return the requests that steps in flight ran on workers that died: those of a dead replica, and those with KV on
    a dead memory worker. ``owners``: of sequences; ``replicas_of``: the replicas that run a step."""
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
    """Return the sequences that a step runs, each with the position behind its tokens."""
    decoding = plan.decoding
    yield from ((sequence, start + 1) for sequence, start in zip(decoding.sequences, decoding.starts, strict=True))
    yield from ((chunk.sequence, chunk.stop) for chunk in plan.chunks)


class Holding:
    """Keeps requests that are held out of the queue. Those with KV keep it, and their seats, unless others need it."""

    def __init__(self, admissions: Admissions) -> None:
        self._admissions = admissions
        self._hold = Hold()
        self._parked: dict[Group, None] = {}  # without KV

    def __len__(self) -> int:
        return len(self._parked)

    def may_run(self, group: Group) -> bool:
        """Return whether steps may run this request."""
        return self._hold.may_run(group.request.request_id)

    def use(self, hold: Hold, waiting: Iterable[Group]) -> None:
        """Hold these from now on; ``waiting`` are those of them that wait to be admitted. Those that may run again, and
        have KV, do once requests are dealt out again."""
        self._hold = hold
        self._admissions.restrict(hold.only)
        for group in [one for one in waiting if one not in self._parked]:
            self._admissions.remove(group)
            self._parked[group] = None
        for group in [one for one in self._parked if self.may_run(one)]:
            del self._parked[group]
            self._admissions.put_back(group)

    def enqueue_unless_held(self, group: Group) -> None:
        """Queue a request, unless it has the id of a held one."""
        if group.request.request_id in self._hold.held:
            self._parked[group] = None
        else:
            self._admissions.enqueue(group)

    def put_back(self, group: Group) -> None:
        """A request that was admitted before waits again, ahead of all others that do."""
        if self._hold.active and not self.may_run(group):
            self._parked[group] = None
        else:
            self._admissions.put_back(group)

    def remove(self, group: Group) -> None:
        """A request that waits has ended."""
        if group in self._parked:
            del self._parked[group]
        else:
            self._admissions.remove(group)

    def in_the_way(self, running: Iterable[Group]) -> list[Group]:
        """Return the held requests among those ``running``, if nothing can run because of their KV."""
        if not self._hold.active or not self._admissions.full:
            return []
        alive = [group for group in running if group.alive]
        return [] if any(map(self.may_run, alive)) else alive
