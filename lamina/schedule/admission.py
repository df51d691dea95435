"""Which requests are admitted next, and where: in fair order, with room for their KV and a seat in a lane. Pure.

A request that fits nowhere when its turn comes is skipped, and is tried again whenever something is released. Those
behind it pass it together, every ``PAUSE`` steps: prompts admitted one by one, as soon as there is room, fill steps
badly, and where requests end often the skipped one has room by then. Once the first skipped request has waited for
``PATIENCE`` steps, the room of one memory worker and the seats that it needs are reserved for it: it is admitted at the
latest when all that ran there by then has ended. Meanwhile others are admitted elsewhere.

Order alone is not fair while all seats are taken for long: every ``SHARE`` steps, a client with more seats gives way to
a waiting one with fewer. No request gives way twice, so that each of them ends however many others come.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lamina.core.pipeline import LaneRole
from lamina.core.requests import Group
from lamina.core.types import Client
from lamina.kv.placement import NOWHERE, Placement
from lamina.kv.prefix_cache import PrefixCache
from lamina.schedule.lane import Residents
from lamina.schedule.limits import Limits
from lamina.schedule.policy import Policy, Rank, RankedQueue, WaitingQueue, rank_of

PAUSE = 32  # steps, of all lanes together
PATIENCE = 256
SHARE = 2
MOST_SKIPPED = 32  # requests: all are tried again when something is released


@dataclass(frozen=True)
class _Reservation:
    """Room and seats that only the first skipped request gets.

    Attributes:
        workers: the memory workers with this room: one, or all if the request is too long for one.
        since: the step at which room was last sought.
    """

    workers: frozenset[str]
    since: int


@dataclass(frozen=True)
class _Preference:
    """A skipped request that goes before all others but the one with a reservation, since step ``since``."""

    group: Group
    since: int


class Seats:
    """Number of sequences of each lane and client."""

    def __init__(self, lanes: int, role: Callable[[int], LaneRole] = lambda _: "both") -> None:
        """``role``: what a lane runs."""
        self.taken = [0] * lanes
        self._decoding = [lane for lane in range(lanes) if role(lane) == "decode"] or list(range(lanes))
        self._prompts = [lane for lane in range(lanes) if role(lane) != "decode"] or list(range(lanes))
        self.total = 0
        self.leaving = 0  # sequences that have ended, and are still in steps in flight
        self._accounts = Counter[str]()
        self._clients = Counter[Client]()

    def note_ended(self) -> None:
        """Record that a sequence has ended, which steps in flight may still run: its seat is leaving."""
        self.leaving += 1

    def free_ended(self, lane: int, client: Client) -> None:
        """Free the seat of a sequence that has ended, and that no step in flight runs."""
        self.leaving -= 1
        self.add_sequences(lane, -1, client)

    def add_sequences(self, lane: int, sequences: int, client: Client) -> None:
        """``client`` has ``sequences`` more in ``lane`` than before, or fewer if negative."""
        self.taken[lane] += sequences
        self.total += sequences
        self._accounts[client.account] += sequences
        self._clients[client] += sequences
        if not self._clients[client]:
            del self._clients[client]
            if not self._accounts[client.account]:
                del self._accounts[client.account]

    @property
    def emptiest_to_decode(self) -> int:
        """The lane with fewest sequences of those that decode; of several, the first."""
        return min(self._decoding, key=self.taken.__getitem__)

    @property
    def emptiest(self) -> int:
        """The lane with fewest sequences of those that run prompts; of several, the first."""
        return min(self._prompts, key=self.taken.__getitem__)

    def count_of_client(self, client: Client) -> tuple[int, int]:
        """Sequences of a client's account, and its own."""
        return self._accounts[client.account], self._clients[client]

    def holders(self, client: Client, wanted: int) -> list[Client]:
        """Return the clients that should give seats to this one, which wants ``wanted`` more; those with most first.

        Max-min fairness between accounts, and within an account between its connections: another one gives way if it
        has more than this one would have then. So no exchange is undone at once.
        """
        account, own = self.count_of_client(client)
        giving = [
            other
            for other, taken in self._clients.items()
            if (
                taken > own + wanted
                if other.account == client.account
                else self._accounts[other.account] > account + wanted
            )
        ]
        return sorted(giving, key=self.count_of_client, reverse=True)


