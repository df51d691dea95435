"""The queue of requests that wait for admission, fair to clients. Pure."""

import heapq
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from lamina.core.errors import OverloadedError
from lamina.core.pipeline import LaneRole
from lamina.core.requests import Group
from lamina.core.types import Client
from lamina.schedule.policy import Policy, Rank, rank_of


class Seats:
    """Number of sequences of each lane and client. Changes and ``emptiest`` cost O(log lanes)."""

    def __init__(self, lanes: int, role: Callable[[int], LaneRole] = lambda _: "both") -> None:
        """``role``: what a lane runs."""
        self.taken = [0] * lanes
        self._decodes = [role(lane) == "decode" for lane in range(lanes)]
        self._apart = any(self._decodes)
        self.total = 0
        self.leaving = 0  # sequences that have ended, and are still in steps in flight
        self._accounts = Counter[str]()
        self._clients = Counter[Client]()
        self._fewest = [(0, lane) for lane in range(lanes)]  # a heap of (taken, lane); some are out of date

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
        heapq.heappush(self._fewest, (self.taken[lane], lane))
        if len(self._fewest) > 4 * len(self.taken):
            self._fewest = [(taken, lane) for lane, taken in enumerate(self.taken)]
            heapq.heapify(self._fewest)

    @property
    def emptiest_to_decode(self) -> int:
        """The lane with fewest sequences of those that decode; of several, the first."""
        if not self._apart:
            return self.emptiest
        return min((lane for lane, decodes in enumerate(self._decodes) if decodes), key=self.taken.__getitem__)

    @property
    def emptiest(self) -> int:
        """The lane with fewest sequences of those that run prompts; of several, the first."""
        if self._apart:
            return min((lane for lane, decodes in enumerate(self._decodes) if not decodes), key=self.taken.__getitem__)
        while self._fewest[0][0] != self.taken[self._fewest[0][1]]:
            heapq.heappop(self._fewest)
        return self._fewest[0][1]

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


MAX_WAITING = 16384  # requests of one client that wait


class _Line:
    """The requests of one connection, in order of arrival."""

    def __init__(self) -> None:
        self._groups = OrderedDict[Group, None]()  # finds its first key in constant time, unlike dict

    def __len__(self) -> int:
        return len(self._groups)

    def enqueue(self, group: Group) -> None:
        self._groups[group] = None

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def first(self) -> Group:
        return next(iter(self._groups))

    def remove(self, group: Group) -> None:
        del self._groups[group]

    pop = remove

    def firsts(self) -> Iterator[Group]:
        if self._groups:
            yield self.first()


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
        """Queue a request behind those of its connection."""
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
        """Return the line served next. Drops lines before it that have no requests."""
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
        """Remove a request that is served, and charge its client for it. Costs O(clients) if it is not the first."""
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
        """Remove a request that is not served."""
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
        """Queue a request."""
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
        """Remove a request that is served."""
        del self._keys[group]

    remove = pop


class Places:
    """Bounds how many requests of each client an engine holds.

    A client may hold as many places as are still free (the dynamic thresholds of Choudhury and Hahne, IEEE/ACM
    Transactions on Networking 1998). So a single client gets half of all places, and others always find some.
    """

    def __init__(self, most: int) -> None:
        """``most``: places that a single client may hold."""
        self._free = 2 * most
        self._clients: dict[str, Client] = {}  # by request
        self._taken: dict[Client, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._clients

    def __len__(self) -> int:
        return len(self._clients)

    def reserve_place(self, request_id: str, client: Client, again: bool = False) -> None:
        """Take a place for a request. Raises OverloadedError, with the figures, if its client already holds its share.

        ``again``: the request had a place before the engine was restarted, and gets it whatever the share is now.
        """
        taken = self._taken.get(client, 0)
        if taken >= self._free and not again:
            raise OverloadedError(
                f"{len(self)} requests are in the engine, {taken} of them from this client, which may have at most as "
                f"many as there are free places: {self._free}; try again later"
            )
        self._clients[request_id] = client
        self._taken[client] = taken + 1
        self._free -= 1

    def free_place(self, request_id: str) -> None:
        """Free the place of a request, if it holds one."""
        client = self._clients.pop(request_id, None)
        if client is not None:
            self._free += 1
            self._taken[client] -= 1
            if not self._taken[client]:
                del self._taken[client]
