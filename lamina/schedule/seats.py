"""Number of sequences by lane and by client, the lane with fewest, and the client with most. Pure."""

import heapq
from collections import Counter

from lamina.types import Client


class Seats:
    """Number of sequences of each lane and client. Changes and ``emptiest`` cost O(log lanes)."""

    def __init__(self, lanes: int) -> None:
        self.taken = [0] * lanes
        self.total = 0
        self.leaving = 0  # sequences that have ended, and are still in steps in flight
        self._accounts = Counter[str]()
        self._clients = Counter[Client]()
        self._fewest = [(0, lane) for lane in range(lanes)]  # a heap of (taken, lane); some are out of date

    def change(self, lane: int, sequences: int, client: Client) -> None:
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
    def emptiest(self) -> int:
        """The lane with fewest sequences; of several, the first."""
        while self._fewest[0][0] != self.taken[self._fewest[0][1]]:
            heapq.heappop(self._fewest)
        return self._fewest[0][1]

    def of(self, client: Client) -> tuple[int, int]:
        """Sequences of a client's account, and its own."""
        return self._accounts[client.account], self._clients[client]

    def holders(self, client: Client, wanted: int) -> list[Client]:
        """The clients that should give seats to this one, which wants ``wanted`` more; those with most first.

        Max-min fairness between accounts, and within an account between its connections: another one gives way if it
        has more than this one would have then. So no exchange is undone at once.
        """
        account, own = self.of(client)
        giving = [
            other
            for other, taken in self._clients.items()
            if (
                taken > own + wanted
                if other.account == client.account
                else self._accounts[other.account] > account + wanted
            )
        ]
        return sorted(giving, key=self.of, reverse=True)