class Admissions:
    """Waiting requests; ``deal`` selects those that go to lanes.

    A waiting request is either in ``_queue``, in fair order, or in ``_skipped``, in the order in which all are tried
    again: requests that did not fit, were preempted or are preferred. Only ``_skip`` moves one from the former to the
    latter. A reservation or a preference says more of a skipped request, and ends when that leaves ``_skipped``.
    """

    def __init__(
        self, limits: Limits, placement: Placement, residents: Residents, prefixes: PrefixCache, policy: Policy
    ) -> None:
        self._only: Collection[str] | None = None  # the requests that may be admitted; None: all may
        self._max_sequences = limits.max_sequences
        self._rows = limits.max_num_batched_tokens  # of a step, and so the sequences that fit one lane
        self._placement = placement
        self._residents = residents
        self._prefixes = prefixes
        self._policy = policy
        self._queue = WaitingQueue() if policy.fair else RankedQueue(policy)
        self._skipped: dict[Group, int] = {}  # with the step since which each is there
        self._reserved: _Reservation | None = None  # for the first skipped request
        self._preferred: _Preference | None = None
        self._passed = 0  # the step at which all that fit had last passed
        self._steps = 0
        self._shared = 0  # the step at which seats were last compared
        self._exhausted = False  # no waiting request fits, and nothing has changed since

    def __len__(self) -> int:
        return len(self._queue) + len(self._skipped)

    @property
    def due(self) -> bool:
        return not self._exhausted and len(self) > 0

    @property
    def full(self) -> bool:
        """True if no waiting request fits, and nothing has been released since that was found."""
        return self._exhausted and len(self) > 0

    def enqueue(self, group: Group) -> None:
        self._queue.enqueue(group)
        if self._queue.first() is group:
            self._exhausted = False

    def expire(self, now: float, token_s: float) -> None:
        """Let requests become late. Arguments are those of ``Policy.start_by``."""
        self._queue.expire(now, token_s)

    def put_back(self, group: Group) -> None:
        """Let a request that was admitted before wait again, ahead of all others."""
        self._reserved = None  # another request was the first
        self._skipped = {group: self._steps, **self._skipped}
        self._exhausted = False

    @property
    def may_share(self) -> bool:
        due = self._steps >= self._shared + SHARE and len(self) > 0 and self._only is None
        return due and self._policy.fair

    def share(self, seats: Seats) -> list[Client]:
        """Prefer the waiting request whose client has fewest seats, if others have more than their share.

        Returns the clients of which one must give up seats for it; none if enough are free, or will be.
        """
        self._shared = self._steps
        if self._preferred is not None and self._steps >= self._preferred.since + PAUSE:
            self._preferred = None  # its room has been taken meanwhile
            self._exhausted = False

        def shares(group: Group) -> tuple[int, ...]:
            return tuple(taken + len(group.completions) for taken in seats.count_of_client(group.request.client))

        if self._preferred is not None:
            neediest = self._preferred.group
        else:
            neediest = min(itertools.chain(self._skipped, self._queue.firsts()), key=shares)
        wanted = len(neediest.completions)
        holders = seats.holders(neediest.request.client, wanted)
        if self._preferred is None and holders and self._placement.fitting(neediest.to_run, wanted):
            if neediest not in self._skipped:
                self._skip(neediest)
            self._preferred = _Preference(neediest, self._steps)
            self._exhausted = False
        lacks = seats.total - seats.leaving + wanted > self._max_sequences
        return holders if lacks and self._preferred is not None else []

    def remove(self, group: Group) -> None:
        if not self._unskip(group):
            self._queue.remove(group)
        self._exhausted = False

    def restrict(self, only: Collection[str] | None) -> None:
        """Admit only the requests with these ids from now on, wherever they wait; None: all."""
        self._only = only
        self._exhausted = False

    def note_freed(self) -> None:
        """Record that slots or seats have been freed."""
        self._exhausted = False

    def on_places_changed(self) -> None:
        self._exhausted = False
        if self._reserved is not None and not self._reserved.workers <= self._placement.capacities.keys():
            self._reserved = None

    def close(self, worker: str) -> None:
        """Admit no more requests to a memory worker."""
        self._exhausted = False
        if self._reserved is not None and not self._reserved.workers.isdisjoint(self._placement.touching([worker])):
            self._reserved = None

    def step_completed(self) -> None:
        """Advance the time of skipped requests by a step."""
        self._steps += 1
        if self._exhausted and self._skipped and (self._may_pass or self._is_overdue):
            self._exhausted = False

    @property
    def _first(self) -> Group | None:
        return next(iter(self._skipped), None)

    @property
    def _may_pass(self) -> bool:
        """True if those behind the first skipped request need not wait for it."""
        return not self._skipped or self._steps >= max(next(iter(self._skipped.values())), self._passed) + PAUSE

    @property
    def _is_overdue(self) -> bool:
        """True if room is to be sought for the first skipped request, for the first time or again."""
        since = next(iter(self._skipped.values())) if self._reserved is None else self._reserved.since
        return self._steps >= since + PATIENCE

    def deal(self, seats: Seats, may_take: Callable[[int], bool]) -> Iterator[Group]:
        """Requests, in order, with lane and segments set and room reserved.

        The caller counts each one's seats before it takes the next. ``may_take``: whether a lane's next step has room
        for another prompt; if the emptiest lane's has not, all wait.
        """
        if not self.due:
            return
        for group in self._in_turn():
            lane = seats.emptiest_to_decode if group.searches else seats.emptiest  # beams share all their steps
            if not may_take(lane):
                return
            if seats.total >= self._max_sequences:
                break
            spans = self._room_for(group, lane, seats)
            if spans is not None:
                if not self._unskip(group):
                    self._queue.pop(group)
                group.lane = lane
                group.place(spans)
                last, _ = spans[-1]
                for completion in group.completions:
                    self._placement.go_on(last, completion.worker)
                self._prefixes.share(group)
                group.seats = group.holders = len(group.completions)
                self._residents.update(group)
                yield group
            elif not self._may_be_passed(group):
                break
        self._exhausted = True
        if self._may_pass:
            self._passed = self._steps

    def _in_turn(self) -> Iterator[Group]:
        """Yield each waiting request once: the one with a reservation, the preferred one, then the other skipped ones
        and the head of the queue, as long as the caller admits or skips it. Skipped ones precede the queue, unless a
        policy ranks both."""
        if self._only is not None:
            yield from [one for one in (*self._skipped, *self._queue) if one.request.request_id in self._only]
            return
        ahead = [] if self._reserved is None else [*self._skipped][:1]
        ahead += [] if self._preferred is None else [self._preferred.group]
        if self._policy.fair:
            ahead += self._skipped
        yield from dict.fromkeys(ahead)
        skipped = [] if self._policy.fair else sorted(self._skipped.keys() - set(ahead), key=self._rank)
        for group in skipped:
            while self._queue and self._rank(self._queue.first()) < self._rank(group):
                yield self._queue.first()
            yield group
        while self._queue:
            yield self._queue.first()

    def _rank(self, group: Group) -> Rank:
        return rank_of(self._policy, group)

    def _room_for(self, group: Group, lane: int, seats: Seats) -> list[tuple[str, int]] | None:
        """Reserve this request's present tokens: how many on which memory workers; None if they, or its seats, do not
        fit."""
        wanted, besides = len(group.completions), NOWHERE
        if self._reserved is not None and self._first is not None and group is not self._first:
            wanted += len(self._first.completions)
            besides = frozenset(self._placement.touching(self._reserved.workers))
        if seats.total + wanted > self._max_sequences or seats.taken[lane] + wanted > self._rows:
            return None
        found = self._prefixes.find(group)
        return self._placement.reserve(group.to_run, len(group.completions), besides, found)

    def _may_be_passed(self, group: Group) -> bool:
        """Skip a request that does not fit, if it is not yet. False if all behind it must wait."""
        if group not in self._skipped:
            if len(self._skipped) >= MOST_SKIPPED:
                return False
            self._skip(group)
        if group is self._first and self._is_overdue:
            self._keep_room(group)
        if self._preferred is not None:
            return group is not self._preferred.group
        return self._may_pass

    def _skip(self, group: Group) -> None:
        """Move a request from the queue to the end of the skipped ones."""
        self._queue.pop(group)
        self._skipped[group] = self._steps

    def _unskip(self, group: Group) -> bool:
        """Remove a skipped request, its reservation and its preference. False if it is not a skipped one."""
        if group not in self._skipped:
            return False
        if group is self._first:
            self._reserved = None
        if self._preferred is not None and self._preferred.group is group:
            self._preferred = None
        del self._skipped[group]
        return True

    def _keep_room(self, group: Group) -> None:
        """Reserve the room of one worker for the first skipped request.

        A request that is too long for one worker waits until all together have room.
        """
        if self._placement.splits(group.to_run):
            self._reserved = _Reservation(frozenset(self._placement.capacities), self._steps)
            return
        workers = [] if self._reserved is None else [*self._reserved.workers]
        kept = workers[0] if len(workers) == 1 else None
        worker = kept or self._placement.roomiest(min(group.tokens, self._placement.largest))
        self._reserved = None if worker is None else _Reservation(frozenset([worker]), self._steps)


def giving(clients: Sequence[Client], running: Iterable[Group]) -> Group | None:
    """Return the running request that gives up its seats: the latest of the first of ``clients`` that has one. A
    request gives up its seats only once."""
    able = [one for one in running if one.alive and not one.gave_way and one.request.client in clients]
    return min(able, key=lambda one: (clients.index(one.request.client), -one.arrival), default=None)
