"""Decides which waiting requests are admitted next, to which lane and memory workers, in fair order. Pure.

A request needs slots for its KV, and a seat in a lane for each of its sequences. A request that fits nowhere when its
turn comes is skipped, and tried again whenever slots or seats are freed. Requests behind it may be admitted before it
only every ``PAUSE`` steps, together: prompts admitted one by one fill steps badly, and where requests end often, the
skipped request fits by then. Once the first skipped request has waited for ``PATIENCE`` steps, the slots of one memory
worker and the seats that it needs are reserved for it, so it is admitted at the latest when all requests that ran on
that worker have ended. Meanwhile, other requests are admitted on other workers.

Order alone is not fair while all seats are taken for long. So every ``SHARE`` steps, a request of a client with more
seats may be preempted for a waiting client with fewer. No request is preempted twice for this, so each of them ends.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lamina.core.pipeline import LaneRole
from lamina.core.requests import Group, Rank
from lamina.core.types import Client
from lamina.kv.placement import AHEAD, LEAST_SEGMENT, Placement
from lamina.kv.prefix_cache import PrefixCache
from lamina.schedule.lane import Residents
from lamina.schedule.lane_times import LaneTimes
from lamina.schedule.limits import Limits
from lamina.schedule.policy import Policy, RankedQueue, WaitingQueue, rank_of
from lamina.schedule.short_prompts import Load

PAUSE = 32  # steps of all lanes together
PATIENCE = 256  # steps of all lanes together
SHARE = 2  # steps of all lanes together
ROUNDS = 8  # segments of a divided prompt on each replica
MOST_SHORT = 32  # requests of which some may run in lanes that decode, while lanes for prompts have no room
MOST_SKIPPED = 32  # requests; all of them are tried again when slots or seats are freed


@dataclass(frozen=True)
class _Reservation:
    """Slots and seats reserved for the first skipped request.

    Attributes:
        workers: Memory workers whose slots are reserved: one, or all if the request is too long for one.
        since: Step at which the workers were chosen.
    """

    workers: frozenset[str]
    since: int


@dataclass(frozen=True)
class _Preference:
    """A skipped request that precedes all others but the one with a reservation, from step ``since`` on."""

    group: Group
    since: int


class Seats:
    """Counts the sequences of each lane and of each client."""

    def __init__(self, lanes: int, role: Callable[[int], LaneRole] = lambda _: "both") -> None:
        """``role``: Returns whether a lane runs prompts, decodes, or both."""
        self.taken = [0] * lanes
        self._decoding = [lane for lane in range(lanes) if role(lane) == "decode"] or list(range(lanes))
        self._prompts = [lane for lane in range(lanes) if role(lane) != "decode"] or list(range(lanes))
        self.total = 0
        self.leaving = 0  # ended sequences that steps in flight still run
        self._accounts = Counter[str]()
        self._clients = Counter[Client]()

    def note_ended(self) -> None:
        """Record that a sequence has ended. Its seat is freed later: steps in flight may still run it."""
        self.leaving += 1

    def free_ended(self, lane: int, client: Client) -> None:
        """Free the seat of an ended sequence that no step in flight runs."""
        self.leaving -= 1
        self.add_sequences(lane, -1, client)

    def add_sequences(self, lane: int, sequences: int, client: Client) -> None:
        """Add ``sequences`` sequences of ``client`` to ``lane``; negative: remove them."""
        self.taken[lane] += sequences
        self.total += sequences
        self._accounts[client.account] += sequences
        self._clients[client] += sequences
        if not self._clients[client]:
            del self._clients[client]
            if not self._accounts[client.account]:
                del self._accounts[client.account]

    def lanes(self, decode: bool) -> Sequence[int]:
        """Return the lanes that decode, or those that run prompts."""
        return self._decoding if decode else self._prompts

    @property
    def emptiest_to_decode(self) -> int:
        """The first of the decoding lanes with the fewest sequences."""
        return min(self._decoding, key=self.taken.__getitem__)

    @property
    def emptiest(self) -> int:
        """The first of the lanes that run prompts with the fewest sequences."""
        return min(self._prompts, key=self.taken.__getitem__)

    def count_of_client(self, client: Client) -> tuple[int, int]:
        """Return the number of sequences of the client's account, and of the client."""
        return self._accounts[client.account], self._clients[client]

    def holders(self, client: Client, wanted: int) -> list[Client]:
        """Return the clients that should give seats to ``client``, which wants ``wanted`` more; most seats first.

        Max-min fairness between accounts, and between the connections of an account: a client gives up seats if it has
        more than ``client`` would have with ``wanted`` more. So no exchange is undone at once.
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
    """Waiting requests; ``deal`` yields those that are admitted.

    A waiting request is either in ``_queue``, in fair order, or in ``_skipped``, in the order of the next attempts:
    requests that did not fit, were preempted or are preferred. Only ``_skip`` moves a request from ``_queue`` to
    ``_skipped``. A reservation or a preference of a skipped request ends when the request leaves ``_skipped``.
    """

    def __init__(
        self,
        limits: Limits,
        placement: Placement,
        residents: Residents,
        prefixes: PrefixCache,
        policy: Policy,
        times: LaneTimes,
    ) -> None:
        self._only: Collection[str] | None = None  # the requests that may be admitted; None: all may
        self._max_sequences = limits.max_sequences
        self._rows = limits.max_num_batched_tokens  # rows of a step, which bound the sequences of one lane
        self._placement = placement
        self._residents = residents
        self._prefixes = prefixes
        self._policy = policy
        self._times = times
        self._queue = WaitingQueue() if policy.fair else RankedQueue(policy)
        self._skipped: dict[Group, int] = {}  # with the step at which each was skipped
        self._reserved: _Reservation | None = None  # reservation for the first skipped request
        self._preferred: _Preference | None = None
        self._passed = 0  # the last step at which requests passed skipped ones
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
        """Move requests that have become late behind all others. Arguments are those of ``RankedQueue.expire``."""
        self._queue.expire(now, token_s)

    def put_back(self, group: Group) -> None:
        """Queue a preempted request ahead of all others."""
        self._reserved = None  # it was for the request that was first before
        self._skipped = {group: self._steps, **self._skipped}
        self._exhausted = False

    @property
    def may_share(self) -> bool:
        due = self._steps >= self._shared + SHARE and len(self) > 0 and self._only is None
        return due and self._policy.fair

    def share(self, seats: Seats) -> list[Client]:
        """Prefer the waiting request whose client has fewest seats, if others have more than their share.

        Returns the clients one of which must give up seats; empty if enough seats are free or will be.
        """
        self._shared = self._steps
        if self._preferred is not None and self._steps >= self._preferred.since + PAUSE:
            self._preferred = None  # other requests have taken its slots meanwhile
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
        """Admit only requests with the ids ``only`` from now on; None: all."""
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
        """Drop a reservation on a memory worker to which the placement admits no more requests."""
        self._exhausted = False
        if self._reserved is not None and not self._reserved.workers.isdisjoint(self._placement.places_on(worker)):
            self._reserved = None

    def steps_completed(self, steps: int) -> None:
        """Count completed steps, in which skipped requests have waited."""
        self._steps += steps
        if self._exhausted and self._skipped and (self._may_pass or self._is_overdue):
            self._exhausted = False

    @property
    def _first(self) -> Group | None:
        return next(iter(self._skipped), None)

    @property
    def _may_pass(self) -> bool:
        """Whether requests may be admitted before the first skipped request."""
        return not self._skipped or self._steps >= max(next(iter(self._skipped.values())), self._passed) + PAUSE

    @property
    def _is_overdue(self) -> bool:
        """Whether slots must be reserved for the first skipped request, or the reservation reconsidered."""
        since = next(iter(self._skipped.values())) if self._reserved is None else self._reserved.since
        return self._steps >= since + PATIENCE

    def upcoming(self, most: int) -> list[Group]:
        """Return the waiting requests in order, at most ``most`` besides the skipped ones: the request with a
        reservation first, as nothing else may use its slots. The policy is not fair."""
        ahead = None if self._reserved is None else self._first
        waiting = [*self._skipped, *self._queue.upcoming(most)]
        return sorted(waiting, key=lambda one: (one is not ahead, self._rank(one)))

    @property
    def is_restricted(self) -> bool:
        """True if only some requests may be admitted."""
        return self._only is not None

    def deal(
        self,
        seats: Seats,
        may_take: Callable[[int], bool],
        homes: Mapping[Group, int | None] | None = None,
        load: Load | None = None,
    ) -> Iterator[Group]:
        """Yield the requests to admit, in order, with lane and segments set and slots reserved.

        The caller adds a request's seats before it asks for the next request.

        Args:
            may_take: Whether the next step of a lane has room for another prompt. If no lane to try has room, all
                requests wait.
            homes: The requests to admit, in order, and their lanes, in which they may wait for room in a step. None:
                all in turn, in the lanes with the fewest sequences. A request whose lane is None runs in one of those.
            load: Selects requests whose prompts run in lanes that decode, if other lanes only run prompts.
        """
        if not self.due:
            return
        for group in self._in_turn() if homes is None else homes:
            home = None if homes is None else homes[group]
            if load is not None and self._runs_beside_decoding(group, seats, load):
                yield group
                continue
            lanes = self._lanes_for(group, seats) if home is None else [home]
            able = [lane for lane in lanes if homes is not None or may_take(lane)]
            if not able:
                if load is not None:
                    yield from self._short_ones(group, seats, load)
                return
            if seats.total >= self._max_sequences:
                break
            lane, spans = self._find_room(group, able, seats)
            if spans is None and able != lanes:
                return
            if spans is not None:
                self._admit(group, lane, spans)
                yield group
            elif not self._skip_and_pass(group):
                break
        tried = len(self) if homes is None else sum(group in self._skipped for group in homes)
        self._exhausted = tried == len(self) or seats.total >= self._max_sequences
        if self._may_pass:
            self._passed = self._steps

    def _admit(self, group: Group, lane: int, spans: Sequence[tuple[str, int]]) -> None:
        """Admit a waiting request to a lane, in the slots that were reserved for it."""
        if not self._unskip(group):
            self._queue.pop(group)
        group.lane = lane
        group.place(spans)
        last, _ = spans[-1]
        for completion in group.completions:
            self._placement.continue_on(last, completion.worker)
        self._prefixes.share(group)
        group.seats = group.holders = len(group.completions)
        self._residents.update(group)

    def _short_ones(self, first: Group, seats: Seats, load: Load) -> Iterator[Group]:
        """Yield requests to admit to lanes that decode, of those behind ``first``, which waits until a lane for prompts
        has room in a step. They pass skipped requests as rarely as in other lanes."""
        if self._only is not None or self._preferred is not None or not self._may_pass:
            return
        for group in self._queue.upcoming(MOST_SHORT) if load.has_room else ():
            if group is not first and self._runs_beside_decoding(group, seats, load):
                yield group
                self._passed = self._steps

    def _runs_beside_decoding(self, group: Group, seats: Seats, load: Load) -> bool:
        """Admit a request to a lane that decodes, if ``load`` selects one for its prompt and there is room."""
        if not load.has_room:
            return False
        lane = load.lane_for(group, self._prefixes.find(group))
        spans = None
        if lane is not None:
            spans = self._room_for(group, lane, self._placement.others(lane), seats)
        if lane is None or spans is None:
            load.pass_over(group)
            return False
        group.stays, group.replicas = self._placement.in_one_lane, 1
        self._admit(group, lane, spans)
        return True

    def _lanes_for(self, group: Group, seats: Seats) -> list[int]:
        """Return the lanes to try for a request: the emptiest, or the emptiest of each replica with its own memory.

        If a replica has a prefix of the request cached, that on which the request is expected to end first precedes the
        others: the replica with the prefix saves its computation, but may have more to do.
        """
        lanes = seats.lanes(decode=group.searches)  # beams share all their steps
        emptiest = seats.emptiest_to_decode if group.searches else seats.emptiest
        others = self._placement.others
        if not others(emptiest):
            return [emptiest]
        expected_s = self._expected_s(group, lanes, seats)

        def order(lane: int) -> tuple[float, int, int, int]:
            elsewhere = others(lane)
            held = self._held(self._placement.local - elsewhere)
            taken = seats.taken[lane] or (1 if held else 0)
            return expected_s.get(elsewhere, 0.0), taken, held, lane

        by_replica = {others(lane): lane for lane in sorted(lanes, key=order, reverse=True)}
        return sorted(by_replica.values(), key=order)

    def _expected_s(self, group: Group, lanes: Sequence[int], seats: Seats) -> dict[frozenset[str], float]:
        """Return the seconds that a request is expected to take on each replica, by the workers of the others; nothing
        if no replica has a prefix of it."""
        expected = dict[frozenset[str], float]()
        found = self._prefixes.find(group)
        for elsewhere in {self._placement.others(lane) for lane in lanes} if found else ():
            own = [lane for lane in lanes if self._placement.others(lane) == elsewhere]
            cached = max((one.length for worker, one in found.items() if worker not in elsewhere), default=0)
            taken = sum(seats.taken[lane] for lane in own)
            expected[elsewhere] = self._times.seconds(own, group.to_run - cached, taken)
        return expected

    def _in_turn(self) -> Iterator[Group]:
        """Yield each waiting request once: the request with a reservation, the preferred request, then the rest.

        The rest are skipped requests, then the queue's head as long as the caller admits or skips it. A policy that is
        not fair orders both by rank instead.
        """
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

    def _find_room(self, group: Group, lanes: Sequence[int], seats: Seats) -> tuple[int, list[tuple[str, int]] | None]:
        """Reserve slots for a request in one of ``lanes``, the first that has room. Return the lane, and the workers
        with the tokens on each; None if there is no room.

        Local memory of other replicas is used only for a request that finds no room without, or is divided. A prompt
        that is too long for one replica runs on all replicas that hold its KV.
        """
        placement = self._placement
        if (spans := self._divide(group, lanes, seats)) is not None:
            return lanes[0], spans
        splits = placement.splits(group.to_run)
        divides = splits and placement.may_divide
        longest = max(LEAST_SEGMENT, group.to_run // (ROUNDS * len(placement.capacities))) if divides else None
        near = not (placement.lends and splits)
        tries = [placement.others] * near + [placement.beyond] * placement.lends
        for besides in tries:
            for lane in lanes:
                if (spans := self._room_for(group, lane, besides(lane), seats, longest)) is not None:
                    stays = placement.in_one_lane and not divides
                    several = 0 if stays else self._running({worker for worker, _ in spans}, seats)
                    group.stays, group.replicas = stays, max(1, several)
                    return lane, spans
        return -1, None

    def _running(self, workers: Collection[str], seats: Seats) -> int:
        """Return how many replicas run prompts and have some of ``workers`` as local memory; all that only run prompts
        count as one, since they hold no KV."""
        placement = self._placement
        near = {placement.local - placement.others(lane) for lane in seats.lanes(decode=False)}
        return sum(not one.isdisjoint(workers) for one in near)

    def _held(self, workers: Iterable[str]) -> int:
        return sum(self._placement.reserved[worker] for worker in workers)

    def _divide(self, group: Group, lanes: Sequence[int], seats: Seats) -> list[tuple[str, int]] | None:
        """Reserve slots for a long prompt on half of the replicas with local memory that have no KV, or on as many as
        it needs, which all run its chunks. Return None for a short prompt, or if fewer than two such replicas have
        room: the others are left to the requests that come next."""
        placement, tokens, wanted = self._placement, group.to_run, AHEAD * len(group.completions)
        if not placement.may_divide or tokens <= self._rows or self._prefixes.find(group):
            return None
        own = [*dict.fromkeys(placement.local - placement.others(lane) for lane in lanes)]
        idle = [one for one in own if placement.closed.isdisjoint(one) and not self._held(one)]
        rooms = itertools.accumulate(sum(map(placement.room, one)) for one in idle)
        count = max(sum(room < tokens + wanted for room in rooms) + 1, -(-len(idle) // 2))
        if not 1 < count <= len(idle) or idle[0] != own[0] or tokens < count * LEAST_SEGMENT:
            return None
        group.stays, group.replicas = False, count
        besides = frozenset(placement.capacities).difference(*idle[:count])
        return self._room_for(group, lanes[0], besides, seats, max(LEAST_SEGMENT, tokens // (ROUNDS * count)))

    def _room_for(
        self, group: Group, lane: int, besides: frozenset[str], seats: Seats, longest: int | None = None
    ) -> list[tuple[str, int]] | None:
        """Reserve slots for a request's present tokens, on workers that are not in ``besides``.

        ``longest``: Most tokens of a segment of a request that is to be divided; None: it is divided if it must be.

        Returns:
            Memory workers and the tokens on each; None if tokens or seats do not fit.
        """
        wanted = len(group.completions)
        if self._reserved is not None and self._first is not None and group is not self._first:
            wanted += len(self._first.completions)
            besides = besides.union(self._placement.touching(self._reserved.workers))
        if seats.total + wanted > self._max_sequences or seats.taken[lane] + wanted > self._rows:
            return None
        found = self._prefixes.find(group)
        return self._placement.reserve(group.to_run, len(group.completions), besides, found, longest)

    def _skip_and_pass(self, group: Group) -> bool:
        """Skip a request that does not fit. Returns False if all requests behind it must wait."""
        if group not in self._skipped:
            if len(self._skipped) >= MOST_SKIPPED:
                return False
            self._skip(group)
        if group is self._first and self._is_overdue:
            self._reserve_room(group)
        if self._preferred is not None:
            return group is not self._preferred.group
        return self._may_pass

    def _skip(self, group: Group) -> None:
        self._queue.pop(group)
        self._skipped[group] = self._steps

    def _unskip(self, group: Group) -> bool:
        """Remove a request from the skipped ones, with its reservation and preference. False if it is not skipped."""
        if group not in self._skipped:
            return False
        if group is self._first:
            self._reserved = None
        if self._preferred is not None and self._preferred.group is group:
            self._preferred = None
        del self._skipped[group]
        return True

    def _reserve_room(self, group: Group) -> None:
        """Reserve the slots of one worker for the first skipped request, or of all if it is too long for one."""
        if self._placement.splits(group.to_run):
            self._reserved = _Reservation(frozenset(self._placement.capacities), self._steps)
            return
        workers = [] if self._reserved is None else [*self._reserved.workers]
        kept = workers[0] if len(workers) == 1 else None
        worker = kept or self._placement.roomiest(min(group.tokens, self._placement.largest))
        self._reserved = None if worker is None else _Reservation(frozenset([worker]), self._steps)


def request_to_preempt(clients: Sequence[Client], running: Iterable[Group]) -> Group | None:
    """Return the running request that gives up its seats: the latest of the first of ``clients`` that has any.

    A request gives up its seats only once.
    """
    able = [one for one in running if one.alive and not one.gave_way and one.request.client in clients]
    return min(able, key=lambda one: (clients.index(one.request.client), -one.arrival), default=None)
