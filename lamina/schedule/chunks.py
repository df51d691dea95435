"""How the prompts of a lane share a step, and other tokens that are known before they run. Pure."""

import heapq

from lamina.groups import Completion, Group, Owner

SMALLEST = 64  # tokens: a smaller chunk is not worth its share of a step's fixed costs


class PromptBatch:
    """Sequences with tokens of a prompt left to run, or with tokens whose KV was dropped.

    Half of a step's prompt budget is the oldest prompt's, so that each takes at most twice as long as in order of
    arrival; the other half goes to those with fewest tokens left. So a short prompt does not wait for long ones, equal
    ones run one after the other, and a step has at most two prompts that it does not finish: steps do not fill up with
    small chunks.
    """

    def __init__(self) -> None:
        self._owners: dict[Completion, Group] = {}  # the oldest first
        self._shortest: list[tuple[int, int, Completion]] = []  # a heap of (left, sequence, ...); some are out of date

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, group: Group, completion: Completion) -> None:
        """Run the tokens that a completion has left."""
        self._owners[completion] = group
        self._note(completion)

    def discard(self, completion: Completion) -> None:
        """Do not run this completion's tokens any more. Does nothing if it is not here."""
        self._owners.pop(completion, None)

    def clear(self) -> None:
        """Remove all."""
        self._owners.clear()
        self._shortest.clear()

    def share(self, budget: int) -> dict[Owner, int]:
        """Tokens of each in the next step, ``budget`` in total at most. Removes those that it finishes."""
        shared: dict[Owner, int] = {}
        for one, tokens in self.split(budget).items():
            one.cached += tokens
            shared[self._owners[one], one] = tokens
            if one.left:
                self._note(one)
            else:
                del self._owners[one]
        return shared

    def split(self, budget: int) -> dict[Completion, int]:
        """What ``share`` would give each. Changes nothing."""
        if budget <= 0 or not self._owners:
            return {}
        oldest = next(iter(self._owners))
        shares = {oldest: min(oldest.left, (budget + 1) // 2)}
        spare = budget - shares[oldest]
        smallest, shortest = min(SMALLEST, budget // 2), self._shortest.copy()
        while spare and (one := self._pop_shortest(shortest)) is not None:
            if spare < min(smallest, one.left):
                more = min(spare, oldest.left - shares[oldest])
                shares[oldest] += more
                spare -= more
            tokens = min(spare, one.left - shares.get(one, 0))
            if tokens:
                shares[one] = shares.get(one, 0) + tokens
                spare -= tokens
        shares[oldest] += min(spare, oldest.left - shares[oldest])
        return shares

    def _note(self, completion: Completion) -> None:
        heapq.heappush(self._shortest, (completion.left, completion.sequence, completion))
        if len(self._shortest) > 4 * len(self._owners) + SMALLEST:
            self._shortest = [(each.left, each.sequence, each) for each in self._owners]
            heapq.heapify(self._shortest)

    def _pop_shortest(self, shortest: list[tuple[int, int, Completion]]) -> Completion | None:
        while shortest:
            left, _, one = heapq.heappop(shortest)
            if one in self._owners and left == one.left:
                return one
        return None
