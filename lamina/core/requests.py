"""State of one request in the scheduler (``Group``) and of each of its completions."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lamina.core.segments import by_worker, continued, forked
from lamina.core.steps import Admission
from lamina.core.types import Request, Segment

Ids: TypeAlias = "array[int]"  # token ids, of typecode "i": slices are compared as fast as memory is read


Rank: TypeAlias = tuple[float, ...]  # by a policy: the smallest goes first

Drawn: TypeAlias = Mapping[int, list[int]]
"""The tokens that completions have drawn, by index, without those completions that have ended."""


def ids_of(tokens: Iterable[int]) -> Ids:
    """Return token ids as an array, which the prefix cache compares quickly."""
    return array("i", tokens)


@dataclass(eq=False, slots=True)
class Completion:
    """One sequence and the tokens it has drawn.

    Attributes:
        known: number of ``generated`` tokens that must run again, like a prompt, because their KV was dropped.
        cached: position up to which its tokens are in planned steps. Other completions than the first stay at 0 until
            they are forked at the end of the prompt.
        goal: position after the last token to run before the next token is drawn.
        own: KV tokens reserved for this completion alone, without the prompt; not updated while it decodes.
        segments: where its KV is or will be, the prompt's included, by ascending token. Set at admission. Their
            workers are places (``lamina.kv.placement``), with all heads.
        drawn: length of ``generated`` when the completion ended. A beam that continues it may append to the list.
        until: number of the last step of its lane that runs it; set when it stops decoding.
        finished: True once it draws no more tokens.
        retired: True once the completion waits for the release of its KV.
        released: True once a plan has released its KV.
        dropped: True once it has ended and memory workers keep nothing of its KV, although no plan has released it.
        answered: for a beam: its last token has run, and its possible continuations have arrived, but none is chosen.
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
    dropped: bool = False
    until: int = 0
    answered: bool = False

    @property
    def left(self) -> int:
        """Tokens not in any planned step that must run before it draws."""
        return self.goal - self.cached

    @property
    def worker(self) -> str:
        """The memory worker that stores its next tokens."""
        return self.segments[-1].worker


