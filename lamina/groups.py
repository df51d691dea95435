"""A request in the scheduler, with its completions."""

from dataclasses import dataclass, field

from lamina.types import Request


@dataclass(eq=False, slots=True)
class Completion:
    """One sequence and the tokens it has drawn.

    Attributes:
        until: number of the last step of its lane that runs it; set when it stops decoding.
        retired: handed over for release.
    """

    sequence: int
    index: int
    generated: list[int] = field(default_factory=list)
    finished: bool = False
    retired: bool = False
    until: int = 0


@dataclass(eq=False, slots=True)
class Group:
    """A request with its completions.

    Attributes:
        prompt_length: tokens of the prompt, which the completions share.
        own_tokens: most KV tokens of one completion without the prompt; the last token drawn is never kept.
        tokens: most KV tokens of the request.
        lane: -1 while it waits. memory, heads: the placement of its KV.
        cached: tokens of the prompt whose KV is on the memory worker, or will be once the planned steps have run.
        until: number of the last step of its lane that runs a chunk of its prompt.
        seats: completions that steps run or may run. holders: completions with KV reserved.
    """

    request: Request
    max_tokens: int
    completions: list[Completion]
    lane: int = -1
    memory: str = ""
    heads: tuple[int, int] = (0, 0)
    cached: int = 0
    until: int = 0
    forked: bool = False
    seats: int = 0
    holders: int = 0
    prompt_length: int = field(init=False)
    own_tokens: int = field(init=False)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.request.prompt_token_ids)
        self.own_tokens = self.max_tokens - 1
        self.tokens = self.prompt_length + len(self.completions) * self.own_tokens

    @property
    def prompt_left(self) -> int:
        """Tokens of the prompt not in any planned step."""
        return self.prompt_length - self.cached

    @property
    def prompt_done(self) -> bool:
        """True when planned steps cover the whole prompt."""
        return self.cached >= self.prompt_length

    @property
    def alive(self) -> list[Completion]:
        """The completions that still draw tokens."""
        return [completion for completion in self.completions if not completion.finished]

    @property
    def histories(self) -> dict[int, list[int]]:
        """By sequence, the tokens that a replica needs to draw with penalties: all but the last, which the next step
        runs. Empty without penalties."""
        if not self.request.params.penalizes:
            return {}
        return {completion.sequence: completion.generated[:-1] for completion in self.alive}

    def kept(self, completion: Completion) -> int:
        """Tokens of a completion whose KV is on the memory worker, its prompt's included."""
        return self.cached + max(len(completion.generated) - 1, 0)


Owner = tuple[Group, Completion]
