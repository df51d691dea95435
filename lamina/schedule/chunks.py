"""How the prompts of a lane share a step. Pure."""

import heapq

from lamina.groups import Group

SMALLEST = 64  # tokens: a smaller chunk is not worth its share of a step's fixed costs


class PromptBatch:
    """Requests with prompt tokens left to run.

    Half of a step's prompt budget is the oldest prompt's, so that each takes at most twice as long as in order of
    arrival; the other half goes to those with fewest tokens left. So a short prompt does not wait for long ones, equal
    ones run one after the other, and a step has at most two prompts that it does not finish: steps do not fill up with
    small chunks.
    """

    def __init__(self) -> None:
        self._groups: dict[Group, None] = {}  # the oldest first
        self._shortest: list[tuple[int, int, Group]] = []  # a heap of (left, sequence, group); some are out of date

    def add(self, group: Group) -> None:
        """Run the prompt of a request, or what is left of it."""
        self._groups[group] = None
        self._note(group)

    def discard(self, group: Group) -> None:
        """Do not run this prompt any more. Does nothing if it is not here."""
        self._groups.pop(group, None)

    def clear(self) -> None:
        """Remove all prompts."""
        self._groups.clear()
        self._shortest.clear()

    def share(self, budget: int) -> dict[Group, int]:
        """Tokens of each prompt in the next step, ``budget`` in total at most. Removes prompts that it finishes."""
        if budget <= 0 or not self._groups:
            return {}
        oldest = next(iter(self._groups))
        shares = {oldest: min(oldest.prompt_left, (budget + 1) // 2)}
        spare = budget - shares[oldest]
        while spare and (group := self._pop_shortest()) is not None:
            if spare < min(SMALLEST, group.prompt_left):
                more = min(spare, oldest.prompt_left - shares[oldest])
                shares[oldest] += more
                spare -= more
            tokens = min(spare, group.prompt_left - shares.get(group, 0))
            if tokens:
                shares[group] = shares.get(group, 0) + tokens
                spare -= tokens
            elif group not in shares:
                self._note(group)
        shares[oldest] += min(spare, oldest.prompt_left - shares[oldest])
        for group, tokens in shares.items():
            group.cached += tokens
            if group.prompt_done:
                del self._groups[group]
            else:
                self._note(group)
        return shares

    def _note(self, group: Group) -> None:
        heapq.heappush(self._shortest, self._entry(group))
        if len(self._shortest) > 4 * len(self._groups) + SMALLEST:
            self._shortest = [self._entry(each) for each in self._groups]
            heapq.heapify(self._shortest)

    @staticmethod
    def _entry(group: Group) -> tuple[int, int, Group]:
        return group.prompt_left, group.completions[0].sequence, group

    def _pop_shortest(self) -> Group | None:
        while self._shortest:
            left, _, group = heapq.heappop(self._shortest)
            if group in self._groups and left == group.prompt_left:
                return group
        return None
