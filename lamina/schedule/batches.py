"""The sequences of one lane that provide rows of its next step: those that decode, and those with prompts. Pure."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from lamina.core.requests import Completion, Group, Owner, Rank
from lamina.core.segments import holding
from lamina.core.steps import LAST_DRAWN, DecodeRows


class DecodeBatch:
    """The decoding sequences of a lane, and their positions.

    All advance by one token a step, so that a step costs one increment of a counter. The batch visits each sequence
    only after one has joined or left. A sequence leaves by itself in the step that draws its last token.

    A segment is full at its end or, if it has none, after ``longest`` tokens, if given.

    Attributes:
        steps: number of steps of the lane so far, including those without decoding sequences.
        workers: by memory worker: tokens that the next step adds.
    """

    def __init__(self, longest: int | None = None) -> None:
        self.steps = 0
        self._longest = longest
        self.workers: dict[str, int] = {}
        self._owners: dict[int, Owner] = {}
        self._joined: dict[int, int] = {}  # by sequence: its position minus ``steps``, which is constant
        self._leaving: dict[int, list[int]] = {}  # by number of steps: sequences that end then
        self._places: dict[int, str] = {}  # by sequence: the worker that stores its next token
        self._ends: dict[int, int] = {}  # by sequence: number of steps at which its segment is full
        self._full: dict[int, list[int]] = {}  # sequences by the values of ``_ends``; some entries are stale
        self._members: dict[int, Owner] | None = {}  # None: a sequence has joined or left
        self._sequences: list[int] = []
        self._offsets: list[int] = []
        self._changes_at: int | None = None  # the earliest of ``_leaving`` and ``_full``; None: one was added
        self._resumed: set[int] = set()  # sequences resumed since the last step, whose last token is known

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._owners

    @property
    def members(self) -> Mapping[int, Owner]:
        """Owners by sequence, in order of joining. The object stays the same until a sequence joins or leaves."""
        if self._members is None:
            self._members = self._owners.copy()
            self._sequences, self._offsets = list(self._joined), list(self._joined.values())
        return self._members

    def join(self, group: Group, completion: Completion, position: int) -> None:
        """Start to decode a completion, whose next row is at ``position``, if it has a token left to draw."""
        rows = group.prompt_length + group.own_tokens - position
        if rows > 0:
            self._owners[completion.sequence] = group, completion
            self._joined[completion.sequence] = position - self.steps
            self._leaving.setdefault(self.steps + rows, []).append(completion.sequence)
            self._changes_at = None
            self._settle(completion, position, holding(completion.segments, position).tokens[0])
            self._members = None

    def leave(self, sequence: int) -> None:
        """Stop decoding a sequence, if it decodes."""
        if sequence in self._owners:
            group, completion = self._owners.pop(sequence)
            completion.until = self.steps
            completion.own = self._joined.pop(sequence) + self.steps - group.base
            self._unsettle(sequence)
            self._members = None

    def _settle(self, completion: Completion, position: int, first: int) -> None:
        """Record the worker that stores the next tokens of a sequence: the one that holds ``position``. ``longest``
        counts from position ``first``."""
        segment = holding(completion.segments, position)
        self._places[completion.sequence] = segment.worker
        self.workers[segment.worker] = self.workers.get(segment.worker, 0) + 1
        _, stop = segment.tokens
        if stop is None and self._longest is not None:
            stop = first + self._longest
        if stop is not None:
            self.postpone(completion.sequence, max(stop - position, 0))

    def _unsettle(self, sequence: int) -> None:
        worker = self._places.pop(sequence)
        self.workers[worker] -= 1
        if not self.workers[worker]:
            del self.workers[worker]
        self._ends.pop(sequence, None)

    def begin_segment(self, completion: Completion) -> None:
        """Continue a sequence in the segment that holds its position."""
        self._unsettle(completion.sequence)
        position = self.position(completion.sequence)
        self._settle(completion, position, position)  # counts from here, wherever the segment began

    def postpone(self, sequence: int, steps: int) -> None:
        """Let the segment of a sequence grow for ``steps`` more steps."""
        self._ends[sequence] = self.steps + steps
        self._full.setdefault(self.steps + steps, []).append(sequence)
        self._changes_at = None

    def full(self) -> list[Owner]:
        """Return the sequences whose segments are full. The caller calls ``begin_segment`` or ``postpone`` for each."""
        ended = self._full.pop(self.steps, ())
        return [self._owners[one] for one in ended if self._ends.get(one) == self.steps]

    def growing_on(self, worker: str) -> list[Owner]:
        """Return the sequences whose next tokens this worker stores, in the order in which they began to grow there."""
        return [self._owners[sequence] for sequence, place in self._places.items() if place == worker]

    def pause(self, sequence: int) -> int:
        """Stop decoding a sequence for a while. Returns the position at which to resume it."""
        group, _ = self._owners[sequence]
        position = self.position(sequence)
        self._leaving[self.steps + group.prompt_length + group.own_tokens - position].remove(sequence)
        self.leave(sequence)
        return position

    def resume(self, group: Group, completion: Completion, position: int) -> None:
        """Continue to decode a paused completion at this position."""
        self.join(group, completion, position)
        self._resumed.add(completion.sequence)

    def position(self, sequence: int) -> int:
        return self._joined[sequence] + self.steps

    def count_steps(self, steps: int) -> None:
        """Move on by ``steps`` steps of the lane."""
        self.steps += steps

    def remove_ended(self) -> None:
        """Remove sequences whose last token planned steps draw. Call before using ``workers`` or ``rows``."""
        for sequence in self._leaving.pop(self.steps, ()):
            self.leave(sequence)

    @property
    def unchanged_steps(self) -> int:
        """Number of further steps with the same sequences, of which none ends a segment; there must be a sequence."""
        if self._changes_at is None or self._changes_at < self.steps:
            self._changes_at = min(itertools.chain(self._leaving, self._full))
        return self._changes_at - self.steps

    def rows(self, still_drawn: bool) -> DecodeRows:
        """Return the rows of the lane's next step. ``still_drawn``: the previous step is in flight, so that its tokens
        are not known."""
        members, steps = self.members, self.steps
        resumed, self._resumed = self._resumed, set()
        tokens = [
            completion.generated[-1] if not still_drawn or sequence in resumed else LAST_DRAWN
            for sequence, (_, completion) in (members.items() if resumed or not still_drawn else ())
        ]
        return DecodeRows(self._sequences, [offset + steps for offset in self._offsets], tokens)


SMALLEST = 64  # tokens: a smaller chunk is not worth its share of a step's fixed costs

Lead: TypeAlias = Callable[[Mapping[Completion, Group]], tuple[Sequence[Completion], float]]
"""Returns the prompts to run in order, and their share of a step's rows for prompts; at least one of some prompts."""


