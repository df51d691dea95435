"""The lane of each request: seats in lanes and how requests are dealt to them; which lanes to plan for. Pure."""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

from lamina.core.pipeline import LaneRole
from lamina.core.requests import Group
from lamina.core.types import Client
from lamina.schedule.lane import Lane


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


def deal_again(lanes: Sequence[Lane], seats: Seats, may_run: Callable[[Group], bool]) -> None:
    """Deal all requests out to the lanes of ``seats``, which are empty: those with most sequences first. No step is in
    flight. Those that may not run keep their KV."""
    groups = sorted((group for own in lanes for group in own.running), key=lambda group: -len(group.completions))
    dealt = {group for own in lanes for group in own.dealt}
    ending = [owner for own in lanes for owner in own.ending]
    prompts_run = {group for own in lanes for group in own.prompts_run}
    for own in lanes:
        own.clear()
    for group in groups:
        decodes = group.searches or group.forked
        group.lane, group.until = seats.emptiest_to_decode if decodes else seats.emptiest, 0
        seats.add_sequences(group.lane, group.seats, group.request.client)
        own = lanes[group.lane]
        own.take_over(group, group in dealt, not may_run(group))
        if group in prompts_run:
            own.prompts_run.append(group)
    for owner in ending:  # a request's lane releases the sequence that it may still fork from
        lanes[owner[0].lane].ending.append(owner)


class Readiness:
    """Every lane is in one of these states: it may have something to plan, it has as many steps in flight as the driver
    allows, or it had nothing to plan last time and rests."""

    def __init__(self, lanes: int) -> None:
        """All may have something to plan."""
        self._lanes = lanes
        self._changed = set(range(lanes))
        self._ahead = set[int]()
        self._resting = set[int]()

    def extend(self, lanes: int) -> None:
        """There are ``lanes`` now; the new ones rest."""
        self._resting.update(range(self._lanes, lanes))
        self._lanes = max(self._lanes, lanes)

    def wake(self) -> None:
        """Any lane may have something to plan, unless enough of its steps are in flight."""
        self._changed |= self._resting
        self._resting.clear()

    def restart(self) -> None:
        """Any lane may have something to plan: none has a step in flight."""
        self._changed, self._ahead, self._resting = set(range(self._lanes)), set(), set()

    def note_change(self, lane: int) -> None:
        """This lane may have something to plan."""
        self._changed.add(lane)
        self._resting.discard(lane)

    def note_completed(self, lane: int) -> None:
        """A step of this lane is not in flight any more."""
        self._ahead.discard(lane)
        self.note_change(lane)

    def note_ahead(self, lane: int) -> None:
        """Note that this lane has as many steps in flight as allowed."""
        self._ahead.add(lane)
        self._changed.discard(lane)
        self._resting.discard(lane)

    def note_nothing(self, lane: int) -> None:
        """This lane had nothing to plan."""
        self._changed.discard(lane)
        self._resting.add(lane)

    def candidates(self, moving: bool, dealing: bool) -> set[int]:
        """Return the lanes to plan for. ``moving``: all requests are about to be dealt out again; ``dealing``: some
        wait."""
        if moving:
            return set(range(self._lanes)) - self._ahead
        if dealing and self._resting:  # the first lane planned deals to all of them
            return self._changed | {min(self._resting)}
        return self._changed