@dataclass(eq=False, slots=True)
class Group:
    """A request with its completions; after its KV was dropped, with those that have not ended.

    Attributes:
        arrival: number of the request in order of arrival; kept when its KV is dropped.
        arrived_s: when the request arrived, of the clock that ``Turn.plan`` uses; kept when its KV is dropped.
        lane: the lane that runs it; -1 while it waits.
        allocated: lanes that its policy has chosen for its prompt; empty if it has chosen none.
        heads: head range of its segments.
        expand: turns segments on places into segments on memory workers.
        until: number of the last step of its lane that runs one of its chunks.
        lent: steps in flight of other lanes that run one of its chunks.
        forked: True once its prompt has run, and all completions share the prompt's KV.
        seats: completions that steps run or may run.
        holders: completions with KV reserved.
        hit: tokens at its beginning whose KV was in the prefix cache when it was admitted, and is not computed.
        unshared: tokens of the prompt whose slots are reserved for this request, and not shared by a cached prefix.
        cached_tokens: tokens of the prompt found in the prefix cache when the request was first admitted.
        suspect: True if its KV must not enter the prefix cache.
        ids: tokens that it looks up in the prefix cache; None before the first look-up and after its prompt was kept.
        replicas: how many replicas share the chunks of its prompt, since admission divided it over their local memory;
            1 if it was not divided, or if these replicas run no prompts.
        stays: True if all chunks of its prompt run in its own lane.
        gave_way: True once it was preempted for a client with fewer seats.
        choice: for a beam search, by completion: the index of the beam that it continues, and the token, which the
            next plan of its lane runs and appends to ``generated``.
        prompt_length: tokens of the prompt, which the completions share.
        own_tokens: most KV tokens of one completion without the prompt; the KV of the last drawn token is not needed.
        tokens: most KV tokens of the request.
        searches: True if its completions are beams.
    """

    request: Request
    max_tokens: int
    completions: list[Completion]
    arrival: int = 0
    arrived_s: float = 0.0
    lane: int = -1
    allocated: frozenset[int] = frozenset()
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
    replicas: int = 1
    stays: bool = False
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

    def chunk(self, rows: int) -> int:
        """Return the most prompt tokens of a step with ``rows`` rows left: chunks of all its replicas fill one step."""
        return -(-rows // self.replicas)

    @property
    def to_run(self) -> int:
        """Tokens, of the prompt and of those generated before, that must run before all its completions draw."""
        return self.prompt_length + sum(completion.known for completion in self.completions) - self.hit

    @property
    def base(self) -> int:
        """Position from which on slots are reserved for single completions."""
        return max(self.prompt_length, self.hit)

    def share(self, tokens: int) -> None:
        """Begin the first sequence with ``tokens`` tokens of a cached prefix, before any of its steps is planned."""
        first = self.completions[0]
        self.hit = first.cached = tokens
        self.unshared = max(0, self.prompt_length - tokens)
        first.own = self.prompt_length + first.known - self.base

    @property
    def home(self) -> str:
        """The place that holds its first tokens, which other requests may share."""
        return self.completions[0].segments[0].worker

    def unshare(self) -> None:
        """Note that the request has moved and shares no KV any more."""
        self.hit, self.unshared = 0, self.prompt_length

    def place(self, spans: Sequence[tuple[str, int]]) -> None:
        """Set the segments of all completions.

        ``spans`` gives workers and numbers of slots; the prompt and the known tokens of each completion fill them in
        this order.
        """
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
        return {segment.worker for one in self.completions if not one.released for segment in one.segments}

    def slots(self, completion: Completion, own: int, *, alone: bool = False) -> dict[str, int]:
        """Return, by memory worker, the slots reserved for ``own`` tokens of a completion.

        With ``alone``, those of the prompt are included. Slots shared with cached prefixes are never counted.
        """
        begin = self.base - (self.unshared if alone else 0)
        return by_worker(completion.segments, begin, self.base + own)

    @property
    def admission(self) -> Admission:
        """What a step plan says about the request."""
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
            self.request.request_id,
        )

    def fork(self) -> list[Completion]:
        """Let all completions continue from the end of the prompt. Return those whose sequences must be forked."""
        self.forked = True
        for completion in self.completions:
            completion.cached = max(completion.cached, self.prompt_length)
            completion.goal = self.prompt_length + completion.known
        return [completion for completion in self.alive if completion is not self.completions[0]]

    def is_forked_from(self, completion: Completion) -> bool:
        """True if other completions will still be forked from this one."""
        return not self.forked and completion is self.completions[0] and bool(self.alive)

    def withdraw(self, completion: Completion, cached: int) -> None:
        """Run the tokens of a completion again from position ``cached`` on: the steps in flight were dropped."""
        completion.cached = cached
        if cached < self.prompt_length and self.forked:
            first, *others = self.completions
            self.forked = False
            first.goal = self.prompt_length if others else self.prompt_length + first.known
            for other in others:
                other.cached = other.goal = 0

    def draws_after(self, completion: Completion) -> list[Completion]:
        """Return the completions that draw a token once ``completion`` has run the tokens up to its goal."""
        if self.forked or len(self.completions) == 1:
            return [completion]
        drawing = [one for one in self.alive if not one.known]
        return drawing[:1] if self.searches else drawing  # beams are all the same after the prompt

    def known_tokens(self, completion: Completion, start: int, stop: int) -> list[int]:
        """Return the tokens of prompt and completion at positions [start, stop)."""
        prompt, length = self.request.prompt_token_ids, self.prompt_length
        if stop <= length:
            return prompt[start:stop]
        return prompt[start:] + completion.generated[max(start - length, 0) : stop - length]

    @property
    def alive(self) -> list[Completion]:
        """The completions that still draw tokens."""
        return [completion for completion in self.completions if not completion.finished]

    @property
    def most_shared(self) -> int:
        """The most tokens of a cached prefix that the first completion can begin with; its last token is computed."""
        most = self.completions[0].goal - 1
        if self.request.params.reads_history:
            return min(most, self.prompt_length)  # replicas note generated tokens as they run
        return most

    @property
    def histories(self) -> dict[int, list[int]]:
        """Generated tokens by sequence, without the last, which the next step runs; empty if draws do not depend on
        them."""
        if not self.request.params.reads_history:
            return {}
        return {completion.sequence: completion.generated[:-1] for completion in self.alive}

    @property
    def computed(self) -> int:
        """Tokens whose KV is stored, the shared prompt counted once. Valid while none of its steps is in flight."""
        shared = min(self.stored_tokens(self.completions[0]), self.prompt_length)
        return shared + sum(max(self.stored_tokens(one) - self.prompt_length, 0) for one in self.alive)

    def stored_tokens(self, completion: Completion) -> int:
        """Return the number of tokens of prompt and completion whose KV is on memory workers."""
        runs = completion if self.forked else self.completions[0]
        if runs.cached < self.prompt_length + completion.known:
            return runs.cached
        drawn = len(completion.generated) if completion.drawn is None else completion.drawn
        return self.prompt_length + max(drawn - 1 + completion.answered, 0)


def _part(spans: Sequence[tuple[str, int]], begin: int, stop: int) -> Iterator[tuple[str, int]]:
    """Yield the parts of ``spans`` that tokens [begin, stop) fill."""
    at = 0
    for worker, tokens in spans:
        low, high = max(at, begin), min(at + tokens, stop)
        if low < high:
            yield worker, high - low
        at += tokens


Owner = tuple[Group, Completion]
