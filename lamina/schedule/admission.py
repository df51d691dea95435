"""Which requests are admitted next, and where: in fair order, with room for their KV and a seat in a lane. Pure.

A request that fits nowhere when its turn comes is set aside, and is tried again whenever something is released. Those
behind it pass it together, every ``PAUSE`` steps: prompts admitted one by one, as soon as there is room, fill steps
badly, and where requests end often the one set aside has room by then. Once it has waited for ``PATIENCE`` steps, the
room of one memory worker and the seats that it needs are reserved for it, and sequences move away from there if that
helps: it is admitted at the latest when all that ran there by then has ended. Meanwhile others are admitted elsewhere.

Order alone is not fair while all seats are taken for long: every ``SHARE`` steps, a client with more seats gives way to
a waiting one with fewer. No request gives way twice, so that each of them ends however many others come.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lamina.groups import Group
from lamina.placement.map import NOWHERE, Placement
from lamina.placement.prefix_cache import PrefixCache
from lamina.placement.relocation import Relocations
from lamina.schedule.limits import Limits
from lamina.schedule.seats import Seats
from lamina.schedule.waiting import WaitingQueue
from lamina.types import Client

PAUSE = 32  # steps, of all lanes together
PATIENCE = 256
SHARE = 2
MOST_ASIDE = 32  # requests set aside: all are tried again when something is released


@dataclass(frozen=True)
class _Kept:
    """Room on ``workers``, and seats, are reserved for ``group``; room was last sought at step ``since``.

    These are all, if the request is too long for one, else one.
    """

    group: Group
    workers: frozenset[str]
    since: int


class Admissions:
    """Waiting requests; ``deal`` selects those that go to lanes.

    Attributes:
        only: the requests that may be admitted; None: all may.
    """

    def __init__(self, limits: Limits, placement: Placement, relocations: Relocations, prefixes: PrefixCache) -> None:
        self.only: Collection[str] | None = None
        self._max_sequences = limits.max_sequences
        self._rows = limits.max_num_batched_tokens  # of a step, and so the sequences that fit one lane
        self._placement = placement
        self._relocations = relocations
        self._prefixes = prefixes
        self._waiting = WaitingQueue()
        self._aside: dict[Group, int] = {}  # with the step at which each did not fit
        self._kept: _Kept | None = None
        self._passed = 0  # the step at which all that fit had last passed
        self._steps = 0
        self._preferred: Group | None = None  # ahead of all but ``_kept``, since a step
        self._preferred_since = 0
        self._shared = 0  # the step at which seats were last compared
        self._exhausted = False  # no waiting request fits, and nothing has changed since

    def __len__(self) -> int:
        return len(self._waiting) + len(self._aside) + (self._preferred is not None)

    @property
    def due(self) -> bool:
        """True if ``deal`` may find a request."""
        return not self._exhausted and len(self) > 0

    @property
    def full(self) -> bool:
        """True if no waiting request fits, and nothing has been released since that was found."""
        return self._exhausted and len(self) > 0

    def add(self, group: Group) -> None:
        """Queue a request."""
        self._waiting.add(group)
        if self._waiting.first() is group:
            self._exhausted = False

    def put_back(self, group: Group) -> None:
        """Queue a request that was admitted before, ahead of all others."""
        self._aside = {group: self._steps, **self._aside}
        self._kept = None  # room is kept for the first one alone
        self._exhausted = False

    @property
    def may_share(self) -> bool:
        """True if ``share`` is due."""
        return self._steps >= self._shared + SHARE and len(self) > 0 and self.only is None

    def share(self, seats: Seats) -> list[Client]:
        """Prefer the waiting request whose client has fewest seats, if others have more than their share.

        Returns the clients of which one must give up seats for it; none if enough are free, or will be.
        """
        self._shared = self._steps
        if self._preferred is not None and self._steps >= self._preferred_since + PAUSE:
            self._aside = {self._preferred: self._steps, **self._aside}  # its room has been taken meanwhile
            self._preferred = None

        def shares(group: Group) -> tuple[int, ...]:
            return tuple(taken + len(group.completions) for taken in seats.of(group.request.client))

        first = self._preferred or min(itertools.chain(self._aside, self._waiting.firsts()), key=shares)
        wanted = len(first.completions)
        holders = seats.holders(first.request.client, wanted)
        if self._preferred is None and holders and self._placement.fitting(first.to_run, wanted):
            if first in self._aside:
                del self._aside[first]
            else:
                self._waiting.remove(first)
            self._preferred, self._preferred_since = first, self._steps
            self._exhausted = False
        lacks = seats.total - seats.leaving + wanted > self._max_sequences
        return holders if lacks and first is self._preferred else []

    def remove(self, group: Group) -> None:
        """Remove a waiting request."""
        if group is self._preferred:
            self._preferred = None
        elif group in self._aside:
            del self._aside[group]
            self._keep_no_more(group)
        else:
            self._waiting.remove(group)
        self._exhausted = False

    def given_back(self) -> None:
        """Room or seats have been released."""
        self._exhausted = False

    def follow(self) -> None:
        """The places of the placement have changed."""
        self._exhausted = False
        if self._kept is not None and not self._kept.workers <= self._placement.capacities.keys():
            self._kept = None

    def close(self, worker: str) -> None:
        """A memory worker takes no more requests."""
        self._exhausted = False
        if self._kept is not None and not self._kept.workers.isdisjoint(self._placement.touching([worker])):
            self._kept = None

    def step_completed(self) -> None:
        """Advance the time of those set aside by a step."""
        self._steps += 1
        if self._exhausted and self._aside and (self._may_pass or self._is_overdue):
            self._exhausted = False

    @property
    def _may_pass(self) -> bool:
        """True if those behind the first one set aside need not wait for it."""
        return not self._aside or self._steps >= max(next(iter(self._aside.values())), self._passed) + PAUSE

    @property
    def _is_overdue(self) -> bool:
        """True if room is to be sought for the first one set aside, for the first time or again."""
        since = next(iter(self._aside.values())) if self._kept is None else self._kept.since
        return self._steps >= since + PATIENCE

    def deal(self, seats: Seats, may_take: Callable[[int], bool]) -> Iterator[Group]:
        """Requests, in order, with lane and segments set and room reserved.

        The caller counts each one's seats before it takes the next. ``may_take``: whether a lane's next step has room
        for another prompt; if the emptiest lane's has not, all wait.
        """
        if not self.due:
            return
        for group in self._in_turn():
            lane = seats.emptiest
            if not may_take(lane):
                return
            if seats.total >= self._max_sequences:
                break
            spans = self._room_for(group, lane, seats)
            if spans is not None:
                self._leave(group)
                group.lane = lane
                group.place(spans)
                last, _ = spans[-1]
                for completion in group.completions:
                    self._placement.go_on(last, completion.worker)
                self._prefixes.share(group)
                group.seats = group.holders = len(group.completions)
                self._relocations.settle(group)
                yield group
            elif not self._may_be_passed(group):
                break
        self._exhausted = True
        if self._may_pass:
            self._passed = self._steps

    def _in_turn(self) -> Iterator[Group]:
        """The one that room is kept for, the preferred one, those set aside, then the first of the others until the
        caller leaves it there."""
        if self.only is not None:
            yield from [group for group in self._aside if group.request.request_id in self.only]
            return
        kept = None if self._kept is None else self._kept.group
        yield from [group for group in (kept, self._preferred) if group is not None]
        yield from [group for group in self._aside if group is not kept]
        while self._waiting:
            yield self._waiting.first()

    def _room_for(self, group: Group, lane: int, seats: Seats) -> list[tuple[str, int]] | None:
        """Reserve this request's present tokens: how many on which memory workers; None if they, or its seats, do not
        fit."""
        wanted, besides = len(group.completions), NOWHERE
        if self._kept is not None and self._kept.group is not group:
            wanted += len(self._kept.group.completions)
            besides = frozenset(self._placement.touching(self._kept.workers))
        if seats.total + wanted > self._max_sequences or seats.taken[lane] + wanted > self._rows:
            return None
        found = self._prefixes.find(group)
        return self._placement.reserve(group.to_run, len(group.completions), besides, found)

    def _may_be_passed(self, group: Group) -> bool:
        """Set aside a request that does not fit, if it is not yet. False if all behind it must wait."""
        if group is self._preferred:
            return False
        if group not in self._aside:
            if len(self._aside) >= MOST_ASIDE:
                return False
            self._waiting.pop()
            self._aside[group] = self._steps
        if group is next(iter(self._aside)) and self._is_overdue:
            self._keep_room(group)
        return self._may_pass or self._preferred is not None

    def _leave(self, group: Group) -> None:
        if group is self._preferred:
            self._preferred = None
        elif group in self._aside:
            del self._aside[group]
            self._keep_no_more(group)
        else:
            self._waiting.pop()

    def _keep_room(self, group: Group) -> None:
        """Reserve the room of one worker for this request; move sequences away from there if that helps.

        A request that is too long for one worker waits until all together have room.
        """
        if self._placement.splits(group.to_run):
            self._kept = _Kept(group, frozenset(self._placement.capacities), self._steps)
            return
        kept = next(iter(self._kept.workers)) if self._kept is not None and len(self._kept.workers) == 1 else None
        source = self._relocations.start_move(group.to_run, kept)
        worker = kept or source or self._placement.roomiest(min(group.tokens, self._placement.largest))
        self._kept = None if worker is None else _Kept(group, frozenset([worker]), self._steps)

    def _keep_no_more(self, group: Group) -> None:
        if self._kept is not None and self._kept.group is group:
            self._kept = None


def giving(clients: Sequence[Client], running: Iterable[Group]) -> Group | None:
    """Of running requests, the latest one of the first of these clients that may give way; each does so only once."""
    able = [one for one in running if one.alive and not one.gave_way and one.request.client in clients]
    return min(able, key=lambda one: (clients.index(one.request.client), -one.arrival), default=None)
