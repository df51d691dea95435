"""Policies: in which order requests are admitted, preempted and computed. Pure: engine and simulator use the same ones.

A policy of another package is found by its entry point in the group ``lamina.policies``: a callable that takes
``Targets`` and returns a ``Policy``.
"""

import importlib.metadata
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from lamina.core.errors import ConfigError
from lamina.core.requests import Group

Rank: TypeAlias = tuple[float, ...]

ENTRY_POINTS = "lamina.policies"
QUEUEING = 2.0  # times as long as alone: how long a prompt is expected to take beside others


@dataclass(frozen=True)
class Targets:
    """What users of a server expect.

    Attributes:
        ttft_s: Target for the time to the first token; None: none is given.
    """

    ttft_s: float | None = None


class Policy(Protocol):
    """The order of requests. A smaller rank goes first; ranks of a request never change.

    Whenever a memory worker runs out of slots, the request with the largest rank there is preempted, and the one with
    the smallest keeps its KV. So the running request with the smallest rank always progresses.

    Attributes:
        fair: True: clients take turns, and ranks order the requests of each connection. False: ranks order the requests
            of all clients together, and no request gives up its seat to another client.
        first_share: Part of a step's rows for prompts that the running prompt with the smallest rank gets. The prompts
            with fewest tokens left share the rest.
    """

    fair: bool
    first_share: float

    def rank(self, group: Group) -> Rank:
        """Return the rank of a request. Requests with equal ranks go in order of arrival."""

    def start_by(self, group: Group, now: float, token_s: float) -> float:
        """Return the time after which a request that still waits goes behind all that are not late.

        Args:
            group: A request that has just arrived.
            now: Seconds of the clock that ``Turn.plan`` is given.
            token_s: Seconds that a prompt's token has taken lately; 0 if no prompt has run.
        """


def rank_of(policy: Policy, group: Group) -> Rank:
    """Return the rank of a request, which no other has."""
    return (*policy.rank(group), group.arrival)


class Fifo:
    """Order of arrival, fair between clients."""

    fair = True
    first_share = 0.5

    def rank(self, group: Group) -> Rank:
        return ()

    def start_by(self, group: Group, now: float, token_s: float) -> float:
        return math.inf


class Shortest(Fifo):
    """Shortest prompt first. A long prompt waits as long as shorter ones arrive faster than they are computed."""

    fair = False
    first_share = 0.0

    def rank(self, group: Group) -> Rank:
        return (group.prompt_length,)


class Priority(Fifo):
    """Smallest ``SamplingParams.priority`` first. A request waits as long as requests before it fill the server."""

    fair = False
    first_share = 1.0

    def rank(self, group: Group) -> Rank:
        return (group.request.params.priority,)


class Slo(Fifo):
    """Earliest deadline first, among requests that can still have their first token in time; late ones go last.

    Once more requests wait than can be served in time, order of arrival serves each of them too late. Here, those that
    are late already make way for those that are not, and wait as long as requests in time fill the server.
    """

    fair = False

    def __init__(self, ttft_s: float) -> None:
        """``ttft_s``: Target for the time to the first token, in seconds."""
        self._ttft_s = ttft_s

    def start_by(self, group: Group, now: float, token_s: float) -> float:
        return now + self._ttft_s - QUEUEING * group.prompt_length * token_s


FIFO = Fifo()


def _slo(targets: Targets) -> Policy:
    if targets.ttft_s is None:
        raise ConfigError("policy slo orders requests by their deadlines: give slo_ttft_ms")
    return Slo(targets.ttft_s)


POLICIES: Mapping[str, Callable[[Targets], Policy]] = {
    "fifo": lambda _: Fifo(),
    "shortest": lambda _: Shortest(),
    "priority": lambda _: Priority(),
    "slo": _slo,
}


def find_policy(name: str, slo_ttft_ms: int | None = None) -> Policy:
    """Return the policy called ``name``: Lamina's own, or an entry point's. Raises ConfigError for an unknown name."""
    targets = Targets(None if slo_ttft_ms is None else slo_ttft_ms / 1e3)
    if name in POLICIES:
        return POLICIES[name](targets)
    others = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in others:
        known = ", ".join([*POLICIES, *sorted(others)])
        raise ConfigError(f"policy is {name!r}; give one of {known}, or install a package with that {ENTRY_POINTS}")
    made: Policy = others[name].load()(targets)
    return made
