"""Prompts of a lane that are being computed, and how they share a step. Pure."""

import heapq

from lamina.groups import Group

SMALLEST = 64  # tokens: a smaller part of a prompt is not worth its share of a step's fixed costs


class PromptBatch:
    """Requests with tokens of their prompt to run.

    Half of what a step has for prompts is the oldest one's, so that each takes no more than twice as long as if they
    came one after the other; the other half goes to those with fewest tokens left, which are soon done. So a short
    prompt does not wait for long ones, equal ones run one after the other, and a step has no more than two that it does
    not finish: steps do not fill up with small pieces.
    """

    def __init__(self) -> None:
        self._groups: dict[Group, None] = {}  # the oldest first
        self._shortest: list[tuple[int, int, Group]] = []  # a heap of (left, sequence, group); some are out of date

    def add(self, group: Group) -> None:
        """The prompt of a request, or what is left of it, is to be run."""
        self._groups[group] = None
        self._note(group)

    def discard(self, group: Group) -> None:
        """A prompt is not to be run any more; nothing happens if it is not here."""
        self._groups.pop(group, None)

    def clear(self) -> None:
        """No prompt is to be run any more."""
        self._groups.clear()
        self._shortest.clear()

    def share(self, budget: int) -> dict[Group, int]:
        """Tokens of each prompt that the next step runs, ``budget`` at most. Those that it finishes leave."""
        if budget <= 0 or not self._groups:
            return {}
        oldest = next(iter(self._groups))
        pieces = {oldest: min(oldest.prompt_left, (budget + 1) // 2)}
        spare = budget - pieces[oldest]
        while spare and (group := self._pop_shortest()) is not None:
            if spare < min(SMALLEST, group.prompt_left):
                more = min(spare, oldest.prompt_left - pieces[oldest])
                pieces[oldest] += more
                spare -= more
            tokens = min(spare, group.prompt_left - pieces.get(group, 0))
            if tokens:
                pieces[group] = pieces.get(group, 0) + tokens
                spare -= tokens
            elif group not in pieces:
                self._note(group)
        pieces[oldest] += min(spare, oldest.prompt_left - pieces[oldest])
        for group, tokens in pieces.items():
            group.cached += tokens
            if group.prompt_done:
                del self._groups[group]
            else:
                self._note(group)
        return pieces

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
