"""What a seed chooses besides the cluster (``layouts``): what clients ask for, and what goes wrong when.

Each seed leaves out some kinds of faults and prefers some sizes of requests ("swarm testing", Groce et al. 2012): what
needs many faults of one kind in a row, or none of another, does not come up where all are always mixed.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from typing_extensions import override

from lamina.core.sampling import SamplingParams
from lamina.core.topology import Pool
from tests.simulation.layouts import Layout
from tests.simulation.model import POISON
from tests.simulation.moments import MOMENTS
from tests.simulation.themes import theme

MOST_SEARCHED = 24  # tokens of the answers of a beam search, each of which takes as many runs of the plain function

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """A request of a client, and what the client does with it.

    Attributes:
        abort_at: When it is aborted, in seconds after it was sent.
        again_s: How much later it is aborted once more.
        cuts: By completion: after how many tokens the client ends it, as at a stop string.
        next_s: How much later the next request comes.
        poison: Whether compute workers die of its prompt.
    """

    prompt: list[int]
    params: SamplingParams
    client: str
    seed: int
    abort_at: float | None
    again_s: float | None
    cuts: dict[int, int]
    next_s: float
    poison: bool = False


class Asking(Protocol):
    """The requests of a run, one after another."""

    def ask(self, longest: int, most: int) -> Asked | None:
        """Return the next request, of at most ``longest`` tokens with a completion, and ``most`` completions; None if
        there is no other one."""


class Load(Asking):
    """Requests that a seed chooses."""

    def __init__(self, seed: int) -> None:
        self._chance = chance = random.Random(f"load {seed}")
        self._pause_s = chance.choice([0.02, 0.1, 0.25, 0.25, 1.0])
        self._burst = chance.choice([0.0, 0.5, 0.9])
        self._clients = chance.choice([[1], [1, 1, 1], [8, 1], [20, 3, 1]])
        self._completions = _some(chance, [1, 2, 3, 4])
        self._longest = _some(chance, [1, 2, 5, 20, 60, 120])
        self._prompts = _some(chance, [1, 5, 20, 60])
        self._stops = chance.choice([0, 1, 8, 60])
        self._aborts = chance.choice([0.0, 0.1, 0.5])
        self._cuts = chance.choice([0.0, 0.0, 0.2])
        self._poison = chance.choice([0.0, 0.0, 0.0, 0.02, 0.1])
        self._shared = chance.choice([0.0, 0.5, 0.9])
        self._cut_prefixes = chance.choice([0.0, 0.2, 0.8])
        self._prefixes = [self._tokens(chance.choice([8, 30, 60, 80, 100])) for _ in range(3)]
        self._searching = random.Random(f"beams {seed}")
        self._searches = self._searching.choice([0.0, 0.0, 0.1, 0.5])
        vars(self).update(theme(seed).load)

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(POISON) for _ in range(count)]

    def _search(self, params: SamplingParams, most: int) -> SamplingParams:
        """Return parameters of a beam search, with at most ``most`` beams, instead of other ones."""
        chance = self._searching
        return SamplingParams(
            use_beam_search=True,
            n=chance.randint(2, min(most, 4)),
            max_tokens=min(params.max_tokens or MOST_SEARCHED, MOST_SEARCHED),
            length_penalty=chance.choice([-1.0, 0.0, 1.0, 1.0, 2.0]),
            early_stopping=chance.choice([True, False, "never"]),
            stop_token_ids=params.stop_token_ids,
            ignore_eos=True,
            priority=params.priority,
        )

    @override
    def ask(self, longest: int, most: int) -> Asked:
        chance = self._chance
        prompt = list(chance.choice(self._prefixes)) if chance.random() < self._shared else []
        if chance.random() < self._cut_prefixes:
            prompt = prompt[: chance.randint(0, len(prompt))]
        prompt += self._tokens(chance.choice(self._prompts))
        params = SamplingParams(
            n=min(most, chance.choice(self._completions)),
            max_tokens=chance.choice(self._longest),
            temperature=chance.choice([0.0, 1.0, 1.0]),
            stop_token_ids=sorted(chance.sample(range(POISON), self._stops)),
            ignore_eos=True,
            priority=chance.choice([0, 0, 1, 2]),
        )
        if most > 1 and self._searching.random() < self._searches:
            params = self._search(params, most)
        cut = chance.random() < self._cuts and not params.use_beam_search
        prompt = prompt[: max(1, longest - (params.max_tokens or 0) - 1)]
        if poison := chance.random() < self._poison:
            prompt[chance.randrange(len(prompt))] = POISON
        return Asked(
            prompt,
            params,
            f"client{chance.choices(range(len(self._clients)), self._clients)[0]}",
            chance.getrandbits(32),
            chance.choice([0.0, 0.05, 0.5, 2.0]) * chance.random() if chance.random() < self._aborts else None,
            chance.choice([None, 0.0, 1e-3, 0.01]),
            {chance.randrange(params.n): chance.randint(1, params.max_tokens or 1)} if cut else {},
            0.0 if chance.random() < self._burst else chance.expovariate(1 / self._pause_s) / (1 - self._burst),
            poison,
        )


@dataclass(frozen=True)
class Scene:
    """What a run has besides faults.

    Attributes:
        load: What clients ask for.
        chances: How often rare branches are taken, by point (``tests.simulation.points``).
    """

    layout: Layout
    load: Asking
    chances: Mapping[str, float]


CHANGES: Sequence[Mapping[Pool, int]] = [
    {"prefill": 1, "compute": -1},
    {"prefill": -1, "compute": 1},
    {"prefill": 1},
    {"prefill": -1},
    {"compute": 1},
    {"memory": 1},
    {"memory": 1},
    {"compute": 1, "memory": 1},
    {"compute": 1, "memory": -1},
    {"compute": -1, "memory": 1},
    {"compute": -1},
    {"memory": -1},
    {"memory": -1},
    {"compute": -1, "memory": -1},
]
"""Changes of the sizes of pools: of ``compute`` and ``prefill`` in replicas."""

MEANWHILE: Sequence[Mapping[Pool, int]] = [{"memory": -1}, {"memory": -1}, {"memory": 1}, {"compute": -1}]
"""Changes that come while another one is under way."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        at: When it happens, or when it begins to wait for its moment.
        seconds: How long it lasts.
        choice: Selects the victim.
        changes: Of the sizes of pools.
        moment: Names of ``moments.MOMENTS`` that must all be true when it happens.
    """

    number: int
    at: float
    kind: str
    seconds: float
    choice: float
    changes: Mapping[Pool, int]
    moment: Sequence[str] = ()


KINDS: dict[str, float] = {
    "kill": 3.0,
    "wipe": 1.0,
    "fail": 1.0,
    "stop": 2.0,
    "lag": 1.0,
    "block": 1.0,
    "part": 1.0,
    "slow": 1.0,
    "scale": 3.0,
    "pause": 1.0,
    "refuse": 0.5,
    "restart": 0.5,
    "disk": 0.5,
    "hangup": 0.5,
    "clock": 0.5,
    "leap": 0.5,
    "crash": 0.5,
    "hang": 0.5,
    "cut": 0.5,
}
"""Kinds of faults, and how often each comes where a seed has all."""

LEFT_OUT = 0.5  # chance of a kind to be left out of a run


def faults(seed: int, seconds: float) -> list[Fault]:
    """Return the faults that a seed has within so many seconds."""
    chance, themed = random.Random(f"faults {seed}"), theme(seed)
    weights = {
        kind: weight * chance.choice([0.3, 1.0, 1.0, 4.0])
        for kind, weight in KINDS.items()
        if chance.random() >= LEFT_OUT
    }
    weights = {**themed.kinds} or weights
    pause_s, series = chance.choice([0.3, 0.7, 0.7, 2.0, 5.0]), chance.choice([0.0, 0.3, 0.6])
    lengths = _some(chance, [0.02, 0.2, 1.0, 3.0, 8.0, 20.0])
    changes = _some(chance, CHANGES)
    timed, moments = chance.choice([0.0, 0.5, 1.0]), _some(chance, [*MOMENTS])
    if themed.moments:
        timed, moments = 0.0, [*themed.moments]
    chase = themed.chase or chance.choice([0.0, 0.0, 0.3])
    found, at = list[Fault](), 0.0
    while weights and at < seconds:
        at += chance.expovariate(1.0) * (0.05 if chance.random() < series else pause_s)
        kind = chance.choices([*weights], [*weights.values()])[0]
        lasts, choice = chance.choice(lengths), chance.random()
        moment = [chance.choice(moments) for _ in range(chance.randint(1, 2))] if chance.random() >= timed else []
        found.append(Fault(len(found), at, kind, lasts, choice, chance.choice(changes), moment))
        if kind == "scale" and chance.random() < chase:
            stage = [chance.choice(["linking", "linking", "linked"])]
            found.append(Fault(len(found), at, "scale", 0.0, choice, chance.choice(MEANWHILE), stage))
            also = chance.choice(["stop", "stop", "kill"])
            found.append(Fault(len(found), at, also, 1.0, chance.random() / 2, {}, stage))
    return found


def _some(chance: random.Random, values: Sequence[T]) -> list[T]:
    """Return some of the values, at least one."""
    return chance.sample(values, chance.randint(1, len(values)))
