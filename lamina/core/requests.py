"""A request in the scheduler, with its completions."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lamina.core.segments import by_worker, continued, forked
from lamina.core.steps import Admission
from lamina.core.types import Request, Segment

Ids: TypeAlias = "array[int]"  # token ids, of typecode "i": slices are compared as fast as memory is read


Drawn: TypeAlias = Mapping[int, list[int]]
"""The tokens that completions have drawn, by index, without those completions that have ended."""


def ids_of(tokens: Iterable[int]) -> Ids:
    """Token ids as the prefix cache compares them."""
    return array("i", tokens)


@dataclass(eq=False, slots=True)
class Completion:
    """One sequence and the tokens it has drawn.

    Attributes:
        known: how many of the generated tokens were drawn before its KV was dropped: they run again, like a prompt.
        cached, goal: of the tokens that run before it draws, those in planned steps, and all of them. The prompt is
            the first completion's; the others begin behind it when they are forked.
        own: KV tokens reserved for it alone, besides the prompt; while it decodes, those when it began.
        segments: where its KV is and will be, the prompt's included, by ascending token. Set at admission. Their
            workers are places (``lamina.kv.placement``), with all heads.
        drawn: how many of the generated tokens it had when it ended; its list may be another's to add to since.
        until: number of the last step of its lane that runs it; set when it stops decoding.
        retired: handed over for release.
        released: a plan has released its KV.
        answered: of a beam search: its last token has run, and its continuations are known, but not chosen from.
    """

    sequence: int
    index: int
    generated: list[int] = field(default_factory=list)
    known: int = 0
    cached: int = 0
    goal: int = 0
    own: int = 0
    segments: list[Segment] = field(default_factory=list)
    drawn: int | None = None
    finished: bool = False
    retired: bool = False
    released: bool = False
    until: int = 0
    answered: bool = False

    @property
    def left(self) -> int:
        """Tokens not in any planned step that must run before it draws."""
        return self.goal - self.cached

    @property
    def worker(self) -> str:
        """The memory worker that takes its next tokens."""
        return self.segments[-1].worker


@dataclass(eq=False, slots=True)
class Group:
    """A request with its completions: all of them, or those that go on after its KV was dropped.

    Attributes:
        arrival: counts the requests; the same after its KV was dropped.
        prompt_length: tokens of the prompt, which the completions share.
        own_tokens: most KV tokens of one completion without the prompt; the last token drawn is never kept.
        tokens: most KV tokens of the request.
        lane: -1 while it waits.
        heads: of its segments.
        expand: makes segments on memory workers of those on places.
        hit: tokens that it shares with a cached prefix since it was admitted, and so does not compute.
        unshared: tokens of the prompt for which slots are reserved for this request, not for those who share a prefix.
        cached_tokens: tokens of the prompt that were found in the prefix cache when the request was first admitted.
        suspect: its KV must not be kept for others.
        until: number of the last step of its lane that runs a chunk of it.
        lent: steps in flight of other lanes that run a chunk of it.
        forked: its prompt has run, and all of its completions share it.
        seats: completions that steps run or may run.
        holders: completions with KV reserved.
        gave_way: it has been dropped once for a client with fewer seats.
        searches: its completions are beams.
        choice: of a beam search: by completion, the place of the one that it continues, and the token, which the next
            plan of its lane runs. ``generated`` has it once that is planned.
    """

    request: Request
    max_tokens: int
    completions: list[Completion]
    arrival: int = 0
    lane: int = -1
    heads: tuple[int, int] = (0, 0)
    expand: Callable[[Iterable[Segment]], list[Segment]] = list
    until: int = 0
    lent: int = 0
    forked: bool = False
    seats: int = 0
    holders: int = 0
    hit: int = 0
    unshared: int = field(init=False)
    cached_tokens: int | None = None
    suspect: bool = False
    ids: "Ids | None" = None
    gave_way: bool = False
    choice: list[tuple[int, int]] | None = None
    prompt_length: int = field(init=False)
    own_tokens: int = field(init=False)
    tokens: int = field(init=False)
    searches: bool = field(init=False)

    def __post_init__(self) -> None:
        self.searches = self.request.params.use_beam_search
        self.prompt_length = len(self.request.prompt_token_ids)
        self.own_tokens = self.max_tokens - 1
        self.tokens = self.prompt_length + len(self.completions) * self.own_tokens
        self.unshared = self.prompt_length
        first, *others = self.completions
        first.goal = self.prompt_length if others else self.prompt_length + first.known

    @property
    def to_run(self) -> int:
        """Tokens of the prompt and generated ones that must run before all its completions draw."""
        return self.prompt_length + sum(completion.known for completion in self.completions) - self.hit

    @property
    def base(self) -> int:
        """Position from which on tokens are its completions' own: they are reserved for one of them alone."""
        return max(self.prompt_length, self.hit)

    def share(self, tokens: int) -> None:
        """Its first sequence begins with so many tokens of a cached prefix. Before any step of it is planned."""
        first = self.completions[0]
        self.hit = first.cached = tokens
        self.unshared = max(0, self.prompt_length - tokens)
        first.own = self.prompt_length + first.known - self.base

    @property
    def home(self) -> str:
        """The place with its first tokens: those may be shared."""
        return self.completions[0].segments[0].worker

    def unshare(self) -> None:
        """Note that the request has moved and shares no KV any more."""
        self.hit, self.unshared = 0, self.prompt_length

    def place(self, spans: Sequence[tuple[str, int]]) -> None:
        """Set where KV goes. The tokens to run, those of the prompt and the first completion first, take so many slots
        of each worker, in order."""
        first, *others = self.completions
        begin = self.prompt_length + first.known
        nowhere = Segment(first.sequence, "", self.heads, (0, None))
        first.segments = continued([], nowhere, _part(spans, 0, begin))
        for other in others:
            shared = forked(first.segments, other.sequence, self.prompt_length)
            after = Segment(other.sequence, "", self.heads, (self.prompt_length, None))
            other.segments = continued(shared, after, _part(spans, begin, begin + other.known))
            begin += other.known

    @property
    def workers(self) -> set[str]:
        """The memory workers with segments of it."""
        return {segment.worker for one in self.completions if not one.released for segment in one.segments}

    def slots(self, completion: Completion, own: int, *, alone: bool = False) -> dict[str, int]:
        """By memory worker, the slots of ``own`` tokens of a completion, and of the prompt if it has that ``alone``:
        those reserved for the request, without those that it shares with cached prefixes."""
        begin = self.base - (self.unshared if alone else 0)
        return by_worker(completion.segments, begin, self.base + own)

    @property
    def admission(self) -> Admission:
        """What workers are told of it."""
        params, first = self.request.params, self.completions[0]
        prompt = self.request.prompt_token_ids if params.repetition_penalty != 1.0 else []
        indices = [completion.index for completion in self.completions]
        return Admission(
            first.sequence,
            len(indices),
            self.prompt_length,
            self.expand(first.segments),
            params,
            self.request.seed,
            prompt,
            indices,
        )

    def fork(self) -> list[Completion]:
        """Let all completions go on from the end of the prompt. Returns those that do not have it as their own."""
        self.forked = True
        for completion in self.completions:
            completion.cached = max(completion.cached, self.prompt_length)
            completion.goal = self.prompt_length + completion.known
        return [completion for completion in self.alive if completion is not self.completions[0]]

    def is_forked_from(self, completion: Completion) -> bool:
        """True if other completions will still be forked from this one."""
        return not self.forked and completion is self.completions[0] and bool(self.alive)

    def withdraw(self, completion: Completion, cached: int) -> None:
        """Steps in flight will not run tokens from ``cached`` on: they run again."""
        completion.cached = cached
        if cached < self.prompt_length and self.forked:
            first, *others = self.completions
            self.forked = False
            first.goal = self.prompt_length if others else self.prompt_length + first.known
            for other in others:
                other.cached = other.goal = 0

    def draws_after(self, completion: Completion) -> list[Completion]:
        """Return the completions that draw a token once this one has run the tokens up to its goal."""
        if self.forked or len(self.completions) == 1:
            return [completion]
        drawing = [one for one in self.alive if not one.known]
        return drawing[:1] if self.searches else drawing  # beams are all the same after the prompt

    def known_tokens(self, completion: Completion, start: int, stop: int) -> list[int]:
        """Return the tokens at positions [start, stop) of a completion, of the prompt and generated."""
        prompt, length = self.request.prompt_token_ids, self.prompt_length
        if stop <= length:
            return prompt[start:stop]
        return prompt[start:] + completion.generated[max(start - length, 0) : stop - length]

    @property
    def alive(self) -> list[Completion]:
        """The completions that still draw tokens."""
        return [completion for completion in self.completions if not completion.finished]

    @property
    def histories(self) -> dict[int, list[int]]:
        """By sequence, the tokens that a replica needs to draw with penalties: all but the last, which the next step
        runs. Empty if draws do not depend on them."""
        if not self.request.params.reads_history:
            return {}
        return {completion.sequence: completion.generated[:-1] for completion in self.alive}

    @property
    def computed(self) -> int:
        """Tokens whose KV its completions have, with what they share counted once; no step of it is in flight."""
        shared = min(self.kept(self.completions[0]), self.prompt_length)
        return shared + sum(max(self.kept(one) - self.prompt_length, 0) for one in self.alive)

    def kept(self, completion: Completion) -> int:
        """Tokens of a completion whose KV is on the memory worker, its prompt's included."""
        runs = completion if self.forked else self.completions[0]
        if runs.cached < self.prompt_length + completion.known:
            return runs.cached
        drawn = len(completion.generated) if completion.drawn is None else completion.drawn
        return self.prompt_length + max(drawn - 1 + completion.answered, 0)


def _part(spans: Sequence[tuple[str, int]], begin: int, stop: int) -> Iterator[tuple[str, int]]:
    """Tokens [begin, stop) of those that the spans have together."""
    at = 0
    for worker, tokens in spans:
        low, high = max(at, begin), min(at + tokens, stop)
        if low < high:
            yield worker, high - low
        at += tokens


Owner = tuple[Group, Completion]
