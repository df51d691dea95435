"""Policies: in which order requests are admitted, preempted and computed, and the queues of waiting requests. Pure.

A policy of another package is found by its entry point in the group ``lamina.policies``: a callable that takes
``Targets`` and returns a ``Policy``.
"""

import heapq
import importlib.metadata
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from lamina.core.errors import ConfigError
from lamina.core.requests import Group

Rank: TypeAlias = tuple[float, ...]

ENTRY_POINTS = "lamina.policies"
QUEUEING = 2.0  # times as long as alone: how long a prompt is expected to take beside others


@dataclass(frozen=True)
class Targets:
    """What users of a server expect.

    Attributes:
        ttft_s: Target for the time to the first token; None: none is given.
    """

    ttft_s: float | None = None


class Policy(Protocol):
    """The order of requests. A smaller rank goes first; ranks of a request never change.

    Whenever a memory worker runs out of slots, the request with the largest rank there is preempted, and the one with
    the smallest keeps its KV. So the running request with the smallest rank always progresses.

    Attributes:
        fair: True: clients take turns, and ranks order the requests of each connection. False: ranks order the requests
            of all clients together, and no request gives up its seat to another client.
        first_share: Part of a step's rows for prompts that the running prompt with the smallest rank gets. The prompts
            with fewest tokens left share the rest.
    """

    fair: bool
    first_share: float

    def rank(self, group: Group) -> Rank:
        """Return the rank of a request. Requests with equal ranks go in order of arrival."""

    def start_by(self, group: Group, now: float, token_s: float) -> float:
        """Return the time after which a request that still waits goes behind all that are not late.

        Args:
            group: A request that has just arrived.
            now: Seconds of the clock that ``Turn.plan`` is given.
            token_s: Seconds that a prompt's token has taken lately; 0 if no prompt has run.
        """


def rank_of(policy: Policy, group: Group) -> Rank:
    """Return the rank of a request, which no other has."""
    return (*policy.rank(group), group.arrival)


class Fifo:
    """Order of arrival, fair between clients."""

    fair = True
    first_share = 0.5

    def rank(self, group: Group) -> Rank:
        return ()

    def start_by(self, group: Group, now: float, token_s: float) -> float:
        return math.inf


class Shortest(Fifo):
    """Shortest prompt first. A long prompt waits as long as shorter ones arrive faster than they are computed."""

    fair = False
    first_share = 0.0

    def rank(self, group: Group) -> Rank:
        return (group.prompt_length,)


class Priority(Fifo):
    """Smallest ``SamplingParams.priority`` first. A request waits as long as requests before it fill the server."""

    fair = False
    first_share = 1.0

    def rank(self, group: Group) -> Rank:
        return (group.request.params.priority,)


class Slo(Fifo):
    """Earliest deadline first, among requests that can still have their first token in time; late ones go last.

    Once more requests wait than can be served in time, order of arrival serves each of them too late. Here, those that
    are late already make way for those that are not, and wait as long as requests in time fill the server.
    """

    fair = False

    def __init__(self, ttft_s: float) -> None:
        """``ttft_s``: Target for the time to the first token, in seconds."""
        self._ttft_s = ttft_s

    def start_by(self, group: Group, now: float, token_s: float) -> float:
        return now + self._ttft_s - QUEUEING * group.prompt_length * token_s


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
}


def find_policy(name: str, slo_ttft_ms: int | None = None) -> Policy:
    """Return the policy called ``name``: Lamina's own, or an entry point's. Raises ConfigError for an unknown name."""
    targets = Targets(None if slo_ttft_ms is None else slo_ttft_ms / 1e3)
    if name in POLICIES:
        return POLICIES[name](targets)
    others = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in others:
        known = ", ".join([*POLICIES, *sorted(others)])
        raise ConfigError(f"policy is {name!r}; give one of {known}, or install a package with that {ENTRY_POINTS}")
    made: Policy = others[name].load()(targets)
    return made


class _Line(OrderedDict[Group, None]):
    """The requests of one connection, in order of arrival. Finds its first key in constant time, unlike a dict."""

    def enqueue(self, group: Group) -> None:
        self[group] = None

    def first(self) -> Group:
        return next(iter(self))

    def firsts(self) -> Iterator[Group]:
        yield from itertools.islice(self, 1)

    def remove(self, group: Group) -> None:
        del self[group]


class WaitingQueue:
    """Requests in the order of admission: fair between accounts, within an account fair between its connections, within
    a connection in order of arrival.

    A change costs O(log clients), whatever the number of requests. A client without requests keeps its tag until the
    others have caught up, so that leaving and returning gains nothing. Tags are dropped when the queue is empty.
    """

    def __init__(self, level: int = 0) -> None:
        """``level``: the field of ``Client`` that distinguishes the clients of this queue."""
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
        """Do nothing: no request becomes late."""

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
        self._shorten()

    def remove(self, group: Group) -> None:
        self._lines[group.request.client[self._level]].remove(group)
        self._shorten()

    def _shorten(self) -> None:
        self._length -= 1
        if not self._length:
            self._lines.clear()
            self._order.clear()


class RankedQueue:
    """Requests of all clients, ordered by a policy; those that are late go behind all others."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._keys: dict[Group, Rank] = {}
        self._order: list[tuple[Rank, int, Group]] = []  # a heap; entries with another key than ``_keys`` are stale
        self._deadlines: list[tuple[float, int, Group]] = []  # a heap, of requests that may become late
        self._arrived: list[Group] = []  # since the time was last told
        self._entries = itertools.count()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Group]:
        return iter(sorted(self._keys, key=self._keys.__getitem__))

    def enqueue(self, group: Group) -> None:
        self._arrived.append(group)
        self._put(group, late=False)

    def _put(self, group: Group, late: bool) -> None:
        self._keys[group] = (late, *rank_of(self._policy, group))
        heapq.heappush(self._order, (self._keys[group], next(self._entries), group))

    def expire(self, now: float, token_s: float) -> None:
        """Let requests become late. Arguments are those of ``Policy.start_by``."""
        for group in self._arrived:
            if group in self._keys and (start_by := self._policy.start_by(group, now, token_s)) < math.inf:
                heapq.heappush(self._deadlines, (start_by, next(self._entries), group))
        self._arrived.clear()
        while self._deadlines and self._deadlines[0][0] < now:
            *_, group = heapq.heappop(self._deadlines)
            if group in self._keys:
                self._put(group, late=True)

    def first(self) -> Group:
        """Return the request to admit next. The queue must not be empty."""
        while self._keys.get(self._order[0][2]) != self._order[0][0]:
            heapq.heappop(self._order)
        return self._order[0][2]

    def firsts(self) -> Iterator[Group]:
        """Yield the request to admit next, if there is one."""
        if self._keys:
            yield self.first()

    def pop(self, group: Group) -> None:
        del self._keys[group]

    remove = pop