class PromptBatch:
    """Sequences with tokens left to run before they draw: of a prompt, or tokens whose KV was dropped.

    A part of a step's prompt budget, by default half, goes to the first prompt, so that each prompt takes at most twice
    as long as in order of arrival. The rest goes to the prompts with fewest tokens left. So a short prompt does not
    wait for long ones, prompts of equal length run one after the other, and a step has at most two unfinished prompts.
    """

    def __init__(
        self, first_share: float = 0.5, rank: Callable[[Group], Rank] | None = None, lead: Lead | None = None
    ) -> None:
        """Create a batch without prompts.

        Args:
            first_share: The first prompt's share of the budget.
            rank: The first prompt has the smallest rank; None: it was added first.
            lead: Chooses several prompts and their share instead of the first one and ``first_share``.
        """
        self._first_share = first_share
        self._rank = rank
        self._lead = lead
        self._owners: dict[Completion, Group] = {}  # prompts' owners, in the order in which the prompts run
        self._shortest: list[tuple[int, int, Completion]] = []  # a heap of (left, sequence, ...); some are out of date

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[Completion]:
        return iter(self._owners)

    def add(self, group: Group, completion: Completion) -> None:
        """Run the tokens that a completion has left."""
        self._owners[completion] = group
        if (rank := self._rank) is not None:
            self._owners = dict(sorted(self._owners.items(), key=lambda one: rank(one[1])))
        self._note(completion)

    def discard(self, completion: Completion) -> None:
        """Remove a completion, if it is in the batch."""
        self._owners.pop(completion, None)

    def clear(self) -> None:
        self._owners.clear()
        self._shortest.clear()

    def share(self, budget: int, waits: Callable[[Group, Completion], bool] | None = None) -> dict[Owner, int]:
        """Return the tokens of each sequence in the next step, at most ``budget`` in total, and remove sequences that
        the step finishes. Sequences for which ``waits`` is true do not run in that step."""
        shared: dict[Owner, int] = {}
        for one, tokens in self.split(budget, waits).items():
            one.cached += tokens
            shared[self._owners[one], one] = tokens
            if one.left:
                self._note(one)
            else:
                del self._owners[one]
        return shared

    def lendable(self, budget: int, stays: Callable[[Group, Completion], bool]) -> Owner | None:
        """Return the oldest prompt of which another lane may run the next ``budget`` tokens.

        The last chunk, which draws, and tokens generated before their KV was dropped run in the prompt's own lane, and
        so do all chunks of prompts for which ``stays`` is true.
        """
        for one, group in self._owners.items():
            if group.forked or stays(group, one):
                continue
            tokens = group.chunk(budget)
            if one.left > tokens and one.cached + tokens <= group.prompt_length:
                return group, one
        return None

    def lend(self, one: Completion, tokens: int) -> None:
        """Let another lane run the next ``tokens`` of a completion."""
        one.cached += tokens
        self._note(one)

    def split(self, budget: int, waits: Callable[[Group, Completion], bool] | None = None) -> dict[Completion, int]:
        """Return the result of ``share`` by completion, without changing anything."""
        owners: Mapping[Completion, Group] = self._owners
        if waits is not None:
            owners = {one: group for one, group in owners.items() if not waits(group, one)}
        if budget <= 0 or not owners:
            return {}
        leaders, share = self._lead(owners) if self._lead else ([next(iter(owners))], self._first_share)
        shares, reserved = dict[Completion, int](), math.ceil(budget * share)
        for leader in leaders:
            shares[leader] = min(self._most(leader, budget), reserved)
            reserved -= shares[leader]
        first, spare = leaders[0], budget - sum(shares.values())
        smallest, shortest = min(SMALLEST, budget // 2), self._shortest.copy()
        while spare and (one := self._pop_shortest(shortest)) is not None:
            if one not in owners:
                continue
            if spare < min(smallest, one.left):
                more = min(spare, self._most(first, budget) - shares[first])
                shares[first] += more
                spare -= more
            tokens = min(spare, self._most(one, budget) - shares.get(one, 0))
            if tokens:
                shares[one] = shares.get(one, 0) + tokens
                spare -= tokens
        shares[first] += min(spare, self._most(first, budget) - shares[first])
        return {one: tokens for one, tokens in shares.items() if tokens}

    def _most(self, one: Completion, budget: int) -> int:
        return min(one.left, self._owners[one].chunk(budget))

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
