"""Scheduling policies, which order requests, and the queues of waiting requests. Pure.

A policy of another package is found by its entry point in the group ``lamina.policies``: a callable that takes
``Targets`` and returns a ``Policy``.
"""

import heapq
import importlib.metadata
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lamina.core.errors import ConfigError
from lamina.core.requests import Group, Rank
from lamina.core.steps import StepPlan
from lamina.schedule.loongserve import FourSteps, LaneLoad, Spread

ENTRY_POINTS = "lamina.policies"
QUEUEING = 2.0  # expected time of a prompt in a loaded engine, as a multiple of its time alone
HASTE = 1.25  # share of the rows that prompts with deadlines get, as a multiple of what they are predicted to need


@dataclass(frozen=True)
class Targets:
    """Latency targets; None for no target.

    Attributes:
        ttft_s: Seconds to the first token.
        tbt_s: Seconds between tokens. ``lamina.schedule.pace`` keeps it with every policy.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None


class LanePolicy(Protocol):
    """Decides which lanes run which prompts. It learns from the steps of one scheduler."""

    @property
    def memory_bound_rows(self) -> int:
        """Most sequences that decode in one lane before requests from other lanes stay where their prompts ran."""

    def note_step(self, plan: StepPlan, rows: int, busy_s: float, waited_s: float) -> None:
        """Learn from a completed step. Arguments are those of ``StepDone``."""

    def note_output(self, tokens: int) -> None:
        """Record that a completion has ended after ``tokens`` tokens."""

    def deal(self, waiting: Sequence[int], lanes: Sequence[LaneLoad], now: float) -> Sequence[Spread]:
        """Return where the first of the waiting requests run; the others wait on. If nothing runs, one must run.

        Args:
            waiting: Prompt tokens of the next requests, in order.
            lanes: The lanes that may run prompts.
            now: Current time in seconds, of the clock that ``Turn.plan`` uses.
        """

    def worth(self, lane: LaneLoad, allocated: frozenset[int], left: int, degree: int) -> int:
        """Return whether a lane should run a chunk of another lane's prompt; 0: no. The greatest value goes first.

        Args:
            lane: The lane.
            allocated: ``Group.allocated`` of the prompt.
            left: Tokens left of the prompt.
            degree: Lanes that run the prompt.
        """


class Policy(Protocol):
    """The order of requests. A smaller rank goes first; ranks of a request never change.

    When a memory worker runs out of slots, the request with the largest rank there is preempted. So the running request
    with the smallest rank always keeps its KV and progresses.

    Attributes:
        fair: If True, clients take turns, and ranks order the requests of each connection. If False, ranks order the
            requests of all clients together, and no request is preempted in favour of another client.
        first_share: Part of a step's rows for prompts that the running prompt with the smallest rank gets. The prompts
            with fewest tokens left share the rest. Where prompts have deadlines, these decide about the part instead,
            see ``keep_deadlines``.
    """

    fair: bool
    first_share: float

    def rank(self, group: Group) -> Rank:
        """Return the rank of a request. Requests with equal ranks go in order of arrival."""

    def due_s(self, group: Group) -> float:
        """Return the seconds from the arrival of a request to the deadline of its first token; inf: it has none.

        A request that waits when its prompt can hardly be computed in time any more goes behind all others.
        """

    def lane_policy(self, rows: int, attentions: int) -> LanePolicy | None:
        """Return what decides which lanes run which prompts. None: each request runs in the emptiest lane, once
        its next step has room, and lanes without requests run the next chunk of any prompt. A fair policy returns None.

        Args:
            rows: Rows of a step.
            attentions: Attentions of the model.
        """


def keep_deadlines(prompts: Sequence[tuple[float, float]]) -> tuple[list[int], float]:
    """Return the prompts that the shortest prompt must not delay, the earliest deadline first, and their share of the
    time: the least with which they meet their deadlines, one after the other.

    They are those with earlier deadlines than the shortest prompt, or all in time if it is late. As many prompts as
    possible are in time if the longest is left out, and late, whenever those with the earliest deadlines need more time
    than is left (Moore and Hodgson).

    Args:
        prompts: Seconds that each takes alone, and seconds that are left until its deadline.
    """
    kept, needed_s = list[int](), 0.0
    for place in sorted(range(len(prompts)), key=lambda one: prompts[one][1]):
        kept.append(place)
        needed_s += prompts[place][0]
        if needed_s > prompts[place][1]:
            longest = max(kept, key=lambda one: prompts[one][0])
            kept.remove(longest)
            needed_s -= prompts[longest][0]
    shortest = min(range(len(prompts)), key=lambda one: prompts[one][0])
    ahead = kept[: kept.index(shortest)] if shortest in kept else kept
    sums = itertools.accumulate(prompts[place][0] for place in ahead)
    return ahead, max((each / prompts[place][1] for each, place in zip(sums, ahead, strict=True)), default=0.0)


def rank_of(policy: Policy, group: Group) -> Rank:
    """Return the rank of a request, made unique by its order of arrival."""
    return (*policy.rank(group), group.arrival)


class Fifo:
    """Order of arrival, fair between clients."""

    fair = True
    first_share = 0.5

    def rank(self, group: Group) -> Rank:
        return ()

    def due_s(self, group: Group) -> float:
        return math.inf

    def lane_policy(self, rows: int, attentions: int) -> LanePolicy | None:
        return None


class Shortest(Fifo):
    """Shortest prompt first. Long prompts starve while shorter ones arrive faster than they are computed."""

    fair = False
    first_share = 0.0

    def rank(self, group: Group) -> Rank:
        return (group.prompt_length,)


class Priority(Fifo):
    """Smallest ``SamplingParams.priority`` first. A request starves while requests of smaller value fill the server."""

    fair = False
    first_share = 1.0

    def rank(self, group: Group) -> Rank:
        return (group.request.params.priority,)


class Slo(Fifo):
    """Earliest deadline first, among requests that can still have their first token in time; late ones go last.

    Under overload, order of arrival would serve every request too late. With this policy, requests that are late
    already let the others go first, and starve while requests that are in time fill the server. Of the rows of a step,
    prompts get as many in this order as their deadlines need, and the shortest prompts get the rest: a short prompt
    overtakes the chunks of a long one that still has time.

    Tokens have deadlines too: each is due ``Targets.tbt_s`` after the one before it. Sequences that decode are in every
    step of their lane, so that their slack is the target less the time of a step without prompts, and ``Pace`` bounds
    the chunks beside them by it, with every policy.
    """

    fair = False

    def __init__(self, ttft_s: float) -> None:
        """``ttft_s``: Target for the time to the first token, in seconds."""
        self._ttft_s = ttft_s

    def due_s(self, group: Group) -> float:
        return self._ttft_s


class LoongServe(Fifo):
    """Order of arrival, of all clients together. Measured times decide when prompts run, and in which lanes."""

    fair = False

    def lane_policy(self, rows: int, attentions: int) -> LanePolicy:
        return FourSteps(rows, attentions)


FIFO = Fifo()


def _slo(targets: Targets) -> Policy:
    if targets.ttft_s is None:
        raise ConfigError("policy slo orders requests by their deadlines: give slo_ttft_ms")
    return Slo(targets.ttft_s)


POLICIES: Mapping[str, Callable[[Targets], Policy]] = {
    "fifo": lambda _: Fifo(),
    "shortest": lambda _: Shortest(),
    "priority": lambda _: Priority(),
    "slo": _slo,
    "loongserve": lambda _: LoongServe(),
}


def find_policy(name: str, slo_ttft_ms: int | None = None, slo_tbt_ms: int | None = None) -> Policy:
    """Return the policy called ``name``: Lamina's own, or an entry point's.

    Raises ConfigError for an unknown name, and for an entry point that cannot be loaded or returns no ``Policy``.
    """
    targets = Targets(*(None if each is None else each / 1e3 for each in (slo_ttft_ms, slo_tbt_ms)))
    if name in POLICIES:
        return POLICIES[name](targets)
    others = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in others:
        known = ", ".join([*POLICIES, *sorted(others)])
        raise ConfigError(f"policy is {name!r}; give one of {known}, or install a package with that {ENTRY_POINTS}")
    return _made_by(others[name], targets)


def _made_by(point: importlib.metadata.EntryPoint, targets: Targets) -> Policy:
    try:
        made: Policy = point.load()(targets)
    except Exception as error:  # of another package
        raise ConfigError(
            f"policy {point.name!r} ({point.value}) fails: {type(error).__name__}: {error}; repair its package, or "
            "give another policy"
        ) from error
    if missing := [name for name in ("fair", "first_share", "rank", "due_s", "lane_policy") if not hasattr(made, name)]:
        raise ConfigError(
            f"policy {point.name!r} ({point.value}) returns {type(made).__name__}, which lacks {', '.join(missing)}; "
            "see lamina.schedule.policy.Policy"
        )
    return made


class _Line(OrderedDict[Group, None]):
    """The requests of one connection, in order of arrival. Unlike a dict, it finds its first key in constant time."""

    def enqueue(self, group: Group) -> None:
        self[group] = None

    def first(self) -> Group:
        return next(iter(self))

    def firsts(self) -> Iterator[Group]:
        yield from itertools.islice(self, 1)

    def remove(self, group: Group) -> None:
        del self[group]


class WaitingQueue:
    """Waiting requests by start-time fair queueing: fair between accounts, between the connections of an account, and
    in order of arrival within a connection.

    A client's tag grows by the tokens of each admitted request; the client with the smallest tag is next. To pop the
    next request costs O(log clients), whatever the number of requests. A client without requests keeps its tag
    until the others have caught up, so that leaving and returning gains nothing. Tags are dropped when the queue is
    empty.
    """

    def __init__(self, level: int = 0) -> None:
        """``level``: Index of the field of ``Client`` by which this queue distinguishes clients."""
        self._level = level
        self._lines: dict[str, WaitingQueue | _Line] = {}
        self._order: list[tuple[int, int, str]] = []  # a heap of (tag, joined, name), one per line
        self._now = 0  # the tag of the client served last
        self._joined = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Group]:
        return itertools.chain.from_iterable(self._lines.values())

    def expire(self, now: float, token_s: float) -> None:
        """Do nothing: requests of this queue are never late."""

    def enqueue(self, group: Group) -> None:
        name = group.request.client[self._level]
        line = self._lines.get(name)
        if line is None:
            last = self._level + 1 == len(group.request.client)
            line = self._lines[name] = _Line() if last else WaitingQueue(self._level + 1)
            self._joined += 1
            heapq.heappush(self._order, (self._now, self._joined, name))
        line.enqueue(group)
        self._length += 1

    def _next(self) -> "WaitingQueue | _Line":
        while not (line := self._lines[self._order[0][2]]):
            self._now, _, name = heapq.heappop(self._order)
            del self._lines[name]
        return line

    def first(self) -> Group:
        """Return the request to admit next. The queue must not be empty."""
        return self._next().first()

    def firsts(self) -> Iterator[Group]:
        """Yield the next request of every connection."""
        for line in self._lines.values():
            yield from line.firsts()

    def upcoming(self, most: int) -> list[Group]:
        """Return some waiting requests, at most ``most``: the next of every connection, then those behind them."""
        return list(
            itertools.islice(dict.fromkeys(itertools.islice(itertools.chain(self.firsts(), self), 2 * most)), most)
        )

    def pop(self, group: Group) -> None:
        name = group.request.client[self._level]
        self._lines[name].pop(group)
        place = next(place for place, (_, _, one) in enumerate(self._order) if one == name)
        tag, joined, _ = self._order[place]
        charged = tag + group.tokens, joined, name
        if place == 0:
            self._now = tag
            heapq.heapreplace(self._order, charged)
        else:
            self._order[place] = charged
            heapq.heapify(self._order)
        self._decrement_length()

    def remove(self, group: Group) -> None:
        self._lines[group.request.client[self._level]].remove(group)
        self._decrement_length()

    def _decrement_length(self) -> None:
        self._length -= 1
        if not self._length:
            self._lines.clear()
            self._order.clear()


class RankedQueue:
    """Waiting requests of all clients in the order of a policy; late requests go behind all others."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._keys: dict[Group, Rank] = {}
        self._order: list[tuple[Rank, int, Group]] = []  # a heap; entries with another key than ``_keys`` are stale
        self._deadlines: list[tuple[float, int, Group]] = []  # a heap, of requests that may become late
        self._arrived: list[Group] = []  # since the last ``expire``
        self._entries = itertools.count()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Group]:
        return iter(sorted(self._keys, key=self._keys.__getitem__))

    def enqueue(self, group: Group) -> None:
        self._arrived.append(group)
        self._push(group, late=False)

    def _push(self, group: Group, late: bool) -> None:
        self._keys[group] = (late, *rank_of(self._policy, group))
        heapq.heappush(self._order, (self._keys[group], next(self._entries), group))

    def expire(self, now: float, token_s: float) -> None:
        """Move requests that have become late behind all others.

        Args:
            now: Current time in seconds, of the clock that ``Turn.plan`` uses.
            token_s: Recent time per prompt token, in seconds; 0 if no prompt has run.
        """
        for group in self._arrived:
            if group in self._keys and (due_s := self._policy.due_s(group)) < math.inf:
                start_by = now + due_s - QUEUEING * group.prompt_length * token_s
                heapq.heappush(self._deadlines, (start_by, next(self._entries), group))
        self._arrived.clear()
        while self._deadlines and self._deadlines[0][0] < now:
            *_, group = heapq.heappop(self._deadlines)
            if group in self._keys:
                self._push(group, late=True)

    def first(self) -> Group:
        """Return the request to admit next. The queue must not be empty."""
        while self._keys.get(self._order[0][2]) != self._order[0][0]:
            heapq.heappop(self._order)
        return self._order[0][2]

    def upcoming(self, most: int) -> list[Group]:
        """Return the requests to admit next, in order, at most ``most``."""
        found, entries = dict[Group, None](), []
        while len(found) < min(most, len(self)):
            found[self.first()] = None
            entries.append(heapq.heappop(self._order))
        for entry in entries:
            heapq.heappush(self._order, entry)
        return [*found]

    def firsts(self) -> Iterator[Group]:
        """Yield the request to admit next, if there is one."""
        if self._keys:
            yield self.first()

    def pop(self, group: Group) -> None:
        del self._keys[group]

    remove = pop
